"""Counts of a router's choices in a large batch, in one launch.

Plain twin, bit for bit: ``vllm_dymoe.cache.device_table.count_uses``.
"""

import triton
import triton.language as tl
from torch import Tensor

from vllm_dymoe.kernels.triton.start import Given, Repeated, Start, run_kernel
from vllm_dymoe.planner.constants import MOST_WEIGHT
from vllm_dymoe.planner.hotness import GATE_UNIT
from vllm_dymoe.planner.rule import HIGH

_BLOCK = 128  # pairs of a program, padding to a power of two included
_WARPS = 4
_MOST_WEIGHT = tl.constexpr(float(MOST_WEIGHT))
_GATE_UNIT = tl.constexpr(float(GATE_UNIT))
_HIGH = tl.constexpr(HIGH)


class CountUses:
    """Runs ``count_uses`` on the device.

    From the second layer on its launches are prepared.
    """

    def __init__(self) -> None:
        self._launches = Repeated()

    def __call__(self, uses: Tensor, precision: Tensor, layer: int, ids: Tensor, weights: Tensor) -> None:
        given = Given({"uses": uses, "precision": precision, "ids": ids, "weights": weights}, {"layer": layer})
        self._launches.run(len(ids), given, count_uses_on_gpu, uses, precision, layer, ids, weights)


def count_uses_on_gpu(
    uses: Tensor, precision: Tensor, layer: int, ids: Tensor, weights: Tensor, *, start: Start = run_kernel
) -> None:
    """Count a layer's choices.

    Args:
        uses: int64 [3 * (layers * experts + 1)], see ``count_uses``.
        precision: int8 [layers, experts].
        layer: index of the layer.
        ids: int32 [tokens, top_k].
        weights: float32 [tokens, top_k].
        start: makes the launch.
    """
    (tokens, top_k), width = ids.shape, triton.next_power_of_2(ids.shape[1])
    rows = max(1, _BLOCK // width)
    sizes = {"BINS": len(uses) // 3, "EXPERTS": precision.shape[1], "TOP_K": top_k, "WIDTH": width, "ROWS": rows}
    tensors = uses, precision, ids, weights
    start(count_uses_kernel, (-(-tokens // rows),), (*tensors, layer, tokens), sizes, {"num_warps": _WARPS})


@triton.jit(
    do_not_specialize_on_alignment=["uses", "precision", "ids", "weights"], do_not_specialize=["layer", "tokens"]
)
def count_uses_kernel(
    uses, precision, ids, weights, layer: tl.int32, tokens: tl.int32,
    BINS: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """See ``count_uses``; grid [blocks of ROWS tokens]."""
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    k = tl.arange(0, WIDTH)[None, :]
    inside = (token < tokens) & (k < TOP_K)
    chosen = tl.load(ids + token * TOP_K + k, mask=inside, other=-1)
    weight = tl.load(weights + token * TOP_K + k, mask=inside, other=0.0)
    usable = tl.abs(weight) < _MOST_WEIGHT  # not if it is NaN
    exact = weight.to(tl.float64)
    every = tl.min(usable.to(tl.int32), 1)[:, None] > 0
    total = tl.sum(tl.where(usable, exact, 0.0), 1)[:, None]
    share = tl.where(every, exact, 0.0) / tl.maximum(total, tl.full([1, 1], 1e-9, tl.float64))
    place = tl.where(chosen >= 0, layer * EXPERTS + chosen, BINS - 1)
    high = tl.load(precision + tl.minimum(place, BINS - 2)).to(tl.int32) == _HIGH
    ones = tl.full([ROWS, WIDTH], 1, tl.int64)
    tl.atomic_add(uses + place + tl.where(high, BINS, 0), ones, mask=inside & usable, sem="relaxed")
    gates = (share * share * _GATE_UNIT).to(tl.int64)
    tl.atomic_add(uses + 2 * BINS + place, gates, mask=inside & (gates > 0), sem="relaxed")
