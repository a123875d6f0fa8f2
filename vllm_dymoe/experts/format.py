"""Packed experts: gate | up | down, each with its weights and scales, contiguous in memory (docs/format.md).

A nested packed expert has two slices: the *base slice* is the low version, and the *residual slice* turns it into the
high one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

import torch

from vllm_dymoe.experts.encoding import NESTED, Encoding
from vllm_dymoe.experts.matrix import BLOCK_ROWS, MatrixFormat, PackedMatrix


class Projection(IntEnum):
    """The matrices of an expert, in the order of a packed expert; the gate may have no bytes."""

    GATE = 0
    UP = 1
    DOWN = 2


EVERY_PROJECTION = range(len(Projection))


@dataclass(frozen=True, slots=True)
class SliceKey:
    """Names one version of one expert: index of its layer, local expert index, bits.

    For a nested version it names only the residual slice; the key with half the bits names the base slice.
    """

    layer: int
    expert: int
    bits: int


class PackedExpert(NamedTuple):
    """Views of one expert's packed bytes, wherever they are; nothing is copied."""

    gate: PackedMatrix
    up: PackedMatrix
    down: PackedMatrix


@dataclass(frozen=True)
class ExpertFormat:
    """How one version of an expert is packed."""

    hidden: int  # model width H; gate and up are [I, H], down is [H, I]
    intermediate: int  # expert width I on this rank
    encoding: Encoding  # a nested encoding is that of the residual slice; `base` has the base's
    group_size: int  # weights that share a scale and a zero; encodings with their own groups ignore it
    dtype: torch.dtype  # of the scales, and of the weights at 16 bits; bfloat16 or float16
    bias: bool = False  # whether every projection has a bias
    integer_zeros: bool = False  # whether zeros count steps of their scale, see :class:`MatrixFormat`
    act_order: bool = False  # whether columns are stored in another order than the inputs', see :class:`MatrixFormat`
    has_gate: bool = True  # without a gate, its matrix has no rows and its section no bytes

    @property
    def bits(self) -> int:
        return self.encoding.bits

    @property
    def nested(self) -> bool:
        return self.encoding.nested

    @cached_property
    def base(self) -> "ExpertFormat":
        return replace(self, encoding=self.encoding.base)

    @cached_property
    def slices(self) -> tuple["ExpertFormat", ...]:
        """The slices of the version: base and residual if it is nested, else itself."""
        return (self.base, self) if self.nested else (self,)

    @cached_property
    def whole_nbytes(self) -> int:
        """Bytes of all slices of the version."""
        return sum(part.nbytes for part in self.slices)

    @cached_property
    def projections(self) -> tuple[Projection, ...]:
        return tuple(Projection)[not self.has_gate :]

    @cached_property
    def matrices(self) -> tuple[MatrixFormat, MatrixFormat, MatrixFormat]:
        """Formats of gate [I, H] or [0, H], up [I, H] and down [H, I]."""
        group_size = self.encoding.group_size or self.group_size
        rest = self.encoding, group_size, self.dtype, self.bias, self.integer_zeros, self.act_order
        outer, inner = self.rotations
        up = MatrixFormat(self.intermediate, self.hidden, *rest, outer)
        down = MatrixFormat(self.hidden, self.intermediate, *rest, inner)
        return up if self.has_gate else replace(up, rows=0), up, down

    @property
    def rotations(self) -> tuple[int, int]:
        """Block sizes of the rotation of inputs, for gate and up, and for down.

        They are the largest powers of two that divide the widths.

        The block size of down is limited to what one kernel program computes, so that the program can rotate before it
        stores.
        """
        if not self.encoding.lattice:
            return 0, 0
        return self.hidden & -self.hidden, min(self.intermediate & -self.intermediate, BLOCK_ROWS)

    @cached_property
    def sections(self) -> tuple[slice, slice, slice]:
        ends = [0]
        for matrix in self.matrices:
            ends.append(ends[-1] + matrix.nbytes)
        return slice(ends[0], ends[1]), slice(ends[1], ends[2]), slice(ends[2], ends[3])

    def span(self, projections: range) -> slice:
        return slice(self.sections[projections.start].start, self.sections[projections.stop - 1].stop)

    @cached_property
    def nbytes(self) -> int:
        return self.sections[-1].stop

    def view(self, packed: torch.Tensor, base: PackedExpert | None = None) -> PackedExpert:
        """View a slice (uint8 [nbytes], contiguous) as packed matrices, without copying.

        A nested one needs its base slice.
        """
        gate, up, down = (
            matrix.view(packed[section], upper)
            for matrix, section, upper in zip(self.matrices, self.sections, base or (None,) * 3, strict=True)
        )
        return PackedExpert(gate, up, down)


@dataclass(frozen=True)
class ModelExperts:
    """The experts of one model on one rank, as stores and slots hold them."""

    layers: tuple[int, ...]  # index of each MoE layer in the model, ascending; dense layers are absent
    num_experts: int  # experts per layer on this rank
    top_k: int  # experts that one token uses in one layer
    formats: Mapping[int, ExpertFormat]  # one per stored bit-width
    draft_layers: int = 0
    """Number of layers, the last ones, that belong to a draft that proposes the model's tokens."""
    curves: tuple[tuple[float, ...], ...] = field(default=(), compare=False)
    """Start values of thresholds for prompts' tokens and decoded tokens, see :mod:`~.threshold`; empty without a
    calibration.
    """
    lost: Mapping[int, tuple[float, ...]] = field(default_factory=dict, compare=False)
    """By index of the layer: the measured error of each expert's low version, if a calibration measured it."""

    @property
    def projections(self) -> tuple[Projection, ...]:
        return next(iter(self.formats.values())).projections

    def nbytes(self, bits: int) -> int:
        return len(self.layers) * self.num_experts * self.formats[bits].whole_nbytes

    @property
    def stored_nbytes(self) -> int:
        return len(self.layers) * self.num_experts * sum(fmt.nbytes for fmt in self.formats.values())

    @cached_property
    def places(self) -> Mapping[int, "SlicePlace"]:
        """Place of each version, or slice, in a layer's packed experts in memory."""
        return self.places_at(1)

    def places_at(self, alignment: int) -> Mapping[int, "SlicePlace"]:
        """Return the places if every slice begins at a multiple of ``alignment`` bytes."""
        places = {}
        for bits, fmt in self.formats.items():
            if fmt.encoding.upper_of:
                continue
            starts = [0]
            for part in fmt.slices:
                starts.append(-(-(starts[-1] + part.nbytes) // alignment) * alignment)
            for number, part in enumerate(fmt.slices):
                places[part.bits] = SlicePlace(bits, starts[-1], starts[number], number, len(fmt.slices))
        return places


class SlicePlace(NamedTuple):
    """Place of a slice among the packed experts of a layer."""

    bits: int  # bits of the packed experts
    stride: int  # bytes from one to the next
    start: int  # first byte of the slice in its packed expert
    number: int  # number of the slice in its packed expert
    slices: int  # number of slices in a packed expert


def stored_formats(bits: Sequence[int], make: Callable[[int], ExpertFormat]) -> dict[int, ExpertFormat]:
    """Return the formats of a store, high precision first. ``make`` returns the format of a separate version.

    A version with half the bits of the other is nested in it, and shares everything else with it.
    """
    formats = {width: make(width) for width in bits}
    high, low = max(bits), min(bits)
    if nests(bits, formats[high].encoding):
        residual = nested(formats[high])
        return {high: residual, low: residual.base}
    return formats


def nested(fmt: ExpertFormat) -> ExpertFormat:
    return fmt if fmt.nested else replace(fmt, encoding=NESTED[fmt.bits])


def nests(bits: Sequence[int], encoding: Encoding | None) -> bool:
    """Return whether the low precision is nested in the high one, for this encoding; floats cannot be halved."""
    return not (encoding and encoding.floats) and set(bits) in ({4, 2}, {8, 4})


def all_keys(experts: ModelExperts) -> Iterator[SliceKey]:
    """Yield the key of every packed expert of a model, layer by layer, in the order of the files."""
    for layer in range(len(experts.layers)):
        yield from layer_keys(experts, layer)


def layer_keys(experts: ModelExperts, layer: int) -> Iterator[SliceKey]:
    """Yield the key of every packed expert of one layer (an index), in the order of its file."""
    for bits in experts.formats:
        for expert in range(experts.num_experts):
            yield SliceKey(layer, expert, bits)
