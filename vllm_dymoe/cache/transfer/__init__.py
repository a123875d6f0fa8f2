"""Transfers from the host store into slots.

Tickets, priorities, and a delivery for each kind of device.
"""

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
    timeout: float | None = None,  # seconds to wait for a transfer; None for no limit
    link_gbps: float | None = None,  # rate of an emulated link in GB/s, on a CPU; None for none
    io_threads: int | None = None,  # threads that read ahead, 0 for none; the store's number if None
) -> TransferEngine:
    """Return the transfer engine for ``device``, which has the slots.

    ValueError for an emulated link to a device that has a real one.
    """
    threads = store.depth if io_threads is None else io_threads
    if device.type == "cpu":
        if link_gbps is None:
            return TransferEngine(CpuDelivery(store), threads, timeout=timeout)
        # A link is one queue, so one thread serves it.
        link = EmulatedLink(CpuDelivery(store), link_gbps * 1e9)
        return TransferEngine(link, threads=1, timeout=timeout, waiters_move=False)
    if link_gbps is not None:
        raise ValueError(
            f"vllm-dymoe: link_gbps emulates a link on a CPU, but {device.type} devices have one; leave link_gbps out."
        )
    from vllm_dymoe.cache.transfer.cuda import CudaStreams, StreamDelivery

    streams = CudaStreams(device)
    # A new thread starts on the first device, which may be another rank's.
    index = torch.cuda.current_device() if device.index is None else device.index
    enter = functools.partial(torch.cuda.set_device, index)
    if store.readable:
        # For demand the host only enqueues copies; the thread issues what is not urgent, one piece at a time.
        return TransferEngine(StreamDelivery(store, streams), threads=1, eager=True, enter=enter)
    # Each read that waits for a disk has a buffer, and the link has one more to copy from.
    buffers = [torch.empty(largest_slice, dtype=torch.uint8, pin_memory=True) for _ in range(1 + max(1, threads))]
    return TransferEngine(StreamDelivery(store, streams, buffers), threads, timeout=timeout, enter=enter)
