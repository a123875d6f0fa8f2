"""Checks what compiled decode kernels compute, without a card.

All programs of a launch are run from their PTX. Triton's interpreter executes Python, so it does not show what the
compiler does. Once, ``up = gate`` before a loop that moves ``up`` to ``gate`` made the compiler take ``gate`` for a
constant, and decoded experts gave zeros.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import torch
from flow import Program
from machine_code import compiled_ptx
from variants import MAIN, variant_of

from vllm_dymoe.experts.encoding import CODEBOOKS, LATTICES, NESTED, STEPS, WHOLE, Encoding
from vllm_dymoe.experts.format import DownFormat, ExpertFormat, PackedExpert
from vllm_dymoe.experts.matrix import PackedMatrix
from vllm_dymoe.kernels import Activation, expert_reference
from vllm_dymoe.kernels.triton import (
    DecodeTile,
    ExpertShape,
    ExpertTable,
    GroupedTile,
    Scratch,
    Weighting,
    WorkList,
    decode_down,
    decode_gate_up,
    grouped_down,
    grouped_gate_up,
)
from vllm_dymoe.kernels.triton.rotate import rotated_inputs
from vllm_dymoe.kernels.triton.start import Overlap
from vllm_dymoe.quantize.dummy import fill_randomly

TOLERANCE = 1e-2
ENCODINGS = tuple(encoding for encoding in WHOLE.values() if encoding.stored_bits == encoding.bits)
"""Those that lie in one section."""


@dataclass
class Order:
    """What the programs of a kernel do before they wait for the previous launch.

    Attributes:
        early: global addresses that they use.
        waits: every program waits.
        releases_first: a program lets the next launch begin before it waits.
    """

    early: set[int] = field(default_factory=set)
    waits: bool = True
    releases_first: bool = False


class Launched(Program):
    """One program of a launch, at its place in the grid.

    The programs before it have ended.
    """

    def __init__(self, ptx: str, memory: Any, arguments: Sequence[int], threads: int, place: Sequence[int]) -> None:
        super().__init__(ptx, memory, arguments, threads, traced=False)
        self.order = Order(waits=False)
        for name, number in zip("xyz", (*place, 0), strict=False):
            self._registers[f"%ctaid.{name}"] = self._only(np.full(threads, number, np.uint64))

    def _wait(self) -> None:
        self.order.waits = True

    def _release(self) -> None:
        self.order.releases_first |= not self.order.waits

    def _execute(self, words: tuple[str, ...], operands: list[str], active: Any) -> None:
        if not self.order.waits and "global" in words and active.any():
            self.order.early.update(self._address(operands[words[0] != "st"])[active].tolist())
        super()._execute(words, operands, active)
        if words[0] == "atom" and active.any():  # one thread is active; its operand 0 gets the old value
            (lane,) = np.flatnonzero(active)
            at = int(self._address(operands[1])[lane])
            self._spaces["global"].words[32][at // 4] += np.uint32(self._value(operands[2]).bits[lane])


class Host:
    """Runs launches on the host, with an array of bytes as the card's memory.

    Args:
        architecture: the architecture that is compiled for.
        changed: gets the PTX of each kernel and returns what runs in its place.

    Attributes:
        order: of each kernel that was launched.
    """

    def __init__(self, architecture: int, changed: Callable[[str], str] = str) -> None:
        self._architecture, self._changed, self.order = architecture, changed, dict[str, Order]()
        self._bytes, self._places, self._end = np.zeros(1 << 22, np.uint8), dict[int, int](), 512

    def run(
        self, kernel: Any, grid: tuple[int, ...], tensors: Any, constants: dict[str, Any], options: dict[str, Any]
    ) -> None:
        """Run all programs of a launch, one after the other."""
        name = kernel.__name__.removesuffix("_kernel")
        variant = variant_of((self._architecture, name, "", "", ""), kernel, tensors, constants, options)
        ptx, arguments = self._changed(compiled_ptx(variant)), [self.place(tensor) for tensor in tensors]
        order = self.order.setdefault(name, Order())
        for place in product(*map(range, grid)):
            program = Launched(ptx, self._bytes, arguments, 32 * options["num_warps"], place)
            program.run()
            order.early |= program.order.early
            order.waits &= program.order.waits
            order.releases_first |= program.order.releases_first

    def place(self, tensor: torch.Tensor) -> int:
        """Return a tensor's address; the first time, its content is copied there."""
        key = tensor.data_ptr()
        if key not in self._places:
            held = tensor.contiguous().view(-1).view(torch.uint8).numpy()
            self._places[key], self._end = self._end, self._end + -(-len(held) // 512) * 512
            self._bytes[self._places[key] :][: len(held)] = held
        return self._places[key]

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor's current content."""
        raw = self._bytes[self.place(tensor) :][: tensor.nbytes].copy()
        return torch.from_numpy(raw).view(tensor.dtype).view(tensor.shape)


@dataclass(frozen=True)
class Launch:
    """One expert and some tokens: launches of gate and up, and of down."""

    encoding: Encoding
    tokens: int
    split: int = 1  # programs that share a sum
    fetch: bool = False  # the expert lies elsewhere; afterwards its slot has to have its bytes
    weighted: bool = False  # outputs are weighted sums; one more token has no expert and becomes zero
    low: bool = False  # computed from the base slice alone
    tensor_cores: int = 0  # see DecodeTile, also for the next field
    dependent: bool = False
    overlap: Overlap = Overlap.NONE  # of gate and up with the launch before; there is one more item, without tokens
    grouped: bool = False  # launched as in large batches, with weights dequantized in registers
    warps: int = 4
    group: int = 64
    dtype: torch.dtype = torch.bfloat16
    sizes: tuple[int, int] = (200, 136)  # hidden and intermediate
    bias: bool = False
    integer_zeros: bool = False
    act_order: bool = False
    activation: Activation = Activation.SILU
    down: DownFormat | None = None  # see ExpertFormat


@dataclass(frozen=True)
class Ran:
    """The results of a launch.

    Attributes:
        error: relative to float64; infinite if a slot does not have its bytes, or a token without an expert is not 0.
        out: outputs of the tokens or pairs, in the launch's dtype.
        x: inputs of the tokens.
        expert: the computed expert.
        packed: addresses of the expert's sections.
        planned: addresses that a planner writes: addresses, destinations, bits, work list and rows.
        written: addresses that launches write: hidden states, outputs, partial sums and semaphores.
    """

    error: float
    out: torch.Tensor
    x: torch.Tensor
    expert: PackedExpert
    packed: list[range]
    planned: list[range]
    written: list[range]


def ran(launch: Launch, memory: Any) -> Ran:
    """Run gate and up, then down, of an expert.

    Args:
        launch: what to run.
        memory: where it runs: a `Host`, or an object with its methods.
    """
    generator = torch.Generator().manual_seed(launch.encoding.tag)
    flags = launch.bias, launch.integer_zeros, launch.act_order, launch.activation.has_gate
    fmt = ExpertFormat(*launch.sizes, launch.encoding, launch.group, launch.dtype, *flags, down=launch.down)
    packed, expert = [torch.zeros(part.nbytes, dtype=torch.uint8) for part in fmt.slices], None
    for part, held in zip(fmt.slices, packed, strict=True):
        for matrix, section in zip(part.matrices, part.sections, strict=True):
            fill_randomly(matrix, held[section], generator)
        if expert is None or not launch.low:
            expert, computed = part.view(held, expert), part
    for matrix in expert:
        if matrix.order is not None:
            matrix.order.copy_(torch.randperm(len(matrix.order), generator=generator))
    for matrix in expert:
        _vary_scales(matrix, generator)
    if launch.bias:
        for matrix in expert:
            matrix.bias.copy_(torch.randn(len(matrix.bias), generator=generator) / 16)
    shape = ExpertShape.of([computed.matrices])
    tags = [matrix.encoding.tag for matrix in computed.matrices]
    slots = [torch.zeros_like(held) for held in packed]

    def places(held: torch.Tensor, part: ExpertFormat) -> torch.Tensor:
        return torch.tensor([[memory.place(held) + section.start for section in part.sections]])

    used = packed[: 1 + (computed.nested)]
    addresses = [places(held, part) for held, part in zip(used, fmt.slices, strict=False)]
    targets = [places(held, part) for held, part in zip(slots[: len(used)], fmt.slices, strict=False)]
    if shape.nested and len(used) == 1:
        addresses, targets = addresses * 2, [*targets, torch.zeros(1, 3, dtype=torch.int64)]
    destinations = targets if launch.fetch else [None, None]
    residual = (addresses[1], destinations[1]) if shape.nested else (None, None)
    bits = torch.tensor([tags], dtype=torch.int32)
    table = ExpertTable(shape, frozenset(tags[:2]), addresses[0], bits, destinations[0], *residual)
    tokens, index = launch.tokens, torch.arange(launch.tokens)
    tile = DecodeTile(launch.warps, launch.split, tensor_cores=launch.tensor_cores, dependent=launch.dependent)
    grouped = GroupedTile(64, 256, 64, 4, 3, in_registers=True)
    apart = grouped.block_m if launch.grouped else tokens if launch.fetch else tile.positions
    pieces = [[0, at, min(at + apart, tokens)] for at in range(0, tokens, apart)]
    if launch.overlap:
        pieces.append([0, 0, 0])
    summed = tokens + launch.weighted
    if launch.weighted:
        pieces.append([-1, 0, summed])
    work = WorkList(torch.tensor(pieces, dtype=torch.int32), index, index)
    # The first tokens are the same for every number of tokens.
    x = torch.randn(128, shape.hidden, generator=generator)[:tokens].to(launch.dtype)
    hidden, out = (x.new_full(size, torch.nan) for size in ((tokens, shape.intermediate), (summed, shape.hidden)))
    scratch = Scratch(torch.full((1 << 16,), torch.nan), torch.zeros(1 << 8, dtype=torch.int32))
    weights = Weighting(torch.full((summed, 1), 0.5), (torch.arange(summed) < tokens).int()[:, None])

    start = memory.run
    read = rotated_inputs(x, shape.rotation(table.precisions), start=start)
    first = WorkList(work.items[: len(work.items) - launch.weighted].clone(), index, index)
    if launch.grouped:
        grouped_gate_up(read, hidden, table, first, launch.activation, grouped, start=start)
        grouped_down(hidden, out, table, first, grouped, start=start)
    else:
        overlap = launch.overlap
        decode_gate_up(read, hidden, table, first, launch.activation, tile, scratch, overlap=overlap, start=start)
        decode_down(hidden, out, table, work, tile, scratch, weights if launch.weighted else None, start=start)
    want = expert_reference(x, *expert, launch.activation) * (0.5 if launch.weighted else 1.0)
    got, rest = memory.read(out).split([tokens, launch.weighted])
    error = float((got.double() - want).norm() / want.norm())
    if rest.count_nonzero():
        error = torch.inf
    fetched = zip(slots[: len(used)], used, strict=True)
    if launch.fetch and not all(torch.equal(memory.read(slot), held) for slot, held in fetched):
        error = torch.inf
    planned = *table.places, table.bits, first.items, work.items, index
    written = hidden, out, scratch.partials, scratch.semaphores
    listed = packed, planned, written
    at = [[range(memory.place(t), memory.place(t) + t.nbytes) for t in some] for some in listed]
    return Ran(error, got, x, expert, *at)


def _vary_scales(matrix: PackedMatrix, generator: torch.Generator) -> None:
    """Multiply scales by powers of two, so that a kernel that takes another errs."""
    if matrix.scales is not None:
        scales = matrix.scales.float()
        scales *= 2.0 ** torch.randint(-1, 2, scales.shape, generator=generator)
        matrix.scales.view(torch.uint8).copy_(scales.to(matrix.scales.dtype).view(torch.uint8))
    elif matrix.scales_zeros is not None:
        powers = 2.0 ** torch.randint(-1, 2, matrix.scales_zeros.shape[:2], generator=generator)
        changed = [0] if matrix.format.integer_zeros else [0, 1]  # integer zeros count steps of the scale
        matrix.scales_zeros[..., changed] *= powers[..., None].to(matrix.scales_zeros.dtype)


SHARED = {"split": 2, "fetch": True, "weighted": True}
ON_TENSOR_CORES = tuple(encoding for encoding in (*WHOLE.values(), *NESTED.values()) if encoding.name != "16")


def plain_launches() -> Iterator[tuple[int, Launch]]:
    """Yield an architecture, and launches of every code.

    They compute one token, and three tokens whose sums are shared, fetched and weighted.
    """
    for code in ENCODINGS:
        yield from ((MAIN, Launch(code, tokens, **more)) for tokens, more in ((1, {}), (3, SHARED)))


def tensor_core_launches() -> Iterator[tuple[int, Launch]]:
    """Yield architectures, and launches on tensor cores.

    They compute three tokens, and eleven; every code occurs on one architecture.
    """
    for architecture in (80, 89, MAIN, 120):
        codes = ON_TENSOR_CORES if architecture == MAIN else (STEPS[2], NESTED[4])
        yield from ((architecture, Launch(code, 3, **SHARED, tensor_cores=8)) for code in codes)
        yield from ((architecture, Launch(code, 11, tensor_cores=16)) for code in (STEPS[4], NESTED[4]))


def large_batch_launches() -> Iterator[tuple[int, Launch]]:
    """Yield architectures, and launches of large batches with weights in registers.

    4/2 bits have a tile of 64 positions and one of 8, and other codes, on one architecture, one of 16.
    """
    for architecture in (80, 89, MAIN, 120):
        yield architecture, Launch(NESTED[4], 70, grouped=True, sizes=(136, 72))
    for code in (NESTED[8], *CODEBOOKS.values(), *LATTICES.values()):
        yield MAIN, Launch(code, 11, grouped=True, sizes=(136, 72))


def wrong_numbers(chosen: Iterable[tuple[int, Launch]]) -> list[str]:
    """Return sentences about launches whose outputs are wrong."""
    found = []
    for architecture, launch in chosen:
        if not (error := ran(launch, Host(architecture)).error) < TOLERANCE:
            on_card = launch.tensor_cores or launch.grouped
            how = f"on tensor cores of sm_{architecture}" if on_card else "without tensor cores"
            found.append(f"{launch.encoding.name}: {launch.tokens} tokens {how} have a relative error of {error:.2g}")
    return found
