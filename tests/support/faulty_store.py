"""A store whose reads fail, wait or never end, as a test specifies."""

import threading

from vllm_dymoe.cache.store import HostStore, StoreError
from vllm_dymoe.experts.format import EVERY_PROJECTION


class FaultyStore(HostStore):
    """A store whose reads have faults, chosen by a read's number and key.

    Faults are "fail", "hang" (until ``gate`` is set), "cold" (waits for a disk, and then delivers) and None. ``reads``
    contains the thread and the key of each read so far.
    """

    description = "files in /disk"

    def __init__(self, store, action=lambda number, key: None):
        self.experts, self.action, self._read = store.experts, action, store.read_into
        self.gate, self.reads, self._lock = threading.Event(), [], threading.Lock()

    def read_into(self, key, destination, projections=EVERY_PROJECTION, *, wait=True):
        with self._lock:
            action = self.action(len(self.reads), key)
            if action and not wait:
                raise BlockingIOError("not in memory")
            self.reads.append((threading.current_thread(), key))
        if action == "hang":
            self.gate.wait()
        if action == "fail":
            destination.fill_(0xFF)  # NaN in 16 bits: nothing may compute with it
            raise StoreError("the disk is on fire")
        self._read(key, destination, projections)

    def close(self):
        """Does nothing: the bytes belong to the wrapped store."""
