"""The system `dymoe` through the runtime: the cache's three rules, skipping, budgets, and changes while it runs."""

import itertools
from dataclasses import replace
from functools import cached_property
from typing import Any

import pytest
import torch

from tests.runtime import steps
from tests.runtime.steps import CPU, equal, forward, kept_by
from tests.small_model import fill, make_experts, make_store
from tests.support.instead import Instead
from vllm_dymoe.config import ConfigError, Options
from vllm_dymoe.quantize import QUANTIZERS
from vllm_dymoe.quantize.packer import ExpertPacker
from vllm_dymoe.residency.routing import PromptTokens
from vllm_dymoe.residency.tier import Tier
from vllm_dymoe.runtime import MoERuntime, precision_of
from vllm_dymoe.store import Manifest, whole_level
from vllm_dymoe.store.writer import StoreWriter
from vllm_dymoe.systems import System
from vllm_dymoe.systems.base import Precision
from vllm_dymoe.transfer import HostLevel

LAYERS, EXPERTS, TOP_K = 3, 8, 4
SIZES = {"layers": LAYERS, "num_experts": EXPERTS, "top_k": TOP_K}
STORE = make_store(make_experts(**SIZES))
NESTED = {bits: make_store(make_experts(bits=bits, nested=True, **SIZES)) for bits in ((4, 2), (8, 4))}


def make_runtime(retention=0.75, budget="50%", lo=2, system="dymoe", store=STORE, **parameters):
    parameters |= {"retention": retention} if system == "dymoe" else {}
    hi = max(store.experts.formats)
    return steps.make_runtime(store, budget, system, hi=hi, lo=lo, threads=0, system_options=parameters)


def random_step(seed, tokens):
    return steps.random_step(seed, tokens, STORE.experts)


def prompt_of(tokens):
    rows = torch.ones(tokens, dtype=torch.bool)
    return PromptTokens(rows, torch.arange(tokens) % 3 == 0, mixed=False)


@pytest.mark.parametrize("decisions", ["host", "device"])
def test_thresholds_begin_by_the_curves_of_a_store(decisions, tmp_path):
    prompts, tokens = (tuple(scale * (16 - part) / 16 for part in range(1, 17)) for scale in (2.0, 3.0))
    experts = make_experts(layers=LAYERS, num_experts=EXPERTS, top_k=TOP_K)
    writer = StoreWriter(tmp_path / "store", Manifest(replace(experts, curves=(prompts, tokens)), "gptq", "random"))
    packer = ExpertPacker(experts, QUANTIZERS["rtn"], writer)
    fill(packer)
    store = HostLevel(packer.finish(), whole_level(experts))
    store.fill()
    options = {"retention": 0.5, "reuse_high": False}
    runtime = steps.make_runtime(store, "50%", "dymoe", lo=2, decisions=decisions, system_options=options)
    table, (of_prompts, of_tokens) = runtime.memory.table, runtime.system.precision.thresholds
    assert [int(of_prompts[0]), int(of_tokens[0])] == [1 << 32, 3 << 31]
    if decisions == "device":
        table = runtime.memory.device_side.table
        assert [int(table.prompt_threshold[0]), int(table.threshold[0])] == [1 << 32, 3 << 31]
        return
    forward(runtime, 0, *steps.random_step(0, 1, store.experts))
    settled = int(of_tokens[0])
    runtime.resize("60%")
    assert settled != 3 << 31
    assert int(runtime.system.precision.thresholds[1][0]) == settled, "what has moved does not begin again"
    runtime.set_precision(retention=0.25)
    assert int(runtime.system.precision.thresholds[1][0]) == 9 << 30


STEPS = [(seed, seed % LAYERS, (1, 1, 1, 9, 30)[seed % 5]) for seed in range(40)]


def run(runtime, taken=STEPS):
    outputs = []
    for seed, layer, tokens in taken:
        prompt = prompt_of(tokens) if tokens > 5 else None
        outputs.append(forward(runtime, layer, *random_step(seed, tokens), prompt=prompt))
        runtime.check_integrity()
    return outputs


class Recorded:
    """Which version of each expert was computed, and what the system had asked for."""

    def __init__(self, runtime):
        self.versions, self.plans = [], []
        system, begin = runtime.system, runtime.kernel.begin
        tiers = {bits: tier for tier, bits in runtime.memory.bits.items()}
        outer = self

        def select(routing):
            outer.plans.append(system.precision.select(routing))
            outer.versions.append({})
            return outer.plans[-1]

        def recorded(x, decision, *rest):
            begin(x, decision, *rest)
            place = decision.place

            def placed(item, packed):
                outer.versions[-1][int(decision.experts[item])] = tiers[packed.gate.format.bits]
                place(item, packed)

            decision.place = placed

        runtime.serving.system = Instead(system, precision=Instead(system.precision, select=select))
        runtime.kernel.begin = recorded


class Replayed(System):
    """The versions that another runtime has computed, as a plan."""

    versions: Any

    @cached_property
    def precision(self):
        return Instead(Precision(), select=lambda routing: next(self.versions))


@pytest.mark.parametrize("budget", ["45%", "60%"])
def test_the_three_rules_of_the_cache_through_the_system(budget):
    runtime = make_runtime(budget=budget, high_by="depth")
    recorded = Recorded(runtime)
    run(runtime)
    stats = runtime.stats()
    pairs = [
        (plan[e], got)
        for plan, versions in zip(recorded.plans, recorded.versions, strict=True)
        for e, got in versions.items()
    ]
    # Promotion: what is wanted high is never computed low. Conservative reuse: what is wanted low may be computed high.
    assert (Tier.HI, Tier.LO) not in pairs
    assert pairs.count((Tier.LO, Tier.HI)) == stats.reuses > 0
    assert pairs.count((Tier.LO, Tier.LO)) > 0
    assert stats.promotions > 0
    # No duplication: an expert never has two slots.
    high, low = kept_by(runtime)[Tier.HI], kept_by(runtime)[Tier.LO]
    assert high
    assert low
    assert not high & low
    low, high = (runtime.experts.formats[bits].nbytes for bits in (2, 4))
    assert stats.bytes_moved["demand"] < high * stats.misses
    assert stats.bytes_moved["demand"] > low * stats.misses
    assert stats.peak_expert_bytes <= stats.budget_bytes


@pytest.mark.parametrize("retention", [0.25, 0.5, 0.8])
@pytest.mark.parametrize(
    ("store", "lo"),
    [(STORE, 2), (NESTED[4, 2], 2), (NESTED[8, 4], 4), (STORE, 0)],
    ids=["apart", "4/2", "8/4", "skips"],
)
def test_without_reuse_no_budget_changes_a_bit(store, lo, retention):
    options = {"store": store, "lo": lo, "reuse_high": False}
    want = run(make_runtime(retention, "100%", **options))
    for budget in ("60%", "20%"):
        runtime = make_runtime(retention, budget, **options)
        recorded = Recorded(runtime)
        assert equal(run(runtime), want), budget
        assert not lo or recorded.versions == recorded.plans
        assert runtime.stats().reuses == 0
        assert runtime.stats().peak_expert_bytes <= runtime.stats().budget_bytes


def test_reuse_changes_nothing_but_which_version_is_computed():
    """Invariant 1 where the cache may serve more than was asked: the same versions give the same bits at any budget."""
    runtime = make_runtime(budget="40%")
    recorded = Recorded(runtime)
    want = run(runtime)
    assert recorded.versions != recorded.plans
    for budget in ("100%", "20%"):
        other = make_runtime(budget=budget, reuse_high=False)
        other.serving.system = Replayed(versions=iter(recorded.versions))
        assert equal(run(other), want), budget


def test_skipped_experts_move_nothing():
    runtime = make_runtime(0.6, "100%", lo=0)
    recorded = Recorded(runtime)
    run(runtime)
    stats = runtime.stats()
    skipped = sum(tier is Tier.LO for plan in recorded.plans for tier in plan.values())
    assert stats.planned == {"hi": stats.hits + stats.misses, "lo": 0, "skip": skipped}
    assert skipped > 0
    assert stats.bytes_moved["demand"] == stats.misses * runtime.experts.formats[4].nbytes
    assert stats.slots.keys() == {"hi"}


@pytest.mark.parametrize("rule", ["keep", "renormalize"])
def test_what_skipping_leaves_is_the_sum_over_the_others(rule):
    runtime = make_runtime(0.6, "100%", lo=0, high_by="depth", skipped_weights=rule)
    recorded = Recorded(runtime)
    x, weights, ids = random_step(5, 9)
    got = forward(runtime, 2, x, weights, ids)
    high = [expert for expert, tier in recorded.plans[0].items() if tier is Tier.HI]
    stays = torch.isin(ids, torch.tensor(high))
    assert not stays.all()
    left = weights * stays
    if rule == "renormalize":
        left = left / left.sum(1, keepdim=True).clamp_min(1e-9)
    exact = make_runtime(system="exact", budget="100%", lo=0)
    want = forward(exact, 2, x, left, ids)
    # Rounded once to bf16; dividing in another order may change the last of its 8 bits.
    torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("lo", [2, 0])
def test_retention_1_is_exact_bit_for_bit(lo):
    exact = make_runtime(system="exact", lo=lo)
    dymoe = make_runtime(1.0, lo=lo)
    assert dymoe.plan == exact.plan
    assert equal(run(dymoe), run(exact))
    assert replace(dymoe.stats(), exposed_wait_seconds=0) == replace(exact.stats(), exposed_wait_seconds=0)


SETTINGS = [
    {"retention": 1.0},
    {"retention": 0.5},
    {"lo": 0},
    {"lo": 2, "retention": 0.8},
    {"hi": 2, "lo": 0},
    {"hi": 4, "lo": 2, "rounding": "nearest"},
    {"retention": 0.0},
]


def test_a_change_holds_from_the_next_step_on_and_never_exceeds_the_budget():
    runtime = make_runtime(0.75, "40%")
    limit = runtime.plan.limit
    values: dict = {"retention": 0.75}
    for changes in SETTINGS + SETTINGS[::-1]:
        if "retention" not in changes and values.get("retention") == 0.0 and changes.get("lo") == 0:
            continue
        runtime.set_precision(**changes)
        values |= changes
        assert runtime.plan.limit == limit
        assert runtime.budget.reserved <= limit
        taken = sum(pool.nbytes for pool in runtime.memory.pools.values()) + runtime.kernel.workspace_bytes
        assert taken == runtime.budget.reserved
        tiers = {name: values[name] for name in ("hi", "lo") if name in values}
        parameters = {name: value for name, value in values.items() if name not in tiers}
        options = Options(**{"hi": 4, "lo": 2} | tiers, group_size=32, system="dymoe", system_options=parameters)
        fresh = MoERuntime(STORE, options, CPU, automatic_budget=limit)
        assert fresh.plan == runtime.plan
        fresh.memory.clear()
        runtime.memory.clear()
        assert equal(run(runtime, STEPS[:12]), run(fresh, STEPS[:12])), changes


def test_a_change_that_needs_no_other_slots_keeps_the_cache():
    runtime = make_runtime(0.75, "40%")
    run(runtime)
    held = kept_by(runtime)
    runtime.set_precision(heavy_share=0.5, skipped_weights="renormalize")
    assert kept_by(runtime) == held
    assert runtime.system.precision.heavy_hitters == 0.5
    assert runtime.system.precision.renormalizes


def test_memory_that_is_gone_in_between_leaves_the_old_precision(monkeypatch):
    runtime = make_runtime(0.75, "40%")
    plan, system = runtime.plan, runtime.system
    answers = itertools.chain([1 << 40, 0], itertools.repeat(1 << 40))
    monkeypatch.setattr("vllm_dymoe.runtime.device_memory.available_host_memory", lambda: next(answers))
    with pytest.raises(ConfigError, match="0 bytes of host memory are available"):
        runtime.set_precision(retention=0.6)
    assert (runtime.plan, runtime.system) == (plan, system)
    run(runtime, STEPS[:5])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"retention": 1.5}, "vllm-dymoe: the precision stays as it was: .*retention: input should be less than"),
        ({"hi": 8}, "hi cannot become 8 bits, because the experts are stored at 4 and 2 bits; start again"),
        ({"lo": 8}, "lo cannot become 8 bits"),
        ({"hi": 2}, "lo is 2 bits but must be below hi, which is 2"),
        ({"hi": 0}, "hi cannot become 0 bits"),
        ({"lo": 0, "retention": 0}, 'system "dymoe" as it is set would skip every expert with lo = 0'),
        ({"system": "exact"}, "system cannot change while the model is served; hi, lo, retention, high_by"),
        ({"reuse_high": False}, "reuse_high cannot change while the model is served"),
        ({"skipped_weights": "half"}, "the precision stays as it was: "),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_changes(changes, sentence):
    runtime = make_runtime(0.75, "40%")
    before = runtime.options, runtime.system, runtime.plan, runtime.memory.table
    with pytest.raises(ConfigError, match=sentence):
        runtime.set_precision(**changes)
    assert before == (runtime.options, runtime.system, runtime.plan, runtime.memory.table)


def test_another_system_has_no_retention():
    with pytest.raises(ConfigError, match='retention is a parameter of the system "dymoe", but "exact" is served'):
        make_runtime(system="exact").set_precision(retention=0.5)


def test_a_budget_too_small_for_two_tiers_is_refused_at_the_change():
    runtime = make_runtime(1.0, "100%")
    runtime.resize(runtime.minimum_budget)
    with pytest.raises(ConfigError, match="one expert of each tier"):
        runtime.set_precision(retention=0.5)
    run(runtime, STEPS[:3])


def test_what_is_in_force_can_be_asked_for():
    runtime = make_runtime(0.75, "40%")
    runtime.set_precision(retention=0.5)
    answer = precision_of(runtime)
    assert answer["system_options"] == {"retention": 0.5}
    assert (answer["hi"], answer["lo"], answer["stored_bits"]) == (4, 2, [4, 2])
    assert answer["slots"] == {tier.value: count for tier, count in runtime.plan.slots.items()}
    assert answer["share_of_tiers_in_decode"] == pytest.approx({"hi": 0.5, "lo": 0.5})
