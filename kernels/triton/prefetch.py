"""Prefetch on the device: lists the copies of predicted experts, and makes them until the next layer is planned.

Plain twin of the list, bit for bit: ``vllm_dymoe.planner.prefetch``. Names are those of ``Table`` and ``PrefetchList``.
"""

from collections.abc import Mapping

import triton
import triton.language as tl
from torch import Tensor

from vllm_dymoe.kernels.triton.planner import WARPS, bytes_ahead, number_of
from vllm_dymoe.kernels.triton.start import Start, run_kernel
from vllm_dymoe.planner.constants import experts_width

# Each program has 8 KiB in flight, and a PCIe link of 50 GB/s with 2 us of latency needs 100 KB. They stop within that
# many bytes.
_PROGRAMS = 32
_WORDS = tl.constexpr(2048)  # int32 words that a program copies at a time

_LISTED_BY = (
    "predicted", "precision", "staging", "prefetch_slots", "staged", "staged_for", "offsets", "pool", "slot_bytes",
    "source",
)  # fmt: skip


def list_predicted_on_gpu(
    table: Mapping[str, Tensor], layer: int, rows: Tensor, projections: int, out: Mapping[str, Tensor],
    *, start: Start = run_kernel,
) -> None:  # fmt: skip
    """Run ``list_predicted`` on the device, in one launch.

    Args:
        table: the tensors of a Table, by name.
        rows: int32 [1], number of real tokens.
        projections: how many projections of an expert are copied.
        out: the tensors of a PrefetchList, by name; rows of copies after the last one keep their values.
    """
    layers, experts = table["precision"].shape
    columns = *(table[name] for name in _LISTED_BY), out["copies"], out["count"], out["arrivals"]
    sizes = {"EXPERTS": experts, "WIDTH": experts_width(experts)}
    start(list_predicted_kernel, (1,), (rows, *columns, layer, layers, projections), sizes, {"num_warps": WARPS})


def copy_predicted_on_gpu(
    table: Mapping[str, Tensor], layer: int, projections: int, listed: Mapping[str, Tensor],
    *, start: Start = run_kernel,
) -> None:  # fmt: skip
    """Make the listed copies in one launch, until the plan of ``layer`` begins; each is published when complete.

    A program is one warp, so that all of its lanes see the same value when it checks whether to continue.
    """
    columns = listed["copies"], listed["count"], listed["arrivals"], table["planned"], table["staged"]
    sizes = {"EXPERTS": table["precision"].shape[1], "PROGRAMS": _PROGRAMS}
    start(copy_predicted_kernel, (_PROGRAMS,), (*columns, layer, projections), sizes, {"num_warps": 1})


@triton.jit(
    do_not_specialize_on_alignment=["rows", *_LISTED_BY, "copies", "count", "arrivals"],
    do_not_specialize=["layer", "layers", "projections"],
)
def list_predicted_kernel(
    rows, predicted, precision, staging, prefetch_slots, staged, staged_for, offsets, pool, slot_bytes, source,
    copies, count, arrivals, layer: tl.int32, layers: tl.int32, projections: tl.int32,
    EXPERTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """See ``list_predicted``; grid [1]. WIDTH is a power of two, at least EXPERTS."""
    number = tl.arange(0, WIDTH)
    known = number < EXPERTS
    of_layer = layer * EXPERTS + number
    expert = tl.load(predicted + of_layer, mask=known, other=-1)
    code = tl.load(predicted + layers * EXPERTS + of_layer, mask=known, other=0)
    ended = tl.cumsum((expert < 0).to(tl.int32), 0)
    named = (known & (ended == 0)) & (expert < tl.where(tl.load(rows) > 0, EXPERTS, 0))
    held = tl.load(precision + layer * EXPERTS + expert, mask=named, other=1).to(tl.int32)
    lacking = named & (held == 0)
    low = lacking & (code == 1)
    high = lacking & (code == 2)
    low_place = tl.cumsum(low.to(tl.int32), 0) - 1
    high_place = tl.cumsum(high.to(tl.int32), 0) - 1
    low = low & (low_place < tl.load(prefetch_slots + 1))
    high = high & (high_place < tl.load(prefetch_slots + 2))
    chosen = low | high
    slot = tl.where(high, tl.load(staging + 4) + high_place, tl.load(staging + 2) + low_place)
    code = tl.where(high, 2, tl.where(low, 1, 0))

    half = staged + layer % 2 * 3 * EXPERTS
    for column in tl.static_range(3):
        tl.store(half + column * EXPERTS + number, 0, mask=known)
    tl.store(arrivals + number, 0, mask=known)
    tl.debug_barrier()
    tl.store(half + expert, slot, mask=chosen)
    tl.store(half + EXPERTS + expert, code, mask=chosen)
    tl.store(staged_for + layer % 2, layer)
    copy = copies + 4 * (tl.cumsum(chosen.to(tl.int32), 0) - 1)
    row = (layer * EXPERTS + expert).to(tl.int64) * 3 + code
    tl.store(copy, tl.load(source + row, mask=chosen, other=0), mask=chosen)
    tl.store(copy + 1, tl.load(pool + code) + slot * tl.load(slot_bytes + code), mask=chosen)
    tl.store(copy + 2, bytes_ahead(offsets, slot_bytes, code, code * 0 + projections), mask=chosen)
    tl.store(copy + 3, expert.to(tl.int64), mask=chosen)
    tl.store(count, number_of(chosen))


@triton.jit(
    do_not_specialize_on_alignment=["copies", "count", "arrivals", "planned", "staged"],
    do_not_specialize=["layer", "projections"],
)
def copy_predicted_kernel(
    copies, count, arrivals, planned, staged, layer: tl.int32, projections: tl.int32,
    EXPERTS: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Copy parts of 8 KiB, each program its own; the last program of a copy publishes it. Grid [PROGRAMS]."""
    listed = tl.load(count)
    number = tl.program_id(0) * 0
    going = tl.load(planned, volatile=True) != layer
    while (number < listed) & going:
        copy = copies + 4 * number
        source = tl.multiple_of(tl.load(copy).to(tl.pointer_type(tl.int32)), 16)
        destination = tl.multiple_of(tl.load(copy + 1).to(tl.pointer_type(tl.int32)), 16)
        words = tl.multiple_of((tl.load(copy + 2) // 4).to(tl.int32), 4)
        first = tl.program_id(0) * _WORDS
        while (first < words) & going:
            offset = first + tl.arange(0, _WORDS)
            inside = offset < words
            tl.store(destination + offset, tl.load(source + offset, mask=inside), mask=inside)
            first += PROGRAMS * _WORDS
            going = tl.load(planned, volatile=True) != layer
        if first >= words:
            tl.debug_barrier()
            before = tl.atomic_add(arrivals + number, 1, sem="acq_rel", scope="gpu")
            if before == PROGRAMS - 1:
                expert = tl.load(copy + 3)
                tl.atomic_xchg(staged + (layer % 2 * 3 + 2) * EXPERTS + expert, projections, sem="release", scope="gpu")
        number += 1
