"""Argument checks for tensors.

Every error names the argument, what it is, and what it should be.
"""

import torch
from torch import Tensor


def check_tensor(
    name: str,
    tensor: Tensor,
    *,
    shape: tuple[int | None, ...],
    dtype: torch.dtype | None = None,
    contiguous: bool = True,
) -> None:
    """Check a tensor argument. None allows any size or dtype.

    Raises TypeError if it is not a tensor or has another dtype, and ValueError if it has another shape or is not
    contiguous.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}, expected a tensor")
    if dtype is not None and tensor.dtype != dtype:
        raise TypeError(f"{name} is {tensor.dtype}, expected {dtype}")
    sizes = tensor.shape
    if len(sizes) != len(shape) or any(
        want is not None and have != want for have, want in zip(sizes, shape, strict=True)
    ):
        expected = ", ".join("*" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} has shape {list(sizes)}, expected [{expected}]")
    if contiguous and not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {tensor.stride()}, expected a contiguous tensor")
