"""The kernel for experts in a GPU's memory."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_dymoe.kernels.activation import Activation
from vllm_dymoe.kernels.base import ExpertWork, Receive, check_formats, check_tokens
from vllm_dymoe.kernels.checks import check_tensor
from vllm_dymoe.kernels.packed import DTYPES, MatrixFormat
from vllm_dymoe.kernels.triton.launch import (
    DOWN,
    Scratch,
    decode_down,
    decode_gate_up,
    grouped_gate_up,
    grouped_linear,
)
from vllm_dymoe.kernels.triton.start import Start, compile_kernel, compiling_together, run_kernel
from vllm_dymoe.kernels.triton.table import ExpertShape, ExpertTable, WorkList, check_addresses
from vllm_dymoe.kernels.triton.tiles import Tiles, choose_tiles

DEFAULT_WORKSPACE_BYTES = 32 << 20
MINIMUM_WORKSPACE_BYTES = 320 << 10
_TICKETS = 1 << 14


class Kind(NamedTuple):
    """What is compiled in of a matrix's format, beside what all experts have in common; see MatrixFormat."""

    bits: int
    zeros_in_steps: bool
    ordered: bool


@dataclass(frozen=True)
class _Run:
    """Experts of one class that are launched together.

    Attributes:
        grouped: index of the grouped tiles, -1 for decode.
        first: first of its positions in the call's order.
        positions: how many.
        items: first of its items.
        stop: last + 1 of its items.
    """

    grouped: int
    first: int
    positions: int
    items: int
    stop: int


@dataclass(frozen=True, eq=False)
class Prepared:
    """A call, ready to be launched any number of times while its experts stay where they are.

    Attributes:
        table: its experts.
        tiles: of its shape.
        runs: what is launched together: the index of its grouped tiles or -1 for decode, and its tokens.
    """

    table: ExpertTable
    tiles: Tiles
    runs: tuple[tuple[int, WorkList], ...]


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
        self._kinds = frozenset(Kind(fmt.bits, fmt.zeros_in_steps, fmt.ordered) for fmt in formats)
        self._device = torch.device(device)
        self._tickets = torch.zeros(_TICKETS, dtype=torch.int32, device=device)
        self._memory = torch.empty(workspace_bytes - 4 * _TICKETS, dtype=torch.uint8, device=device)
        self._compiled: set[tuple[ExpertShape, frozenset[int], Activation]] = set()
        self._architecture = 90
        if self._device.type == "cuda":
            major, minor = torch.cuda.get_device_capability(self._device)
            self._architecture = 10 * major + minor

    def forward(
        self,
        x: Tensor,
        work: Sequence[ExpertWork],
        out: Tensor,
        activation: Activation,
        receive: Receive | None = None,
    ) -> None:
        """See :class:`vllm_dymoe.kernels.base.ExpertKernel`."""
        if x.dtype not in DTYPES:
            raise TypeError(f"x is {x.dtype}, expected torch.bfloat16 or torch.float16")
        check_tensor("x", x, shape=(None, None))
        check_tensor("out", out, shape=(None, x.shape[1]), dtype=x.dtype)
        for expert in work:
            check_formats(expert.gate.format, expert.up.format, expert.down.format, x)
        prepared = self.prepare(work)
        if prepared is not None:
            self._compile(prepared.table, activation)
            self.launch(prepared, x, out, activation, receive)

    def prepare(self, work: Sequence[ExpertWork]) -> Prepared | None:
        """The host's part of a call: what is launched, and one copy of its description to the device.

        Raises:
            TypeError: tokens or pairs that are not int64.
            ValueError: experts that cannot share a launch, or a misaligned address.
        """
        active = [expert for expert in work if check_tokens(expert)]
        if not active:
            return None
        shape = common_shape(active, self._kinds)
        tiles = choose_tiles(self._architecture, shape.hidden, shape.intermediate)
        active.sort(key=lambda expert: _class(tiles, expert.tokens.shape[0]))
        items, runs = _cut(active, tiles, self._limits(shape, tiles))
        table, items_tensor = self._describe(shape, active, items)
        rows = torch.cat([expert.tokens for expert in active]) if len(active) > 1 else active[0].tokens
        pairs = torch.cat([expert.pairs for expert in active]) if len(active) > 1 else active[0].pairs
        lists = []
        for run in runs:
            part = slice(run.first, run.first + run.positions)
            lists.append((run.grouped, WorkList(items_tensor[run.items : run.stop], rows[part], pairs[part])))
        return Prepared(table, tiles, tuple(lists))

    def launch(
        self, prepared: Prepared, x: Tensor, out: Tensor, activation: Activation, receive: Receive | None = None
    ) -> None:
        """The device's part: launches only, so that a graph can capture it."""
        for grouped, work in prepared.runs:
            self._launch(grouped, x, out, prepared.table, work, activation, prepared.tiles, receive)

    def _compile(self, table: ExpertTable, activation: Activation) -> None:
        """At the first call for a kind of experts, compile all that later calls for it can need.

        How many tokens experts have decides which kernels run: without this, requests would wait for a compiler
        whenever a number comes that was not there before.
        """
        kind = (table.shape, table.tiers, activation)
        if kind in self._compiled:
            return
        shape, dtype, device = table.shape, table.shape.dtype, self._device
        tiles = choose_tiles(self._architecture, shape.hidden, shape.intermediate)
        row = torch.zeros(1, dtype=torch.int64, device=device)
        work = WorkList(torch.zeros(1, 3, dtype=torch.int32, device=device), row, row)
        x = torch.empty(1, shape.hidden, dtype=dtype, device=device)
        with compiling_together():
            for grouped in range(-1, len(tiles.grouped_linear)):
                self._launch(grouped, x, x, table, work, activation, tiles, start=compile_kernel)
        self._compiled.add(kind)

    def _launch(
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
        inner = table.shape.intermediate
        used = _round_up(2 * inner * work.positions)
        hidden = self._memory[: 2 * inner * work.positions].view(x.dtype).view(work.positions, inner)
        if receive is not None:
            receive(2)  # gate and up are one launch
        if grouped < 0:
            scratch = Scratch(self._memory[used : len(self._memory) // 4 * 4].view(torch.float32), self._tickets)
            decode_gate_up(x, hidden, table, work, activation, tiles.gate_up, scratch, start=start)
            if receive is not None:
                receive(3)
            decode_down(hidden, out, table, work, tiles.down, scratch, start=start)
        else:
            grouped_gate_up(x, hidden, table, work, activation, tiles.grouped_gate_up[grouped], start=start)
            if receive is not None:
                receive(3)
            grouped_linear(hidden, out, table, work, DOWN, tiles.grouped_linear[grouped], scatter=True, start=start)

    def _limits(self, shape: ExpertShape, tiles: Tiles) -> tuple[int, int]:
        """Positions that the workspace holds at a time: in decode, and grouped."""
        hidden = 2 * shape.intermediate
        blocks = -(-shape.intermediate // 64), -(-shape.hidden // 64)
        partials = max(
            2 * 256 * blocks[0] * tiles.gate_up.split if tiles.gate_up.split > 1 else 0,
            256 * blocks[1] * tiles.down.split if tiles.down.split > 1 else 0,
        )
        room = len(self._memory) - 512
        decode = min(room // (hidden + partials), _TICKETS // max(blocks) if partials else room)
        if decode < 1:
            raise ValueError(
                f"workspace has {self.workspace_bytes} bytes, expected at least "
                f"{hidden + partials + 512 + 4 * _TICKETS} for experts of {shape.hidden} x {shape.intermediate}"
            )
        return decode, room // hidden

    def _describe(
        self, shape: ExpertShape, active: Sequence[ExpertWork], items: list[list[int]]
    ) -> tuple[ExpertTable, Tensor]:
        """Everything that the host knows, in one copy to the device."""
        matrices = [(expert.gate, expert.up, expert.down) for expert in active]
        addresses = [matrix.weight.data_ptr() for three in matrices for matrix in three]
        check_addresses("work", addresses)
        widths = [matrix.format.bits for three in matrices for matrix in three]
        host = torch.empty(len(addresses) + (len(widths) + 3 * len(items) + 1) // 2, dtype=torch.int64)
        host[: len(addresses)] = torch.tensor(addresses)
        small = host[len(addresses) :].view(torch.int32)
        small[: len(widths)] = torch.tensor(widths)
        small[len(widths) : len(widths) + 3 * len(items)] = torch.tensor(items).view(-1)
        if self._device.type == "cuda":
            host = host.pin_memory()
        moved = host.to(self._device, non_blocking=True)
        small = moved[len(addresses) :].view(torch.int32)
        tiers = frozenset(widths).union(kind.bits for kind in self._kinds)
        table = ExpertTable(shape, tiers, moved[: len(addresses)].view(-1, 3), small[: len(widths)].view(-1, 3))
        return table, small[len(widths) : len(widths) + 3 * len(items)].view(-1, 3)


def common_shape(work: Sequence[ExpertWork], kinds: Iterable[Kind] = ()) -> ExpertShape:
    """What all experts of a call have in common; a group size counts below 16 bits only.

    Args:
        work: the call.
        kinds: what other calls hold.

    Raises:
        ValueError: they do not have it in common.
    """
    formats = [matrix.format for expert in work for matrix in (expert.gate, expert.up, expert.down)]
    groups = {fmt.group_size for fmt in formats if fmt.quantized}
    inner = {expert.gate.format.rows for expert in work}
    biases = {fmt.bias for fmt in formats}
    for name, values in (("group sizes", groups), ("intermediate sizes", inner)):
        if len(values) > 1:
            raise ValueError(f"work holds experts of different {name}: {', '.join(map(str, sorted(values)))}")
    if len(biases) > 1:
        raise ValueError("work holds projections with a bias and projections without one")
    every = {Kind(fmt.bits, fmt.zeros_in_steps, fmt.ordered) for fmt in formats}.union(kinds)
    if len({kind.bits for kind in every}) < len(every):
        raise ValueError("work holds matrices of the same bits with and without zeros in steps or an order of columns")
    steps = frozenset(kind.bits for kind in every if kind.zeros_in_steps)
    ordered = frozenset(kind.bits for kind in every if kind.ordered)
    first, group = work[0].gate.format, groups.pop() if groups else work[0].gate.format.group_size
    return ExpertShape(first.columns, first.rows, group, first.dtype, first.bias, steps, ordered)


def _class(tiles: Tiles, tokens: int) -> int:
    """-1 for decode, else the index of the grouped tiles."""
    return -1 if tokens <= tiles.decode_tokens else tiles.grouped_class(tokens)


def _cut(work: Sequence[ExpertWork], tiles: Tiles, limits: tuple[int, int]) -> tuple[list[list[int]], list[_Run]]:
    """Items of one tile each, and runs of them that fit the workspace; work is sorted by class."""
    items: list[list[int]] = []
    runs: list[_Run] = []
    for expert, grouped, begin, stop in _pieces(work, tiles, limits):
        run = runs[-1] if runs else None
        limit = limits[grouped >= 0]
        if run is None or run.grouped != grouped or run.positions + stop - begin > limit:
            run = _Run(grouped, begin, 0, len(items), len(items))
            runs.append(run)
        step = 2 if grouped < 0 else tiles.grouped_linear[grouped].block_m
        for first in range(begin, stop, step):
            items.append([expert, first - run.first, min(first + step, stop) - run.first])
        runs[-1] = _Run(grouped, run.first, stop - run.first, run.items, len(items))
    return items, runs


def _pieces(work: Sequence[ExpertWork], tiles: Tiles, limits: tuple[int, int]) -> Iterator[tuple[int, int, int, int]]:
    """(expert, class, first and last + 1 of its positions), no piece larger than its limit."""
    position = 0
    for number, expert in enumerate(work):
        count = expert.tokens.shape[0]
        grouped = _class(tiles, count)
        limit = limits[grouped >= 0]
        if grouped >= 0:
            limit = max(limit // tiles.grouped_linear[grouped].block_m, 1) * tiles.grouped_linear[grouped].block_m
        for begin in range(position, position + count, limit):
            yield number, grouped, begin, min(begin + limit, position + count)
        position += count


def _round_up(size: int) -> int:
    return -(-size // 256) * 256
