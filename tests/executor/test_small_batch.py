"""Steps without the host have the bits of host-planned steps at every budget.

This holds for small and for large batches.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.errors import refused
from tests.executor.device_planned import (
    KINDS,
    decode,
    device_planned_server,
    run_device_planned,
    store_of,
)
from tests.executor.steps import BUDGETS, CPU, STEPS, equal, forward, make_server, random_step, run
from tests.small_model import make_experts, make_store
from tests.support.faulty_store import FaultyStore
from vllm_dymoe.executor import disk_queue
from vllm_dymoe.executor.device_planning import plans_on_device
from vllm_dymoe.options import Options
from vllm_dymoe.planner.rule import HIGH, LOW
from vllm_dymoe.policies.dymoe import Dymoe
from vllm_dymoe.policies.exact import Exact
from vllm_dymoe.server import ExpertServer, Parts, expert_server

OBSTACLE = "its kernels failed their self-test on this card"
MIXED = Dymoe(retention=0.5, high_by="depth", reuse_high=False)
HANDED_ON = Dymoe(retention=0.5, high_by="depth", reuse_high=False, skipped_weights="renormalize")
POLICIES = {
    "exact": (Exact(), 2), "precisions": (MIXED, 2), "skips": (MIXED, 0), "low": (Dymoe(retention=0), 2),
    "hands weights on": (HANDED_ON, 0), "least recent": (Exact(evicts="least recent"), 2),
    "first in": (Exact(evicts="first in"), 2),
}  # fmt: skip


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("nested", [False, True])
def test_no_budget_and_no_path_changes_a_bit(memory_store, nested_store, policy, budget, nested):
    policy, low = POLICIES[policy]
    store = nested_store if nested else memory_store
    want = run(make_server(store, "100%", policy, low=low), STEPS)
    server = device_planned_server(store, budget, policy, low=low)
    assert equal(run_device_planned(server, STEPS), want)
    assert server.budget.reserved <= server.budget.limit


def test_a_device_and_the_host_move_one_threshold_alike(memory_store):
    """Each has a threshold of its own; they agree after the same steps."""
    steps = [(number, layer, 1 + number % 3) for number in range(40) for layer in range(2)]
    host, device = (Dymoe(retention=0.5, reuse_high=False) for _ in range(2))
    want = run(make_server(memory_store, "100%", host), steps)
    server = device_planned_server(memory_store, "50%", device)
    begun = server.cache.device_table.table.threshold.clone()
    assert equal(run_device_planned(server, steps), want)
    settled = server.cache.device_table.table.threshold
    assert settled.tolist() == host.precision.thresholds[1].tolist() != begun.tolist()
    server.resize("25%")
    assert server.cache.device_table.table.threshold.tolist() == settled.tolist(), "it stays where it has settled"


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_experts_is_decided_and_computed(kind):
    """Published floats, lattice codes, and experts without a gate.

    Published floats have a low version on a grid. Without a gate, its section is empty.
    """
    store, activation = store_of(kind)
    high, tags = max(store.experts.formats), [fmt.encoding.tag for fmt in store.experts.formats.values()]
    want = run(make_server(store, policy=MIXED, high=high), STEPS, activation)
    server = device_planned_server(store, "50%", MIXED, high=high)
    assert equal(run_device_planned(server, STEPS, activation), want)
    assert server.cache.device_table.table.bits[0, [LOW, HIGH]].tolist() == [[tag] * 3 for tag in tags[::-1]]


@pytest.mark.parametrize("low", [0, 2], ids=["one precision", "two precisions"])
@pytest.mark.parametrize("nested", [False, True])
def test_the_hosts_steps_beside_a_deciding_device_keep_what_the_host_alone_would(nested, low):
    store, policy = make_store(make_experts(nested=nested)), MIXED if low else None
    server, host = device_planned_server(store, "50%", policy, low=low), make_server(store, "100%", policy, low=low)
    host.resize("50%")
    assert server.slot_plan.quotas == host.slot_plan.quotas
    for number, tokens in enumerate((40, 1, 3, 40, 40, 1, 2, 25, 1)):
        steps = [(number, layer, tokens) for layer in range(2)]
        assert equal(run_device_planned(server, steps), run(host, steps))
        server.cache.read_device()
        for name in ("precision", "score", "used_at", "step"):
            np.testing.assert_array_equal(getattr(server.cache.table, name), getattr(host.cache.table, name), name)
    assert server.cache.table.precision.any()
    assert server.stats().hits == host.stats().hits > 0


def test_rows_that_fill_up_a_batch_are_zeros_and_change_nothing(memory_store):
    x, weights, ids = random_step(1, 8, memory_store.experts)
    x[5:] = torch.nan
    server, other = (device_planned_server(memory_store, "50%") for _ in range(2))
    filled_up = decode(server, 0, x, weights, ids, rows=5)
    assert torch.equal(filled_up[:5], decode(other, 0, x[:5], weights[:5], ids[:5]))
    assert not filled_up[5:].any()
    for name in ("precision", "slot", "score", "counters"):
        assert torch.equal(
            getattr(server.cache.device_table.table, name), getattr(other.cache.device_table.table, name)
        )


def test_experts_of_another_rank_add_nothing(memory_store):
    x, weights, ids = random_step(3, 8, memory_store.experts)
    mine = torch.where(ids < 3, ids, -1)
    server = device_planned_server(memory_store, "50%")
    assert torch.equal(decode(server, 0, x, weights, mine), forward(make_server(memory_store), 0, x, weights, mine))
    assert not decode(server, 0, x, weights, torch.full_like(ids, -1)).any()
    assert server.stats().planned["high"] == len(np.unique(mine[mine >= 0]))


def test_counts_of_both_kinds_of_steps_add_up(memory_store):
    server = device_planned_server(memory_store, "50%", MIXED)
    host = make_server(memory_store, "50%", MIXED)
    run_device_planned(server, STEPS)
    run(host, STEPS)
    stats = server.stats()
    assert stats.planned == host.stats().planned
    assert stats.hits + stats.misses == sum(stats.planned.values())
    assert stats.misses == stats.transfers["demand"]
    assert server.stats() == stats
    residents = {precision.value: len(server.cache.table.residents(precision)) for precision in server.cache.pools}
    assert stats.resident_experts == residents
    server.reset_stats()
    assert server.stats().hits == server.stats().bytes_moved["demand"] == 0


def test_bytes_are_counted_at_the_precision_that_they_had(memory_store):
    server = device_planned_server(memory_store, "minimum", "dymoe", policy_options={"retention": 1})
    sizes = {bits: fmt.nbytes for bits, fmt in memory_store.experts.formats.items()}
    run_device_planned(server, [(1, 0, 1)])
    server.set_precision(high=2, low=0)
    run_device_planned(server, [(1, 0, 1)])
    assert server.stats().bytes_moved["demand"] == 2 * sizes[4] + 2 * sizes[2]


@pytest.mark.parametrize("change", ["budget", "retention"])
def test_changes_between_steps_are_values_and_no_memory_moves(memory_store, change):
    """A captured graph keeps reading the same addresses."""
    server = device_planned_server(
        memory_store, "50%", "dymoe", policy_options={"retention": 0.5, "high_by": "depth", "reuse_high": False}
    )
    memory = server.small_batches.memory

    def addresses():
        plans = (tensor for plan in memory.plans[0] for tensor in plan.tensors.values())
        tensors = *vars(memory.table).values(), memory.told, memory.firsts, memory.of_parts, *plans
        return [tensor.data_ptr() for tensor in tensors]

    before = addresses()
    for value in (0.25, 0.75, 0.5):
        if change == "budget":
            server.resize(f"{value:.0%}")
        else:
            server.set_precision(retention=value)
        assert equal(run_device_planned(server, STEPS), run(make_server(memory_store, policy=server.policy), STEPS))
    assert server.small_batches.memory is memory
    assert server.cache.device_table.table is memory.table
    assert addresses() == before


def test_what_decides_is_checked(memory_store, monkeypatch):
    options = Options(group_size=32, planning="device")
    with refused(OBSTACLE, option="planning"):
        ExpertServer(memory_store, options, CPU, obstacle=OBSTACLE)
    parts = Parts(CPU)
    parts.device_memory = SimpleNamespace(shares_addresses=lambda: False)
    with refused("addresses", option="planning"):
        ExpertServer(memory_store, options, CPU, parts=parts)
    said = plans_on_device(Options(), Exact(), "cuda", obstacle=OBSTACLE)
    assert said == (False, OBSTACLE), "where the device was not asked for the host takes over, and says why"
    with monkeypatch.context() as without, refused("native library", option="planning"):
        without.setattr(disk_queue.native, "load", lambda *_: None)
        make_server(FaultyStore(memory_store), planning="device")
    for planning in ("auto", "host"):
        assert make_server(memory_store, planning=planning).small_batches is None
    assert device_planned_server(memory_store).small_batches is not None


def test_the_host_decides_where_the_kernels_cannot_and_says_why(memory_store, monkeypatch):
    class Unfit(Parts):
        def decode_kernel(self, kernel, experts, link_gbps=None):
            raise ValueError("a step needs more scratch")

    options = {"group_size": 32, "expert_budget": "50%", "low": 2}
    with refused("a step needs more scratch", option="planning"):
        ExpertServer(memory_store, Options(planning="device", **options), CPU, parts=Unfit(CPU))
    monkeypatch.setattr(expert_server, "plans_on_device", lambda *_, **__: (True, ""))  # the default on a GPU
    server = ExpertServer(memory_store, Options(**options), CPU, parts=Unfit(CPU))
    assert server.small_batches is None
    assert server.host_plans_because == "a step needs more scratch"
    assert equal(run(server, STEPS[:5]), run(make_server(memory_store), STEPS[:5]))


def test_what_the_device_decides_by_is_a_part_of_the_budget(memory_store):
    server, host = device_planned_server(memory_store, "50%"), make_server(memory_store, "50%")
    tables = server.slot_plan.workspace_bytes - server.kernel.workspace_bytes
    assert tables >= sum(tensor.nbytes for tensor in vars(server.cache.device_table.table).values())
    assert tables == server.small_batches.memory.nbytes == server.minimum_budget - host.minimum_budget
    assert server.slot_plan.limit == host.slot_plan.limit + tables


def test_weights_of_skipped_experts_are_handed_on_from_the_next_step(memory_store):
    """The switch is a value on the device, so a captured graph stays valid."""
    options = {"retention": 0.5, "high_by": "depth", "reuse_high": False}
    server = device_planned_server(memory_store, "50%", "dymoe", low=0, policy_options=options)
    assert equal(run_device_planned(server, STEPS[:5]), run(make_server(memory_store, policy=MIXED, low=0), STEPS[:5]))
    server.set_precision(skipped_weights="renormalize")
    want = run(make_server(memory_store, policy=HANDED_ON, low=0), STEPS[:5])
    assert equal(run_device_planned(server, STEPS[:5]), want)
