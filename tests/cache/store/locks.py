"""A page lock that records what it would pin."""

from vllm_dymoe.cache.pages import whole_pages


class RecordedLock:
    """A page lock that pins nothing, and that can fail in its n-th call.

    Records its calls in order, and the pinned bytes by address. ``node`` is computed as by the real lock.
    """

    def __init__(self, refuse=None, node=None):
        self.node = node
        self.calls, self.pinned = [], {}
        self._refuse = refuse

    def lock(self, address, nbytes):
        assert address % whole_pages(1) == nbytes % whole_pages(1) == 0, "pages are whole"
        for other, size in self.pinned.items():
            assert address + nbytes <= other or other + size <= address, "locked twice"
        if len(self.calls) == self._refuse:
            return "CUDA error 2: out of memory"
        self.calls.append(("lock", address))
        self.pinned[address] = nbytes
        return None

    def unlock(self, address):
        self.calls.append(("unlock", address))
        del self.pinned[address]
