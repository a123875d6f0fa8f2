"""The low version inside the high one, through the runtime: what moves, what stays, and that no bit changes."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from pydantic import Field

from tests.runtime import steps
from tests.runtime.steps import forward
from tests.small_model import make_experts, make_store
from tests.support.faulty_store import FaultyStore
from vllm_dymoe.residency.rule import HIGH, LOW, NOWHERE
from vllm_dymoe.residency.tier import Tier
from vllm_dymoe.systems import System
from vllm_dymoe.systems.base import Precision
from vllm_dymoe.transfer import Reason, TransferError

LAYERS, EXPERTS, TOP_K = 2, 8, 4
HI, LO, SKIP = Tier.HI, Tier.LO, Tier.SKIP


def store_of(bits):
    return make_store(make_experts(layers=LAYERS, num_experts=EXPERTS, top_k=TOP_K, bits=bits, nested=True))


STORES = {bits: store_of(bits) for bits in ((4, 2), (8, 4))}


@dataclass(frozen=True)
class PlannedPrecision(Precision):
    plan: dict[int, Any] = field(default_factory=dict)
    high: float = 1.0

    def shares(self, num_layers, top_k):
        return {HI: [self.high] * num_layers, LO: [1 - self.high] * num_layers}

    def select(self, routing):
        return {expert: self.plan.get(expert, SKIP) for expert in routing.active}


class Planned(System):
    plan: dict[int, Any] = Field(default_factory=dict)
    high: float = 1.0

    @property
    def precision(self):
        return PlannedPrecision(frozenset((HI, LO)), plan=self.plan, high=self.high)


def make_runtime(bits=(4, 2), budget="50%", store=None, high=1.0, **options):
    system = options.pop("system", None) or Planned(high=high)
    return steps.make_runtime(store or STORES[bits], budget, system, hi=bits[0], lo=bits[1], threads=0, **options)


def step(runtime, layer=0, **plan):
    """One token whose experts are named by tier, hi=[...], lo=[...]; bytes that moved."""
    tiers = {expert: Tier(tier) for tier, experts in plan.items() for expert in experts}
    runtime.system.plan.clear()
    runtime.system.plan.update(tiers)
    others = [expert for expert in range(EXPERTS) if expert not in tiers]
    ids = torch.tensor([[*tiers, *others][:TOP_K]], dtype=torch.int32)
    before = runtime.stats().bytes_moved["demand"]
    x = torch.ones(1, 64, dtype=torch.bfloat16)
    forward(runtime, layer, x, torch.full((1, TOP_K), 0.25), ids)
    runtime.check_integrity()
    return runtime.stats().bytes_moved["demand"] - before


def sizes(runtime):
    high, low = sorted(runtime.experts.formats, reverse=True)
    return runtime.experts.formats[high].nbytes, runtime.experts.formats[low].nbytes


@pytest.mark.parametrize("bits", STORES)
def test_a_promotion_moves_the_fine_slice_and_a_demotion_nothing(bits):
    runtime = make_runtime(bits, "100%")
    fine, base = sizes(runtime)
    assert fine / (fine + base) < 0.5
    assert step(runtime, lo=[3]) == base
    assert step(runtime, hi=[3]) == fine
    assert runtime.stats().promotions == 1
    assert step(runtime, hi=[4]) == base + fine
    runtime.memory.evict(0, 3, HI)
    runtime.check_integrity()
    assert runtime.memory.table.tier[0, 3] == LOW
    assert step(runtime, lo=[3]) == 0
    runtime.memory.evict(0, 4, LO)
    assert runtime.memory.table.tier[0, 4] == NOWHERE
    runtime.check_integrity()


def test_a_promotion_that_is_not_kept_loses_neither_version():
    runtime = make_runtime(budget="60%", high=0.5)
    fine, base = sizes(runtime)
    share = int(runtime.memory.table.shares[0, HIGH])
    several = list(range(TOP_K))
    assert share < len(several) <= runtime.memory.table.shares[0, LOW]
    assert step(runtime, lo=several) == base * len(several)
    assert step(runtime, hi=several) == fine * len(several)
    assert (runtime.memory.table.tier[0, several] != NOWHERE).all()
    assert (runtime.memory.table.tier[0] == HIGH).sum() == share


def test_a_version_that_is_there_is_read_as_it_is_wanted():
    """Without reuse a low expert is computed from its base alone; nothing moves for that."""
    runtime = make_runtime(budget="100%", system="dymoe", system_options={"retention": 0.5, "reuse_high": False})
    runtime.memory.table.reuse_high[:] = False
    seen = []
    begin = runtime.kernel.begin

    def watched(x, decision, *rest):
        begin(x, decision, *rest)
        place = decision.place
        decision.place = lambda expert, packed: (seen.append(packed[0].format.bits), place(expert, packed))

    runtime.kernel.begin = watched
    runtime.serving.system = Planned()
    assert step(runtime, hi=[1]) > 0
    assert step(runtime, lo=[1]) == 0
    assert seen == [4, 2]


def test_a_slice_that_cannot_be_read_costs_no_slot():
    broken = []
    store = FaultyStore(STORES[4, 2], lambda number, key: "fail" if key.bits in broken else None)
    runtime = make_runtime(store=store, budget="30%")
    for bits in (4, 2):
        broken[:] = [bits]
        with pytest.raises(TransferError, match="on fire"):
            step(runtime, hi=[1 + bits, 2 + bits])
        runtime.check_integrity()
        broken.clear()
        assert step(runtime, hi=[1 + bits, 2 + bits]) > 0


@pytest.mark.parametrize("wanted", [{"hi": [4, 5, 6, 7]}, {"hi": [4, 5], "lo": [6, 7]}, {"hi": [0, 4, 5, 6]}], ids=str)
@pytest.mark.parametrize("lent", [(HI, LO), (HI,), (LO,)], ids=str)
def test_where_no_staging_slot_comes_back_kept_slices_make_room(wanted, lent):
    """Reads that do not end have them: a fine slice gives up its slot alone, a base takes its fine slice along."""
    runtime, roomy = make_runtime(budget="50%", high=0.5), make_runtime(budget="100%")
    for _ in range(3):  # so warm that others pass through
        step(runtime, hi=[0, 1])
        step(runtime, hi=[2], lo=[3])
    pools = [runtime.memory.pools[tier] for tier in lent]
    stuck = [(pool, slot) for pool in pools for slot in iter(lambda pool=pool: pool.take(kept=False), None)]
    assert stuck
    tiers = {expert: Tier(tier) for tier, experts in wanted.items() for expert in experts}
    ids, x = torch.tensor([list(tiers)], dtype=torch.int32), torch.ones(1, 64, dtype=torch.bfloat16)
    outputs = []
    for one in (runtime, roomy):
        one.system.plan.clear()
        one.system.plan.update(tiers)
        one.memory.table.reuse_high[:] = False
        outputs.append(forward(one, 0, x, torch.full((1, TOP_K), 0.25), ids))
    assert torch.equal(*outputs)
    for pool, slot in stuck:
        pool.give_back(slot, kept=False)
    runtime.check_integrity()
    step(runtime, **wanted)


class Ahead:
    """What a prefetcher hands over to layer 0."""

    frees_slots_early, intervals = False, {}

    def __init__(self, runtime, expert, **slices):
        self.ahead = [runtime.serving.fetcher.start(0, expert, Tier(tier), Reason.PREFETCH) for tier in slices]
        for fetch, complete in zip(self.ahead, slices.values(), strict=True):
            (runtime.serving.fetcher.complete if complete else lambda fetch: runtime.engine.demand(fetch.ticket))(fetch)
        runtime.serving.prefetcher = self

    def claim(self, layer, wanted):
        claimed, self.ahead = {(fetch.expert, fetch.tier): fetch for fetch in self.ahead}, []
        return claimed

    def give_way(self, tier):
        return False

    def answer(self):
        pass

    fill = answer


@pytest.mark.parametrize("slices", [{"hi": True}, {"lo": False, "hi": True}, {"lo": True, "hi": False}, {"lo": True}])
@pytest.mark.parametrize("budget", ["60%", "minimum"])
def test_slices_that_were_fetched_ahead_come_in_any_order(slices, budget):
    """A base may have given way to demand, or arrive last; an expert with half of what it needs waits for no other."""
    runtime = make_runtime()
    runtime.resize(runtime.minimum_budget if budget == "minimum" else budget)
    Ahead(runtime, 3, **slices)
    step(runtime, hi=[0, 3])
    if budget == "60%":
        assert runtime.memory.table.tier[0, 3] == HIGH
