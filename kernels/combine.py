"""The weighted sum over each token's experts, by native code or by torch.

In a GPU's steps it is one Triton launch (``kernels/triton/combine.py``).
"""

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_dymoe.experts.checks import check_tensor
from vllm_dymoe.kernels import native
from vllm_dymoe.planner.weights import renormalized, sum_in_order

# Products held at a time, in float32: small enough for a cache, and a bound on memory when a prefill has thousands of
# tokens.
_CHUNK_ELEMENTS = 1 << 18

# On a CPU torch's reduction adds in ascending order as long as one thread does it, in whole vectors.
_CHUNK_OF_A_LOOP = 32768


class Pairs(NamedTuple):
    """The checked arguments of a weighted sum."""

    out: Tensor  # [tokens * top_k, hidden] bfloat16 or float16
    weights: Tensor  # float32 [tokens, top_k]
    expert_ids: Tensor | None  # int [tokens, top_k], or None
    skipped: Tensor | None  # int32 [any], 1 for experts that were skipped; experts after its end were not
    renormalize: bool  # whether a token's other experts take over the weights of its skipped ones


def combine(
    out: Tensor,  # [tokens * top_k, hidden] bfloat16 or float16, as a kernel wrote it
    topk_weights: Tensor,  # float32 [tokens, top_k]
    expert_ids: Tensor | None = None,
    skipped: Collection[int] = (),  # experts that no kernel computed; their pairs count as zero, too
    *,
    renormalize: bool = False,
) -> Tensor:
    """Return the weighted sum of each token's experts: [tokens, hidden], like out.

    It is the sum over k of topk_weights[t, k] * out[t * top_k + k]. Terms are added in ascending k, starting from
    zero. Products are rounded to float32, sums are float32 and are rounded once at the end, so every device gives the
    same bits. A token's result does not depend on other tokens.

    Args:
        expert_ids: int [tokens, top_k]. A negative id means that the pair has no expert here (it belongs to another
            rank, or the row is padding); it counts as zero whatever `out` contains. None if all pairs have one.
        renormalize: scale the weights of a token's remaining experts so that their sum is what it was with the skipped
            ones. Pairs without an expert here are left out: each rank moves the weight of what it skips to what it
            computes. A token of which every expert is skipped stays zero.

    Raises TypeError and ValueError for other dtypes and shapes, or if experts are skipped and ids are None.
    """
    check_tensor("topk_weights", topk_weights, shape=(None, None), dtype=torch.float32, contiguous=False)
    tokens, top_k = topk_weights.shape
    check_tensor("out", out, shape=(tokens * top_k, None))
    if expert_ids is not None:
        check_tensor("expert_ids", expert_ids, shape=(tokens, top_k), contiguous=False)
        if expert_ids.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"expert_ids is {expert_ids.dtype}, expected torch.int32 or torch.int64")
    elif skipped:
        raise ValueError(f"skipped names {len(skipped)} experts, but expert_ids is missing")
    if expert_ids is None and out.is_cpu and (library := native.load()) is not None:
        into = out.new_empty(tokens, out.shape[1])
        library.weighted_sum(out, topk_weights.contiguous(), into)
        return into
    marked = _marked(skipped, out.device) if skipped else None
    return combine_with_torch(Pairs(out, topk_weights, expert_ids, marked, renormalize and marked is not None))


def combine_with_torch(pairs: Pairs) -> Tensor:
    """Return the sum computed with torch operations.

    This is the plain twin of the Triton kernel.
    """
    tokens, top_k = pairs.weights.shape
    hidden = pairs.out.shape[1]
    outputs, weights, absent = pairs.out.view(tokens, top_k, hidden), pairs.weights, None
    if pairs.expert_ids is not None:
        elsewhere = absent = pairs.expert_ids < 0
        if pairs.skipped is not None:
            known = pairs.expert_ids.clamp(0, len(pairs.skipped) - 1)
            absent = elsewhere | (pairs.skipped[known] > 0) & (pairs.expert_ids == known)
        if pairs.renormalize:
            weights = renormalized(weights, absent, elsewhere)
    step = max(1, _CHUNK_ELEMENTS // max(1, top_k * hidden))
    if tokens <= step:
        return _weighted_sum(outputs, weights, absent).to(outputs.dtype)
    into = outputs.new_empty(tokens, hidden)
    for start in range(0, tokens, step):
        part = slice(start, start + step)
        into[part] = _weighted_sum(outputs[part], weights[part], None if absent is None else absent[part])
    return into


def _marked(skipped: Collection[int], device: torch.device) -> Tensor:
    """Return int32 [highest expert + 1]: 1 for the given experts, else 0."""
    marks = [0] * (max(skipped) + 1)
    for expert in skipped:
        marks[expert] = 1
    return torch.tensor(marks, dtype=torch.int32, device=device)


def _weighted_sum(pairs: Tensor, weights: Tensor, absent: Tensor | None) -> Tensor:
    """Return float32 [tokens, hidden], the weighted sum of each token's rows.

    Args:
        pairs: [tokens, top_k, hidden].
        weights: [tokens, top_k].
        absent: bool [tokens, top_k], pairs that count as zero; None if all count.
    """
    _, top_k, hidden = pairs.shape
    products = pairs * weights.unsqueeze(2)  # float32, as the weights are
    if absent is not None:
        products.masked_fill_(absent.unsqueeze(2), 0.0)
    if products.is_cpu and top_k <= 16 and hidden % 64 == 0 and products.numel() <= _CHUNK_OF_A_LOOP:
        return products.sum(1)  # the same order, in one call
    return sum_in_order(products.unbind(1))
