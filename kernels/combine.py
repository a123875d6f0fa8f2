"""The sum of a token's expert outputs, weighted by the router."""

import torch
from torch import Tensor

from vllm_dymoe.kernels.checks import check_tensor

# Products held at a time, in float32: small enough for a cache, and a bound on
# memory when a prefill brings thousands of tokens.
_CHUNK_ELEMENTS = 1 << 18

# torch's reduction adds in ascending order as long as one thread does it, in whole vectors.
_CHUNK_OF_A_LOOP = 32768


def combine(out: Tensor, topk_weights: Tensor, skipped: Tensor | None = None) -> Tensor:
    """Sum over k of topk_weights[t, k] * out[t * top_k + k], in ascending k.

    Products and sums are float32 and rounded once, at the end; a token's result
    does not depend on the other tokens.

    Args:
        out: [tokens * top_k, hidden], as a kernel wrote it.
        topk_weights: float32 [tokens, top_k].
        skipped: bool [tokens, top_k], pairs that no kernel wrote; they count as zero whatever `out` holds there.

    Returns:
        [tokens, hidden] in out's dtype.

    Raises:
        TypeError: weights that are not float32, or a mask that is not bool.
        ValueError: shapes that do not fit.
    """
    check_tensor("topk_weights", topk_weights, shape=(None, None), dtype=torch.float32, contiguous=False)
    tokens, top_k = topk_weights.shape
    check_tensor("out", out, shape=(tokens * top_k, None))
    if skipped is not None:
        check_tensor("skipped", skipped, shape=(tokens, top_k), dtype=torch.bool, contiguous=False)
    hidden = out.shape[1]
    pairs = out.view(tokens, top_k, hidden)
    step = max(1, _CHUNK_ELEMENTS // max(1, top_k * hidden))
    if tokens <= step:
        return _weighted_sum(pairs, topk_weights, skipped).to(out.dtype)
    combined = out.new_empty(tokens, hidden)
    for start in range(0, tokens, step):
        part = slice(start, start + step)
        mask = None if skipped is None else skipped[part]
        combined[part] = _weighted_sum(pairs[part], topk_weights[part], mask)
    return combined


def _weighted_sum(pairs: Tensor, weights: Tensor, skipped: Tensor | None) -> Tensor:
    """[tokens, top_k, hidden] and [tokens, top_k] to float32 [tokens, hidden]."""
    _, top_k, hidden = pairs.shape
    products = pairs * weights.unsqueeze(2)  # float32, as the weights are
    if skipped is not None:
        products.masked_fill_(skipped.unsqueeze(2), 0.0)
    if top_k <= 16 and hidden % 64 == 0 and products.numel() <= _CHUNK_OF_A_LOOP:
        return products.sum(1)  # the same order, in one call
    total, *rest = products.unbind(1)
    for product in rest:
        total.add_(product)
    return total
