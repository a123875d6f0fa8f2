"""Every policy, planned by an emulated device, has the bits of ``exact``.

No step waits for the host.
"""

import pytest
import torch

from tests.executor.device_planned import (
    check_device_planned,
    decode,
    device_planned_server,
    run_device_planned,
)
from tests.executor.steps import make_server, random_step, run
from tests.executor.test_host_syncs import OnDevice
from tests.small_model import make_experts, make_store
from vllm_dymoe.executor.plain_kernels import PlainKernels
from vllm_dymoe.planner.table import Counter
from vllm_dymoe.policies import POLICIES

LAYERS, EXPERTS = 4, 16
STORE = make_store(make_experts(layers=LAYERS, num_experts=EXPERTS))
STEPS = [(seed, layer, tokens) for seed, tokens in enumerate((1, 1, 20, 3, 1, 40, 2, 1)) for layer in range(LAYERS)]
PREFETCH = {name: kind().prefetch for name, kind in POLICIES.items()}
"""What is trained, and what asks gates, has tests of its own (test_predictors_on_device.py)."""
ON_DEVICE = sorted(
    name
    for name, kind in POLICIES.items()
    if not kind().needs_host and not (PREFETCH[name] and PREFETCH[name].needs_predictor)
)
HIGH_ONLY = [name for name in ON_DEVICE if len(POLICIES[name]().precision.precisions) == 1]
NAMES_EXPERTS = [name for name in HIGH_ONLY if PREFETCH[name] and not PREFETCH[name].needs_gates]


@pytest.fixture(scope="module")
def exact():
    return run(make_server(STORE, "100%", "exact", low=0), STEPS)


@pytest.mark.parametrize("budget", ["100%", "50%", "25%", "minimum"])
@pytest.mark.parametrize("policy", HIGH_ONLY)
def test_every_policy_has_the_bits_of_exact(policy, budget, exact):
    server = device_planned_server(STORE, budget, policy, low=0)
    assert all(map(torch.equal, run_device_planned(server, STEPS), exact))
    kept = server.stats().resident_experts["high"]
    assert (kept > 0) == (
        server.policy.residency.keeps and sum(server.slot_plan.quotas[next(iter(server.cache.pools))]) > 0
    )
    assert server.budget.reserved <= server.budget.limit


@pytest.mark.parametrize("policy", NAMES_EXPERTS)
def test_predicted_experts_are_hits_where_the_link_has_brought_them(policy, exact):
    """Without an emulated rate all predictions arrive in time, on a slow link none."""
    server = device_planned_server(STORE, "25%", policy, low=0)
    run_device_planned(server, STEPS)
    stats = server.stats()
    assert stats.prefetches["useful"] > 0
    assert stats.bytes_moved["prefetch"] > 0
    slow = device_planned_server(STORE, "25%", policy, low=0, link_gbps=0.05)
    assert all(map(torch.equal, run_device_planned(slow, STEPS), exact))
    counts = slow.cache.device_table.table.counters.sum(0)
    assert counts[Counter.AHEAD_USED] <= counts[Counter.AHEAD]


@pytest.mark.parametrize("policy", NAMES_EXPERTS)
def test_predictions_evict_nothing_and_leave_slots_for_experts_of_several_tokens(policy):
    server = device_planned_server(STORE, "50%", policy, low=0)
    table, staged = server.cache.device_table.table, []
    for seed in range(6):
        for layer in range(LAYERS):
            before = table.precision.clone()
            decode(server, layer, *random_step(seed, 1 + seed % 3, STORE.experts))
            others = torch.arange(LAYERS) != layer
            assert torch.equal(before[others], table.precision[others])
            if layer + 1 < LAYERS:
                slots, _, projections = table.staged[(layer + 1) % 2, 0]
                staged += slots[projections > 0].tolist()
        check_device_planned(server)
    first, count = table.staging[0, 2].tolist()
    assert all(first <= slot < first + count - count // 4 for slot in staged)


@pytest.mark.parametrize("policy", ON_DEVICE)
def test_no_policy_waits_for_the_device(policy, monkeypatch):
    """Launches do nothing here, and only the device has the values."""
    monkeypatch.setattr(PlainKernels, "forward", lambda self, table, layer, rows, plan, x, *_, **__: x)
    monkeypatch.setattr(PlainKernels, "list_predicted", lambda *_: None)
    monkeypatch.setattr(PlainKernels, "copy_predicted", lambda *_: None)
    monkeypatch.setattr(PlainKernels, "judge_predicted", lambda *_: None)
    kind = POLICIES[policy]
    migrates = kind().residency.migrating is not None
    low = 2 if migrates else kind.default_low
    server = device_planned_server(STORE, "90%" if migrates else "50%", policy, low=low)
    OnDevice.log = []
    for layer in range(LAYERS):
        given = (part.as_subclass(OnDevice) for part in random_step(layer, 3, STORE.experts))
        decode(server, layer, *given)
    assert OnDevice.log == []
