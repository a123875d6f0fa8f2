"""How much an expert matters to a step (DyMoE 4.2, Eqs. 2 and 3).

The paper counts the tokens of a prompt that attention dwells on (Eq. 1). A fifth of the tokens by attention, a fifth at
random and all of them choose experts that lose the same (benchmarks/LOG.md), so all of them count here.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_dymoe.residency.constants import WEIGHT_UNIT
from vllm_dymoe.residency.routing import PromptTokens
from vllm_dymoe.residency.rule import Ints
from vllm_dymoe.residency.threshold import above, follow


class Importance(NamedTuple):
    """Of experts, for the tokens of one phase; whole numbers, so that no order of additions decides."""

    used: Ints  # int64 [n], experts that its tokens use, ascending
    hits: Ints  # int64 [n], tokens that use each (Eq. 2); 0 in decode
    sums: Ints  # int64 [n], of routing weights in 1 / WEIGHT_UNIT (Eq. 3)

    def first(self, count: int) -> NDArray[np.bool_]:
        """bool [n], the most important ones, of equal ones those with the lower numbers."""
        chosen = np.zeros(len(self.used), bool)
        chosen[np.lexsort((-self.sums, -self.hits))[:count]] = True
        return chosen


def importance(
    expert_ids: Tensor, weights: Tensor, experts: int, prompt: PromptTokens | None = None
) -> tuple[Importance, Importance]:
    """For the tokens of prompts, if there are some, and for the others; the host waits for the device once, however
    many there are. ``experts`` is more than the largest number in ``expert_ids``, int [tokens, top_k], negative where
    another rank has the expert; weights are float32 [tokens, top_k]."""
    units = (weights.float() * float(WEIGHT_UNIT)).long()
    of_prompt = torch.zeros_like(units)
    if prompt is not None:
        of_prompt += prompt.rows[:, None]
    columns = torch.stack((of_prompt, units * of_prompt, 1 - of_prompt, units * (1 - of_prompt)))
    places = (expert_ids.flatten().long() + 1).clamp_min_(0)  # other ranks' experts fall into the first place
    totals = units.new_zeros(len(columns), experts + 1).index_add_(1, places, columns.view(len(columns), -1))
    read, read_sums, decoded, decoded_sums = totals[:, 1:].cpu().numpy()
    prompts = Importance(read.nonzero()[0], read[read > 0], read_sums[read > 0])
    others = Importance(decoded.nonzero()[0], 0 * decoded[decoded > 0], decoded_sums[decoded > 0])
    return prompts, others


def high_experts(phases: Sequence[Importance], thresholds: Sequence[Ints], critical: Callable[[int], int]) -> set[int]:
    """The experts that tokens of some phase want high: those above the phase's threshold, which follows, or where there
    are none as many of the most important ones as are ``critical`` of so many."""
    high: set[int] = set()
    for number, phase in enumerate(phases):
        if thresholds:
            those = above(thresholds[number], phase.sums)
            follow(thresholds[number], int(those.sum()), len(those))
        else:
            those = phase.first(critical(len(phase.used)))
        high.update(phase.used[those].tolist())
    return high
