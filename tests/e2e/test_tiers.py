"""Invariants 2 and 4 through the real engine: mixed tiers, complete bytes, one version of each expert."""

from dataclasses import dataclass, field
from functools import cached_property

import pytest
import torch

from tests.e2e.engines import answer, engine, prompts, runtime_of
from tests.support.computed import watch_computed
from vllm_dymoe.residency.format import BlobKey
from vllm_dymoe.residency.tier import Tier
from vllm_dymoe.systems.base import Precision
from vllm_dymoe.systems.exact import Exact

pytestmark = pytest.mark.engine


@dataclass(frozen=True)
class ByWeightPrecision(Precision):
    """High for an expert that is some token's first choice, low for the others; every fifth step skips the last one."""

    _calls: list = field(default_factory=list)

    def shares(self, num_layers, top_k):
        return dict.fromkeys(self.tiers, [1.0] * num_layers)

    def select(self, routing):
        self._calls.append(routing.layer)
        best = routing.weights.argmax(dim=1, keepdim=True)
        first = set(routing.ids.gather(1, best).flatten().tolist())
        plan = {expert: Tier.HI if expert in first else Tier.LO for expert in routing.active}
        if len(self._calls) % 5 == 0:
            plan[routing.active[-1]] = Tier.SKIP
        return plan


class ByWeight(Exact):
    @cached_property
    def precision(self):
        return ByWeightPrecision(frozenset((Tier.HI, Tier.LO)))


def watch(runtime):
    """Check every slot when its computation is done: the bytes are the store's, and the table was right."""
    seen, expected = [], {}

    def check(layer, expert, tier, slot):
        bits = runtime.memory.bits[tier]
        key = BlobKey(layer, expert, bits)
        if key not in expected:
            expected[key] = torch.empty(runtime.experts.formats[bits].nbytes, dtype=torch.uint8)
            runtime.store.read_into(key, expected[key])
        assert torch.equal(slot.blob, expected[key]), f"{key} is not what slot {slot.index} of tier {tier} holds"
        seen.append(tier)

    watch_computed(runtime, check)
    return seen


@pytest.mark.parametrize("store", ["file", "pinned"])
def test_mixed_tiers_read_complete_bytes_and_keep_one_version(store):
    options = {"hi": 4, "lo": 2, "expert_budget": "50%", "host_store": store}
    with engine(dymoe=options) as llm:
        runtime = runtime_of(llm)
        runtime.serving.system = ByWeight()
        for budget in ("50%", "10%", "100%"):
            runtime.resize(budget)
            runtime.reset_stats()
            seen = watch(runtime)
            answer(llm, prompts()[:2], max_tokens=24)
            answer(llm, prompts(), max_tokens=12)
            runtime.check_integrity()
            stats = runtime.stats()
            assert {Tier.HI, Tier.LO} <= set(seen)
            # With a high slot for nearly every expert hardly a low version is kept that could be promoted.
            assert stats.promotions > 0 or budget == "100%"
            assert stats.reuses > 0
            assert stats.misses <= stats.transfers["demand"], "one or two slices for each"
            assert stats.peak_expert_bytes <= stats.budget_bytes
        fine = runtime.experts.formats[4]
        assert fine.nbytes * stats.misses < stats.bytes_moved["demand"] < fine.whole_nbytes * stats.misses
