"""Popularity on the device, in one launch.

It counts a layer's experts, and predicts the next layer's by counts. Plain twin, bit for bit:
``vllm_dymoe.prefetch.on_device.count_and_name``.
"""

import triton
import triton.language as tl
from torch import Tensor

from vllm_dymoe.kernels.triton.planner import WARPS
from vllm_dymoe.kernels.triton.start import Start, run_kernel
from vllm_dymoe.planner.constants import SMALL_BATCH_ROWS, experts_width

_MOST_AT_ONCE = 1024  # pairs that are counted together


def count_and_name_on_gpu(
    counts: Tensor, predicted: Tensor, layer: int, ids: Tensor, rows: Tensor, fade: int, unit: int, named: int,
    *, start: Start = run_kernel,
) -> None:  # fmt: skip
    """Run ``count_and_name`` on the device.

    Args:
        counts: int64 [layers, experts].
        predicted: int32 [layers, experts], where predictions are written.
        ids: int32 or int64 [tokens, top_k], negative where another rank has the expert.
        rows: int32 [1], number of real tokens.
        fade: each step subtracts a share of 2 ** -fade from a count.
        unit: of one use.
        named: most experts to predict; 0 only to count.
    """
    (layers, experts), (tokens, top_k) = counts.shape, ids.shape
    small = tokens <= SMALL_BATCH_ROWS
    chunk = min(_MOST_AT_ONCE, triton.next_power_of_2(max(32, SMALL_BATCH_ROWS * top_k))) if small else _MOST_AT_ONCE
    sizes = {"TOP_K": top_k, "EXPERTS": experts, "WIDTH": experts_width(experts), "CHUNK": chunk}
    constants = sizes | {"FADE": fade, "UNIT": unit, "NAMED": min(named, experts)}
    tensors = counts, predicted, ids, rows
    options = {"num_warps": 1 if small else WARPS}
    start(popularity_kernel, (1,), (*tensors, layer, layers, tokens * top_k), constants, options)


@triton.jit(
    do_not_specialize_on_alignment=["counts", "predicted", "ids", "rows"],
    do_not_specialize=["layer", "layers", "positions"],
)
def popularity_kernel(
    counts, predicted, ids, rows, layer: tl.int32, layers: tl.int32, positions: tl.int32,
    TOP_K: tl.constexpr, EXPERTS: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, FADE: tl.constexpr,
    UNIT: tl.constexpr, NAMED: tl.constexpr,
):  # fmt: skip
    """See ``count_and_name``; grid [1]."""
    expert = tl.arange(0, WIDTH)
    known = expert < EXPERTS
    pairs = tl.minimum(tl.load(rows) * TOP_K, positions)
    if pairs > 0:
        count = tl.load(counts + layer * EXPERTS + expert, mask=known, other=0)
        count -= count >> FADE
        for first in range(0, pairs, CHUNK):
            pair = first + tl.arange(0, CHUNK)
            chosen = tl.load(ids + pair, mask=pair < pairs, other=-1).to(tl.int32)
            count += tl.histogram(chosen, WIDTH, mask=(chosen >= 0) & (chosen < EXPERTS)).to(tl.int64) * UNIT
        tl.store(counts + layer * EXPERTS + expert, count, mask=known)
    if layer + 1 < layers:
        of_next = (layer + 1) * EXPERTS
        count = tl.load(counts + of_next + expert, mask=known, other=-1)
        for place in range(NAMED):
            most = tl.max(count, 0)
            one = tl.min(tl.where(count == most, expert, WIDTH), 0)
            tl.store(predicted + of_next + place, tl.where(most > 0, one, -1))
            count = tl.where(expert == one, -1, count)
