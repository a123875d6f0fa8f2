"""A store in memory without files, and its writer.

For tests that need only the bytes.
"""

import contextlib
import copy
from types import SimpleNamespace

import torch

from vllm_dymoe.cache.store import HostStore
from vllm_dymoe.experts.format import EVERY_PROJECTION, all_keys


class MemoryStore(HostStore):
    """A store in memory, which can lend all of its bytes and counts as pinned."""

    whole = readable = True
    description = "host memory"

    def __init__(self, experts):
        self.experts = experts
        self._slices = {key: torch.zeros(experts.format(key).nbytes, dtype=torch.uint8) for key in all_keys(experts)}

    def packed(self, key, projections=EVERY_PROJECTION):
        return self._slices[key][self.experts.format(key).span(projections)]

    def read_into(self, key, destination, projections=EVERY_PROJECTION, *, wait=True):
        destination.copy_(self.packed(key, projections))

    def hold(self, key, projections=EVERY_PROJECTION, *, wait=True):
        return contextlib.nullcontext(SimpleNamespace(packed=self.packed(key), pinned=True, last_read=None))

    def take(self, other, experts):
        more = [other._slices[key] for key in all_keys(other.experts)]
        mine, self.experts = list(self._slices.values()), experts
        self._slices = dict(zip(all_keys(experts), mine + more, strict=True))

    def close(self):
        """Does nothing: the memory is freed with the last tensor that uses it."""


def staged(store):
    """Return the store without lending, so that copies go through buffers."""
    store = copy.copy(store)
    store.whole = store.readable = False
    store.hold = lambda *asked, **more: contextlib.nullcontext()
    return store


class MemoryWriter:
    def __init__(self, experts):
        self._store = MemoryStore(experts)

    def write(self, key, projection, section):
        self._store.packed(key)[self._store.experts.format(key).sections[projection]].copy_(section)

    def finish(self, errors=None):
        return self._store

    def discard(self):
        self._store.close()
