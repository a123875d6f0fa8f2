"""Transfers from the host store into slots: tickets, priorities, and a delivery for each kind of device."""

import functools

import torch

from vllm_dymoe.cache.store import HostStore
from vllm_dymoe.cache.transfer.delivery import CpuDelivery, EmulatedLink
from vllm_dymoe.cache.transfer.engine import TransferEngine
from vllm_dymoe.cache.transfer.ticket import Reason, Ticket, TransferError, TransferStats


def make_engine(
    store: HostStore,
    device: torch.device,
    largest_slice: int,  # bytes of the largest packed expert, the size of a staging buffer
    timeout: float | None = None,  # seconds that a transfer is waited for; None for ever
    link_gbps: float | None = None,  # 1e9 bytes per second of an emulated link, on a CPU; None for none
    io_threads: int | None = None,  # threads that read ahead, 0 for none; as many as the store says if None
) -> TransferEngine:
    """Make the transfer engine for ``device``, which has the slots.

    Raises ValueError for an emulated link to a device that has a real one.
    """
    threads = store.depth if io_threads is None else io_threads
    if device.type == "cpu":
        if link_gbps is None:
            return TransferEngine(CpuDelivery(store), threads, timeout=timeout)
        # A link is one queue: one thread serves it.
        link = EmulatedLink(CpuDelivery(store), link_gbps * 1e9)
        return TransferEngine(link, threads=1, timeout=timeout, waiters_move=False)
    if link_gbps is not None:
        raise ValueError(
            f"vllm-dymoe: link_gbps emulates a link on a CPU, but {device.type} devices have one; leave link_gbps out."
        )
    from vllm_dymoe.cache.transfer.cuda import CudaStreams, StreamDelivery

    streams = CudaStreams(device)
    # A new thread begins on the first device, which may be another rank's.
    index = torch.cuda.current_device() if device.index is None else device.index
    enter = functools.partial(torch.cuda.set_device, index)
    if store.readable:
        # Enqueueing a copy is all the host does for demand; the thread meters out what is not urgent.
        return TransferEngine(StreamDelivery(store, streams), threads=1, eager=True, enter=enter)
    # What waits for a disk has one buffer each, and the link one more to copy from.
    buffers = [torch.empty(largest_slice, dtype=torch.uint8, pin_memory=True) for _ in range(1 + max(1, threads))]
    return TransferEngine(StreamDelivery(store, streams, buffers), threads, timeout=timeout, enter=enter)
