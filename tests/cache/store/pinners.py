"""A pinner that records what it would pin."""

from vllm_dymoe.cache.pages import whole_pages


class RecordedPinner:
    """A pinner that pins nothing, and that can fail in its n-th call.

    Records its calls in order, and the pinned bytes by address. ``node`` is computed as by the real pinner.
    """

    def __init__(self, refuse=None, node=None):
        self.node = node
        self.calls, self.pinned = [], {}
        self._refuse = refuse

    def pin(self, address, nbytes):
        assert address % whole_pages(1) == nbytes % whole_pages(1) == 0, "pages are whole"
        for other, size in self.pinned.items():
            assert address + nbytes <= other or other + size <= address, "pinned twice"
        if len(self.calls) == self._refuse:
            return "CUDA error 2: out of memory"
        self.calls.append(("pin", address))
        self.pinned[address] = nbytes
        return None

    def unpin(self, address):
        self.calls.append(("unpin", address))
        del self.pinned[address]
