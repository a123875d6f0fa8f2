"""Compares every variant of the kernels with float64 on the CPU."""

import itertools
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
from experts import Products, random_packed, section_of, table_of_slices
from record import Recorder

from vllm_dymoe.experts.format import PackedExpert
from vllm_dymoe.experts.matrix import PackedMatrix
from vllm_dymoe.kernels import Activation, expert_reference
from vllm_dymoe.kernels.triton import (
    DecodeTile,
    ExpertShape,
    ExpertTable,
    Scratch,
    TritonKernel,
    Weighting,
    WorkList,
    decode_down,
    decode_gate_up,
)

TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3}
BITS = (16, 4), (8, 2)
"""Encodings of experts that share a launch; with all four a kernel takes 40 seconds to compile instead of 5 to 18."""
DEVICE = "cuda"
COUNTS = (1, 2, 3, 40, 200)
"""Tokens of experts in one step: decoded ones, and every class of grouped ones."""
DECODED = 1100, 500
"""Hidden and intermediate size."""
REPEATS = 100

FORWARD_CASES = (
    (ExpertShape(300, 203, 64, torch.bfloat16), Activation.SILU),
    (ExpertShape(512, 384, 32, torch.float16, bias=True), Activation.SWIGLU_OAI),
    (ExpertShape(512, 384, 128, torch.bfloat16, bias=True), Activation.GELU),
    (ExpertShape(300, 203, 64, torch.float16), Activation.GELU_TANH),
    (ExpertShape(300, 203, 64, torch.float16, integer_zeros=frozenset((4,))), Activation.SILU),
    (ExpertShape(512, 384, 32, torch.bfloat16, integer_zeros=frozenset((8, 2))), Activation.SILU),
    (ExpertShape(300, 203, 64, torch.bfloat16, bias=True, act_order=frozenset((8, 4))), Activation.SILU),
)
DECODE_CASES = (
    (torch.bfloat16, DecodeTile(4, 1)),
    (torch.bfloat16, DecodeTile(8, 4)),
    (torch.float16, DecodeTile(4, 2)),
)


def run(record: Recorder) -> None:
    """Compile all variants concurrently, since compiling takes longest; then check."""
    pool = ProcessPoolExecutor(min(os.cpu_count() or 1, 8), get_context("spawn"))
    with pool, record.check("every variant agrees with float64, repeats its bits, and fetches true bytes") as wrong:
        found = [pool.submit(check_forward, *case, bits) for case in FORWARD_CASES for bits in BITS]
        found += [pool.submit(check_decode, *case, bits) for case in DECODE_CASES for bits in BITS]
        wrong += [sentence for part in found for sentence in part.result()]


def make_expert(shape: ExpertShape, bits: int, seed: int) -> tuple[list[PackedMatrix], torch.Tensor]:
    """Return random matrices on the CPU, and their packed expert."""
    matrices = [random_packed(fmt, 3 * seed + number) for number, fmt in enumerate(shape.formats(bits))]
    return matrices, torch.cat([section_of(packed) for packed in matrices])


def check_forward(shape: ExpertShape, activation: Activation, precisions: Sequence[int]) -> list[str]:
    """Return what is wrong with the products of a step, as sentences.

    Every precision and class of tokens occurs in it.
    """
    dtype, hidden = shape.dtype, shape.hidden
    wrong = []
    tokens, experts = max(COUNTS), len(precisions) * len(COUNTS)
    x = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(shape.group_size)).to(dtype)
    packed, references, ids = {}, [], torch.full((tokens, experts), -1)
    for expert, (bits, count) in enumerate(itertools.product(precisions, COUNTS)):
        matrices, packed_bytes = make_expert(shape, bits, expert)
        sections = packed_bytes.to(DEVICE).split([packed.format.nbytes for packed in matrices])
        packed[expert] = PackedExpert(*map(_viewed, matrices, sections))
        ids[:count, expert] = expert
        references.append(expert_reference(x[:count], *matrices, activation))
    kernel, formats = TritonKernel(DEVICE), [shape.formats(bits) for bits in precisions]
    out, again = (torch.full((tokens * experts, hidden), float("nan"), dtype=dtype, device=DEVICE) for _ in range(2))

    def compute(some: torch.Tensor, into: torch.Tensor) -> None:
        Products(kernel, packed, formats, some, experts, activation).launch(x.to(DEVICE), into)

    compute(ids, out)
    got = out.view(tokens, experts, hidden).cpu().double()
    for expert, want in enumerate(references):
        error = float((got[: len(want), expert] - want).norm() / want.norm())
        if not error < TOLERANCE[dtype]:
            wrong.append(f"forward {shape} {activation} expert {expert}: relative error {error:.2g}")
    for expert in packed:  # computed one at a time, experts have the same bits
        compute(torch.where(ids == expert, ids, -1), again)
    if not torch.equal(out.view(torch.int16), again.view(torch.int16)):
        wrong.append(f"forward {shape}: experts one at a time give different bits than together")
    return wrong


def _viewed(packed: PackedMatrix, section: torch.Tensor) -> PackedMatrix:
    return packed.format.view(section)


def check_decode(dtype: torch.dtype, tile: DecodeTile, precisions: Sequence[int]) -> list[str]:
    """Check the weighted sum, and fetching from pinned memory.

    The sum is split in one launch, and runs are repeated.
    """
    wrong = []
    hidden_size, intermediate = DECODED
    shape = ExpertShape(hidden_size, intermediate, 64, dtype, True)
    experts, count = [make_expert(shape, bits, i) for i, bits in enumerate(precisions)], len(precisions)
    slices = [packed_bytes.to(DEVICE) for _, packed_bytes in experts]
    table = table_of_slices(shape, [packed_bytes.data_ptr() for packed_bytes in slices], precisions, DEVICE)
    x = torch.randn(3, hidden_size, generator=torch.Generator().manual_seed(tile.split)).to(dtype)
    items = torch.tensor([[e, 3 * e + a, 3 * e + b] for e in range(count) for a, b in ((0, 2), (2, 3))])
    rows = torch.arange(3).repeat(count)
    pairs = torch.cat([torch.arange(3) * count + e for e in range(count)])
    work = WorkList(items.int().to(DEVICE), rows.to(DEVICE), pairs.to(DEVICE))
    weights = torch.rand(3, count)
    weighting = Weighting(weights.to(DEVICE), torch.ones(3, count, dtype=torch.int32, device=DEVICE))
    scratch = Scratch(
        torch.full((1 << 20,), float("nan"), device=DEVICE), torch.zeros(1 << 12, dtype=torch.int32, device=DEVICE)
    )

    def run(table: ExpertTable = table, work: WorkList = work) -> torch.Tensor:
        hidden = torch.full((3 * count, intermediate), float("nan"), dtype=x.dtype, device=DEVICE)
        out = torch.full((3, hidden_size), float("nan"), dtype=x.dtype, device=DEVICE)
        decode_gate_up(x.to(DEVICE), hidden, table, work, Activation.SILU, tile, scratch)
        decode_down(hidden, out, table, work, tile, scratch, weighting)
        return out

    out = run()
    want = sum(weights[:, e : e + 1] * expert_reference(x, *experts[e][0], Activation.SILU) for e in range(count))
    error = float((out.cpu().double() - want).norm() / want.norm())
    name = f"decode {dtype} {tile}"
    if not error < TOLERANCE[dtype]:
        wrong.append(f"{name}: relative error {error:.2g}")
    if not all(torch.equal(run(), out) for _ in range(REPEATS)):
        wrong.append(f"{name}: the same launch gives different bits")
    if scratch.semaphores.any():
        wrong.append(f"{name}: semaphores are left above zero")
    pinned = [packed_bytes.pin_memory() for _, packed_bytes in experts]
    slots = [torch.full_like(packed_bytes, 0xEE) for packed_bytes in slices]
    items = torch.tensor([[e, 3 * e, 3 * e + 3] for e in range(count)])
    whole = WorkList(items.int().to(DEVICE), work.rows, work.pairs)
    targets = [slot.data_ptr() for slot in slots]
    through = table_of_slices(shape, [packed_bytes.data_ptr() for packed_bytes in pinned], precisions, DEVICE, targets)
    fetched = run(table=through, work=whole)
    if not all(torch.equal(slot, packed_bytes) for slot, packed_bytes in zip(slots, slices, strict=True)):
        wrong.append(f"{name}: a slot does not hold the source's bytes")
    if not torch.equal(fetched, run(table=table_of_slices(shape, targets, precisions, DEVICE), work=whole)):
        wrong.append(f"{name}: fetching through gives different bits than a launch from the slot")
    return wrong
