"""Tensors that would be on a device.

Every operation that needs their values on the host is recorded.
"""

from typing import ClassVar

import torch

# Operations that need a number from the device. Indexing with a mask needs the size of the result.
WAITS = {"tolist", "item", "cpu", "numpy", "nonzero", "bincount", "masked_select", "argwhere", "equal", "allclose"}
WAITS |= {"__bool__", "__int__", "__float__", "__index__"}


class OnDevice(torch.Tensor):
    """A tensor whose values only the device has, like all results computed from it."""

    log: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func == torch.Tensor.is_cpu.__get__:
            return False
        name = getattr(func, "__name__", str(func))
        mask = name in ("__getitem__", "__setitem__") and any(
            isinstance(index, torch.Tensor) and index.dtype is torch.bool
            for index in (args[1] if isinstance(args[1], tuple) else (args[1],))
        )
        if name in WAITS or "unique" in name or mask:
            cls.log.append(f"wait for {name}")
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result.as_subclass(torch.Tensor) if name == "cpu" else result
