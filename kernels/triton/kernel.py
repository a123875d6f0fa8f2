"""The kernel for experts in a GPU's memory."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_dymoe.kernels.activation import Activation
from vllm_dymoe.kernels.base import Receive, check_activations, check_formats
from vllm_dymoe.kernels.triton.description import DECODE, Description, Plan, plan
from vllm_dymoe.kernels.triton.launch import (
    DOWN,
    Scratch,
    decode_down,
    decode_gate_up,
    grouped_gate_up,
    grouped_linear,
)
from vllm_dymoe.kernels.triton.place import Place, place_experts
from vllm_dymoe.kernels.triton.start import Start, compile_kernel, compiling_together, run_kernel
from vllm_dymoe.kernels.triton.step import DecodeStep
from vllm_dymoe.kernels.triton.table import ExpertShape, ExpertTable, WorkList
from vllm_dymoe.kernels.triton.tiles import Tiles, choose_tiles
from vllm_dymoe.residency.decision import Decision
from vllm_dymoe.residency.format import Expert
from vllm_dymoe.residency.matrix import GROUP_SIZES, MatrixFormat

DEFAULT_WORKSPACE_BYTES = 32 << 20
MINIMUM_WORKSPACE_BYTES = 320 << 10
_SEMAPHORES = 1 << 14

Formats = tuple[MatrixFormat, MatrixFormat, MatrixFormat]
"""Of gate, up and down."""


class Kind(NamedTuple):
    """What is compiled in of a matrix's format, beside what all experts have in common; see MatrixFormat."""

    bits: int
    integer_zeros: bool
    act_order: bool
    nested: int

    @classmethod
    def of(cls, format: MatrixFormat) -> "Kind":
        """That of a format."""
        nested = format.bits if format.nested else format.code.upper_of
        return cls(format.code.tag, format.integer_zeros, format.act_order, nested)


class TritonKernel:
    """Experts on a GPU, straight from their packed bytes.

    How an expert is computed follows from its shape and from the number of its tokens in the call, never from the other
    experts: which of them happen to be on the device changes no bit.

    Args:
        device: where the experts are; a CPU only in Triton's interpreter.
        workspace_bytes: scratch that is held, at least 320 KiB. It bounds the tokens that are computed together.
        formats: those that calls may hold, whatever their sizes, to compile once for all of them; none for those of
            each call, which compiles again when another mix comes.

    Raises:
        ValueError: a smaller workspace.
    """

    name = "triton"

    def __init__(
        self,
        device: torch.device | str,
        workspace_bytes: int = DEFAULT_WORKSPACE_BYTES,
        formats: Iterable[MatrixFormat] = (),
    ) -> None:
        if workspace_bytes < MINIMUM_WORKSPACE_BYTES:
            raise ValueError(f"workspace has {workspace_bytes} bytes, expected at least {MINIMUM_WORKSPACE_BYTES}")
        self.workspace_bytes = workspace_bytes
        self._kinds = frozenset(map(Kind.of, formats))
        self.device = torch.device(device)
        self._semaphores = torch.zeros(_SEMAPHORES, dtype=torch.int32, device=device)
        self._memory = torch.empty(workspace_bytes - 4 * _SEMAPHORES, dtype=torch.uint8, device=device)
        self.step: TritonStep
        self._compiled: set[tuple[ExpertShape, frozenset[int], Activation]] = set()
        self.asynchronous = self.device.type == "cuda"
        self._architecture = 90
        if self.device.type == "cuda":
            major, minor = torch.cuda.get_device_capability(self.device)
            self._architecture = 10 * major + minor

    def begin(self, x: Tensor, decision: Decision, out: Tensor, activation: Activation) -> None:
        """Begin a layer's step, see :class:`vllm_dymoe.kernels.base.ExpertKernel`."""
        check_activations(x, out)
        self.step = TritonStep(self, x, decision, out, activation)

    def compute(self, items: Sequence[int], receive: Receive | None = None) -> None:
        """Compute some items, see :class:`vllm_dymoe.kernels.base.ExpertKernel`.

        Once every item has a place, only launches are left of this, so that a graph can capture it.
        """
        step = self.step
        for grouped, work in step.launches(items):
            self.launch(grouped, step.x, step.out, step.table, work, step.activation, step.tiles, receive)

    def compile(self, table: ExpertTable, activation: Activation) -> None:
        """At the first call for a kind of experts, compile all that later calls for it can need.

        How many tokens experts have decides which kernels run: without this, requests would wait for a compiler
        whenever a number comes that was not there before.
        """
        kind = (table.shape, table.tiers, activation)
        if kind in self._compiled:
            return
        shape, dtype, device = table.shape, table.shape.dtype, self.device
        tiles = choose_tiles(self._architecture, shape.hidden, shape.intermediate)
        row = torch.zeros(1, dtype=torch.int64, device=device)
        work = WorkList(torch.zeros(1, 3, dtype=torch.int32, device=device), row, row)
        x = torch.empty(1, shape.hidden, dtype=dtype, device=device)
        place = Place(0, (1 << 40,) * 3, (16,) * 3)
        with compiling_together():
            place_experts(table.addresses, table.bits, [place], start=compile_kernel)
            for grouped in range(DECODE, len(tiles.grouped_linear)):
                self.launch(grouped, x, x, table, work, activation, tiles, start=compile_kernel)
        self._compiled.add(kind)

    def launch(
        self,
        grouped: int,
        x: Tensor,
        out: Tensor,
        table: ExpertTable,
        work: WorkList,
        activation: Activation,
        tiles: Tiles,
        receive: Receive | None = None,
        start: Start = run_kernel,
    ) -> None:
        """Gate and up, and then down, of what one work list names."""
        inner = table.shape.intermediate
        used = _round_up(2 * inner * work.positions)
        hidden = self._memory[: 2 * inner * work.positions].view(x.dtype).view(work.positions, inner)
        if receive is not None:
            receive(2)  # gate and up are one launch
        if grouped == DECODE:
            scratch = Scratch(self._memory[used : len(self._memory) // 4 * 4].view(torch.float32), self._semaphores)
            decode_gate_up(x, hidden, table, work, activation, tiles.gate_up, scratch, start=start)
            if receive is not None:
                receive(3)
            decode_down(hidden, out, table, work, tiles.down, scratch, start=start)
        else:
            grouped_gate_up(x, hidden, table, work, activation, tiles.grouped_gate_up[grouped], start=start)
            if receive is not None:
                receive(3)
            grouped_linear(hidden, out, table, work, DOWN, tiles.grouped_linear[grouped], scatter=True, start=start)

    def decode_step(self, formats: Sequence[Formats], activation: Activation) -> DecodeStep:
        """A whole decode step of experts of some formats, in this kernel's scratch.

        Raises:
            ValueError: they cannot share a launch.
        """
        shape, tiers = self.shape_of(formats)
        tiles = choose_tiles(self._architecture, shape.hidden, shape.intermediate)
        return DecodeStep(shape, tiers, tiles, activation, self._memory, self._semaphores)

    def shape_of(self, formats: Sequence[Formats]) -> tuple[ExpertShape, frozenset[int]]:
        """What experts of some formats have in common, and the bit-widths that launches are compiled for.

        Raises:
            ValueError: they cannot share a launch.
        """
        tiers = frozenset(fmt.code.tag for three in formats for fmt in three)
        return common_shape(formats, self._kinds), tiers.union(kind.bits for kind in self._kinds)

    def plan(self, shape: ExpertShape, counts: Sequence[int]) -> tuple[Tiles, Plan]:
        """Sizes of programs, and what they are launched for if experts have so many tokens."""
        tiles = choose_tiles(self._architecture, shape.hidden, shape.intermediate)
        return tiles, plan(counts, tiles, self._limits(shape, tiles))

    def _limits(self, shape: ExpertShape, tiles: Tiles) -> tuple[int, int]:
        """Positions that the workspace holds at a time: in decode, and grouped."""
        hidden = 2 * shape.intermediate
        blocks = -(-shape.intermediate // 64), -(-shape.hidden // 64)
        partials = max(
            2 * 256 * blocks[0] * tiles.gate_up.split if tiles.gate_up.split > 1 else 0,
            256 * blocks[1] * tiles.down.split if tiles.down.split > 1 else 0,
        )
        room = len(self._memory) - 512
        decode = min(room // (hidden + partials), _SEMAPHORES // max(blocks) if partials else room)
        if decode < 1:
            raise ValueError(
                f"workspace has {self.workspace_bytes} bytes, expected at least "
                f"{hidden + partials + 512 + 4 * _SEMAPHORES} for experts of {shape.hidden} x {shape.intermediate}"
            )
        return decode, room // hidden


def common_shape(formats: Sequence[Formats], kinds: Iterable[Kind] = ()) -> ExpertShape:
    """What all experts of a launch have in common; a group size counts below 16 bits only.

    Args:
        formats: of gate, up and down of the experts.
        kinds: what other launches hold.

    Raises:
        ValueError: they do not have it in common.
    """
    every = [fmt for three in formats for fmt in three]
    groups = {fmt.group_size for fmt in every if fmt.quantized and not _own_groups(fmt)}
    inner = {up.rows for _, up, _ in formats}
    biases = {fmt.bias for fmt in every}
    for name, values in (("group sizes", groups), ("intermediate sizes", inner)):
        if len(values) > 1:
            raise ValueError(f"work holds experts of different {name}: {', '.join(map(str, sorted(values)))}")
    if len(biases) > 1:
        raise ValueError("work holds projections with a bias and projections without one")
    found = set(map(Kind.of, every)).union(kinds)
    nested = {kind.nested for kind in found} - {0}
    mixed = any({kind.bits, 2 * kind.bits} & nested for kind in found if not kind.nested)
    if len({kind.bits for kind in found}) < len(found) or len(nested) > 1 or mixed:
        raise ValueError(
            "work holds matrices of the same bits with and without integer zeros or an order of columns, "
            "or whole codes beside halves of codes"
        )
    steps = frozenset(kind.bits for kind in found if kind.integer_zeros)
    act_order = frozenset(kind.bits for kind in found if kind.act_order)
    first = every[1]
    group = groups.pop() if groups else GROUP_SIZES[0] if _own_groups(first) else first.group_size
    shape = first.columns, first.rows, group, first.dtype, first.bias, steps, act_order
    return ExpertShape(*shape, has_gate=every[0].rows > 0, nested=max(nested, default=0))


def _own_groups(format: MatrixFormat) -> bool:
    return format.code.floats and format.code.group_size is not None


def _formats(packed: Expert) -> Formats:
    gate, up, down = packed
    return gate.format, up.format, down.format


def _round_up(size: int) -> int:
    return -(-size // 256) * 256


class TritonStep:
    """A layer's step: described in one copy at its first launch, and launched as its experts come.

    Attributes:
        table: of the experts that have a place.
        tiles: sizes of programs.
    """

    table: ExpertTable
    tiles: Tiles

    def __init__(
        self, kernel: TritonKernel, x: Tensor, decision: Decision, out: Tensor, activation: Activation
    ) -> None:
        self.x, self.out, self.activation = x, out, activation
        self._kernel, self._decision = kernel, decision
        self._sizes = [after - before for before, after in pairwise(decision.bounds)]
        self._formats: list[Formats] = []  # that differ
        self._row: dict[int, int] = {}  # by item
        self._known: set[int] = set()  # items whose places the device knows
        self._description: Description | None = None

    def launches(self, items: Sequence[int]) -> list[tuple[int, WorkList]]:
        """Index of grouped tiles, or DECODE, and work list of each launch that some items need.

        Raises:
            TypeError, ValueError: see ExpertKernel.compute.
        """
        some = [item for item in items if self._sizes[item]]
        if not some:
            return []
        fresh = {
            item: view
            for item, view in enumerate(self._decision.views)
            if view is not None and item not in self._known and self._sizes[item]
        }
        self._known.update(fresh)
        before = len(self._formats)
        for view in fresh.values():
            if (formats := _formats(view)) not in self._formats:
                check_formats(*formats, self.x, self.activation)
                self._formats.append(formats)
        if self._description is None:
            self._description = self._describe(fresh)
        elif fresh:
            # Before anything is waited for: the device has it done while bytes are on their way.
            self._description.place([(self._row[item], view) for item, view in fresh.items()])
        if len(self._formats) > before:
            self.table = self._description.table(*self._kernel.shape_of(self._formats))
            self._kernel.compile(self.table, self.activation)
        return list(self._description.launches(sorted(self._row[item] for item in some)))

    def _describe(self, fresh: Mapping[int, Expert]) -> Description:
        shape, _ = self._kernel.shape_of(self._formats)
        items = [item for item, size in enumerate(self._sizes) if size]
        self.tiles, made = self._kernel.plan(shape, [self._sizes[item] for item in items])
        order = [items[number] for number in made.order]
        self._row = {item: row for row, item in enumerate(order)}
        rows, pairs = (
            torch.cat([parts[item] for item in order])
            for parts in (self._decision.rows.split(self._sizes), self._decision.pairs.split(self._sizes))
        )
        placed = [(self._row[item], view) for item, view in fresh.items()]
        return Description(made, rows, pairs, placed, self._kernel.device, nested=shape.nested > 0)
