"""What a reader of quantized experts says of them, and what readers share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vllm_dymoe.quantize.held import Held
from vllm_dymoe.quantize.tensors import CheckpointError
from vllm_dymoe.residency.code import Code

GROUP_SIZES = (128, 64, 32)
"""Of a store, the largest first."""

SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
EXPONENTS, NUMBERS = ("U8", "F8_E8M0"), ("F16", "BF16", "F32", "F8_E8M0")
"""Dtypes of scales as safetensors names them."""

Make = Callable[[Mapping[str, Tensor], int, int], Held]
"""(tensors by the ends of their names, rows, columns) -> the whole matrix; ValueError if a tensor is something else."""

Check = Callable[[str, Tensor, int, int], None]
"""(end of the name, tensor, rows, columns); ValueError if it contradicts the configuration."""


def ignore(part: str, tensor: Tensor, rows: int, columns: int) -> None:
    """Scales of activations, which stay at 16 bits."""


@dataclass(frozen=True)
class Reader:
    """Reads the experts of one quantized checkpoint.

    Attributes:
        method: ``quant_method`` in its config.json.
        bits: of each code.
        group_size: columns that share a scale and a zero point; None for all columns of a row.
        parts: ends of the names of the tensors that make one matrix.
        make: the matrix of them.
        checks: by the ends of their names, tensors that may come beside them and must agree with the rest.
        asymmetric: whether zero points may be another code than the middle one.
        act_order: whether columns may have been quantized in the order of their activations, so that the columns of a
            group lie anywhere in a row.
        codebook: what codes stand for where they are floats.
        ranks_take_groups: whether vLLM gives tensor-parallel ranks whole groups of the down projection's inputs, and
            the last rank what is left.
        scale_dtypes: what the second part may be, as safetensors names dtypes; none where anything is possible.
        spellings: other ends of names in some checkpoints, which vLLM's models rename, and what they mean.
    """

    method: str
    bits: int
    group_size: int | None
    parts: tuple[str, ...]
    make: Make
    checks: Mapping[str, Check] = field(default_factory=dict)
    asymmetric: bool = False
    act_order: bool = False
    codebook: Code | None = None
    ranks_take_groups: bool = False
    scale_dtypes: tuple[str, ...] = ()
    spellings: Mapping[str, str] = field(default_factory=dict)

    def read(self, tensors: Mapping[str, Tensor], rows: int, columns: int) -> Held:
        """One whole matrix from its tensors, after those beside them have been checked.

        Raises:
            ValueError: a tensor is not what the format says; the message begins with the end of its name.
        """
        for part, check in self.checks.items():
            if part in tensors:
                check(part, tensors[part], rows, columns)
        return self.make(tensors, rows, columns)

    @property
    def known_parts(self) -> tuple[str, ...]:
        """Ends of the names of all tensors that one projection may have."""
        return (*self.parts, *self.checks)

    @property
    def code_dtypes(self) -> tuple[str, ...]:
        """What the first part may be, as safetensors names dtypes."""
        if self.codebook is None:
            return ("I32",)
        return ("F8_E4M3",) if self.codebook.bits == 8 else ("U8", "I8")


def check_part(part: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], *shape: int) -> None:
    """Refuse a tensor of another dtype or shape.

    Raises:
        ValueError: it has one.
    """
    if tensor.dtype not in dtypes:
        raise ValueError(f"{part} is {tensor.dtype}, expected {' or '.join(map(str, dtypes))}.")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{part} has shape {list(tensor.shape)}, expected {list(shape)}.")


def count_groups(columns: int, group_size: int | None) -> int:
    """Groups of a row, the last one perhaps shorter."""
    return -(-columns // (group_size or columns))


def choose_bits(method: str, value: Any, choices: tuple[int, ...]) -> int:
    """The bits of a configuration.

    Raises:
        CheckpointError: no reader has them.
    """
    if value not in choices or isinstance(value, bool):
        raise CheckpointError(
            f"the checkpoint is quantized with {method} at {value} bits, and only {', '.join(map(str, choices))} can "
            "be read; serve one with 16-bit weights, or with other bits."
        )
    return int(value)


def choose_group_size(method: str, value: Any) -> int | None:
    """The group size of a configuration; None where a row is one group.

    Raises:
        CheckpointError: a store has no groups of which its groups are made.
    """
    if value in (None, -1):
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1 or value % GROUP_SIZES[-1]:
        raise CheckpointError(
            f"the checkpoint is quantized with {method} in groups of {value}, and a store's groups are multiples of "
            f"{GROUP_SIZES[-1]}; use a checkpoint with groups of 32, 64 or 128."
        )
    return value
