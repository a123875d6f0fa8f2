"""An emulated link: bytes arrive no sooner than over a link of a given rate, in wall-clock time.

On a CPU the way from the host store into a slot is a memory copy, far faster relative to computation than PCIe is to a
GPU's. Wrapped in this, the same engine shows what a slower link does. It behaves as a copy engine: one queue for all
transfers, which runs beside computation and takes no core but for the copy itself. So it sleeps until the moment when
the last byte would arrive.
"""

from typing import Any

import torch

from vllm_dymoe.residency.format import BlobKey
from vllm_dymoe.store.disk import Pacer
from vllm_dymoe.transfer.delivery import Delivery
from vllm_dymoe.transfer.ticket import Ticket


class EmulatedLink(Delivery):
    """What ``delivery`` moves, at the rate of a link."""

    def __init__(self, delivery: Delivery, bytes_per_second: float) -> None:
        super().__init__(delivery.store)
        self._delivery, self._bytes_per_second, self._pacer = delivery, bytes_per_second, Pacer()
        self._last = 0.0, 0.0  # when the last transfer began and ended

    def demanded_at_once(self, key: BlobKey) -> int:
        """One: an emulated transfer has no fixed cost."""
        return 1

    def deliver(self, ticket: Ticket, projections: range, destination: torch.Tensor, *, wait: bool = True) -> None:
        self._delivery.deliver(ticket, projections, destination, wait=wait)
        self._last = self._pacer.wait(destination.numel(), ticket.ready, self._bytes_per_second)

    def moments(self, event: Any) -> tuple[Any, Any]:
        """When the link was busy with the last transfer, which one thread served."""
        return self._last
