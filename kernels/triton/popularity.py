"""Popularity on the device, in one launch.

It counts a layer's experts, and predicts the next layer's by counts. Plain twin, bit for bit:
``vllm_dymoe.prefetch.on_device.count_and_name``.
"""

import triton
import triton.language as tl
from torch import Tensor

from vllm_dymoe.kernels.triton.start import Start, run_kernel
from vllm_dymoe.planner.constants import experts_width


def count_and_name_on_gpu(
    counts: Tensor, predicted: Tensor, layer: int, ids: Tensor, rows: Tensor, fade: int, unit: int, named: int,
    *, start: Start = run_kernel,
) -> None:  # fmt: skip
    """Run ``count_and_name`` on the device.

    Args:
        counts: int64 [layers, experts].
        predicted: int32 [layers, experts], where predictions are written.
        ids: int32 or int64 [tokens, top_k] of a small batch, negative where another rank has the expert.
        rows: int32 [1], number of real tokens.
        fade: each step subtracts a share of 2 ** -fade from a count.
        unit: of one use.
        named: most experts to predict.
    """
    layers, experts = counts.shape
    sizes = {"TOP_K": ids.shape[1], "EXPERTS": experts, "WIDTH": experts_width(experts)}
    constants = sizes | {"FADE": fade, "UNIT": unit, "NAMED": min(named, experts)}
    start(popularity_kernel, (1,), (counts, predicted, ids, rows, layer, layers), constants, {"num_warps": 1})


@triton.jit(
    do_not_specialize_on_alignment=["counts", "predicted", "ids", "rows"], do_not_specialize=["layer", "layers"]
)
def popularity_kernel(
    counts, predicted, ids, rows, layer: tl.int32, layers: tl.int32,
    TOP_K: tl.constexpr, EXPERTS: tl.constexpr, WIDTH: tl.constexpr, FADE: tl.constexpr, UNIT: tl.constexpr,
    NAMED: tl.constexpr,
):  # fmt: skip
    """See ``count_and_name``; grid [1]."""
    expert = tl.arange(0, WIDTH)
    known = expert < EXPERTS
    pairs = tl.load(rows) * TOP_K
    if pairs > 0:
        count = tl.load(counts + layer * EXPERTS + expert, mask=known, other=0)
        count -= count >> FADE
        for pair in range(pairs):
            count += tl.where(expert == tl.load(ids + pair).to(tl.int32), UNIT, 0)
        tl.store(counts + layer * EXPERTS + expert, count, mask=known)
    if layer + 1 < layers:
        of_next = (layer + 1) * EXPERTS
        count = tl.load(counts + of_next + expert, mask=known, other=-1)
        for place in range(NAMED):
            most = tl.max(count, 0)
            one = tl.min(tl.where(count == most, expert, WIDTH), 0)
            tl.store(predicted + of_next + place, tl.where(most > 0, one, -1))
            count = tl.where(expert == one, -1, count)
