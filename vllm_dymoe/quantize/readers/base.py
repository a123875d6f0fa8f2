"""Readers of experts, and what a store must look like to keep their numbers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vllm_dymoe.cache.store.manifest import read_encodings
from vllm_dymoe.experts.encoding import PLAIN, Encoding
from vllm_dymoe.experts.format import DownFormat, ExpertFormat, Projection, nests
from vllm_dymoe.options import Options
from vllm_dymoe.quantize.held import Held
from vllm_dymoe.quantize.tensors import CheckpointError

GROUP_SIZES = (128, 64, 32)  # of a store, the largest first

DTYPES = {
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu, "U8": torch.uint8, "I8": torch.int8, "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip
"""As safetensors names them."""

FLOATS, WORDS, BYTES = ("F16", "BF16", "F32"), ("I32",), ("I8",)

Make = Callable[[Mapping[str, Tensor], int, int], Held]
"""(tensors by the ends of their names, rows, columns) -> the whole matrix; ValueError if a tensor is something else."""

Check = Callable[[str, Tensor, int, int], None]
"""(end of the name, tensor, rows, columns); ValueError if it contradicts the configuration."""


def ignore(part: str, tensor: Tensor, rows: int, columns: int) -> None:
    """Check nothing: scales of activations are not used, which stay at 16 bits."""


@dataclass(frozen=True, eq=False)
class Reader:
    """Reads the experts of one checkpoint."""

    method: str  # ``quant_method`` in its config.json; empty if nothing is quantized
    encoding: Encoding
    group_size: int | None  # columns that share a scale and a zero point; None for all columns of a row
    dtypes: Mapping[str, tuple[str, ...]]
    """By the endings of their names, the tensors from which ``make`` makes one matrix, and their allowed dtypes; ()
    allows any.
    """
    make: Make
    checks: Mapping[str, Check] = field(default_factory=dict)
    """By the endings of their names, checks for tensors that may accompany them and must agree with the rest."""
    asymmetric: bool = False  # whether zero points may differ from the middle code
    act_order: bool = False
    """Whether columns may have been quantized in the order of their activations, so that groups are scattered."""
    ranks_take_groups: bool = False
    """Whether vLLM gives tensor-parallel ranks whole groups of the down projection's inputs, and the last rank the
    rest.
    """
    spellings: Mapping[str, str] = field(default_factory=dict)
    """Alternative endings of names in some checkpoints, which vLLM's models rename, and their meaning."""
    activations: bool = False
    """Whether the checkpoint's writer intends quantized activations, too; here they stay at 16 bits."""

    def at(self, layer: int, projection: Projection) -> "Reader":
        """Return the reader for one projection of a layer's experts.

        See :class:`MixedReader`.
        """
        return self

    def of_layer(self, layer: int) -> "tuple[Reader, Reader]":
        """Return a layer's readers: the one of gate and up, and the one of down."""
        return self, self

    @property
    def layers(self) -> "dict[int, tuple[Reader, Reader]]":
        """By layer, the readers of layers that may differ, see :meth:`of_layer`."""
        return {}

    @property
    def usual(self) -> "tuple[Reader, Reader]":
        """The readers of most layers."""
        return self, self

    def keeps(self, bits: Sequence[int]) -> bool:
        """Return whether a store of these bit-widths holds every layer as it is.

        That is, whether codes and scales are kept unchanged.
        """
        return self.held and self.bits in bits

    @property
    def mixed(self) -> bool:
        return False

    def read(self, tensors: Mapping[str, Tensor], rows: int, columns: int) -> Held:
        """Read one whole matrix, after checking the tensors that accompany it.

        The message of a ValueError begins with the ending of a tensor's name.
        """
        for part, check in self.checks.items():
            if part in tensors:
                check(part, tensors[part], rows, columns)
        for part, dtypes in self.dtypes.items():
            if dtypes and tensors[part].dtype not in [DTYPES[name] for name in dtypes]:
                raise ValueError(f"{part} is {tensors[part].dtype}, expected {' or '.join(dtypes)}.")
        return self.make(tensors, rows, columns)

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.dtypes)

    @property
    def bits(self) -> int:
        return self.encoding.bits

    @property
    def held(self) -> bool:
        """Whether another tool has quantized the experts."""
        return self.encoding != PLAIN

    @property
    def format(self) -> tuple[object, ...]:
        """What identifies the format: readers with equal values read in the same way.

        Names and numbers only: they are a part of a store's fingerprint.
        """
        made = (self.make.func.__name__, *self.make.args) if isinstance(self.make, partial) else (self.make.__name__,)
        return self.method, self.encoding.name, self.group_size, self.parts, self.asymmetric, self.act_order, made

    @property
    def summary(self) -> str:
        """The format in a few words."""
        if not self.held:
            return "16 bits"
        groups = f" in groups of {self.group_size}" if self.group_size else ""
        return f"{self.method} at {self.bits} bits{groups}"

    @property
    def known_parts(self) -> tuple[str, ...]:
        return (*self.parts, *self.checks)


def _not_held(tensors: Mapping[str, Tensor], rows: int, columns: int) -> Held:
    raise AssertionError("16-bit weights are quantized, not held")


PLAIN_READER = Reader("", PLAIN, None, {"weight": FLOATS}, _not_held)  # for 16-bit experts


@dataclass(frozen=True, eq=False)
class MixedReader(Reader):
    """Reads experts whose format differs between layers or projections.

    A store with one version of each expert holds every matrix as it is, except gate and up of a layer where these two
    have different formats: they get 16 bits. Any other store holds what all of them dequantize to, as the weights of a
    16-bit checkpoint.
    """

    readers: Mapping[tuple[int, Projection], Reader] = field(default_factory=dict)

    @classmethod
    def of(cls, readers: Mapping[tuple[int, Projection], Reader]) -> "MixedReader":
        parts = {part: () for reader in readers.values() for part in reader.known_parts}
        methods = " and ".join(sorted({reader.summary for reader in readers.values()}))
        return cls(methods, PLAIN, None, parts, _not_held, readers=readers)

    @property
    def format(self) -> tuple[object, ...]:
        return tuple((*place, self.readers[place].format) for place in sorted(self.readers))

    def at(self, layer: int, projection: Projection) -> Reader:
        return self.readers.get((layer, projection), PLAIN_READER)

    def of_layer(self, layer: int) -> tuple[Reader, Reader]:
        gate, up, down = (self.at(layer, projection) for projection in Projection)
        return up if gate is up or (layer, Projection.GATE) not in self.readers else PLAIN_READER, down

    @property
    def layers(self) -> dict[int, tuple[Reader, Reader]]:
        return {layer: self.of_layer(layer) for layer in sorted({layer for layer, _ in self.readers})}

    @property
    def usual(self) -> tuple[Reader, Reader]:
        pairs = list(self.layers.values())
        return max(pairs, key=lambda pair: (pairs.count(pair), pair[0].bits), default=(PLAIN_READER, PLAIN_READER))

    def keeps(self, bits: Sequence[int]) -> bool:
        return tuple(bits) == (self.usual[0].bits,)

    @property
    def mixed(self) -> bool:
        return True


def check_shape(part: str, tensor: Tensor, *shape: int) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{part} has shape {list(tensor.shape)}, expected {list(shape)}.")


def count_groups(columns: int, group_size: int | None) -> int:
    return -(-columns // (group_size or columns))


def unreadable(what: str, readable: str, advice: str = "use one of those") -> CheckpointError:
    """Return the error for a checkpoint in an unsupported format."""
    return CheckpointError(f"the checkpoint is quantized with {what}, but only {readable} can be read; {advice}.")


def choose_bits(method: str, value: Any, choices: tuple[int, ...]) -> int:
    if value not in choices or isinstance(value, bool):
        advice = "serve one with 16-bit weights, or with other bits"
        raise unreadable(f"{method} at {value} bits", ", ".join(map(str, choices)), advice)
    return int(value)


def choose_group_size(method: str, value: Any) -> int | None:
    """Return a configuration's group size, None if a row is one group.

    Raises CheckpointError if a store does not support it.
    """
    if value in (None, -1):
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1 or value % GROUP_SIZES[-1]:
        raise CheckpointError(
            f"the checkpoint is quantized with {method} in groups of {value}, but a store's groups are multiples of "
            f"{GROUP_SIZES[-1]}; use a checkpoint with groups of 32, 64 or 128."
        )
    return value


def format_fields(reader: Reader, ours: Mapping[str, Any], bits: int) -> dict[str, Any]:
    """Return arguments of :class:`ExpertFormat` for one bit-width.

    The format can hold the checkpoint's numbers. ``ours`` is the quantization_config of a checkpoint that the plugin
    wrote, else empty. Other precisions are derived from the weights, with groups of adjacent columns: a column order
    would cost a gather for every product.
    """
    if not reader.held or bits != reader.bits:
        return read_encodings(ours, bits)
    return {"encoding": reader.encoding, "integer_zeros": reader.asymmetric, "act_order": reader.act_order}


def store_group_sizes(reader: Reader, rank_columns: int, ranks: int) -> tuple[int, ...]:
    """Return group sizes of a store in which no group has two scales, the best first.

    Empty if ranks, each with ``rank_columns`` inputs of the down projection, cut groups. If an encoding has its own
    groups, the sizes are for precisions derived from it.
    """
    fixed = reader.encoding.group_size
    if fixed is not None:
        whole = ranks == 1 or reader.ranks_take_groups or rank_columns % fixed == 0
        return (Options().group_size, *GROUP_SIZES) if whole else ()
    return tuple(
        size
        for size in GROUP_SIZES
        if reader.group_size is None or (reader.group_size % size == 0 and (ranks == 1 or rank_columns % size == 0))
    )


def kept_format(pair: tuple[Reader, Reader], like: ExpertFormat, rank_columns: int, ranks: int) -> ExpertFormat:
    """Return the format that holds the numbers of a layer as they are.

    Args:
        pair: see :meth:`Reader.of_layer`.
        like: has the sizes, and the group size of codes that have groups of their own.
        rank_columns: see :func:`store_group_sizes`, as for ``ranks``.
    """
    fields = []
    for reader in pair:
        sizes = store_group_sizes(reader, rank_columns, ranks) if reader.held else ()
        own = sizes and reader.encoding.group_size is None
        given = {"integer_zeros": False, "act_order": False, **format_fields(reader, {}, reader.bits)}
        fields.append(given | {"group_size": sizes[0] if own else like.group_size})
    return replace(like, **fields[0], down=DownFormat(**fields[1]) if fields[1] != fields[0] else None)


def own_formats(
    reader: Reader, layers: Mapping[int, int], usual: ExpertFormat, rank_columns: int, ranks: int
) -> dict[int, ExpertFormat]:
    """Return the formats of layers that differ from the usual one.

    In these formats the layers hold the checkpoint's numbers.

    Args:
        layers: by their numbers in the store, those in the checkpoint's names.
        rank_columns: see :func:`store_group_sizes`, as for ``ranks``.
    """
    found = {}
    for number, layer in layers.items():
        fmt = kept_format(reader.of_layer(layer), usual, rank_columns, ranks)
        if fmt != usual:
            found[number] = fmt
    return found


def check_compatible(reader: Reader, bits: Sequence[int], group_size: int, rank_columns: int, ranks: int) -> None:
    """Raise CheckpointError if a store could not hold the checkpoint's numbers.

    ``bits`` start with the high precision.
    """
    if not reader.held:
        return
    if bits[0] not in (reader.bits, 16):
        raise CheckpointError(
            f"high is {bits[0]}, but the experts of this {reader.method} checkpoint have {reader.bits} "
            f"bits; set high to {reader.bits}, which keeps their numbers unchanged, or to 16, which stores their "
            "dequantized weights."
        )
    if reader.bits not in bits:
        return
    if reader.act_order and ranks > 1:
        raise CheckpointError(
            f"--tensor-parallel-size {ranks} gives a rank some columns of the down projection, but in this "
            f"{reader.method} checkpoint each group is scattered over all of them (desc_act, or actorder group), so "
            "that a rank would hold no whole group; add --enable-expert-parallel, or set high to 16 and low to 0, "
            "which "
            "stores its dequantized weights."
        )
    sizes = store_group_sizes(reader, rank_columns, ranks)
    if not sizes:
        raise CheckpointError(
            f"--tensor-parallel-size {ranks} gives a rank {rank_columns} columns of the down projection, which cuts "
            f"the groups of this {reader.method} checkpoint; use another size or --enable-expert-parallel, or set high "
            "to 16 and low to 0, which stores its dequantized weights."
        )
    if group_size not in sizes:
        raise CheckpointError(
            f"group_size is {group_size}, but the groups of {reader.group_size} columns of this "
            f"{reader.method} checkpoint can only be held in groups of {' or '.join(map(str, sizes))}; leave "
            "group_size out."
        )


def quantizer_name(reader: Reader, bits: Sequence[int], quantizer: str, *, kept: bool = False) -> str:
    """Return how the bytes of a store were made, for its manifest.

    ``kept`` says that every layer has a format of its own.
    """
    if reader.mixed and kept:
        return f"{reader.method} checkpoint"
    if reader.mixed:
        return f"{reader.method}, {quantizer}"
    if not reader.held:
        return quantizer
    source = f"{reader.method} checkpoint"
    derived = set() if nests(bits, reader.encoding) else set(bits) - {16, reader.bits}
    return f"{source}, {quantizer}" if derived else source


def describe(reader: Reader, bits: Sequence[int], quantizer: str, *, kept: bool = False) -> str:
    """Return in a few words what becomes of the checkpoint's numbers.

    ``kept`` is as for :func:`quantizer_name`.
    """
    if reader.mixed and kept:
        return f"{reader.method}, each as it is"
    if reader.mixed:
        lossy = [f"{width} bits quantized anew with {quantizer}" for width in bits if width != 16]
        return ", ".join([f"{reader.method}, dequantized to 16 bits", *lossy])
    kinds = {reader.bits: "as they are", 16: "dequantized"}
    if nests(bits, reader.encoding):
        kinds[bits[1]] = f"inside the {bits[0]}"
    versions = [f"{width} bits {kinds.get(width, f'derived with {quantizer}')}" for width in bits]
    remark = "; activations stay at 16 bits, which the checkpoint means to be quantized, too" * reader.activations
    return f"{reader.method} checkpoint, {', '.join(versions)}{remark}"
