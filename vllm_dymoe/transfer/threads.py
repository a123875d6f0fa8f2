"""Delivery where the "device" is host memory: a real read from the store into the slot."""

from typing import Any

from vllm_dymoe.experts.store import HostStore
from vllm_dymoe.transfer.ticket import Ticket


class CpuDelivery:
    """Reads straight into the slot; the bytes are there when ``deliver`` returns."""

    def __init__(self, store: HostStore) -> None:
        self._store = store

    def deliver(self, ticket: Ticket) -> None:
        """Read the blob; file reads release the interpreter lock."""
        self._store.read_into(ticket.key, ticket.destination)

    def receive(self, fence: Any) -> None:
        """Nothing to order: computation is synchronous."""

    def drain(self, fence: Any) -> None:
        """Nothing to wait for."""

    def fence(self) -> None:
        """No fence: a slot's last reader is done when its call returns."""
        return None
