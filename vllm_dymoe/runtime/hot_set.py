"""Which experts a budget that cannot hold every one keeps high (``stream_cold``): the others are fetched low.

Steps fetch what they lack, so that nothing moves between them: an expert that becomes hot is wanted high from then on,
and one that was gives its high version up. Each layer has as many hot ones as high slots, so that these stay.
"""

import numpy as np

from vllm_dymoe.residency.hotness import averaged, swaps
from vllm_dymoe.residency.routing import Routing
from vllm_dymoe.residency.table import CODES
from vllm_dymoe.residency.tier import Tier
from vllm_dymoe.runtime.memory import ExpertMemory
from vllm_dymoe.runtime.sizing import expert_worth
from vllm_dymoe.systems.base import Migrating


class HotSet:
    """Of one rank. Windows end by uses alone: ranks with parts of the same experts have no clock in common."""

    def __init__(self, memory: ExpertMemory, migrating: Migrating) -> None:
        shape = memory.table.tier.shape
        self._memory, self._migrating = memory, migrating
        self._places = memory.table.shares[:, CODES[Tier.HI]]
        self._counts, self._seen = np.zeros(shape, np.int64), 0
        self._score, self._hot = np.zeros(shape), np.zeros(shape, bool)
        self._worth = expert_worth(memory.experts, migrating, [1.0] * shape[0])

    def wants(self, routing: Routing) -> dict[int, Tier]:
        """High for those of a layer's active experts that are hot, low for the others; counts them."""
        uses, hot = routing.counts, self._hot[routing.layer]
        experts = np.fromiter(uses, np.int64, len(uses))
        number = np.fromiter(uses.values(), np.int64, len(uses))
        by_gates = self._migrating.by_gates
        self._counts[routing.layer, experts] += routing.squared_gates[experts] if by_gates else number
        self._seen += int(number.sum())
        return {expert: Tier.HI if hot[expert] else Tier.LO for expert in uses}

    def turn(self) -> None:
        """Between steps: choose anew at the end of a window, and let go of what is not hot any more."""
        if self._seen < self._migrating.window_uses * self._counts.size:
            return
        self._score = averaged(self._score, self._counts, self._migrating.alpha)
        self._counts.fill(0)
        self._seen = 0
        worth = self._score * self._worth
        for layer, (score, hot, places) in enumerate(zip(worth, self._hot, self._places, strict=True)):
            for _, (_, up), down in swaps(score[None], hot[None], int(places), self._migrating.margin):
                hot[up] = True
                if down is not None:
                    hot[down[1]] = False
                    if self._memory.table.tier[layer, down[1]] == CODES[Tier.HI]:
                        self._memory.evict(layer, down[1], Tier.HI)
