"""Experts at addresses in memory, for tests of the Triton kernels."""

import ctypes
import mmap
import os
from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import strategies as st

from benchmarks.gpu.experts import section_offsets, table_of_slices
from tests.kernels.matrices import random_packed
from vllm_dymoe.kernels import Activation, expert_reference
from vllm_dymoe.kernels.triton import (
    DecodeTile,
    ExpertTable,
    GroupedTile,
    Scratch,
    WorkList,
    decode_down,
    decode_gate_up,
    grouped_down,
    grouped_gate_up,
)

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"

# Three roundings at 8 and 11 bits: the dequantized weights of a tile, the inner activation, the result.
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3}


def relative_error(got, want):
    return ((got.cpu().double() - want).norm() / want.norm()).item()


def random_x(tokens, columns, dtype, seed=0):
    return torch.randn(tokens, columns, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def poisoned(*shape, dtype):
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


STRIP, TILE = DecodeTile(4, 2), GroupedTile(16, 64, 32, 4, 2)


def make_scratch(floats=1 << 16, held=float("nan")):
    partials = torch.full((floats,), held, device=DEVICE)
    return Scratch(partials, torch.zeros(1 << 10, dtype=torch.int32, device=DEVICE))


def decode(x, table, work, rows, tile=STRIP, activation=Activation.SILU, weighting=None):
    """Run both decode launches; return the result of gate and up, and the output."""
    scratch = make_scratch()
    hidden = poisoned(work.positions, table.shape.intermediate, dtype=x.dtype)
    decode_gate_up(x, hidden, table, work, activation, tile, scratch)
    out = poisoned(rows, table.shape.hidden, dtype=x.dtype)
    decode_down(hidden, out, table, work, tile, scratch, weighting)
    assert not scratch.semaphores.any(), "semaphores are left above zero"
    return hidden, out


def grouped(x, table, work, rows, tile=TILE, activation=Activation.SILU, place=lambda _: _):
    """Do the same with grouped launches; ``place`` moves the tensors they write."""
    hidden = place(poisoned(work.positions, table.shape.intermediate, dtype=x.dtype))
    grouped_gate_up(x, hidden, table, work, activation, tile)
    out = place(poisoned(rows, table.shape.hidden, dtype=x.dtype))
    grouped_down(hidden, out, table, work, tile)
    return hidden, out


some_widths = st.sets(st.sampled_from([8, 4, 2])).map(frozenset)
"""Encodings with integer zero points, or with an order of columns."""
own_codes = st.none() | st.tuples(st.sampled_from([32, 64, 128]), some_widths, some_widths)
"""Group size, integer zeros and order of down projections, if they have their own."""


class Experts:
    """Random experts of one shape: packed bytes, their bits, and expected results."""

    def __init__(self, shape, bits, seed=0):
        self.shape, self.bits = shape, list(bits)
        self.matrices, self.slices, self.residual = [], [], []
        for number, width in enumerate(self.bits):
            formats = shape.formats(width)
            three = [random_packed(fmt, seed + 3 * number + i) for i, fmt in enumerate(formats)]
            self.matrices.append(three)
            self.slices.append(_joined([packed.weight for packed in three]))
            self.residual.append(_joined([packed.residual for packed in three if packed.residual is not None]))
            first = formats[2].base if formats[2].nested else formats[2]
            assert section_offsets(shape, width)[2] + first.nbytes == self.slices[-1].numel()
            assert self.slices[-1].data_ptr() % 16 == 0

    def table(self, destinations=None, residual_destinations=None):
        starts = [packed.data_ptr() for packed in self.slices]
        residual = [packed.data_ptr() for packed in self.residual] if self.shape.nested else None
        return table_of_slices(self.shape, starts, self.bits, DEVICE, destinations, residual, residual_destinations)

    def reference(self, expert, x, activation):
        return expert_reference(x.cpu(), *self.matrices[expert], activation)


def _joined(parts):
    sections = [torch.tensor([], dtype=torch.uint8).set_(part.untyped_storage()) for part in parts]
    return torch.cat([torch.tensor([], dtype=torch.uint8), *sections]).to(DEVICE)


def work_list(tokens_by_expert, top_k, step=2):
    """Make work items of at most ``step`` positions.

    ``tokens_by_expert`` lists (token, k) for each expert of the table.
    """
    items, rows, pairs = [], [], []
    for expert, chosen in enumerate(tokens_by_expert):
        first = len(rows)
        rows += [token for token, _ in chosen]
        pairs += [token * top_k + k for token, k in chosen]
        items += [[expert, i, min(i + step, len(rows))] for i in range(first, len(rows), step)]
    make = lambda values: torch.tensor(values, dtype=torch.int32, device=DEVICE)  # noqa: E731
    return WorkList(make(items).view(-1, 3), make(rows), make(pairs))


def at_the_edge(tensor):
    """Copy a tensor so that its last byte is the last of mapped memory.

    One load or store beyond it kills the process. This works in the interpreter, which performs exactly the loads and
    stores that a mask allows, one address at a time.
    """
    if not tensor.nbytes:
        return tensor.clone()
    page = mmap.PAGESIZE
    size = -(-tensor.nbytes // page) * page
    memory = mmap.mmap(-1, size + page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(address + size), page, 0) == 0
    copied = torch.frombuffer(memory, dtype=torch.uint8, count=tensor.nbytes, offset=size - tensor.nbytes)
    return copied.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def sections_at_the_edge(experts, copies):
    """Make a table of experts whose sections all end at the end of mapped memory.

    ``copies`` keeps the sections alive.
    """

    def addresses(parts):
        copies.extend(at_the_edge(_joined([part])) for part in parts)
        return [section.data_ptr() for section in copies[-3:]]

    rows = torch.tensor([addresses([packed.weight for packed in matrices]) for matrices in experts.matrices])
    residual = None
    if experts.shape.nested:
        parts = [[packed.residual for packed in matrices] for matrices in experts.matrices]
        residual = torch.tensor([[0] * 3 if three[0] is None else addresses(three) for three in parts])
    bits = torch.tensor([[width] * 3 for width in experts.bits], dtype=torch.int32)
    return ExpertTable(experts.shape, frozenset(experts.bits), rows, bits, residual=residual)


def run_backwards(monkeypatch):
    """Make the interpreter run a launch's last program first from now on."""
    from triton.runtime.interpreter import interpreter_builder as builder

    def mirrored(*place):
        builder.grid_idx = tuple(size - 1 - at for size, at in zip(builder.grid_dim, place, strict=True))

    monkeypatch.setattr(builder, "set_grid_idx", mirrored)


def count_loads(monkeypatch, memory):
    """Count from now on how often kernels load each byte of a tensor: int [nbytes].

    Works in the interpreter.
    """
    from triton.runtime import interpreter

    counts, start, load = np.zeros(memory.nbytes, dtype=int), memory.data_ptr(), interpreter._interpreter.load

    def counting(pointers, mask, other, dtype):
        for byte in range(np.dtype(dtype).itemsize):
            places = pointers[mask].astype(np.int64) + (byte - start)
            np.add.at(counts, places[(places >= 0) & (places < len(counts))], 1)
        return load(pointers, mask, other, dtype)

    real = interpreter._interpreter
    others = {name: getattr(real, name) for name in dir(real) if not name.startswith("__")}
    monkeypatch.setattr(interpreter, "_interpreter", SimpleNamespace(**{**others, "load": counting}))
    return counts
