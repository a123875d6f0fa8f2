"""Steps without the host: the same bits as with it, at every budget and on either path."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.runtime.decided import KINDS, check_decided, decided_runtime, decode, run_decided, store_of
from tests.runtime.steps import BUDGETS, CPU, STEPS, equal, forward, make_runtime, random_step, run
from tests.small_model import make_experts, make_store
from vllm_dymoe.config import ConfigError, Options
from vllm_dymoe.residency.rule import HIGH, LOW
from vllm_dymoe.runtime import MoERuntime, Parts, moe
from vllm_dymoe.runtime.decisions import device_decides
from vllm_dymoe.systems.dymoe import Dymoe
from vllm_dymoe.systems.exact import Exact
from vllm_dymoe.transfer import join

ON_INPUT = "the router's weights multiply what experts read"
MIXED = Dymoe(retention=0.5, high_by="depth", reuse_high=False)
SYSTEMS = {"exact": (Exact(), 2), "tiers": (MIXED, 2), "skips": (MIXED, 0), "low": (Dymoe(retention=0), 2)}


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("nested", [False, True])
def test_no_budget_and_no_path_changes_a_bit(memory_store, nested_store, system, budget, nested):
    system, lo = SYSTEMS[system]
    store = nested_store if nested else memory_store
    want = run(make_runtime(store, "100%", system, lo=lo), STEPS)
    runtime = decided_runtime(store, budget, system, lo=lo)
    assert equal(run_decided(runtime, STEPS), want)
    assert runtime.budget.reserved <= runtime.budget.limit


def test_a_device_and_the_host_move_one_threshold_alike(memory_store):
    """Each has its own: they agree as long as both have decided the same steps."""
    steps = [(number, layer, 1 + number % 3) for number in range(40) for layer in range(2)]
    host, device = (Dymoe(retention=0.5, reuse_high=False) for _ in range(2))
    want = run(make_runtime(memory_store, "100%", host), steps)
    runtime = decided_runtime(memory_store, "50%", device)
    begun = runtime.memory.device_side.table.threshold.clone()
    assert equal(run_decided(runtime, steps), want)
    settled = runtime.memory.device_side.table.threshold
    assert settled.tolist() == host.precision.thresholds[1].tolist() != begun.tolist()
    runtime.resize("25%")
    assert runtime.memory.device_side.table.threshold.tolist() == settled.tolist(), "it stays where it has settled"


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_experts_is_decided_and_computed(kind):
    """Published floats beside a tier of steps, points of a lattice, and experts without a gate, whose section of it has
    no bytes."""
    store, activation = store_of(kind)
    high, tags = max(store.experts.formats), [fmt.code.tag for fmt in store.experts.formats.values()]
    want = run(make_runtime(store, system=MIXED, hi=high), STEPS, activation)
    runtime = decided_runtime(store, "50%", MIXED, hi=high)
    assert equal(run_decided(runtime, STEPS, activation), want)
    assert runtime.memory.device_side.table.bits[[LOW, HIGH]].tolist() == tags[::-1]


@pytest.mark.parametrize("lo", [0, 2], ids=["one tier", "two tiers"])
@pytest.mark.parametrize("nested", [False, True])
def test_the_hosts_steps_beside_a_deciding_device_keep_what_the_host_alone_would(nested, lo):
    store, system = make_store(make_experts(nested=nested)), MIXED if lo else None
    runtime, host = decided_runtime(store, "50%", system, lo=lo), make_runtime(store, "100%", system, lo=lo)
    host.resize("50%")
    assert runtime.plan.quotas == host.plan.quotas
    for number, tokens in enumerate((40, 1, 3, 40, 40, 1, 2, 25, 1)):
        steps = [(number, layer, tokens) for layer in range(2)]
        assert equal(run_decided(runtime, steps), run(host, steps))
        runtime.memory.read_device()
        for name in ("tier", "heat", "used_at", "step"):
            np.testing.assert_array_equal(getattr(runtime.memory.table, name), getattr(host.memory.table, name), name)
    assert runtime.memory.table.tier.any()
    assert runtime.stats().hits == host.stats().hits > 0


def test_rows_that_fill_up_a_batch_are_zeros_and_change_nothing(memory_store):
    x, weights, ids = random_step(1, 8, memory_store.experts)
    x[5:] = torch.nan
    runtime, other = (decided_runtime(memory_store, "50%") for _ in range(2))
    filled_up = decode(runtime, 0, x, weights, ids, rows=5)
    assert torch.equal(filled_up[:5], decode(other, 0, x[:5], weights[:5], ids[:5]))
    assert not filled_up[5:].any()
    for name in ("tier", "slot", "heat", "counters"):
        assert torch.equal(
            getattr(runtime.memory.device_side.table, name), getattr(other.memory.device_side.table, name)
        )


def test_experts_of_another_rank_add_nothing(memory_store):
    x, weights, ids = random_step(3, 8, memory_store.experts)
    mine = torch.where(ids < 3, ids, -1)
    runtime = decided_runtime(memory_store, "50%")
    assert torch.equal(decode(runtime, 0, x, weights, mine), forward(make_runtime(memory_store), 0, x, weights, mine))
    assert not decode(runtime, 0, x, weights, torch.full_like(ids, -1)).any()
    assert runtime.stats().planned["hi"] == len(np.unique(mine[mine >= 0]))


def test_counts_of_both_kinds_of_steps_add_up(memory_store):
    runtime = decided_runtime(memory_store, "50%", MIXED)
    host = make_runtime(memory_store, "50%", MIXED)
    run_decided(runtime, STEPS)
    run(host, STEPS)
    stats = runtime.stats()
    assert stats.planned == host.stats().planned
    assert stats.hits + stats.misses == sum(stats.planned.values())
    assert stats.misses == stats.transfers["demand"]
    assert runtime.stats() == stats
    residents = {tier.value: len(runtime.memory.table.residents(tier)) for tier in runtime.memory.pools}
    assert stats.resident_experts == residents
    runtime.reset_stats()
    assert runtime.stats().hits == runtime.stats().bytes_moved["demand"] == 0


def test_bytes_are_counted_at_the_precision_that_they_had(memory_store):
    runtime = decided_runtime(memory_store, "minimum", "dymoe", system_options={"retention": 1})
    sizes = {bits: fmt.nbytes for bits, fmt in memory_store.experts.formats.items()}
    run_decided(runtime, [(1, 0, 1)])
    runtime.set_precision(hi=2, lo=0)
    run_decided(runtime, [(1, 0, 1)])
    assert runtime.stats().bytes_moved["demand"] == 2 * sizes[4] + 2 * sizes[2]


@pytest.mark.parametrize("change", ["budget", "retention"])
def test_changes_between_steps_are_values_and_no_memory_moves(memory_store, change):
    """A captured graph goes on reading where it has read."""
    runtime = decided_runtime(
        memory_store, "50%", "dymoe", system_options={"retention": 0.5, "high_by": "depth", "reuse_high": False}
    )
    path, addresses = runtime.decode, [tensor.data_ptr() for tensor in vars(runtime.memory.device_side.table).values()]
    for value in (0.25, 0.75, 0.5):
        if change == "budget":
            runtime.resize(f"{value:.0%}")
        else:
            runtime.set_precision(retention=value)
        assert equal(run_decided(runtime, STEPS), run(make_runtime(memory_store, system=runtime.system), STEPS))
    assert runtime.decode is path
    assert [tensor.data_ptr() for tensor in vars(runtime.memory.device_side.table).values()] == addresses


def test_what_decides_is_checked(memory_store, tmp_path):
    for system, options, problem in (
        ("firm", {}, "needs the host"),
        ("dymoe", {"system_options": {"skipped_weights": "renormalize"}, "lo": 0}, "needs the host"),
        ("exact", {"trace": {"folder": tmp_path, "inputs": True}}, "inputs of routers"),
    ):
        with pytest.raises(ConfigError, match=problem):
            decided_runtime(memory_store, "50%", system, **options)
    with pytest.raises(ConfigError, match="a draft with experts"):
        decided_runtime(join(make_store(make_experts()), make_store(make_experts(layers=1))))
    options = Options(group_size=32, decisions="device")
    with pytest.raises(ConfigError, match=ON_INPUT):
        MoERuntime(memory_store, options, CPU, obstacle=ON_INPUT)
    parts = Parts(CPU)
    parts.device_memory = SimpleNamespace(shares_addresses=lambda: False)
    with pytest.raises(ConfigError, match="other addresses for page-locked host memory"):
        MoERuntime(memory_store, options, CPU, parts=parts)
    said = device_decides(Options(), Exact(), "cuda", readable=True, obstacle=ON_INPUT)
    assert said == (False, ON_INPUT), "where the device was not asked for the host takes over, and says why"
    with pytest.raises(ConfigError, match="host_store"):
        make_runtime(SimpleNamespace(experts=memory_store.experts, depth=1, readable=False), decisions="device")
    for decisions in ("auto", "host"):
        assert make_runtime(memory_store, decisions=decisions).decode is None
    assert decided_runtime(memory_store).decode is not None


def test_the_host_decides_where_the_kernels_cannot_and_says_why(memory_store, monkeypatch):
    class Unfit(Parts):
        def decode_kernel(self, kernel, experts, link_gbps=None):
            raise ValueError("a step needs more scratch")

    options = {"group_size": 32, "expert_budget": "50%", "lo": 2}
    with pytest.raises(ConfigError, match='"device" is impossible, because a step needs more scratch'):
        MoERuntime(memory_store, Options(decisions="device", **options), CPU, parts=Unfit(CPU))
    monkeypatch.setattr(moe, "device_decides", lambda *_, **__: (True, ""))  # as by default on a GPU
    runtime = MoERuntime(memory_store, Options(**options), CPU, parts=Unfit(CPU))
    assert runtime.decode is None
    assert runtime.host_decides_because == "a step needs more scratch"
    assert equal(run(runtime, STEPS[:5]), run(make_runtime(memory_store), STEPS[:5]))


def test_what_the_device_decides_by_is_a_part_of_the_budget(memory_store):
    runtime, host = decided_runtime(memory_store, "50%"), make_runtime(memory_store, "50%")
    tables = runtime.plan.workspace_bytes - runtime.kernel.workspace_bytes
    assert tables >= sum(tensor.nbytes for tensor in vars(runtime.memory.device_side.table).values())
    assert tables == runtime.decode.nbytes == runtime.minimum_budget - host.minimum_budget
    assert runtime.plan.limit == host.plan.limit + tables


def test_a_precision_that_needs_the_host_is_refused_while_serving(memory_store):
    runtime = decided_runtime(memory_store, "50%", "dymoe", lo=0, system_options={"retention": 0.5, "high_by": "depth"})
    with pytest.raises(ConfigError, match="decisions"):
        runtime.set_precision(skipped_weights="renormalize")
    run_decided(runtime, STEPS[:3])
    check_decided(runtime)
