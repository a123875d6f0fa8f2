"""One version of one expert is one contiguous blob: gate | up | down, each packed weights and scales.

A transfer is then one copy (or one for each projection), a slot is an address, and
a kernel needs that address and the format. Where the low version has half the bits of the high one it lies inside it:
a blob is two slices, the *base* with the upper halves of codes, which is the low version, and behind it the *fine*
slice with the lower halves. Byte offsets: docs/format.md.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

import torch

from vllm_dymoe.residency.code import Codebook
from vllm_dymoe.residency.matrix import MatrixFormat, PackedMatrix


class Projection(IntEnum):
    """The matrices of an expert, in the order they lie in a blob; the gate may have no bytes."""

    GATE = 0
    UP = 1
    DOWN = 2


EVERY_PROJECTION = range(len(Projection))


@dataclass(frozen=True, slots=True)
class BlobKey:
    """One version of one expert: position of its layer, local index, bit-width.

    Where that version is nested it names the fine slice alone; the base is the key of half the bits.
    """

    layer: int
    expert: int
    bits: int


class Expert(NamedTuple):
    """Zero-copy views into one blob."""

    gate: PackedMatrix
    up: PackedMatrix
    down: PackedMatrix


@dataclass(frozen=True)
class Format:
    """How one version of an expert is packed.

    Attributes:
        hidden: model width H; gate and up are [I, H], down is [H, I].
        intermediate: expert width I on this rank.
        bits: 16, 8, 4 or 2.
        group_size: weights that share one scale and zero.
        dtype: of the scales, and of the weights at 16 bits; bfloat16 or float16.
        bias: whether every projection has one.
        integer_zeros: whether zeros count steps of their scale, see :class:`vllm_dymoe.kernels.MatrixFormat`.
        act_order: whether columns are stored in another order than that of the inputs, see there.
        has_gate: whether there is one; otherwise it has no rows, and its section no bytes.
        codebook: what codes stand for where they are floats, see there; one with groups of its own ignores group_size.
        nested: whether it is the fine slice, beside `base`.
        upper_of: bits of the version whose base slice it is; 0 for a version of its own.
    """

    hidden: int
    intermediate: int
    bits: int
    group_size: int
    dtype: torch.dtype
    bias: bool = False
    integer_zeros: bool = False
    act_order: bool = False
    has_gate: bool = True
    codebook: Codebook | None = None
    nested: bool = False
    upper_of: int = 0

    @cached_property
    def base(self) -> "Format":
        """The format of the base slice, if this one is nested."""
        return replace(self, bits=self.bits // 2, nested=False, upper_of=self.bits)

    @cached_property
    def whole_nbytes(self) -> int:
        """Bytes that an expert needs in this version: with its base slice, if it is nested."""
        return self.nbytes + (self.base.nbytes if self.nested else 0)

    @cached_property
    def projections(self) -> tuple[Projection, ...]:
        """Those that there are."""
        return tuple(Projection)[not self.has_gate :]

    @cached_property
    def matrices(self) -> tuple[MatrixFormat, MatrixFormat, MatrixFormat]:
        """Formats of gate [I, H] or [0, H], up [I, H] and down [H, I]."""
        group_size = (self.codebook and self.codebook.group_size) or self.group_size
        flags = (self.bias, self.integer_zeros, self.act_order, self.codebook, self.nested, self.upper_of)
        rest = (self.bits, group_size, self.dtype, *flags)
        up = MatrixFormat(self.intermediate, self.hidden, *rest)
        return up if self.has_gate else replace(up, rows=0), up, MatrixFormat(self.hidden, self.intermediate, *rest)

    @cached_property
    def sections(self) -> tuple[slice, slice, slice]:
        """Bytes of the blob that each projection takes."""
        ends = [0]
        for matrix in self.matrices:
            ends.append(ends[-1] + matrix.nbytes)
        return slice(ends[0], ends[1]), slice(ends[1], ends[2]), slice(ends[2], ends[3])

    def span(self, projections: range) -> slice:
        """Bytes of the blob that neighbouring projections take."""
        return slice(self.sections[projections.start].start, self.sections[projections.stop - 1].stop)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the whole blob."""
        return sum(matrix.nbytes for matrix in self.matrices)

    def view(self, blob: torch.Tensor, base: Expert | None = None) -> Expert:
        """See a blob or slice (uint8 [nbytes], contiguous) as packed matrices, without copying.

        Args:
            blob: the bytes.
            base: the base slice, if this format is nested.
        """
        gate, up, down = (
            matrix.view(blob[section], upper)
            for matrix, section, upper in zip(self.matrices, self.sections, base or (None,) * 3, strict=True)
        )
        return Expert(gate, up, down)


@dataclass(frozen=True)
class ModelExperts:
    """The experts of one model on one rank: what the store holds and slots take.

    Attributes:
        layers: index of each MoE layer in the model, ascending; dense layers are absent.
        num_experts: experts per layer on this rank.
        top_k: experts that one token uses in one layer.
        formats: one per stored bit-width.
        draft_layers: how many of the layers, the last ones, are those of a draft that proposes the model's tokens.
    """

    layers: tuple[int, ...]
    num_experts: int
    top_k: int
    formats: Mapping[int, Format]
    draft_layers: int = 0

    @property
    def projections(self) -> tuple[Projection, ...]:
        """Of every expert."""
        return next(iter(self.formats.values())).projections

    def nbytes(self, bits: int) -> int:
        """Bytes of every expert of every layer at one bit-width."""
        return len(self.layers) * self.num_experts * self.formats[bits].whole_nbytes

    @property
    def stored_nbytes(self) -> int:
        """Bytes of everything that a store holds."""
        return len(self.layers) * self.num_experts * sum(fmt.nbytes for fmt in self.formats.values())

    @cached_property
    def places(self) -> Mapping[int, "SlicePlace"]:
        """Where each version, or slice, lies in its blob."""
        places = {}
        for bits, fmt in self.formats.items():
            if fmt.nested:
                base = fmt.base.nbytes
                places[bits] = SlicePlace(bits, fmt.whole_nbytes, base, 1, 2)
                places[bits // 2] = SlicePlace(bits, fmt.whole_nbytes, 0, 0, 2)
            elif not fmt.upper_of:
                places[bits] = SlicePlace(bits, fmt.nbytes, 0, 0, 1)
        return places


class SlicePlace(NamedTuple):
    """Where a slice lies among the blobs of a layer.

    Attributes:
        bits: of the blobs.
        stride: bytes from one to the next.
        start: first byte of the slice in its blob.
        number: of the slice in its blob.
        slices: of a blob.
    """

    bits: int
    stride: int
    start: int
    number: int
    slices: int


def stored_formats(bits: Sequence[int], make: Callable[[int], Format]) -> dict[int, Format]:
    """The formats of a store, the high tier first: one inside the other where one has half the bits of the other.

    Args:
        bits: of the tiers.
        make: a version of its own at some bits. A version inside another one has everything else in common with it.
    """
    formats = {width: make(width) for width in bits}
    high, low = max(bits), min(bits)
    if nests(bits, formats[high].codebook):
        fine = replace(formats[high], nested=True)
        return {high: fine, low: fine.base}
    return formats


def nests(bits: Sequence[int], codebook: Codebook | None) -> bool:
    """Whether the low one of two tiers lies inside the high one.

    Args:
        bits: of the tiers.
        codebook: of the high one: the upper half of a float is no float of its own.
    """
    return codebook is None and set(bits) in ({4, 2}, {8, 4})


def all_keys(experts: ModelExperts) -> Iterator[BlobKey]:
    """Every blob of a model, layer by layer, in the order it lies on disk."""
    for layer in range(len(experts.layers)):
        yield from layer_keys(experts, layer)


def layer_keys(experts: ModelExperts, layer: int) -> Iterator[BlobKey]:
    """Every blob of one layer (by position), in the order it lies on disk."""
    for bits in experts.formats:
        for expert in range(experts.num_experts):
            yield BlobKey(layer, expert, bits)
