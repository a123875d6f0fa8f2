"""From a budget to the number of slots of each precision."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.errors import refused
from tests.executor.steps import ByNumber
from tests.small_model import make_experts
from tests.support.instead import Instead
from vllm_dymoe.cache.budget import limit_in_bytes, workspace_bytes
from vllm_dymoe.options import ExpertBudget, Options
from vllm_dymoe.planner.precision import Precision
from vllm_dymoe.policies.dymoe import Dymoe
from vllm_dymoe.policies.exact import Exact
from vllm_dymoe.policies.firm import Firm
from vllm_dymoe.policies.on_demand import OnDemand
from vllm_dymoe.server import minimum_budget, plan_slots

EXPERTS = make_experts(layers=3, num_experts=8, bits=(4, 2))


OPTIONS = Options(high=4, low=2, group_size=32)
WORKSPACE = 1000


def limit(budget, automatic=0):
    return limit_in_bytes(ExpertBudget.parse(budget), EXPERTS, OPTIONS, WORKSPACE, automatic)


def test_bytes_are_strict_and_beside_experts_comes_the_workspace():
    all_of_them, expert = EXPERTS.nbytes(4), EXPERTS.formats[4].whole_nbytes
    assert (limit("100%"), limit("50%")) == (all_of_them + WORKSPACE, all_of_them // 2 + WORKSPACE)
    assert limit("10KiB") == 10 * 1024
    assert limit("top-k") == EXPERTS.top_k * expert + WORKSPACE
    assert limit("layer") == EXPERTS.num_experts * expert + WORKSPACE
    assert limit("auto", automatic=5000) == 5000
    assert limit("auto", automatic=10**12) == all_of_them + WORKSPACE


def test_with_a_slot_for_every_expert_nothing_is_kept_for_staging():
    plan = plan_slots(EXPERTS, OPTIONS, Exact(), limit("100%"), WORKSPACE)
    assert plan.slots == {Precision.HIGH: 24}
    assert plan.staging == {Precision.HIGH: 0}
    assert plan.quotas[Precision.HIGH] == [8, 8, 8]


@given(st.integers(0, 400_000), st.sampled_from([Exact(), Dymoe(retention=0), Dymoe()]))
def test_every_plan_fits_and_spends_what_it_can(nbytes, policy):
    precisions = policy.precision.precisions
    least = minimum_budget(EXPERTS, OPTIONS, policy, WORKSPACE)
    if nbytes < least:
        with refused(option="expert_budget", least=least):
            plan_slots(EXPERTS, OPTIONS, policy, nbytes, WORKSPACE)
        return
    plan = plan_slots(EXPERTS, OPTIONS, policy, nbytes, WORKSPACE)
    sizes = {Precision.HIGH: EXPERTS.formats[4].nbytes, Precision.LOW: EXPERTS.formats[2].nbytes}
    spent = WORKSPACE + sum(count * sizes[precision] for precision, count in plan.slots.items())
    assert spent <= nbytes
    assert set(plan.slots) == set(precisions)
    assert all(1 <= count <= 24 for count in plan.slots.values())
    best = Precision.HIGH if Precision.HIGH in precisions else Precision.LOW
    # If every expert fits in the best precision, the rest of the budget stays unused; otherwise less is left than one
    # slot of each precision takes.
    assert plan.slots[best] == 24 or nbytes - spent < sum(sizes[precision] for precision in precisions)


def test_the_workspace_suits_the_device():
    big = make_experts(layers=1, num_experts=1, hidden=4096, intermediate=14336)
    assert workspace_bytes(big, "cpu") == 1 << 20
    assert workspace_bytes(big, "cuda") == 32 << 20


@pytest.mark.parametrize("budget", ["100%", "50%"])
def test_layers_that_shall_keep_nothing_keep_nothing(budget):
    options = Options(high=4, group_size=32)
    plan = plan_slots(EXPERTS, options, OnDemand(), limit(budget), WORKSPACE)
    assert plan.slots[Precision.HIGH] > 0
    assert plan.quotas[Precision.HIGH] == [0, 0, 0]


@pytest.mark.parametrize(
    ("slots", "staging"),
    [(1, 1), (2, 2), (8, 2), (16, 2), (24, 3), (32, 4), (64, 4), (255, 4), (320, 5), (1024, 16), (4608, 16)],
)
def test_staging_grows_with_the_slots_and_starves_no_layer(slots, staging):
    experts = make_experts(layers=48, num_experts=128, bits=(4,), hidden=32)
    options, exact = Options(high=4, group_size=32), Exact()
    nbytes = WORKSPACE + slots * experts.formats[4].nbytes
    plan = plan_slots(experts, options, exact, nbytes, WORKSPACE)
    assert (plan.slots, plan.staging) == ({Precision.HIGH: slots}, {Precision.HIGH: staging})
    assert slots < 3 or staging * 8 <= slots or staging == 2, "more than an eighth is taken from what layers keep"
    assert minimum_budget(experts, options, exact, WORKSPACE) == WORKSPACE + experts.formats[4].nbytes
    alone = plan_slots(experts, options, Exact(look_ahead=0), nbytes, WORKSPACE)
    assert alone.staging == plan.staging, "experts of a prompt that have arrived are computed in one call"
    two = plan_slots(experts, options, ByNumber(staging=2), nbytes, WORKSPACE)
    assert two.staging == {Precision.HIGH: min(2, slots)}


SHARES = {Precision.HIGH: [1.0, 0.75, 0.5], Precision.LOW: [0.0, 0.25, 0.5]}


@pytest.mark.parametrize(("slots", "staging"), [(8, 2), (24, 6), (80, 6), (120, 6)])
def test_firm_has_room_for_a_tokens_experts_within_a_quarter(slots, staging):
    """K and P of FIRM-MoE (Eqs. 9 and 10) choose prefetches, not numbers of slots."""
    experts = make_experts(layers=4, num_experts=32, top_k=4, bits=(4,))
    nbytes = slots * experts.formats[4].nbytes + WORKSPACE
    plan = plan_slots(experts, Options(high=4, low=0, group_size=32), Firm(), nbytes, WORKSPACE)
    assert plan.staging == {Precision.HIGH: staging}
    assert sum(plan.quotas[Precision.HIGH]) == slots - staging


def plan_with(nbytes, shares=SHARES, staging=0):
    policy = ByNumber(low=frozenset({0}), staging=staging)
    wanted = Instead(policy, precision=Instead(policy.precision, all_shares=lambda experts: shares))
    return plan_slots(EXPERTS, OPTIONS, wanted, WORKSPACE + nbytes, WORKSPACE)


HIGH, LOW = EXPERTS.formats[4].nbytes, EXPERTS.formats[2].nbytes


def test_precisions_and_layers_get_slots_as_experts_are_wanted_in_them():
    plan = plan_with(9 * HIGH + 3 * LOW)
    assert plan.slots == {Precision.HIGH: 9, Precision.LOW: 3}
    assert plan.quotas == {Precision.HIGH: [4, 3, 2], Precision.LOW: [0, 1, 2]}, "each layer keeps four experts"


def test_where_every_expert_fits_as_many_as_possible_are_high():
    plan = plan_with(20 * HIGH + 4 * LOW)
    assert plan.slots == {Precision.HIGH: 20, Precision.LOW: 4}
    everything = plan_with(24 * HIGH + 24 * LOW)
    assert everything.slots == {Precision.HIGH: 24, Precision.LOW: 24}
    assert plan_with(24 * HIGH).slots[Precision.HIGH] == 22, (
        "the low precision keeps two slots, for what a prompt wants low"
    )


def test_a_precision_that_a_single_token_never_wants_has_slots_to_stream_through():
    plan = plan_with(9 * HIGH, {Precision.HIGH: [1.0] * 3, Precision.LOW: [0.0] * 3}, staging=2)
    assert plan.slots[Precision.LOW] >= 2
    assert plan.staging[Precision.LOW] == plan.slots[Precision.LOW]
    assert plan.quotas[Precision.LOW] == [0, 0, 0]


@given(st.integers(0, 400_000), st.lists(st.floats(0, 1), min_size=3, max_size=3), st.integers(1, 4))
def test_every_plan_of_two_precisions_fits(nbytes, high, staging):
    shares = {Precision.HIGH: high, Precision.LOW: [1 - share for share in high]}
    plan = plan_with(HIGH + LOW + nbytes, shares, staging)
    spent = plan.slots[Precision.HIGH] * HIGH + plan.slots[Precision.LOW] * LOW
    assert spent <= HIGH + LOW + nbytes
    assert all(1 <= count <= 24 for count in plan.slots.values())
    assert HIGH + LOW + nbytes - spent < LOW or plan.slots == {Precision.HIGH: 24, Precision.LOW: 24}
    for precision, quotas in plan.quotas.items():
        assert all(0 <= quota <= 8 for quota in quotas)
        assert 0 <= plan.staging[precision] <= plan.slots[precision]
