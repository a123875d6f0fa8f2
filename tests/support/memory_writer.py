"""A writer of stores without files, for tests that only want the bytes."""

from vllm_dymoe.store import MemoryStore


class MemoryWriter:
    def __init__(self, experts):
        self._store = MemoryStore(experts)

    def write(self, key, projection, part, start=0):
        section = self._store.blob(key)[self._store.experts.formats[key.bits].sections[projection]]
        section[start : start + part.numel()].copy_(part)

    def finish(self, errors=None):
        return self._store

    def discard(self):
        self._store.close()
