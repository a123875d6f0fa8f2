"""Nested low versions in the server: what moves, what stays, and the same bits."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from pydantic import Field

from tests.executor import steps
from tests.executor.steps import forward
from tests.small_model import make_experts, make_store
from tests.support.faulty_store import FaultyStore
from vllm_dymoe.cache.transfer import Reason, TransferError
from vllm_dymoe.planner.precision import Precision
from vllm_dymoe.planner.rule import ABSENT, HIGH, LOW
from vllm_dymoe.policies import Policy
from vllm_dymoe.policies.base import PrecisionPolicy

LAYERS, EXPERTS, TOP_K = 2, 8, 4
HI, LO, SKIP = Precision.HIGH, Precision.LOW, Precision.SKIPPED


def store_of(bits):
    return make_store(make_experts(layers=LAYERS, num_experts=EXPERTS, top_k=TOP_K, bits=bits, nested=True))


STORES = {bits: store_of(bits) for bits in ((4, 2), (8, 4))}


@dataclass(frozen=True)
class PlannedPrecision(PrecisionPolicy):
    plan: dict[int, Any] = field(default_factory=dict)
    high: float = 1.0

    def shares(self, num_layers, top_k):
        return {HI: [self.high] * num_layers, LO: [1 - self.high] * num_layers}

    def select(self, routing):
        return {expert: self.plan.get(expert, SKIP) for expert in routing.active}


class Planned(Policy):
    plan: dict[int, Any] = Field(default_factory=dict)
    high: float = 1.0

    @property
    def precision(self):
        return PlannedPrecision(frozenset((HI, LO)), plan=self.plan, high=self.high)


def make_server(bits=(4, 2), budget="50%", store=None, high=1.0, **options):
    policy = options.pop("policy", None) or Planned(high=high)
    return steps.make_server(store or STORES[bits], budget, policy, high=bits[0], low=bits[1], threads=0, **options)


def step(server, layer=0, **plan):
    """Run one token; return the bytes moved.

    Its experts are listed by precision: high=[...], low=[...].
    """
    precisions = {expert: Precision(precision) for precision, experts in plan.items() for expert in experts}
    server.policy.plan.clear()
    server.policy.plan.update(precisions)
    others = [expert for expert in range(EXPERTS) if expert not in precisions]
    ids = torch.tensor([[*precisions, *others][:TOP_K]], dtype=torch.int32)
    before = server.stats().bytes_moved["demand"]
    x = torch.ones(1, 64, dtype=torch.bfloat16)
    forward(server, layer, x, torch.full((1, TOP_K), 0.25), ids)
    server.check_integrity()
    return server.stats().bytes_moved["demand"] - before


def sizes(server):
    high, low = sorted(server.experts.formats, reverse=True)
    return server.experts.formats[high].nbytes, server.experts.formats[low].nbytes


@pytest.mark.parametrize("bits", STORES)
def test_a_promotion_moves_the_fine_slice_and_a_demotion_nothing(bits):
    server = make_server(bits, "100%")
    residual, base = sizes(server)
    assert residual / (residual + base) < 0.5
    assert step(server, low=[3]) == base
    assert step(server, high=[3]) == residual
    assert server.stats().promotions == 1
    assert step(server, high=[4]) == base + residual
    server.cache.evict(0, 3, HI)
    server.check_integrity()
    assert server.cache.table.precision[0, 3] == LOW
    assert step(server, low=[3]) == 0
    server.cache.evict(0, 4, LO)
    assert server.cache.table.precision[0, 4] == ABSENT
    server.check_integrity()


def test_a_promotion_that_is_not_kept_loses_neither_version():
    server = make_server(budget="60%", high=0.5)
    residual, base = sizes(server)
    share = int(server.cache.table.quotas[0, HIGH])
    several = list(range(TOP_K))
    assert share < len(several) <= server.cache.table.quotas[0, LOW]
    assert step(server, low=several) == base * len(several)
    assert step(server, high=several) == residual * len(several)
    assert (server.cache.table.precision[0, several] != ABSENT).all()
    assert (server.cache.table.precision[0] == HIGH).sum() == share


def test_a_version_that_is_there_is_read_as_it_is_wanted():
    """Without reuse a low expert is computed from its base alone.

    Nothing moves for it.
    """
    server = make_server(budget="100%", policy="dymoe", policy_options={"retention": 0.5, "reuse_high": False})
    server.cache.table.reuse_high[:] = False
    seen = []
    begin = server.kernel.begin

    def watched(x, plan, *rest):
        begin(x, plan, *rest)
        place = plan.place
        plan.place = lambda expert, packed: (seen.append(packed[0].format.bits), place(expert, packed))

    server.kernel.begin = watched
    server.host_planned.policy = Planned()
    assert step(server, high=[1]) > 0
    assert step(server, low=[1]) == 0
    assert seen == [4, 2]


def test_a_slice_that_cannot_be_read_costs_no_slot():
    broken = []
    store = FaultyStore(STORES[4, 2], lambda number, key: "fail" if key.bits in broken else None)
    server = make_server(store=store, budget="30%")
    for bits in (4, 2):
        broken[:] = [bits]
        with pytest.raises(TransferError, match="on fire"):
            step(server, high=[1 + bits, 2 + bits])
        server.check_integrity()
        broken.clear()
        assert step(server, high=[1 + bits, 2 + bits]) > 0


@pytest.mark.parametrize(
    "wanted", [{"high": [4, 5, 6, 7]}, {"high": [4, 5], "low": [6, 7]}, {"high": [0, 4, 5, 6]}], ids=str
)
@pytest.mark.parametrize("lent", [(HI, LO), (HI,), (LO,)], ids=str)
def test_where_no_staging_slot_comes_back_kept_slices_make_room(wanted, lent):
    """No read ends, so a slice must give up its slot.

    A residual slice gives up only its own slot, a base also that of its residual slice.
    """
    server, roomy = make_server(budget="50%", high=0.5), make_server(budget="100%")
    for _ in range(3):  # so hot that others are streamed
        step(server, high=[0, 1])
        step(server, high=[2], low=[3])
    pools = [server.cache.pools[precision] for precision in lent]
    stuck = [(pool, slot) for pool in pools for slot in iter(lambda pool=pool: pool.take(kept=False), None)]
    assert stuck
    precisions = {expert: Precision(precision) for precision, experts in wanted.items() for expert in experts}
    ids, x = torch.tensor([list(precisions)], dtype=torch.int32), torch.ones(1, 64, dtype=torch.bfloat16)
    outputs = []
    for one in (server, roomy):
        one.policy.plan.clear()
        one.policy.plan.update(precisions)
        one.cache.table.reuse_high[:] = False
        outputs.append(forward(one, 0, x, torch.full((1, TOP_K), 0.25), ids))
    assert torch.equal(*outputs)
    for pool, slot in stuck:
        pool.give_back(slot, kept=False)
    server.check_integrity()
    step(server, **wanted)


class Ahead:
    """A prefetcher that has fetched slices for layer 0."""

    frees_slots_early, intervals = False, {}

    def __init__(self, server, expert, **slices):
        self.ahead = [
            server.host_planned.fetcher.start(0, expert, Precision(precision), Reason.PREFETCH) for precision in slices
        ]
        for fetch, complete in zip(self.ahead, slices.values(), strict=True):
            (server.host_planned.fetcher.complete if complete else lambda fetch: server.engine.demand(fetch.ticket))(
                fetch
            )
        server.host_planned.prefetcher = self

    def claim(self, layer, wanted):
        claimed, self.ahead = {(fetch.expert, fetch.precision): fetch for fetch in self.ahead}, []
        return claimed

    def give_way(self, precision):
        return False

    def answer(self):
        pass

    fill = answer


@pytest.mark.parametrize(
    "slices", [{"high": True}, {"low": False, "high": True}, {"low": True, "high": False}, {"low": True}]
)
@pytest.mark.parametrize("budget", ["60%", "minimum"])
def test_slices_that_were_fetched_ahead_come_in_any_order(slices, budget):
    """A base may have been evicted by a demanded fetch, or arrive last.

    An expert with half its slices waits for no other.
    """
    server = make_server()
    server.resize(server.minimum_budget if budget == "minimum" else budget)
    Ahead(server, 3, **slices)
    step(server, high=[0, 3])
    if budget == "60%":
        assert server.cache.table.precision[0, 3] == HIGH
