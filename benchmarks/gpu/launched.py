"""Do compiled decode kernels compute what they should? Runs all programs of a launch on their PTX, without a card.

Triton's interpreter executes Python, so it does not show what the compiler does: with ``up = gate`` before a loop that
moves ``up`` to ``gate``, the compiler took ``gate`` for a constant, and decoded experts gave zeros.
"""

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import torch
from flow import Program, Value
from machine_code import compiled_ptx
from variants import MAIN, variant_of

from vllm_dymoe.experts.encoding import WHOLE
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

DTYPE, SIZES = torch.bfloat16, (200, 136, 64)  # hidden and intermediate size, and group
TOLERANCE = 1e-2
CODES = tuple(tag for tag, encoding in WHOLE.items() if encoding.stored_bits == encoding.bits)
"""Tags of encodings in one section."""


class Launched(Program):
    """One program of a launch, at its place in the grid, after earlier ones have ended."""

    def __init__(self, ptx: str, memory: Any, arguments: Sequence[int], threads: int, place: Sequence[int]) -> None:
        super().__init__(ptx, memory, arguments, threads)
        for name, number in zip("xyz", (*place, 0), strict=False):
            self._registers[f"%ctaid.{name}"] = Value(np.full(threads, number, np.uint64), *2 * (self._nothing.bits,))

    def _set(self, text: str, value: Value, active: Any) -> None:
        none = self._nothing.bits  # no trees: only numbers matter here
        super()._set(text, Value(value.bits, none, none), active)

    def _execute(self, words: list[str], operands: list[str], active: Any) -> None:
        super()._execute(words, operands, active)
        if words[0] == "atom" and active.any():  # of one thread, whose operand 0 gets the old value
            (lane,) = np.flatnonzero(active)
            at = int(self._value(operands[1].strip("[ ]").split("+")[0].strip()).bits[lane])
            word = self._spaces["global"][0][at : at + 4].view(np.uint32)
            word += np.uint32(self._value(operands[2]).bits[lane])


class Memory:
    """Tensors of the host, and their addresses in a card's memory."""

    def __init__(self) -> None:
        self.bytes, self._places, self._end = np.zeros(1 << 22, np.uint8), dict[int, int](), 512

    def place(self, tensor: torch.Tensor) -> int:
        """Return a tensor's address; its content is copied the first time."""
        key = tensor.data_ptr()
        if key not in self._places:
            held = tensor.contiguous().view(-1).view(torch.uint8).numpy()
            self._places[key], self._end = self._end, self._end + -(-len(held) // 512) * 512
            self.bytes[self._places[key] :][: len(held)] = held
        return self._places[key]

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor's current content."""
        raw = self.bytes[self.place(tensor) :][: tensor.nbytes].copy()
        return torch.from_numpy(raw).view(tensor.dtype).view(tensor.shape)


def relative_error(bits: int, tokens: int, split: int = 1, *, fetch: bool = False, weighted: bool = False) -> float:
    """Return the relative error of one expert's outputs for some tokens, from compiled gate and up and down.

    Args:
        bits: of its encoding, or the encoding's tag.
        split: programs that share a sum.
        fetch: the expert is elsewhere and is copied to its slot, whose bytes are compared.
        weighted: tokens are summed.
    """
    shape, generator = ExpertShape(*SIZES, DTYPE), torch.Generator().manual_seed(bits)
    sections = [torch.empty(fmt.nbytes, dtype=torch.uint8) for fmt in shape.formats(bits)]
    matrices = []
    for fmt, section in zip(shape.formats(bits), sections, strict=True):
        fill_randomly(fmt, section, generator)
        matrices.append(fmt.view(section))
    memory, slots = Memory(), [torch.zeros_like(section) for section in sections]
    addresses, targets = (torch.tensor([[memory.place(part) for part in some]]) for some in (sections, slots))
    widths = torch.full((1, 3), bits, dtype=torch.int32)
    table = ExpertTable(shape, frozenset((bits,)), addresses, widths, targets if fetch else None)
    index = torch.arange(tokens)
    pieces = [[0, 0, tokens]] if fetch else [[0, at, min(at + 2, tokens)] for at in range(0, tokens, 2)]
    work = WorkList(torch.tensor(pieces, dtype=torch.int32), index, index)
    x = torch.randn(tokens, shape.hidden, generator=generator).to(DTYPE)
    hidden, out = x.new_full((tokens, shape.intermediate), torch.nan), torch.full_like(x, torch.nan)
    scratch = Scratch(torch.full((1 << 14,), torch.nan), torch.zeros(1 << 8, dtype=torch.int32))
    weighting = Weighting(torch.full((tokens, 1), 0.5), torch.ones(tokens, 1, dtype=torch.int32)) if weighted else None
    tile = DecodeTile(4, split)

    def run(kernel: Any, grid: tuple[int, ...], tensors: Any, constants: dict[str, Any], options: Any) -> None:
        key = MAIN, kernel.__name__.removesuffix("_kernel"), "", "", ""
        ptx = compiled_ptx(variant_of(key, kernel, tensors, constants, options))
        arguments = [memory.place(tensor) for tensor in tensors]
        for place in product(*map(range, grid)):
            Launched(ptx, memory.bytes, arguments, 32 * options["num_warps"], place).run()

    read = rotated_inputs(x, shape.rotation(table.precisions), start=run)
    decode_gate_up(read, hidden, table, work, Activation.SILU, tile, scratch, start=run)
    decode_down(hidden, out, table, work, tile, scratch, weighting, start=run)
    if fetch and not all(torch.equal(memory.read(slot), part) for slot, part in zip(slots, sections, strict=True)):
        return torch.inf
    want = expert_reference(x, *matrices, Activation.SILU) * (0.5 if weighted else 1.0)
    return float((memory.read(out).double() - want).norm() / want.norm())


def wrong_numbers(codes: Sequence[int] = CODES) -> list[str]:
    """Return sentences about encodings, by tag, with wrong outputs.

    Checked are one token, and three whose sums are shared, fetched and weighted.
    """
    found = []
    for bits in codes:
        for tokens, options in ((1, {}), (3, {"split": 2, "fetch": True, "weighted": True})):
            if not (error := relative_error(bits, tokens, **options)) < TOLERANCE:
                found.append(f"{WHOLE[bits].name}: {tokens} tokens have a relative error of {error:.2g}")
    return found
