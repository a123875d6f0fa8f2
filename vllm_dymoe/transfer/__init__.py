"""Moving bytes from the host store into slots: tickets, priorities, and an engine per kind of device."""

import torch

from vllm_dymoe.experts.store import HostStore, MemoryStore
from vllm_dymoe.transfer.engine import TransferEngine, TransferStats
from vllm_dymoe.transfer.queue import QueuedEngine
from vllm_dymoe.transfer.ticket import Reason, Ticket, TransferError


def make_engine(
    store: HostStore, device: torch.device, io_threads: int, largest_blob: int, timeout: float | None = None
) -> TransferEngine:
    """The engine for ``device``.

    Args:
        store: where the bytes come from.
        device: where the slots are.
        io_threads: threads that read ahead of whoever waits; 0 for none.
        largest_blob: bytes of the largest blob, the size of a staging buffer.
        timeout: seconds that a transfer is waited for; None for ever. Without threads nobody else can wait.
    """
    if device.type == "cpu":
        from vllm_dymoe.transfer.threads import CpuDelivery

        return QueuedEngine(CpuDelivery(store), io_threads, timeout=timeout)
    from vllm_dymoe.transfer.cuda import CudaStreams, PinnedDelivery, StagedDelivery

    streams = CudaStreams(device)
    if isinstance(store, MemoryStore):
        # Enqueueing a copy is all the host does here, so nobody needs a thread for it.
        return QueuedEngine(PinnedDelivery(store, streams), threads=0, eager=True)
    buffers = [torch.empty(largest_blob, dtype=torch.uint8, pin_memory=True) for _ in range(2 * max(1, io_threads))]
    return QueuedEngine(StagedDelivery(store, streams, buffers), io_threads, timeout=timeout)


__all__ = ["Reason", "Ticket", "TransferEngine", "TransferError", "TransferStats", "make_engine"]
