"""The policy `dymoe` in the server: cache rules, skipping, budgets, live changes."""

import itertools
from dataclasses import replace
from functools import cached_property
from typing import Any

import pytest
import torch

from tests.errors import refused
from tests.executor import steps
from tests.executor.steps import CPU, equal, forward, kept_by
from tests.small_model import fill, make_experts, make_store
from tests.support.instead import Instead
from vllm_dymoe.cache.host_cache import HostCache
from vllm_dymoe.cache.store import Manifest, whole_host_cache
from vllm_dymoe.cache.store.writer import StoreWriter
from vllm_dymoe.options import Options
from vllm_dymoe.planner.precision import Precision
from vllm_dymoe.planner.routing import PromptTokens
from vllm_dymoe.policies import Policy
from vllm_dymoe.policies.base import PrecisionPolicy
from vllm_dymoe.quantize import QUANTIZERS
from vllm_dymoe.quantize.packer import ExpertPacker
from vllm_dymoe.server import ExpertServer, precision_of

LAYERS, EXPERTS, TOP_K = 3, 8, 4
SIZES = {"layers": LAYERS, "num_experts": EXPERTS, "top_k": TOP_K}
STORE = make_store(make_experts(**SIZES))
NESTED = {bits: make_store(make_experts(bits=bits, nested=True, **SIZES)) for bits in ((4, 2), (8, 4))}


def make_server(retention=0.75, budget="50%", low=2, policy="dymoe", store=STORE, **parameters):
    parameters |= {"retention": retention} if policy == "dymoe" else {}
    high = max(store.experts.formats)
    return steps.make_server(store, budget, policy, high=high, low=low, threads=0, policy_options=parameters)


def random_step(seed, tokens):
    return steps.random_step(seed, tokens, STORE.experts)


def prompt_of(tokens):
    rows = torch.ones(tokens, dtype=torch.bool)
    return PromptTokens(rows, torch.arange(tokens) % 3 == 0, mixed=False)


@pytest.mark.parametrize("planning", ["host", "device"])
def test_thresholds_begin_by_the_curves_of_a_store(planning, tmp_path):
    prompts, tokens = (tuple(scale * (16 - part) / 16 for part in range(1, 17)) for scale in (2.0, 3.0))
    experts = make_experts(layers=LAYERS, num_experts=EXPERTS, top_k=TOP_K)
    writer = StoreWriter(tmp_path / "store", Manifest(replace(experts, curves=(prompts, tokens)), "gptq", "random"))
    packer = ExpertPacker(experts, QUANTIZERS["rtn"], writer)
    fill(packer)
    store = HostCache(packer.finish(), whole_host_cache(experts))
    store.fill()
    options = {"retention": 0.5, "reuse_high": False}
    server = steps.make_server(store, "50%", "dymoe", low=2, planning=planning, policy_options=options)
    table, (of_prompts, of_tokens) = server.cache.table, server.policy.precision.thresholds
    assert [int(of_prompts[0]), int(of_tokens[0])] == [1 << 32, 3 << 31]
    if planning == "device":
        table = server.cache.device_table.table
        assert [int(table.prompt_threshold[0]), int(table.threshold[0])] == [1 << 32, 3 << 31]
        return
    forward(server, 0, *steps.random_step(0, 1, store.experts))
    settled = int(of_tokens[0])
    server.resize("60%")
    assert settled != 3 << 31
    assert int(server.policy.precision.thresholds[1][0]) == settled, "what has moved does not begin again"
    server.set_precision(retention=0.25)
    assert int(server.policy.precision.thresholds[1][0]) == 9 << 30


STEPS = [(seed, seed % LAYERS, (1, 1, 1, 9, 30)[seed % 5]) for seed in range(40)]


def run(server, taken=STEPS):
    outputs = []
    for seed, layer, tokens in taken:
        prompt = prompt_of(tokens) if tokens > 5 else None
        outputs.append(forward(server, layer, *random_step(seed, tokens), prompt=prompt))
        server.check_integrity()
    return outputs


class Recorded:
    """Records each expert's requested version, and the version that was computed."""

    def __init__(self, server):
        self.versions, self.plans = [], []
        policy, begin = server.policy, server.kernel.begin
        precisions = {bits: precision for precision, bits in server.cache.bits.items()}
        outer = self

        def select(routing):
            outer.plans.append(policy.precision.select(routing))
            outer.versions.append({})
            return outer.plans[-1]

        def recorded(x, plan, *rest):
            begin(x, plan, *rest)
            place = plan.place

            def placed(item, packed):
                outer.versions[-1][int(plan.experts[item])] = precisions[packed.gate.format.bits]
                place(item, packed)

            plan.place = placed

        server.host_planned.policy = Instead(policy, precision=Instead(policy.precision, select=select))
        server.kernel.begin = recorded


class Replayed(Policy):
    """A policy that requests the versions which another server computed."""

    versions: Any

    @cached_property
    def precision(self):
        return Instead(PrecisionPolicy(), select=lambda routing: next(self.versions))


@pytest.mark.parametrize("budget", ["45%", "60%"])
def test_the_three_rules_of_the_cache_through_the_policy(budget):
    server = make_server(budget=budget, high_by="depth")
    recorded = Recorded(server)
    run(server)
    stats = server.stats()
    pairs = [
        (plan[e], got)
        for plan, versions in zip(recorded.plans, recorded.versions, strict=True)
        for e, got in versions.items()
    ]
    # Promotion: an expert requested at high is never computed at low. Conservative reuse: one requested at low may be
    # computed at high.
    assert (Precision.HIGH, Precision.LOW) not in pairs
    assert pairs.count((Precision.LOW, Precision.HIGH)) == stats.reuses > 0
    assert pairs.count((Precision.LOW, Precision.LOW)) > 0
    assert stats.promotions > 0
    # No duplication: an expert never has two slots.
    high, low = kept_by(server)[Precision.HIGH], kept_by(server)[Precision.LOW]
    assert high
    assert low
    assert not high & low
    low, high = (server.experts.formats[bits].nbytes for bits in (2, 4))
    assert stats.bytes_moved["demand"] < high * stats.misses
    assert stats.bytes_moved["demand"] > low * stats.misses
    assert stats.peak_expert_bytes <= stats.budget_bytes


@pytest.mark.parametrize("retention", [0.25, 0.5, 0.8])
@pytest.mark.parametrize(
    ("store", "low"),
    [(STORE, 2), (NESTED[4, 2], 2), (NESTED[8, 4], 4), (STORE, 0)],
    ids=["apart", "4/2", "8/4", "skips"],
)
def test_without_reuse_no_budget_changes_a_bit(store, low, retention):
    options = {"store": store, "low": low, "reuse_high": False}
    want = run(make_server(retention, "100%", **options))
    for budget in ("60%", "20%"):
        server = make_server(retention, budget, **options)
        recorded = Recorded(server)
        assert equal(run(server), want), budget
        assert not low or recorded.versions == recorded.plans
        assert server.stats().reuses == 0
        assert server.stats().peak_expert_bytes <= server.stats().budget_bytes


def test_reuse_changes_nothing_but_which_version_is_computed():
    """Invariant 1 with reuse: the same versions give the same bits at any budget."""
    server = make_server(budget="40%")
    recorded = Recorded(server)
    want = run(server)
    assert recorded.versions != recorded.plans
    for budget in ("100%", "20%"):
        other = make_server(budget=budget, reuse_high=False)
        other.host_planned.policy = Replayed(versions=iter(recorded.versions))
        assert equal(run(other), want), budget


def test_skipped_experts_move_nothing():
    server = make_server(0.6, "100%", low=0)
    recorded = Recorded(server)
    run(server)
    stats = server.stats()
    skipped = sum(precision is Precision.LOW for plan in recorded.plans for precision in plan.values())
    assert stats.planned == {"high": stats.hits + stats.misses, "low": 0, "skipped": skipped}
    assert skipped > 0
    assert stats.bytes_moved["demand"] == stats.misses * server.experts.formats[4].nbytes
    assert stats.slots.keys() == {"high"}


@pytest.mark.parametrize("rule", ["keep", "renormalize"])
def test_what_skipping_leaves_is_the_sum_over_the_others(rule):
    server = make_server(0.6, "100%", low=0, high_by="depth", skipped_weights=rule)
    recorded = Recorded(server)
    x, weights, ids = random_step(5, 9)
    got = forward(server, 2, x, weights, ids)
    high = [expert for expert, precision in recorded.plans[0].items() if precision is Precision.HIGH]
    stays = torch.isin(ids, torch.tensor(high))
    assert not stays.all()
    left = weights * stays
    if rule == "renormalize":
        left = left / left.sum(1, keepdim=True).clamp_min(1e-9)
    exact = make_server(policy="exact", budget="100%", low=0)
    want = forward(exact, 2, x, left, ids)
    # Both are rounded to bf16 once. Dividing in another order may change the last of its 8 bits.
    torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("low", [2, 0])
def test_retention_1_is_exact_bit_for_bit(low):
    exact = make_server(policy="exact", low=low)
    dymoe = make_server(1.0, low=low)
    assert dymoe.slot_plan == exact.slot_plan
    assert equal(run(dymoe), run(exact))
    assert replace(dymoe.stats(), exposed_wait_seconds=0) == replace(exact.stats(), exposed_wait_seconds=0)


SETTINGS = [
    {"retention": 1.0},
    {"retention": 0.5},
    {"low": 0},
    {"low": 2, "retention": 0.8},
    {"high": 2, "low": 0},
    {"high": 4, "low": 2, "rounding": "nearest"},
    {"retention": 0.0},
]


def test_a_change_holds_from_the_next_step_on_and_never_exceeds_the_budget():
    server = make_server(0.75, "40%")
    limit = server.slot_plan.limit
    values: dict = {"retention": 0.75}
    for changes in SETTINGS + SETTINGS[::-1]:
        if "retention" not in changes and values.get("retention") == 0.0 and changes.get("low") == 0:
            continue
        server.set_precision(**changes)
        values |= changes
        assert server.slot_plan.limit == limit
        assert server.budget.reserved <= limit
        taken = sum(pool.nbytes for pool in server.cache.pools.values()) + server.kernel.workspace_bytes
        assert taken == server.budget.reserved
        precisions = {name: values[name] for name in ("high", "low") if name in values}
        parameters = {name: value for name, value in values.items() if name not in precisions}
        options = Options(
            **{"high": 4, "low": 2} | precisions, group_size=32, policy="dymoe", policy_options=parameters
        )
        fresh = ExpertServer(STORE, options, CPU, automatic_budget=limit)
        assert fresh.slot_plan == server.slot_plan
        fresh.cache.clear()
        server.cache.clear()
        assert equal(run(server, STEPS[:12]), run(fresh, STEPS[:12])), changes


def test_a_change_that_needs_no_other_slots_keeps_the_cache():
    server = make_server(0.75, "40%")
    run(server)
    held = kept_by(server)
    server.set_precision(heavy_share=0.5, skipped_weights="renormalize")
    assert kept_by(server) == held
    assert server.policy.precision.heavy_hitters == 0.5
    assert server.policy.precision.renormalizes


def test_memory_that_is_gone_in_between_leaves_the_old_precision(monkeypatch):
    server = make_server(0.75, "40%")
    plan, policy = server.slot_plan, server.policy
    answers = itertools.chain([1 << 40, 0], itertools.repeat(1 << 40))
    monkeypatch.setattr("vllm_dymoe.cache.device_memory.available_host_memory", lambda: next(answers))
    with refused(option="expert_budget"):
        server.set_precision(retention=0.6)
    assert (server.slot_plan, server.policy) == (plan, policy)
    run(server, STEPS[:5])


@pytest.mark.parametrize(
    ("changes", "option", "reason"),
    [
        ({"retention": 1.5}, "retention", "less than"),
        ({"high": 8}, "high", "4 and 2 bits"),
        ({"low": 8}, "low", "4 and 2 bits"),
        ({"high": 2}, "high", "below high"),
        ({"high": 0}, "high", "0 bits"),
        ({"low": 0, "retention": 0}, None, "every expert"),
        ({"policy": "exact"}, "policy", "high, low, retention, high_by"),
        ({"reuse_high": False}, "reuse_high", "served"),
        ({"skipped_weights": "half"}, "skipped_weights", None),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_changes(changes, option, reason):
    server = make_server(0.75, "40%")
    before = server.options, server.policy, server.slot_plan, server.cache.table
    with refused(reason, option=option):
        server.set_precision(**changes)
    assert before == (server.options, server.policy, server.slot_plan, server.cache.table)


def test_another_policy_has_no_retention():
    with refused('policy "dymoe"', option="retention"):
        make_server(policy="exact").set_precision(retention=0.5)


def test_a_budget_too_small_for_two_precisions_is_refused_at_the_change():
    server = make_server(1.0, "100%")
    server.resize(server.minimum_budget)
    with refused(option="expert_budget"):
        server.set_precision(retention=0.5)
    run(server, STEPS[:3])


def test_what_is_in_force_can_be_asked_for():
    server = make_server(0.75, "40%")
    server.set_precision(retention=0.5)
    answer = precision_of(server)
    assert answer["policy_options"] == {"retention": 0.5}
    assert (answer["high"], answer["low"], answer["stored_bits"]) == (4, 2, [4, 2])
    assert answer["slots"] == {precision.value: count for precision, count in server.slot_plan.slots.items()}
    assert answer["share_of_precisions_in_decode"] == pytest.approx({"high": 0.5, "low": 0.5})


def learnt(server):
    """Return all state that affects later steps, except where experts are."""
    table = server.cache.table
    thresholds = [threshold.tolist() for threshold in server.policy.precision.thresholds]
    return table.score.tolist(), table.used_at.tolist(), table.step.tolist(), thresholds


@pytest.mark.parametrize("policy", ["exact", "dymoe", "duoserve"])
def test_a_warm_up_moves_neither_scores_nor_thresholds(policy):
    server = make_server(policy=policy)
    run(server)
    before = learnt(server)
    with server.host_planned.unobserved():
        run(server, [(seed, layer, 64) for seed in range(5) for layer in range(LAYERS)])
    assert learnt(server) == before
    run(server)
    assert learnt(server) != before


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("policy", ["exact", "dymoe"])
def test_a_row_that_is_not_finite_leaves_neither_scores_nor_thresholds(policy, poison):
    poisoned, clean = (make_server(policy=policy) for _ in range(2))
    for seed in range(30):
        x, weights, ids = random_step(seed, 5)
        forward(clean, seed % LAYERS, x, weights, ids.index_fill(0, torch.tensor([3]), -1))
        out = forward(poisoned, seed % LAYERS, x, weights.index_fill(0, torch.tensor([3]), poison), ids)
        assert out[:3].isfinite().all()
        assert not out[3].isfinite().any(), "what is wrong is not hidden"
        assert learnt(poisoned) == learnt(clean)
