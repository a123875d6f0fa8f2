"""Arguments of a launch, and its four entry points.

Each entry point makes checks that cost microseconds, and then one launch.

Every argument that changes from step to step is a device tensor, and nothing here waits for the device, so a CUDA
graph can capture a step.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vllm_dymoe.experts.checks import check_tensor
from vllm_dymoe.experts.encoding import E8_BASE, E8_NESTED, NESTED, UPPER_HALVES, WHOLE
from vllm_dymoe.experts.format import DownFormat, ExpertFormat
from vllm_dymoe.experts.matrix import GROUP_SIZES, MatrixFormat
from vllm_dymoe.kernels.activation import Activation
from vllm_dymoe.kernels.base import Decode, Grouped
from vllm_dymoe.kernels.triton.activation import constants
from vllm_dymoe.kernels.triton.decode import down_kernel, gate_up_kernel
from vllm_dymoe.kernels.triton.grouped import grouped_down_kernel, grouped_gate_up_kernel
from vllm_dymoe.kernels.triton.start import Overlap, Start, run_kernel
from vllm_dymoe.kernels.triton.tiles import DecodeTile, GroupedTile

Formats = tuple[MatrixFormat, MatrixFormat, MatrixFormat]
"""Formats of gate, up and down."""


class Kind(NamedTuple):
    """Compile-time constants of kernels for a matrix; see MatrixFormat.

    Constants that all experts share are passed separately.
    """

    bits: int
    integer_zeros: bool
    act_order: bool
    nested: int

    @classmethod
    def of(cls, format: MatrixFormat) -> "Kind":
        """Return the kind of a format."""
        nested = format.bits if format.nested else format.encoding.upper_of
        return cls(format.encoding.tag, format.integer_zeros, format.act_order, nested)


class Kinds(NamedTuple):
    """Kinds of the matrices of each launch: of gate and up, and of down."""

    gate_up: frozenset[Kind]
    down: frozenset[Kind]

    @classmethod
    def of(cls, formats: Sequence[Formats]) -> "Kinds":
        """Return the kinds of some experts' matrices."""
        gate_up = frozenset(Kind.of(fmt) for gate, up, _ in formats for fmt in (gate, up))
        return cls(gate_up, frozenset(Kind.of(down) for _, _, down in formats))


class Codes(NamedTuple):
    """What launches of gate and up, or of down, are compiled for.

    See :class:`ExpertShape`.
    """

    precisions: frozenset[int]  # bit-widths, or encodings' tags
    group_size: int  # of every section below 16 bits
    integer_zeros: frozenset[int]  # bit-widths whose zeros count steps of their scale
    act_order: frozenset[int]  # bit-widths whose columns are reordered


@dataclass(frozen=True)
class ExpertShape:
    """What all experts of a launch have in common."""

    hidden: int
    intermediate: int
    group_size: int  # of gate and up below 16 bits, and of down if `down` is None, which holds for other fields, too
    dtype: torch.dtype  # of activations, scales and 16-bit weights
    bias: bool = False  # whether every projection has a bias
    integer_zeros: frozenset[int] = frozenset()  # bit-widths whose zeros count steps of their scale
    act_order: frozenset[int] = frozenset()  # bit-widths whose columns are reordered
    has_gate: bool = True
    nested: int = 0
    """Bits of the codes that are stored in two sections, of upper and of lower halves; half as many bits are the
    upper halves alone. 0 if there are none.
    """
    down: Codes | None = None
    """What launches of down are compiled for, if it is not what those of gate and up are."""

    @classmethod
    def of(cls, formats: Sequence[Formats]) -> "ExpertShape":
        """Return what the experts of a launch have in common, given all their formats.

        Gate and up share launches, and down has launches of its own. Group sizes matter below 16 bits only. Raises
        ValueError if experts cannot share a launch.
        """
        every = [fmt for three in formats for fmt in three]
        inner = {up.rows for _, up, _ in formats}
        if len(inner) > 1:
            raise ValueError(f"work holds experts of different intermediate sizes: {_listed(inner)}")
        if len({fmt.encoding.lattice for fmt in every}) > 1:
            raise ValueError("work mixes lattice codes, whose inputs are rotated, with other codes")
        if len({fmt.bias for fmt in every}) > 1:
            raise ValueError("work mixes projections with and without a bias")
        found = Kinds.of(formats)
        nested = {kind.nested for kind in found.gate_up | found.down} - {0}
        whole = (kind for kind in found.gate_up | found.down if not kind.nested)
        if len(nested) > 1 or any({kind.bits, 2 * kind.bits} & nested for kind in whole):
            raise ValueError("work mixes whole codes and halves of codes")
        first = every[1]
        usual = max(first.group_size, GROUP_SIZES[0])
        gate_up = _codes([fmt for gate, up, _ in formats for fmt in (gate, up)], found.gate_up, usual)
        down = _codes([fmt for _, _, fmt in formats], found.down, gate_up.group_size)
        _, group, steps, ordered = gate_up
        shape = first.columns, first.rows, group, first.dtype, first.bias, steps, ordered, every[0].rows > 0
        return cls(*shape, nested=max(nested, default=0), down=None if down == gate_up else down)

    def codes(self, precisions: frozenset[int]) -> tuple[Codes, Codes]:
        """Return what launches of gate and up, and those of down, are compiled for.

        Args:
            precisions: of gate and up.
        """
        gate_up = Codes(precisions, self.group_size, self.integer_zeros, self.act_order)
        return gate_up, gate_up if self.down is None else self.down

    def formats(self, bits: int) -> Formats:
        """Return the formats of gate [I, H] or [0, H], up [I, H] and down [H, I].

        ``bits`` may be a codebook's tag.
        """
        encoding = WHOLE[bits]
        if self.nested:
            halves = NESTED[self.nested], UPPER_HALVES[self.nested], E8_NESTED, E8_BASE
            encoding = {half.tag: half for half in halves}.get(bits, encoding)
        flags = self.bias, bits in self.integer_zeros, bits in self.act_order, self.has_gate
        own = self.codes(frozenset())[1]
        down = DownFormat(encoding, own.group_size, bits in own.integer_zeros, bits in own.act_order)
        shape = self.hidden, self.intermediate, encoding, self.group_size, self.dtype, *flags
        return ExpertFormat(*shape, down=down).matrices

    def rotation(self, precisions: frozenset[int]) -> int:
        """Return the block size in which inputs of gate and up are rotated.

        They are rotated before launches read them; 0 for no rotation.
        """
        return self.formats(max(precisions))[1].rotation


def _codes(formats: Iterable[MatrixFormat], kinds: frozenset[Kind], usual: int) -> Codes:
    """Return what launches for some matrices are compiled for.

    Args:
        formats: of matrices.
        kinds: of all matrices.
        usual: the group size if no matrix has codes in groups.
    """
    groups = {fmt.group_size for fmt in formats if fmt.quantized and not fmt.encoding.group_size}
    if len(groups) > 1:
        raise ValueError(f"work holds matrices of different group sizes: {_listed(groups)}")
    precisions = frozenset(kind.bits for kind in kinds)
    if len(precisions) < len(kinds):
        raise ValueError("work mixes matrices of the same bits with and without integer zeros or a column order")
    steps = frozenset(kind.bits for kind in kinds if kind.integer_zeros)
    ordered = frozenset(kind.bits for kind in kinds if kind.act_order)
    return Codes(precisions, max(groups, default=usual), steps, ordered)


def _listed(values: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(values)))


@dataclass(frozen=True, eq=False)
class ExpertTable:
    """Addresses and bit-widths of experts.

    The tensors may be rewritten between launches. Only `precisions` and the shape are compiled in. Raises TypeError or
    ValueError if a tensor has another dtype or shape, or is missing.
    """

    shape: ExpertShape
    precisions: frozenset[int]  # bit-widths, or encodings' tags, that `bits` may hold; see :meth:`ExpertShape.codes`
    addresses: Tensor  # int64 [experts, 3], sections of gate, up and down, each a multiple of 16
    bits: Tensor  # int32 [experts, 3]
    destinations: Tensor | None = None
    """int64 [experts, 3], where decode also stores the sections, 0 for nowhere; None to fetch nothing."""
    residual: Tensor | None = None
    """int64 [experts, 3], residual sections of experts with the shape's nested bits; None if it has none."""
    residual_destinations: Tensor | None = None  # like destinations, if both exist

    def __post_init__(self) -> None:
        check_tensor("addresses", self.addresses, shape=(None, 3), dtype=torch.int64)
        check_tensor("bits", self.bits, shape=(self.addresses.shape[0], 3), dtype=torch.int32)
        for name in ("destinations", "residual", "residual_destinations"):
            if (tensor := getattr(self, name)) is not None:
                check_tensor(name, tensor, shape=tuple(self.addresses.shape), dtype=torch.int64)
        if self.shape.nested:
            if self.residual is None:
                raise ValueError("residual is missing, but the shape has nested codes")
            if (self.residual_destinations is None) != (self.destinations is None):
                raise ValueError("nested codes need both destinations and residual_destinations, or neither")

    def constants(self, *, down: bool) -> dict[str, Any]:
        """Return what kernels need to know of the sections of gate and up, or of down."""
        codes = self.shape.codes(self.precisions)[down]
        return {
            "GROUP": codes.group_size,
            "PRECISIONS": sum(codes.precisions),
            "NESTED": self.shape.nested,
            "STEPS": sum(codes.integer_zeros),
            "ORDERED": sum(codes.act_order),
            "BIAS": self.shape.bias,
        }

    @property
    def places(self) -> tuple[Tensor, ...]:
        """Return where decode reads and stores.

        A missing tensor is replaced by another one, which is not read.
        """
        parts = self.addresses, self.destinations, self.residual, self.residual_destinations
        return tuple(self.addresses if part is None else part for part in parts)


def fastest_decode(precisions: Collection[int], architecture: int) -> Decode:
    """Return the fastest way to decode experts on a card.

    ``mma_decode`` has no 16-bit weights, and cards before Ampere have no bfloat16. From Hopper on launches may overlap
    (``start.Overlap``), and whether they do is decided here only.

    Args:
        precisions: bit-widths, or codebooks' tags, of the experts.
        architecture: compute capability times ten.
    """
    if architecture < 80 or 16 in precisions:
        return Decode.PLAIN
    return Decode.CHAINED if architecture >= 90 else Decode.TENSOR_CORES


def fastest_grouped(
    precisions: Collection[int], columns: Collection[int], architecture: int, *, act_order: bool
) -> Grouped:
    """Return the fastest way to compute experts of more tokens on a card.

    ``mma_grouped`` has no 16-bit weights. Columns are in their order, and it copies eight of them at a time.
    """
    if architecture < 80 or 16 in precisions or act_order or any(number % 8 for number in columns):
        return Grouped.PLAIN
    return Grouped.IN_REGISTERS


@dataclass(frozen=True, eq=False)
class WorkList:
    """Tokens sorted by expert.

    Raises TypeError or ValueError if a tensor has another dtype or shape.
    """

    items: Tensor  # int32 [items, 3]: expert of the table, first and last + 1 of its positions; empty ones are allowed
    rows: Tensor  # int32 or int64 [positions], rows of x
    pairs: Tensor  # int32 or int64 [positions], rows of the output, token * top_k + k

    def __post_init__(self) -> None:
        check_tensor("items", self.items, shape=(None, 3), dtype=torch.int32)
        for name, tensor in (("rows", self.rows), ("pairs", self.pairs)):
            check_tensor(name, tensor, shape=(None,))
            if tensor.dtype not in (torch.int32, torch.int64):
                raise TypeError(f"{name} is {tensor.dtype}, expected torch.int32 or torch.int64")
        if self.rows.shape != self.pairs.shape:
            raise ValueError(f"rows has {self.rows.shape[0]} positions, but pairs {self.pairs.shape[0]}")

    @property
    def positions(self) -> int:
        """Number of (token, expert) pairs."""
        return self.rows.shape[0]


@dataclass(frozen=True, eq=False)
class Scratch:
    """What decode needs in addition if programs share a sum.

    One launch at a time may use it.
    """

    partials: Tensor  # float32, contents do not matter
    semaphores: Tensor  # int32, zeros before and after every launch


@dataclass(frozen=True, eq=False)
class Weighting:
    """How decode_down sums a token's experts."""

    weights: Tensor  # float32 [tokens, top_k], from the router
    computed: Tensor  # int32 [tokens, top_k], 1 for pairs in the work list, 0 for others


def decode_gate_up(
    x: Tensor,
    hidden: Tensor,
    table: ExpertTable,
    work: WorkList,
    activation: Activation,
    tile: DecodeTile,
    scratch: Scratch,
    *,
    overlap: Overlap = Overlap.NONE,
    start: Start = run_kernel,
) -> None:
    """Compute hidden states for few positions of each expert.

    hidden[position] = activation(gate x[row]) * up x[row].

    Args:
        x: [tokens, hidden] in the experts' dtype, rotated if the shape says so.
        hidden: [positions, intermediate], dtype of x, overwritten with the inputs of down.
        table: the experts. With destinations, all bytes of the sections of gate and up are stored there as well.
        work: an item has one or two positions, or up to tile.positions. With destinations it has any number, because
            an expert is then in one item only, so that its bytes are read once.
        tile: size of a program; its split determines the order of sums, with and without destinations.
        scratch: needed if the tile's split is above 1.
        overlap: how the launch overlaps the one before it, if the tile has tensor cores. With START x, rows of the
            table and the work list may be what that launch writes; with WHOLE they may not.
        start: makes the launch.

    Raises TypeError for a wrong dtype, and ValueError for sizes that disagree, too little scratch, or an overlap
    without tensor cores.
    """
    _check_states(x, None, hidden, work, table.shape)
    blocks = -(-table.shape.intermediate // 64)
    if tile.split > 1:
        _check_scratch(scratch, work.positions * tile.split * 2 * 64 * blocks, work.positions * blocks)
    _decode(
        start, gate_up_kernel, blocks, table, work, tile,
        (x, hidden), (work.rows, scratch.partials, scratch.semaphores),
        {"ROWS": table.shape.intermediate, "COLUMNS": table.shape.hidden, "ACTIVATION": constants(activation)}, overlap,
    )  # fmt: skip


def decode_down(
    hidden: Tensor,
    out: Tensor,
    table: ExpertTable,
    work: WorkList,
    tile: DecodeTile,
    scratch: Scratch,
    weighting: Weighting | None = None,
    *,
    start: Start = run_kernel,
) -> None:
    """Apply down projections to the result of decode_gate_up.

    One launch computes all experts. Without a weighting out[pair] = down(hidden[position]). With one, out[token] is
    the weighted sum over the token's computed pairs, in ascending k, bit for bit as combine sums unweighted outputs.
    Tokens without a computed pair keep their contents, or become zero if the work's last item is (-1, 0, tokens).

    Args:
        hidden: [positions, intermediate] in the experts' dtype.
        out: [tokens * top_k, hidden] or, with a weighting, [tokens, hidden]; computed rows are overwritten.
        table: the experts. With destinations, down is stored there as well.
        scratch: as for decode_gate_up, or with a weighting.

    Other arguments and errors as for decode_gate_up.
    """
    shape, top_k = table.shape, 1
    if weighting is not None:
        check_tensor("weights", weighting.weights, shape=(None, None), dtype=torch.float32)
        tokens, top_k = weighting.weights.shape
        check_tensor("computed", weighting.computed, shape=(tokens, top_k), dtype=torch.int32)
    _check_states(out, None if weighting is None else tokens, hidden, work, shape, "out")
    blocks = -(-shape.hidden // 64)
    if weighting is not None:
        _check_scratch(scratch, weighting.weights.numel() * tile.split * 64 * blocks, out.shape[0] * blocks)
    elif tile.split > 1:
        _check_scratch(scratch, work.positions * tile.split * 64 * blocks, work.positions * blocks)
    shared = scratch.partials, scratch.semaphores
    summed = shared if weighting is None else (weighting.weights, weighting.computed)
    _decode(
        start, down_kernel, blocks, table, work, tile, (hidden, out), (work.pairs, *summed, *shared),
        {"ROWS": shape.hidden, "COLUMNS": shape.intermediate, "TOP_K": top_k, "WEIGHTED": weighting is not None},
    )  # fmt: skip


def _decode(
    start: Start, kernel: Any, blocks: int, table: ExpertTable, work: WorkList, tile: DecodeTile,
    states: tuple[Tensor, ...], others: tuple[Tensor, ...], sizes: dict[str, Any], overlap: Overlap = Overlap.NONE,
) -> None:  # fmt: skip
    if overlap is not Overlap.NONE and not tile.tensor_cores:
        raise ValueError(f"overlap is {overlap.name}, but only kernels on tensor cores overlap the launch before them")
    if len(work.items):
        fetch: dict[str, Any] = {
            "SPLIT": tile.split, "FETCH": table.destinations is not None, "WARPS": tile.warps
        }  # fmt: skip
        constants = table.constants(down=kernel is down_kernel)
        if tile.tensor_cores:
            # Imported here: the interpreter has no Gluon, and other launches do not need it.
            from vllm_dymoe.kernels.triton.mma_decode import mma_down_kernel, mma_gate_up_kernel

            fetch |= {"MOST": tile.tensor_cores, "DEPENDENT": tile.dependent}
            if kernel is gate_up_kernel:
                kernel, fetch["OVERLAP"] = mma_gate_up_kernel, int(overlap)
            else:
                kernel, overlap = mma_down_kernel, Overlap(tile.dependent)
        tensors = *states, *table.places, table.bits, work.items, *others
        grid = blocks, len(work.items), tile.split
        start(kernel, grid, tensors, {**sizes, **constants, **fetch}, tile.options | overlap.options)


def grouped_gate_up(
    x: Tensor,
    hidden: Tensor,
    table: ExpertTable,
    work: WorkList,
    activation: Activation,
    tile: GroupedTile,
    *,
    start: Start = run_kernel,
) -> None:
    """Compute what decode_gate_up does on tensor cores.

    Items have up to tile.block_m positions. Destinations raise ValueError.
    """
    _check_states(x, None, hidden, work, table.shape)
    sizes = {"ROWS": table.shape.intermediate, "COLUMNS": table.shape.hidden, "ACTIVATION": constants(activation)}
    _grouped(start, grouped_gate_up_kernel, table, work, tile, (x, hidden), work.rows, sizes)


def grouped_down(
    hidden: Tensor,
    out: Tensor,
    table: ExpertTable,
    work: WorkList,
    tile: GroupedTile,
    *,
    start: Start = run_kernel,
) -> None:
    """Compute out[pair] = down(hidden[position]) on tensor cores.

    See decode_down and grouped_gate_up.
    """
    _check_states(out, None, hidden, work, table.shape, "out")
    sizes = {"ROWS": table.shape.hidden, "COLUMNS": table.shape.intermediate}
    _grouped(start, grouped_down_kernel, table, work, tile, (hidden, out), work.pairs, sizes)


def _grouped(
    start: Start, kernel: Any, table: ExpertTable, work: WorkList, tile: GroupedTile,
    states: tuple[Tensor, Tensor], index: Tensor, sizes: dict[str, Any],
) -> None:  # fmt: skip
    if table.destinations is not None:  # many programs read a section here, and none of them stores it
        raise ValueError("table has destinations, but only the decode kernels fetch through")
    if len(work.items):
        addresses, _, residual, _ = table.places
        constants = sizes | table.constants(down=kernel is grouped_down_kernel)
        options = {"num_warps": tile.warps}
        outputs = tile.block_n
        if tile.in_registers:
            # Imported here: the interpreter has no Gluon, and other launches do not need it.
            from vllm_dymoe.kernels.triton.mma_grouped import mma_grouped_down_kernel, mma_grouped_gate_up_kernel

            if kernel is grouped_gate_up_kernel:
                if states[0].numel() >= 1 << 31:  # offsets in x have 32 bits
                    raise ValueError(f"x has {states[0].numel()} elements, expected fewer than 2^31; use fewer rows")
                kernel, outputs = mma_grouped_gate_up_kernel, outputs // (1 + table.shape.has_gate)
            else:
                kernel = mma_grouped_down_kernel
            del constants["ORDERED"]
        else:
            width = min(tile.block_k, constants["GROUP"])
            constants |= {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": width}
            options["num_stages"] = tile.stages
        start(
            kernel,
            (len(work.items), -(-sizes["ROWS"] // outputs)),
            (*states, addresses, residual, table.bits, work.items, index),
            constants,
            options,
        )


def _check_states(
    rows: Tensor, count: int | None, hidden: Tensor, work: WorkList, shape: ExpertShape, name: str = "x"
) -> None:
    check_tensor(name, rows, shape=(count, shape.hidden), dtype=shape.dtype)
    check_tensor("hidden", hidden, shape=(work.positions, shape.intermediate), dtype=shape.dtype)


def _check_scratch(scratch: Scratch, partials: int, semaphores: int) -> None:
    """Raise ValueError if scratch is too small; both tensors are one-dimensional."""
    for name, dtype, needed in (("partials", torch.float32, partials), ("semaphores", torch.int32, semaphores)):
        tensor = getattr(scratch, name)
        check_tensor(name, tensor, shape=(None,), dtype=dtype)
        if tensor.numel() < needed:
            raise ValueError(f"{name} has {tensor.numel()} elements, expected at least {needed}")
