"""What every reader of a quantized checkpoint does: say what it found, and turn tensors into codes."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from vllm_dymoe.quantize.floats import FloatMatrix
from vllm_dymoe.quantize.prequantized import PrequantizedMatrix
from vllm_dymoe.quantize.tensors import CheckpointError
from vllm_dymoe.residency.code import Codebook

GROUP_SIZES = (128, 64, 32)
"""Of a store, the largest first."""

WORD_BITS = 32


class Reader(ABC):
    """Reads the experts of one quantized checkpoint.

    Attributes:
        method: ``quant_method`` in its config.json.
        bits: of each code.
        group_size: columns that share a scale and a zero point; None for all columns of a row.
        asymmetric: whether zero points may be another code than the middle one.
        act_order: whether columns may have been quantized in the order of their activations, so that the columns of a
            group lie anywhere in a row.
        codebook: what codes stand for where they are floats.
        ranks_take_groups: whether vLLM gives tensor-parallel ranks whole groups of the down projection's inputs, and
            the last rank what is left.
        parts: ends of the names of the tensors that make one matrix.
        checked: ends of the names of tensors that may come beside them and must agree with the rest.
        scale_dtypes: what the second of them may be, as safetensors names dtypes; none where anything is possible.
        spellings: other ends of names in some checkpoints, which vLLM's models rename, and what they mean.
    """

    method: str
    bits: int
    group_size: int | None
    asymmetric: bool = True
    act_order: bool = False
    codebook: Codebook | None = None
    ranks_take_groups: bool = False
    parts: tuple[str, ...]
    checked: tuple[str, ...] = ()
    scale_dtypes: tuple[str, ...] = ()
    spellings: Mapping[str, str] = MappingProxyType({})

    @abstractmethod
    def read(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> PrequantizedMatrix | FloatMatrix:
        """One whole matrix [rows, columns] from its tensors, by the ends of their names.

        Raises:
            ValueError: a tensor is not what the format says; the message begins with its name's end.
        """

    def check(self, part: str, tensor: Tensor, rows: int, columns: int) -> None:  # noqa: B027
        """Check a tensor that is not needed.

        Raises:
            ValueError: it contradicts the configuration; the message begins with its name's end.
        """

    @property
    def known_parts(self) -> tuple[str, ...]:
        """Ends of the names of all tensors that one projection may have."""
        return (*self.parts, *self.checked)


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """The numbers in 32-bit words, from the lowest bits up.

    Args:
        words: int32 [n, m].
        bits: of each number, a divisor of 32, at most 8.

    Returns:
        uint8 [n, m * 32 / bits].
    """
    # A machine's bytes are in this order too; four of them are taken at a time instead of one number.
    octets = words.contiguous().view(torch.uint8).view(words.shape[0], -1)
    if bits == 8:
        return octets
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    return ((octets.unsqueeze(2) >> shifts) & (2**bits - 1)).view(words.shape[0], -1)


def check_part(part: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], *shape: int) -> None:
    """Refuse a tensor of another dtype or shape.

    Raises:
        ValueError: it has one.
    """
    if tensor.dtype not in dtypes:
        raise ValueError(f"{part} is {tensor.dtype}, expected {' or '.join(map(str, dtypes))}.")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{part} has shape {list(tensor.shape)}, expected {list(shape)}.")


SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
EXPONENTS, NUMBERS = ("U8", "F8_E8M0"), ("F16", "BF16", "F32", "F8_E8M0")


def neighbours(columns: int, group_size: int | None) -> Tensor:
    """The group of each column where neighbours share one: int64 [columns]."""
    return torch.arange(columns) // (group_size or columns)


def scattered(part: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], columns: int, groups: int) -> Tensor:
    """The group of each column where a tensor says it: int64 [columns].

    Raises:
        ValueError: it is no such tensor, or names a group that does not exist.
    """
    check_part(part, tensor, dtypes, columns)
    named = tensor.long()
    if bool(((named < 0) | (named >= groups)).any()):
        raise ValueError(f"{part} names groups that do not exist: there are {groups}.")
    return named


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
