"""The weighted sum over a token's experts in one launch.

Plain twin, bit for bit: ``combine_with_torch``.

A program owns one token and a block of its columns, and adds its experts in the router's order. Products are rounded
before they are added, as on a CPU: the launch disables fused multiply-add.
"""

import triton
import triton.language as tl
from torch import Tensor

from vllm_dymoe.kernels.combine import Pairs
from vllm_dymoe.kernels.triton.section import DESCRIPTIONS
from vllm_dymoe.kernels.triton.start import Start, run_kernel

_MOST_COLUMNS = 1024  # most columns of a block: eight for each thread of four warps, one load of 16 bytes


def combine_on_gpu(pairs: Pairs, into: Tensor, *, start: Start = run_kernel) -> None:
    """Launch the sum.

    Args:
        pairs: the checked arguments.
        into: [tokens, hidden], contiguous, overwritten.
        start: makes the launch.
    """
    if not into.numel():
        return
    tokens, top_k = pairs.weights.shape
    hidden = into.shape[1]
    block = min(triton.next_power_of_2(hidden), _MOST_COLUMNS)
    weights = pairs.weights.contiguous()
    expert_ids = weights if pairs.expert_ids is None else pairs.expert_ids.contiguous()
    skipped = weights if pairs.skipped is None else pairs.skipped
    start(
        combine_kernel,
        (tokens, triton.cdiv(hidden, block)),
        (pairs.out, weights, expert_ids, skipped, into, 0 if pairs.skipped is None else len(skipped)),
        {
            "HIDDEN": hidden,
            "TOP_K": top_k,
            "ABSENT": pairs.expert_ids is not None,
            "SKIPPED": pairs.skipped is not None,
            "RENORMALIZE": pairs.renormalize,
            "BLOCK": block,
        },
        {"num_warps": 4, "enable_fp_fusion": False},
    )


@triton.jit(do_not_specialize_on_alignment=[*DESCRIPTIONS, "expert_ids", "skipped"], do_not_specialize=["known"])
def combine_kernel(
    out,
    weights,
    expert_ids,
    skipped,
    combined,
    known: tl.int64,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    ABSENT: tl.constexpr,
    SKIPPED: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum each token's rows, weighted.

    combined[token] = sum over ascending k, from zero, of weights[token, k] * out[token * TOP_K + k]. Grid: [tokens,
    blocks of BLOCK columns].

    Args:
        out: [tokens * TOP_K, HIDDEN] bfloat16 or float16; rows of absent pairs are not read.
        weights: float32 [tokens, TOP_K].
        expert_ids: int32 or int64 [tokens, TOP_K], negative if this rank does not have the expert; read if ABSENT.
        skipped: int32 [known], 1 for experts that were skipped; read if SKIPPED.
        combined: [tokens, HIDDEN], dtype of out, overwritten.
        known: number of experts that `skipped` covers; the others were not skipped.
        ABSENT: some pairs have no expert here.
        SKIPPED: some experts are skipped; requires ABSENT.
        RENORMALIZE: scale the weights of the remaining pairs so that their sum is what it was with the skipped ones.
        BLOCK: columns of a program.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < HIDDEN
    factor = 1.0
    if RENORMALIZE:
        here = 0.0
        stays = 0.0
        for k in tl.static_range(TOP_K):
            weight = tl.load(weights + token * TOP_K + k)
            here += tl.where(tl.load(expert_ids + token * TOP_K + k) < 0, 0.0, weight)
            stays += tl.where(_stays(expert_ids + token * TOP_K + k, skipped, known, SKIPPED), weight, 0.0)
        factor = tl.div_rn(here, stays) if stays > 0 else 1.0
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        pair = token * TOP_K + k
        counts = inside
        if ABSENT:
            counts = column < tl.where(_stays(expert_ids + pair, skipped, known, SKIPPED), HIDDEN, 0)
        weight = tl.load(weights + pair)
        if RENORMALIZE:
            weight = weight * factor
        products = widened(tl.load(out + pair * HIDDEN + column, mask=counts, other=0.0)) * weight
        if ABSENT:  # whatever weight an absent pair has, even NaN
            products = tl.where(counts, products, 0.0)
        total += products
    tl.store(combined + token * HIDDEN + column, rounded(total, combined.dtype.element_ty), mask=inside)


@triton.jit
def _stays(expert_id, skipped, known, SKIPPED: tl.constexpr):
    """Return whether the pair of an expert counts."""
    expert = tl.load(expert_id)
    stays = expert >= 0
    if SKIPPED:
        stays = stays & (tl.load(skipped + expert, mask=stays & (expert < known), other=0) == 0)
    return stays


# Conversions of bfloat16 are written out, because Triton's interpreter truncates where a GPU rounds: tests in the
# interpreter must prove the bits that a GPU computes. On a GPU this costs nothing compared with the memory.


@triton.jit
def widened(values):
    """Convert float16 or bfloat16 to float32."""
    if values.dtype == tl.bfloat16:
        return (values.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return values.to(tl.float32)


@triton.jit
def rounded(values, dtype: tl.constexpr):
    """Round float32 to the nearest value of `dtype`, ties to even."""
    if dtype == tl.bfloat16:
        bits = values.to(tl.int32, bitcast=True)
        nearest = bits + 0x7FFF + ((bits >> 16) & 1)
        upper = tl.where(values == values, nearest >> 16, 0x7FC0)
        return upper.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return values.to(dtype)
