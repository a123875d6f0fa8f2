"""The GPU's kernels, and launches by a plan that the host has made.

The object says which ways to compute this card uses. A server makes its launches from the device's own plans
(``large_batch_step.py``, ``decode.py``). Benchmarks and tests use those by a plan of the host, to look at single
experts.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from vllm_dymoe.experts.format import PackedExpert
from vllm_dymoe.experts.matrix import PackedMatrix
from vllm_dymoe.kernels.activation import Activation
from vllm_dymoe.kernels.base import Decode, Grouped, check_activations, check_formats
from vllm_dymoe.kernels.triton.cpu_queue import DeviceQueue
from vllm_dymoe.kernels.triton.large_batch_step import TritonLargeBatch
from vllm_dymoe.kernels.triton.launch import (
    ExpertShape,
    ExpertTable,
    Formats,
    Kinds,
    Scratch,
    WorkList,
    decode_down,
    decode_gate_up,
    fastest_decode,
    fastest_grouped,
    grouped_down,
    grouped_gate_up,
)
from vllm_dymoe.kernels.triton.place import Place, place_experts
from vllm_dymoe.kernels.triton.plan import DECODE, Plan, plan
from vllm_dymoe.kernels.triton.rotate import rotated_inputs
from vllm_dymoe.kernels.triton.small_batch_step import SmallBatchStep
from vllm_dymoe.kernels.triton.start import Start, compile_kernel, compiling_together, run_kernel
from vllm_dymoe.kernels.triton.tiles import Tiles, choose_tiles
from vllm_dymoe.planner.constants import SMALL_BATCH_ROWS
from vllm_dymoe.planner.large_batch import LargeBatchShape
from vllm_dymoe.planner.plan import LayerPlan

DEFAULT_WORKSPACE_BYTES = 32 << 20
MINIMUM_WORKSPACE_BYTES = 320 << 10
_SEMAPHORES = 1 << 14


def architecture_of(device: torch.device) -> int:
    """Return a card's compute capability times ten; 90 for the interpreter."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


class TritonKernel:
    """Computes experts on a GPU.

    How an expert is computed depends on its shape and on the number of its tokens in the call, never on the other
    experts: residency changes no bit.

    Args:
        device: where the experts are; a CPU only in Triton's interpreter.
        workspace_bytes: scratch to keep, at least 320 KiB. It bounds the tokens that are computed together.
        formats: of gate, up and down of all experts that calls may use, of any sizes, to compile once for all of them.
            If empty, each new mix of formats is compiled when a call uses it.
        decode: how experts of few tokens are computed; where precisions or card do not have this way, the next slower
            one is taken, see ``launch.fastest_decode``.
        grouped: how experts of more tokens are computed, if their formats have this way.

    Raises:
        ValueError: the workspace is too small.
    """

    name = "triton"

    def __init__(
        self,
        device: torch.device | str,
        workspace_bytes: int = DEFAULT_WORKSPACE_BYTES,
        formats: Iterable[Formats] = (),
        *,
        decode: Decode = Decode.PLAIN,
        grouped: Grouped = Grouped.PLAIN,
    ) -> None:
        if workspace_bytes < MINIMUM_WORKSPACE_BYTES:
            raise ValueError(f"workspace has {workspace_bytes} bytes, expected at least {MINIMUM_WORKSPACE_BYTES}")
        self.workspace_bytes = workspace_bytes
        self._kinds = Kinds.of(formats)
        self.device = torch.device(device)
        self._semaphores = torch.zeros(_SEMAPHORES, dtype=torch.int32, device=device)
        self._memory = torch.empty(workspace_bytes - 4 * _SEMAPHORES, dtype=torch.uint8, device=device)
        self._floats = self._memory[: len(self._memory) // 4 * 4].view(torch.float32)
        self._larger: Tensor | None = None
        self.step: TritonStep
        self._compiled: set[tuple[ExpertShape, frozenset[int], Activation]] = set()
        self.asynchronous = self.device.type == "cuda"
        self._architecture, self._decode, self._grouped = architecture_of(self.device), decode, grouped

    def begin(self, x: Tensor, plan: LayerPlan, out: Tensor, activation: Activation) -> None:
        """Begin a layer's step, see :class:`vllm_dymoe.kernels.base.ExpertKernel`."""
        check_activations(x, out)
        self.step = TritonStep(self, x, plan, out, activation)

    def compute(self, items: Sequence[int]) -> None:
        """Compute some items, see :class:`vllm_dymoe.kernels.base.ExpertKernel`.

        Once every item has an address, only launches remain, so a graph can capture them.
        """
        step = self.step
        for grouped, work in step.launches(items):
            self.launch(grouped, step.x, step.out, step.table, work, step.activation, step.tiles)

    def compile(self, table: ExpertTable, activation: Activation) -> None:
        """Compile all variants that later calls for a kind of experts may need.

        This happens at the first call for the kind. The number of an expert's tokens decides which kernels run.
        Without this, requests would wait for the compiler whenever a new number occurs.
        """
        kind = (table.shape, table.precisions, activation)
        if kind in self._compiled:
            return
        shape, dtype, device = table.shape, table.shape.dtype, self.device
        tiles = self._tiles_of(shape, table.precisions)
        row = torch.zeros(1, dtype=torch.int64, device=device)
        work = WorkList(torch.zeros(1, 3, dtype=torch.int32, device=device), row, row)
        x = torch.empty(1, shape.hidden, dtype=dtype, device=device)
        place = Place(0, (1 << 40,) * 3, (16,) * 3)
        with compiling_together():
            place_experts(table.addresses, table.bits, [place], start=compile_kernel)
            rotated_inputs(x, shape.rotation(table.precisions), start=compile_kernel)
            for grouped in range(DECODE, len(tiles.grouped_down)):
                self.launch(grouped, x, x, table, work, activation, tiles, start=compile_kernel)
            if tiles.gate_up.tensor_cores:  # where no expert has more tokens
                tiles = self._tiles_of(shape, table.precisions, tokens=1)
                self.launch(DECODE, x, x, table, work, activation, tiles, start=compile_kernel)
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
        start: Start = run_kernel,
    ) -> None:
        """Launch gate and up, then down, for one work list."""
        inner = table.shape.intermediate
        used = 2 * inner * work.positions
        hidden = self._memory[:used].view(x.dtype).view(work.positions, inner)
        if grouped == DECODE:
            scratch = Scratch(self._floats[-(-used // 256) * 64 :], self._semaphores)
            decode_gate_up(x, hidden, table, work, activation, tiles.gate_up, scratch, start=start)
            decode_down(hidden, out, table, work, tiles.down, scratch, start=start)
        else:
            grouped_gate_up(x, hidden, table, work, activation, tiles.grouped_gate_up[grouped], start=start)
            grouped_down(hidden, out, table, work, tiles.grouped_down[grouped], start=start)

    def small_batch_step(
        self, formats: Sequence[Formats], activation: Activation, disk_queue: DeviceQueue | None = None
    ) -> SmallBatchStep:
        """Return a whole decode step for experts of some formats.

        It uses this kernel's scratch. Raises the errors of :meth:`shape_of`.
        """
        shape, precisions = self.shape_of(formats)
        return SmallBatchStep(
            shape, precisions, self._tiles_of(shape, precisions), activation, self._memory, self._semaphores,
            decode=self._decode_of(shape, precisions), disk_queue=disk_queue,
        )  # fmt: skip

    def large_batch_step(
        self, table: Callable[[int], Mapping[str, Tensor]], shape: LargeBatchShape, formats: Sequence[Formats],
        activation: Activation, disk_queue: DeviceQueue | None = None,
    ) -> TritonLargeBatch:  # fmt: skip
        """Return a large-batch step for experts of some formats.

        Args:
            table: returns the columns of a Table for a layer.

        Raises the errors of :meth:`shape_of`.
        """
        experts, precisions = self.shape_of(formats)
        tiles = self._tiles_of(experts, precisions)
        return TritonLargeBatch(table, shape, experts, precisions, tiles, activation, self._scratch_of, disk_queue)

    def _scratch_of(self, partials: int, semaphores: int) -> Scratch:
        """Return this kernel's scratch, or larger scratch.

        Larger scratch is kept as long as steps use it.
        """
        own = self._floats
        if partials > len(own):
            if self._larger is None or len(self._larger) < partials:
                self._larger = torch.empty(partials, dtype=torch.float32, device=self.device)
            own = self._larger
        if semaphores > len(self._semaphores):
            self._semaphores = torch.zeros(semaphores, dtype=torch.int32, device=self.device)
        return Scratch(own, self._semaphores)

    def shape_of(self, formats: Sequence[Formats]) -> tuple[ExpertShape, frozenset[int]]:
        """Return what experts of some formats have in common.

        Returns:
            the shape, and the bit-widths of gate and up to compile launches for.

        Raises ValueError if the formats cannot share a launch.
        """
        found = self._kinds.union(Kinds.of(formats)).gate_up
        return ExpertShape.of(formats, self._kinds), frozenset(kind.bits for kind in found)

    def plan(self, shape: ExpertShape, precisions: frozenset[int], counts: Sequence[int]) -> tuple[Tiles, Plan]:
        """Return sizes of programs, and the launches for experts.

        Args:
            counts: number of tokens of each expert.
        """
        tiles = self._tiles_of(shape, precisions, max(counts))
        return tiles, plan(counts, tiles, self._limits(shape, tiles))

    def _limits(self, shape: ExpertShape, tiles: Tiles) -> tuple[int, int]:
        """Return how many positions the workspace holds at a time, in decode and grouped."""
        hidden, (partials, semaphores) = 2 * shape.intermediate, tiles.shared(shape.hidden, shape.intermediate)
        room, each = len(self._memory) - 512, hidden + 4 * partials
        decode = min(room // each, _SEMAPHORES // semaphores if semaphores else room)
        if decode < 1:
            raise ValueError(
                f"workspace has {self.workspace_bytes} bytes, expected at least {each + 512 + 4 * _SEMAPHORES} for "
                f"experts of {shape.hidden} x {shape.intermediate}"
            )
        return decode, room // hidden

    def _tiles_of(self, shape: ExpertShape, precisions: frozenset[int], tokens: int = SMALL_BATCH_ROWS) -> Tiles:
        """Return sizes of programs for experts with at most so many tokens."""
        tiles = choose_tiles(self._architecture, shape.hidden, shape.intermediate)
        gate_up, down = shape.codes(precisions)
        ordered, sizes = bool(gate_up.act_order | down.act_order), (shape.hidden, shape.intermediate)
        fastest = fastest_grouped(gate_up.precisions | down.precisions, sizes, self._architecture, act_order=ordered)
        if min(self._grouped, fastest) is Grouped.IN_REGISTERS:
            tiles = tiles.in_registers()
        if self._decode_of(shape, precisions) is Decode.PLAIN:
            return tiles
        return tiles.on_tensor_cores(tokens)

    def _decode_of(self, shape: ExpertShape, precisions: frozenset[int]) -> Decode:
        """Return how experts of few tokens are computed.

        Down is computed in the same way as gate and up.
        """
        gate_up, down = shape.codes(precisions)
        return min(self._decode, fastest_decode(gate_up.precisions | down.precisions, self._architecture))


class TritonStep:
    """A layer's step, launched as its experts arrive.

    It is copied to the device once, at its first launch. At the beginning only the addresses of experts are unknown;
    they are added when the experts arrive.

    Attributes:
        table: of the experts that have an address.
        tiles: sizes of programs.
    """

    table: ExpertTable
    tiles: Tiles

    def __init__(self, kernel: TritonKernel, x: Tensor, plan: LayerPlan, out: Tensor, activation: Activation) -> None:
        self.x, self.out, self.activation = x, out, activation
        self._kernel, self._layer_plan = kernel, plan
        self._sizes = [after - before for before, after in pairwise(plan.bounds)]
        self._formats: list[Formats] = []  # distinct formats
        self._row: dict[int, int] = {}  # row of the table, by item; later rows are for second sections
        self._known: set[int] = set()  # items whose places are on the device

    def launches(self, items: Sequence[int]) -> list[tuple[int, WorkList]]:
        """Return the launches that some items need.

        Each is the index of grouped tiles, or DECODE, and a work list. Errors as :meth:`ExpertKernel.compute`.
        """
        some = [item for item in items if self._sizes[item]]
        if not some:
            return []
        fresh = {
            item: view
            for item, view in enumerate(self._layer_plan.views)
            if view is not None and item not in self._known and self._sizes[item]
        }
        self._known.update(fresh)
        before = len(self._formats)
        for gate, up, down in fresh.values():
            if (formats := (gate.format, up.format, down.format)) not in self._formats:
                check_formats(*formats, self.x, self.activation)
                self._formats.append(formats)
        if not self._row:
            self._describe(fresh)
            self.x = rotated_inputs(self.x, self._formats[0][1].rotation)
        elif fresh:
            # Before any wait, so that the device has it done while bytes are in flight.
            place_experts(self._addresses, self._bits, self._places(fresh))
        if len(self._formats) > before:
            shape, precisions = self._kernel.shape_of(self._formats)
            addresses, *residual = self._addresses.chunk(1 + self._nested)
            bits = self._bits[: len(addresses)]
            self.table = ExpertTable(shape, precisions, addresses, bits, residual=residual[0] if residual else None)
            self._kernel.compile(self.table, self.activation)
        return list(self._cut(sorted(self._row[item] for item in some)))

    def _describe(self, fresh: Mapping[int, PackedExpert]) -> None:
        """Copy everything that is known to the device."""
        shape, precisions = self._kernel.shape_of(self._formats)
        self._nested = shape.nested > 0
        items = [item for item, size in enumerate(self._sizes) if size]
        self.tiles, self._plan = self._kernel.plan(shape, precisions, [self._sizes[item] for item in items])
        order = [items[number] for number in self._plan.order]
        self._row = {item: row for row, item in enumerate(order)}
        index = [
            torch.cat([parts[item] for item in order])
            for parts in (self._layer_plan.rows.split(self._sizes), self._layer_plan.pairs.split(self._sizes))
        ]
        experts, count = len(order) * (1 + self._nested), len(self._plan.items)
        addresses, bits = torch.zeros(experts, 3, dtype=torch.int64), torch.zeros(experts, 3, dtype=torch.int32)
        if places := self._places(fresh):
            chosen = torch.tensor([place.row for place in places])
            addresses[chosen] = torch.tensor([place.sections for place in places])
            bits[chosen] = torch.tensor([place.widths for place in places], dtype=torch.int32)
        small = torch.cat((bits.view(-1), torch.tensor(self._plan.items, dtype=torch.int32).view(-1)))
        small = torch.cat((small, small.new_zeros(len(small) % 2)))
        host = torch.cat([addresses.view(-1), small.view(torch.int64), *index])
        if self._kernel.asynchronous:
            host = host.pin_memory()
        moved = host.to(self._kernel.device, non_blocking=True)
        self._addresses = moved[: 3 * experts].view(-1, 3)
        small = moved[3 * experts : 3 * experts + len(small) // 2].view(torch.int32)
        self._bits, self._items = small[: 3 * (experts + count)].view(-1, 3).split([experts, count])
        self._index = moved[len(moved) - 2 * len(index[0]) :].view(2, -1)

    def _places(self, fresh: Mapping[int, PackedExpert]) -> list[Place]:
        """Return rows of some items, then rows of their second sections.

        Raises ValueError at a misaligned address.
        """
        places = []
        for item, expert in fresh.items():
            gate, up, down = expert
            widths = gate.format.encoding.tag, up.format.encoding.tag, down.format.encoding.tag
            places.append(Place(self._row[item], _aligned(gate, up, down, 0), widths))
            if gate.residual is not None and self._nested:
                places.append(Place(len(self._row) + self._row[item], _aligned(gate, up, down, -1), (0, 0, 0)))
        return places

    def _cut(self, rows: Sequence[int]) -> Iterator[tuple[int, WorkList]]:
        """Return the launches of some rows of the table, ascending."""
        pieces = [piece for row in rows for piece in self._plan.pieces[row]]
        # A launch begins at another run, or after an expert that is not among the rows.
        cuts = [
            number
            for number, (before, after) in enumerate(pairwise(pieces), 1)
            if before[0] != after[0] or before[2] != after[1]
        ]
        for begin, end in pairwise([0, *cuts, len(pieces)]):
            run = self._plan.runs[pieces[begin][0]]
            items = self._items[pieces[begin][1] : pieces[end - 1][2]]
            yield run.grouped, WorkList(items, *self._index[:, run.first : run.stop])


def _aligned(gate: PackedMatrix, up: PackedMatrix, down: PackedMatrix, section: int) -> tuple[int, int, int]:
    """Return addresses from which kernels can load 16 bytes at a time."""
    addresses = gate.addresses[section], up.addresses[section], down.addresses[section]
    for address in addresses:
        if address % 16:
            raise ValueError(f"work holds address {address:#x}, expected multiples of 16")
    return addresses
