"""The importance of experts to a step (DyMoE 4.2, Eqs. 1 to 3)."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_dymoe.planner.constants import WEIGHT_UNIT
from vllm_dymoe.planner.hotness import usable
from vllm_dymoe.planner.routing import PromptTokens, Routing, own_experts
from vllm_dymoe.planner.rule import Ints
from vllm_dymoe.planner.threshold import above, follow

# Number of attention scores computed at a time, in float32: 4 MiB.
_SCORES_AT_ONCE = 1 << 20


class Importance(NamedTuple):
    """Importance of the experts that one phase's tokens use.

    Values are integers, so that the order of additions does not matter.
    """

    used: Ints  # int64 [n], the experts, ascending
    hits: Ints  # int64 [n], heavy hitters among the tokens that use each (Eq. 2); 0 in decode
    sums: Ints  # int64 [n], sums of routing weights in 1 / WEIGHT_UNIT (Eq. 3); in prompts only those of heavy hitters
    counted: NDArray[np.bool_]  # bool [n], whether any of its tokens has a usable weight

    def first(self, count: int) -> NDArray[np.bool_]:
        """Return the ``count`` most important experts: bool [n].

        Among equals the lower numbers win.
        """
        chosen = np.zeros(len(self.used), bool)
        chosen[np.lexsort((-self.sums, -self.hits))[:count]] = True
        return chosen


def importance(
    expert_ids: Tensor, weights: Tensor, experts: int, prompt: PromptTokens | None = None
) -> tuple[Importance, Importance]:
    """Return the importance for tokens of prompts, and for decoded tokens.

    Waits for the device once.

    Args:
        expert_ids: int [tokens, top_k], negative where another rank has the expert.
        weights: float32 [tokens, top_k].
        experts: more than the largest id.
        prompt: which tokens belong to prompts; None if none do.
    """
    counts = usable(weights)
    units = (weights.float().where(counts, 0.0) * float(WEIGHT_UNIT)).long() + counts
    none = torch.zeros(len(units), 1, dtype=torch.bool, device=units.device)
    of_prompt, heavy = (none, none) if prompt is None else (prompt.rows[:, None], prompt.heavy[:, None])
    heavy = (of_prompt & heavy).expand_as(units)
    decoded = ~of_prompt.expand_as(units)
    heavy = heavy & counts
    heavy_units, own = units * heavy, units * decoded
    parts = (~decoded, heavy, heavy_units, units - own, decoded, torch.zeros_like(units), own, own)
    columns = torch.stack([part.long() for part in parts])
    places = (expert_ids.flatten().long() + 1).clamp_min_(0)  # experts of other ranks go to place 0
    totals = units.new_zeros(len(columns), experts + 1).index_add_(1, places, columns.view(len(columns), -1))
    phases = totals[:, 1:].cpu().numpy().reshape(2, 4, -1)
    prompts, others = (
        Importance(uses.nonzero()[0], hits[uses > 0], sums[uses > 0], every[uses > 0] != 0)
        for uses, hits, sums, every in phases
    )
    return prompts, others


def high_experts(phases: Sequence[Importance], thresholds: Sequence[Ints], critical: Callable[[int], int]) -> set[int]:
    """Return the experts that at least one phase wants high.

    Experts without a usable weight do not count as active; they are high only if all others are.

    Args:
        phases: importance for each phase.
        thresholds: one per phase, updated here; experts above it are high. If empty, the most important experts are
            high.
        critical: returns how many of a number of active experts are high; used without thresholds.
    """
    high: set[int] = set()
    for number, phase in enumerate(phases):
        active = int(phase.counted.sum())
        if thresholds:
            those = above(thresholds[number], phase.sums, active)
            follow(thresholds[number], int((those & phase.counted).sum()), active)
        else:
            count = critical(active)
            those = phase.first(count if count < active else len(phase.used))
        high.update(phase.used[those].tolist())
    return high


def high_of_step(routing: Routing, thresholds: Sequence[Ints], critical: Callable[[int], int]) -> set[int]:
    """Return the high experts of a layer's step, by this rank's own numbers.

    See :func:`high_experts`. Ranks that share a layer's experts choose among all of them, so they agree on the high
    ones.
    """
    everywhere = routing.global_ids
    if everywhere is None:
        phases = importance(routing.ids, routing.weights, 1 + max(routing.active, default=0), routing.prompt)
        return high_experts(phases, thresholds, critical)
    phases = importance(everywhere, routing.weights, 1 + int(everywhere.max()), routing.prompt)
    high = high_experts(phases, thresholds, critical)
    return own_experts(everywhere.cpu().numpy(), routing.host_ids, high)


def mark_heavy_hitters(mass: Tensor, share: float, heavy: Tensor) -> None:
    """Mark the tokens with the most attention as heavy hitters (T_imp of Eq. 2).

    Marks a ``share`` of the tokens, rounded up. ``mass`` is float32 [tokens]; ``heavy`` is bool [tokens] and must be
    all false.
    """
    count = min(mass.shape[0], math.ceil(share * mass.shape[0] - 1e-9))
    heavy.index_fill_(0, mass.topk(count, sorted=False).indices, True)


def attention_mass(
    query: Tensor, key: Tensor, scale: float, window: int, reach: int | None = None, at_once: int = _SCORES_AT_ONCE
) -> Tensor:
    """Return the attention that each token gets (Eq. 1): float32 [tokens] with sum 1.

    Attention is averaged over heads. The paper sums over a whole prompt. Here the last ``window`` queries stand for
    all: they have seen every token, and the cost grows linearly with the number of tokens.

    Args:
        query: [tokens, heads, dim], with positional encoding.
        key: [tokens, kv_heads, dim]; several heads may share one.
        scale: factor of the scores.
        window: number of queries that are evaluated.
        reach: length of a sliding attention window in tokens; None for full attention.
        at_once: number of scores in memory at a time, at least those of one key-value head.
    """
    tokens, heads, dim = query.shape
    kv_heads = key.shape[1]
    asked = min(window, tokens)
    group = heads // kv_heads
    # [kv_heads, dim, tokens] and [kv_heads, group * asked, dim]
    keys = key.permute(1, 2, 0)
    queries = query[-asked:].view(asked, kv_heads, group, dim).permute(1, 2, 0, 3)
    queries = queries.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    queries = queries.mul_(scale).view(kv_heads, group * asked, dim)
    # Without a sliding window every query sees all tokens before the first query.
    hidden = _hidden(asked, asked if reach is None else tokens, reach, query.device)
    mass = torch.zeros(tokens, dtype=torch.float32, device=query.device)
    step = max(1, at_once // (group * asked * tokens))
    for first in range(0, kv_heads, step):
        part = slice(first, first + step)
        scores = torch.bmm(queries[part], keys[part].float()).view(-1, asked, tokens)
        scores[..., -hidden.shape[1] :].masked_fill_(hidden, -math.inf)
        mass += scores.softmax(-1).view(-1, tokens).sum(0)
    return mass.div_(heads * asked)


@functools.lru_cache(maxsize=8)
def _hidden(asked: int, tokens: int, reach: int | None, device: torch.device) -> Tensor:
    """Return which tokens each query must not see: bool [asked, tokens].

    The last ``asked`` queries are compared with the last ``tokens`` tokens.
    """
    places = torch.arange(tokens, device=device)
    own = places[-asked:].unsqueeze(1)
    hidden = places > own
    return hidden if reach is None else hidden | (places <= own - reach)
