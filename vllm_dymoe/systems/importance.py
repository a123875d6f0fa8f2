"""How much an expert matters to a step (DyMoE 4.2, Eqs. 1 to 3)."""

import functools
import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_dymoe.residency.constants import WEIGHT_UNIT
from vllm_dymoe.residency.routing import PromptTokens
from vllm_dymoe.residency.rule import Ints

# Attention scores held at a time, in float32: 4 MiB.
_SCORES_AT_ONCE = 1 << 20


def gate_importance(expert_ids: NDArray[np.int64], weights: NDArray[np.float32]) -> Mapping[int, float]:
    """Eq. 3: an expert's routing weight, for one token.

    Args:
        expert_ids: [1, top_k], negative where another rank has the expert.
        weights: [1, top_k].

    Returns:
        Importance of each expert that occurs.
    """
    pairs = zip(expert_ids[0].tolist(), weights[0].tolist(), strict=True)
    return {expert: weight for expert, weight in pairs if expert >= 0}


class StepImportance(NamedTuple):
    """How much experts matter to the tokens of a step."""

    load: Mapping[int, tuple[float, float]]
    """Eq. 2: for each expert that tokens of prompts use how many heavy hitters do, and, since many have the same
    number, these tokens' routing weights' sum."""
    gate: Mapping[int, float]  # Eq. 3: for each expert that other tokens use the sum of their routing weights.


def step_importance(
    expert_ids: Tensor, weights: Tensor, experts: int, prompt: PromptTokens | None = None
) -> StepImportance:
    """Eqs. 2 and 3 over all tokens; the host waits for the device once, however many there are.

    Sums are rounded to float32 after the addition in float64: the order in which a GPU adds must not decide which
    expert is high.

    Args:
        expert_ids: [tokens, top_k] int, negative where another rank has the expert.
        weights: [tokens, top_k] float32.
        experts: more than the largest number in ``expert_ids``.
        prompt: which tokens are prompts'; None for no token.
    """
    values = weights.double()
    one = torch.ones_like(values)
    columns = [one, values]
    if prompt is not None:
        of_prompt = prompt.rows.unsqueeze(1)
        heavy = (prompt.heavy & prompt.rows).unsqueeze(1)
        columns = [one * of_prompt, one * heavy, values * of_prompt]
        if prompt.mixed:
            columns += [one * ~of_prompt, values * ~of_prompt]
    places = (expert_ids.flatten().long() + 1).clamp_min_(0)  # other ranks' experts fall into the first place
    sums = values.new_zeros(len(columns), experts + 1)
    sums.index_add_(1, places, torch.stack(columns).view(len(columns), -1))
    found = list(enumerate(zip(*sums.float()[:, 1:].tolist(), strict=True)))
    if prompt is None:
        return StepImportance({}, {expert: total for expert, (count, total) in found if count})
    load = {expert: (hits, total) for expert, (count, hits, total, *_) in found if count}
    gate = {expert: total for expert, (*_, count, total) in found if count} if prompt.mixed else {}
    return StepImportance(load, gate)


def weight_sums(
    expert_ids: Tensor, weights: Tensor, experts: int, prompt: PromptTokens | None = None
) -> list[tuple[Ints, Ints]]:
    """What a threshold goes by, in whole numbers: no order of additions decides.

    Args:
        expert_ids: [tokens, top_k] int, negative where another rank has the expert.
        weights: [tokens, top_k] float32.
        experts: more than the largest number in ``expert_ids``.
        prompt: which tokens are prompts'; None for no token.

    Returns:
        For the tokens of prompts and for the others, the experts that they use, ascending, and the sum of each one's
        routing weights in 1 / WEIGHT_UNIT; in prompts those of heavy hitters alone.
    """
    units = (weights.float() * float(WEIGHT_UNIT)).long()
    none = torch.zeros(len(units), 1, dtype=torch.bool, device=units.device)
    of_prompt, heavy = (none, none) if prompt is None else (prompt.rows[:, None], prompt.heavy[:, None])
    rows = (of_prompt, of_prompt & heavy, ~of_prompt)
    columns = torch.stack([rows[0].expand_as(units), units * rows[1], rows[2].expand_as(units), units * rows[2]])
    places = (expert_ids.flatten().long() + 1).clamp_min_(0)
    sums = units.new_zeros(len(columns), experts + 1).index_add_(1, places, columns.view(len(columns), -1))
    found = sums[:, 1:].cpu().numpy()
    return [(used.nonzero()[0], total[used > 0]) for used, total in (found[:2], found[2:])]


def most_important(importance: Mapping[int, float] | Mapping[int, tuple[float, float]], count: int) -> set[int]:
    """The ``count`` experts of the highest importance; of equal ones those with the lower numbers."""
    return set(sorted(sorted(importance), key=importance.__getitem__, reverse=True)[:count])


def mark_heavy_hitters(mass: Tensor, share: float, heavy: Tensor) -> None:
    """T_imp of Eq. 2: the tokens with the most attention mass.

    Args:
        mass: [tokens].
        share: of the tokens, rounded up.
        heavy: bool [tokens], false everywhere; set where a token is one of them.
    """
    count = min(mass.shape[0], math.ceil(share * mass.shape[0] - 1e-9))
    heavy.index_fill_(0, mass.topk(count, sorted=False).indices, True)


def attention_mass(
    query: Tensor, key: Tensor, scale: float, window: int, reach: int | None = None, at_once: int = _SCORES_AT_ONCE
) -> Tensor:
    """Eq. 1: how much attention a token gets, on average over the heads.

    The paper sums over a whole prompt. Here the last ``window`` queries stand for all of them: they have seen every
    token, and the cost grows with the number of tokens instead of its square.

    Args:
        query: [tokens, heads, dim], with positions in it.
        key: [tokens, kv_heads, dim]; several heads may share one.
        scale: of the scores.
        window: queries that are asked, the last ones.
        reach: of a sliding window, in tokens; None sees everything before.
        at_once: scores that are held at a time; one head's are always.

    Returns:
        float32 [tokens], which sum to 1.
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
    # Without a window every query sees what lies before the first of them.
    hidden = _hidden(asked, asked if reach is None else tokens, reach, query.device)
    mass: Tensor | None = None
    step = max(1, at_once // (group * asked * tokens))
    for first in range(0, kv_heads, step):
        part = slice(first, first + step)
        scores = torch.bmm(queries[part], keys[part].float()).view(-1, asked, tokens)
        scores[..., -hidden.shape[1] :].masked_fill_(hidden, -math.inf)
        some = scores.softmax(-1).view(-1, tokens).sum(0)
        mass = some if mass is None else mass.add_(some)
    assert mass is not None
    return mass.div_(heads * asked)


@functools.lru_cache(maxsize=8)
def _hidden(asked: int, tokens: int, reach: int | None, device: torch.device) -> Tensor:
    """Which of the last tokens each of the last queries must not see: bool [asked, tokens]."""
    places = torch.arange(tokens, device=device)
    own = places[-asked:].unsqueeze(1)
    hidden = places > own
    return hidden if reach is None else hidden | (places <= own - reach)
