"""Packed experts: gate | up | down, contiguous in memory.

Each of the three has its weights and scales (docs/format.md). A nested packed expert has two slices: the *base slice*
is the low version, and the *residual slice* turns it into the high one.
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
    """The matrices of an expert, in the order in which they are packed.

    The gate may have no bytes.
    """

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


class DownFormat(NamedTuple):
    """Format of down projections, if it differs from that of gate and up.

    Fields are as in :class:`ExpertFormat`.
    """

    encoding: Encoding
    group_size: int
    integer_zeros: bool = False
    act_order: bool = False


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
    down: DownFormat | None = None  # format of down, if it differs from gate and up; never in nested versions

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
        usual = DownFormat(self.encoding, self.group_size, self.integer_zeros, self.act_order)
        outer, inner = self.rotations

        def matrix(rows: int, columns: int, of: DownFormat, rotation: int) -> MatrixFormat:
            group_size, flags = of.encoding.group_size or of.group_size, (of.integer_zeros, of.act_order)
            return MatrixFormat(rows, columns, of.encoding, group_size, self.dtype, self.bias, *flags, rotation)

        up = matrix(self.intermediate, self.hidden, usual, outer)
        down = matrix(self.hidden, self.intermediate, self.down or usual, inner)
        return up if self.has_gate else replace(up, rows=0), up, down

    @property
    def rotations(self) -> tuple[int, int]:
        """Block sizes of the rotation of inputs, for gate and up, and for down.

        They are the largest powers of two that divide the widths; 0 without rotation. The block size of down is limited
        to what one kernel program computes, so that the program can rotate before it stores.
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
    formats: Mapping[int, ExpertFormat]
    """One per stored bit-width. If layers differ, it is that of most, and the others' versions go by its bits."""
    draft_layers: int = 0
    """Number of layers of a draft, which proposes the model's tokens; they are the last ones."""
    curves: tuple[tuple[float, ...], ...] = field(default=(), compare=False)
    """Start values of thresholds for prompts' tokens and decoded tokens, see :mod:`~.threshold`; empty without a
    calibration.
    """
    lost: Mapping[int, tuple[float, ...]] = field(default_factory=dict, compare=False)
    """By index of the layer: the measured error of each expert's low version, if a calibration measured it."""
    own: Mapping[int, ExpertFormat] = field(default_factory=dict)
    """By index of the layer, its format where that is not the one of ``formats``, which then has a single bit-width."""

    def __post_init__(self) -> None:
        if self.own and len(self.formats) > 1:
            raise ValueError("layers of several formats have one version of each expert")

    @cached_property
    def of_layers(self) -> tuple[Mapping[int, ExpertFormat], ...]:
        """Formats of each layer, by bit-width, in the order of ``layers``."""
        bits = next(iter(self.formats))
        return tuple({bits: self.own[index]} if index in self.own else self.formats for index in self.layers)

    def format(self, key: SliceKey) -> ExpertFormat:
        return self.of_layers[key.layer][key.bits]

    @cached_property
    def of_kinds(self) -> tuple[Mapping[int, ExpertFormat], ...]:
        """Formats of each kind of layer, by bit-width.

        Layers of one kind have the same formats; most models have one kind.
        """
        found: list[Mapping[int, ExpertFormat]] = []
        for formats in self.of_layers:
            if formats not in found:
                found.append(formats)
        return tuple(found)

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """Each layer's number in ``of_kinds``."""
        return tuple(map(self.of_kinds.index, self.of_layers))

    def of_kind(self, kind: int) -> "ModelExperts":
        """Return the layers of one kind alone."""
        layers = tuple(index for index, own in zip(self.layers, self.kinds, strict=True) if own == kind)
        return replace(self, layers=layers, formats=self.of_kinds[kind], own={}, draft_layers=0)

    @cached_property
    def all_formats(self) -> tuple[ExpertFormat, ...]:
        """All formats that differ."""
        return tuple(dict.fromkeys(fmt for formats in self.of_kinds for fmt in formats.values()))

    @property
    def projections(self) -> tuple[Projection, ...]:
        return next(iter(self.formats.values())).projections

    def nbytes(self, bits: int) -> int:
        return self.num_experts * sum(formats[bits].whole_nbytes for formats in self.of_layers)

    @property
    def stored_nbytes(self) -> int:
        return self.num_experts * sum(fmt.nbytes for formats in self.of_layers for fmt in formats.values())


def places_at(formats: Mapping[int, ExpertFormat], alignment: int) -> dict[int, "SlicePlace"]:
    """Return the place of each slice among a layer's packed experts, by bits.

    A version that is not nested is one slice. Every slice begins at a multiple of ``alignment`` bytes.
    """
    places = {}
    for bits, fmt in formats.items():
        if fmt.encoding.upper_of:
            continue
        starts = [0]
        for part in fmt.slices:
            starts.append(-(-(starts[-1] + part.nbytes) // alignment) * alignment)
        for number, part in enumerate(fmt.slices):
            # A layer's own version goes by the bits of the other layers' version.
            named = bits if part is fmt else part.bits
            places[named] = SlicePlace(bits, starts[-1], starts[number], number, len(fmt.slices))
    return places


class SlicePlace(NamedTuple):
    """Place of a slice among the packed experts of a layer."""

    bits: int  # bits of the packed experts
    stride: int  # bytes from one to the next
    start: int  # first byte of the slice in its packed expert
    number: int  # number of the slice in its packed expert
    slices: int  # number of slices in a packed expert


def stored_formats(bits: Sequence[int], make: Callable[[int], ExpertFormat]) -> dict[int, ExpertFormat]:
    """Return the formats of a store by bits, the high precision first.

    ``make`` returns the format of a separate version with the given bits. A version with half the bits of the other is
    nested in it, and shares everything else with it.
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
    """Return whether the low precision is nested in the high one.

    Published floats cannot be halved, so they never nest.
    """
    return not (encoding and encoding.floats) and set(bits) in ({4, 2}, {8, 4})


def all_keys(experts: ModelExperts) -> Iterator[SliceKey]:
    """Yield the key of every packed expert of a model, in the order of the files.

    Layers follow one another; within a layer the order is that of ``layer_keys``.
    """
    for layer in range(len(experts.layers)):
        yield from layer_keys(experts, layer)


def layer_keys(experts: ModelExperts, layer: int) -> Iterator[SliceKey]:
    """Yield the key of every packed expert of a layer, in the order of its file.

    ``layer`` is the layer's index.
    """
    for bits in experts.formats:
        for expert in range(experts.num_experts):
            yield SliceKey(layer, expert, bits)
