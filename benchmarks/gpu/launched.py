"""Do compiled decode kernels compute what they should? Runs all programs of a launch on their PTX, without a card.

Triton's interpreter executes Python, and says nothing about what the compiler makes of it: with ``up = gate`` in front
of a loop that moves ``up`` to ``gate``, the compiler took ``gate`` for a constant, and decoded experts gave zeros.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
from flow import Program, Value
from machine_code import compiled_ptx
from variants import MAIN, variant_of

from vllm_dymoe.experts.encoding import WHOLE, Encoding
from vllm_dymoe.experts.format import ExpertFormat, PackedExpert
from vllm_dymoe.kernels import Activation, expert_reference
from vllm_dymoe.kernels.triton import (
    DecodeTile,
    ExpertShape,
    ExpertTable,
    Scratch,
    Weighting,
    WorkList,
    decode_down,
    decode_gate_up,
)
from vllm_dymoe.kernels.triton.rotate import rotated_inputs
from vllm_dymoe.quantize.dummy import fill_randomly

TOLERANCE = 1e-2
ENCODINGS = tuple(encoding for encoding in WHOLE.values() if encoding.stored_bits == encoding.bits)
"""Those that lie in one section."""


class Launched(Program):
    """One program of a launch, at its place in the grid; others have come before it, and are at their end."""

    def __init__(self, ptx: str, memory: Any, arguments: Sequence[int], threads: int, place: Sequence[int]) -> None:
        super().__init__(ptx, memory, arguments, threads)
        for name, number in zip("xyz", (*place, 0), strict=False):
            self._registers[f"%ctaid.{name}"] = Value(np.full(threads, number, np.uint64), *2 * (self._nothing.bits,))

    def _set(self, text: str, value: Value, active: Any) -> None:
        none = self._nothing.bits  # no trees: this is about numbers
        super()._set(text, Value(value.bits, none, none), active)

    def _execute(self, words: list[str], operands: list[str], active: Any) -> None:
        super()._execute(words, operands, active)
        if words[0] == "atom" and active.any():  # of one thread, whose operand 0 now has what was there
            (lane,) = np.flatnonzero(active)
            at = int(self._value(operands[1].strip("[ ]").split("+")[0].strip()).bits[lane])
            word = self._spaces["global"][0][at : at + 4].view(np.uint32)
            word += np.uint32(self._value(operands[2]).bits[lane])


class Memory:
    """Tensors of the host, and where they lie in a card's memory."""

    def __init__(self) -> None:
        self.bytes, self._places, self._end = np.zeros(1 << 22, np.uint8), dict[int, int](), 512

    def place(self, tensor: torch.Tensor) -> int:
        """Its address; its contents are copied the first time."""
        key = tensor.data_ptr()
        if key not in self._places:
            held = tensor.contiguous().view(-1).view(torch.uint8).numpy()
            self._places[key], self._end = self._end, self._end + -(-len(held) // 512) * 512
            self.bytes[self._places[key] :][: len(held)] = held
        return self._places[key]

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """What has become of it."""
        raw = self.bytes[self.place(tensor) :][: tensor.nbytes].copy()
        return torch.from_numpy(raw).view(tensor.dtype).view(tensor.shape)


@dataclass(frozen=True)
class Launch:
    """One expert and some tokens, as gate and up and down are launched for them."""

    encoding: Encoding
    tokens: int
    split: int = 1  # programs that share a sum
    fetch: bool = False  # the expert lies elsewhere and is stored in its slot, which has to have its bytes then
    weighted: bool = False  # tokens are summed
    low: bool = False  # computed from the base slice alone
    tensor_cores: int = 0  # see DecodeTile
    warps: int = 4
    group: int = 64
    dtype: torch.dtype = torch.bfloat16
    sizes: tuple[int, int] = (200, 136)  # hidden and intermediate
    bias: bool = False
    integer_zeros: bool = False
    act_order: bool = False
    activation: Activation = Activation.SILU
    architecture: int = MAIN


@dataclass(frozen=True)
class Ran:
    """What came out of a launch.

    Attributes:
        error: relative to float64; infinite if a slot does not have its bytes.
        out: of the tokens or pairs, in the launch's dtype.
        x: of the tokens.
        expert: what was computed.
    """

    error: float
    out: torch.Tensor
    x: torch.Tensor
    expert: PackedExpert


def ran(launch: Launch, changed: Callable[[str], str] = str) -> Ran:
    """Run compiled gate and up and down of an expert on the host.

    Args:
        launch: what to run.
        changed: gets the PTX of each kernel and returns what runs in its place.
    """
    generator = torch.Generator().manual_seed(launch.encoding.tag)
    flags = launch.bias, launch.integer_zeros, launch.act_order
    fmt = ExpertFormat(*launch.sizes, launch.encoding, launch.group, launch.dtype, *flags)
    memory, packed, expert = Memory(), [torch.zeros(part.nbytes, dtype=torch.uint8) for part in fmt.slices], None
    for part, held in zip(fmt.slices, packed, strict=True):
        for matrix, section in zip(part.matrices, part.sections, strict=True):
            fill_randomly(matrix, held[section], generator)
        if expert is None or not launch.low:
            expert, computed = part.view(held, expert), part
    if launch.act_order:
        for matrix in expert:
            matrix.order.copy_(torch.randperm(len(matrix.order), generator=generator))
    if launch.bias:
        for matrix in expert:
            matrix.bias.copy_(torch.randn(len(matrix.bias), generator=generator) / 16)
    shape = ExpertShape.of([computed.matrices])
    precision = computed.matrices[1].encoding.tag
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
    bits = torch.full((1, 3), precision, dtype=torch.int32)
    table = ExpertTable(shape, frozenset((precision,)), addresses[0], bits, destinations[0], *residual)
    tokens, index = launch.tokens, torch.arange(launch.tokens)
    tile = DecodeTile(launch.warps, launch.split, tensor_cores=launch.tensor_cores)
    apart = tokens if launch.fetch else tile.positions
    pieces = [[0, at, min(at + apart, tokens)] for at in range(0, tokens, apart)]
    work = WorkList(torch.tensor(pieces, dtype=torch.int32), index, index)
    # The same first tokens, however many there are.
    x = torch.randn(64, shape.hidden, generator=generator)[:tokens].to(launch.dtype)
    hidden, out = x.new_full((tokens, shape.intermediate), torch.nan), torch.full_like(x, torch.nan)
    scratch = Scratch(torch.full((1 << 16,), torch.nan), torch.zeros(1 << 8, dtype=torch.int32))
    weights = Weighting(torch.full((tokens, 1), 0.5), torch.ones(tokens, 1, dtype=torch.int32))

    def run(kernel: Any, grid: tuple[int, ...], tensors: Any, constants: dict[str, Any], options: Any) -> None:
        key = launch.architecture, kernel.__name__.removesuffix("_kernel"), "", "", ""
        ptx = changed(compiled_ptx(variant_of(key, kernel, tensors, constants, options)))
        arguments = [memory.place(tensor) for tensor in tensors]
        for place in product(*map(range, grid)):
            Launched(ptx, memory.bytes, arguments, 32 * options["num_warps"], place).run()

    read = rotated_inputs(x, shape.rotation(table.precisions), start=run)
    decode_gate_up(read, hidden, table, work, launch.activation, tile, scratch, start=run)
    decode_down(hidden, out, table, work, tile, scratch, weights if launch.weighted else None, start=run)
    want = expert_reference(x, *expert, launch.activation) * (0.5 if launch.weighted else 1.0)
    got = memory.read(out)
    error = float((got.double() - want).norm() / want.norm())
    fetched = zip(slots[: len(used)], used, strict=True)
    if launch.fetch and not all(torch.equal(memory.read(slot), held) for slot, held in fetched):
        error = torch.inf
    return Ran(error, got, x, expert)


def launches(architecture: int, tensor_cores: bool) -> Iterator[Launch]:
    """Every encoding: a token alone, and three whose sums are shared, fetched and weighted; on tensor cores up to 16."""
    for encoding in (*ENCODINGS, *(TENSOR_CORE_ENCODINGS if tensor_cores else ())):
        for tokens, options in ((1, {}), (3, {"split": 2, "fetch": True, "weighted": True})):
            yield Launch(encoding, tokens, **options, tensor_cores=8 * tensor_cores, architecture=architecture)


def wrong_numbers(codes: Sequence[Encoding] = ENCODINGS) -> list[str]:
    """Sentences about codes, by their tags, whose outputs are not what they should be: of one token, and of three whose
    sums are shared, fetched and weighted."""
    found = []
    for encoding in codes:
        for tokens, options in ((1, {}), (3, {"split": 2, "fetch": True, "weighted": True})):
            if not (error := ran(Launch(encoding, tokens, **options)).error) < TOLERANCE:
                found.append(f"{encoding.name}: {tokens} tokens have a relative error of {error:.2g}")
    return found
