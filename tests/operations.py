"""Counts torch operations: on a GPU each is a launch, a copy or an allocation."""

from torch.utils._python_dispatch import TorchDispatchMode

_FREE = {"view", "_unsafe_view", "slice", "select", "expand", "t", "transpose", "permute", "unsqueeze", "squeeze",
         "alias", "detach", "unbind", "split", "split_with_sizes", "as_strided", "reshape", "is_pinned"}  # fmt: skip
"""Views, which cost the device nothing."""


class Operations(TorchDispatchMode):
    """Collects the names of operations in a ``with`` block, in order, without views."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name not in _FREE:
            self.names.append(name)
        return function(*args, **kwargs or {})
