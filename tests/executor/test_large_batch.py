"""Large-batch steps without the host: same bits, order of launches, and no waits."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from tests.executor.device_planned import (
    check_device_planned,
    decode,
    device_planned_server,
    run_device_planned,
    run_large_batch,
)
from tests.executor.steps import forward, make_server, random_step, run
from tests.executor.test_host_syncs import OnDevice
from tests.small_model import make_experts, make_store
from vllm_dymoe.executor.large_batch import LargeBatches
from vllm_dymoe.executor.plain_kernels import PlainKernels, PlainLargeBatch
from vllm_dymoe.kernels import Activation
from vllm_dymoe.planner.large_batch import LargeBatchShape
from vllm_dymoe.planner.routing import PromptTokens
from vllm_dymoe.planner.rule import HIGH
from vllm_dymoe.planner.table import Counter, Table
from vllm_dymoe.policies.dymoe import Dymoe
from vllm_dymoe.policies.exact import Exact
from vllm_dymoe.policies.on_demand import OnDemand

LAYERS, EXPERTS = 4, 16
STORES = {nested: make_store(make_experts(layers=LAYERS, num_experts=EXPERTS, nested=nested)) for nested in (0, 1)}


class Roomy(Exact):
    """A policy with half of its slots as staging slots."""

    def staging_slots(self, slots):
        return slots // 2


class RoomyDymoe(Dymoe, Roomy):
    """A policy with two precisions and half of its slots as staging slots."""


POLICIES = {"exact": (Roomy(), 0), "precisions": (RoomyDymoe(retention=0.5, reuse_high=False), 2)}
POLICIES["skips"] = POLICIES["precisions"][0], 0
STEPS = [(seed, layer, tokens) for seed, tokens in enumerate((40, 40, 3, 20, 1, 60, 17)) for layer in range(LAYERS)]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("budget", ["100%", "50%", "25%", "minimum"])
@pytest.mark.parametrize("nested", [0, 1])
def test_no_budget_changes_a_bit(policy, budget, nested):
    policy, low = POLICIES[policy]
    policy = type(policy)(**policy.model_dump())  # with its own threshold
    want = run(make_server(STORES[nested], "100%", type(policy)(**policy.model_dump()), low=low), STEPS)
    server = device_planned_server(STORES[nested], budget, policy, low=low)
    got = run_device_planned(server, STEPS)
    assert all(map(torch.equal, got, want))
    counts = server.cache.device_table.table.counters.sum(0)
    alone = not nested and len(server.slot_plan.slots) == 1
    assert bool(counts[Counter.AHEAD_USED]) == (alone and budget in ("50%", "25%"))


@pytest.mark.parametrize("high_by", ["threshold", "depth"])
def test_prompts_have_the_hosts_precisions(high_by):
    """Prompts run together with decoding tokens, each with a measure of its own.

    In half of the steps sums of weights are equal, or differ by less than float32 can represent.
    """
    policy = lambda: RoomyDymoe(retention=0.5, reuse_high=False, high_by=high_by)  # noqa: E731
    host, server = make_server(STORES[1], "100%", policy()), device_planned_server(STORES[1], "50%", policy())
    for step in range(12):
        for layer in range(LAYERS):
            (x, weights, ids), place = random_step(step, 30, STORES[1].experts), torch.arange(30)
            given = x, weights if step % 2 else 0.5 + 2**-24 * (weights > weights.median()), ids
            rows = place < (30, 17, 0)[step % 3]
            prompt = PromptTokens(rows, rows & (place % 4 > 0), mixed=not rows.all())
            want = forward(host, layer, *given, prompt=prompt if rows.any() else None)
            marks = rows.to(torch.int8) + prompt.heavy
            assert torch.equal(run_large_batch(server, layer, *given, marks=marks), want)
    table = server.cache.device_table.table
    if high_by == "threshold":
        ours = table.prompt_threshold.tolist(), table.threshold.tolist()
        assert ours == tuple(one.tolist() for one in host.policy.precision.thresholds)


def test_an_interrupted_step_leaves_nothing_that_counts():
    """Experts that were copied for a layer that does not run are not used afterwards."""
    server = device_planned_server(STORES[0], "25%", Roomy(), low=0)
    want = run(make_server(STORES[0], "100%", Roomy(), low=0), STEPS)
    for number, (seed, layer, tokens) in enumerate(STEPS):
        if number % 3 == 0:
            run_large_batch(server, (layer + 2) % LAYERS, *random_step(99, 30, STORES[0].experts))
        step = decode if tokens <= 16 else run_large_batch
        assert torch.equal(step(server, layer, *random_step(seed, tokens, STORES[0].experts)), want[number])
        check_device_planned(server)


def test_a_graph_of_a_layer_holds_for_any_budget():
    """It is captured with every expert resident, and replayed with none."""
    server = device_planned_server(STORES[0], "100%", Roomy(), low=0)
    want = run(make_server(STORES[0], "100%", Roomy(), low=0), STEPS[:LAYERS])
    for budget in ("100%", "25%", "minimum"):
        server.resize(server.minimum_budget if budget == "minimum" else budget)
        for (seed, layer, tokens), one in zip(STEPS, want, strict=False):
            given = random_step(seed, tokens, STORES[0].experts)
            assert torch.equal(run_large_batch(server, layer, *given, captured=True), one)
    check_device_planned(server)
    assert len(server.small_batches.memory.captured) == 1


@pytest.mark.parametrize("captured", [False, True])
def test_no_step_waits_for_the_device(monkeypatch, captured):
    """Launches do nothing here, so that only the path's own code is left.

    Only the device knows the ids.
    """

    class Launches(PlainLargeBatch):
        def plan(self, layer, x, weights, ids, *rest):
            assert isinstance(ids, OnDevice)
            self._x = x

        def copy(self, group): ...

        compute = copy

        def finish(self):
            return self._x

    monkeypatch.setattr(PlainKernels, "large_batch_step", lambda *given: Launches(*given[:-1]))
    server = device_planned_server(STORES[0], "25%", Roomy(), low=0)
    OnDevice.log = []
    for step in range(2):
        for layer in range(LAYERS):
            given = (part.as_subclass(OnDevice) for part in random_step(step, 40, STORES[0].experts))
            run_large_batch(server, layer, *given, captured=captured)
    assert OnDevice.log == []
    assert isinstance(server.small_batches.large, LargeBatches)


class Clocks:
    """A device with two streams in virtual time, and a step with timed launches.

    The streams have reached ``computing`` and ``copying`` seconds.
    """

    def __init__(self, shape, resident, each, compute, decide):
        self.shape, self._resident, self._each = shape, resident, each
        self._compute, self._decide = compute / shape.experts, decide
        self.computing = self.copying = self.busy = 0.0
        self._staged = 0

    @contextlib.contextmanager
    def fork(self):
        self.copying = max(self.copying, self.computing)
        yield

    def mark(self):
        return self.copying

    def join(self, mark=None):
        self.computing = max(self.computing, self.copying if mark is None else mark)

    def plan(self, *given):
        self.computing += self._decide
        self._left, self._there = self.shape.experts - self._resident - self._staged, self._staged
        self._staged = self.shape.half * (given[6] > 0)
        self._sizes = {}
        for group in range(2, self.shape.groups):
            self._sizes[group] = min(self.shape.half, self._left)
            self._left -= self._sizes[group]
        self._sizes[self.shape.groups] = self._staged
        assert not self._left

    def copy(self, group):
        experts = self._sizes.get(group, 0)
        self.copying += experts * self._each
        self.busy += experts * self._each

    def compute(self, group):
        count = self._resident + self._there if group == 0 else self._sizes.get(group, 0)
        self.computing += count * self._compute

    def finish(self):
        return torch.empty(0)


@pytest.mark.parametrize("resident", [16, 32, 64, 96])
def test_the_link_never_rests_in_a_sweep(resident):
    """A prompt takes at most a twentieth longer than the link alone.

    It has 512 tokens, in 48 layers of 128 experts at 25 GB/s. A layer is computed in 1.15 ms and planned in 0.1 ms;
    attention between two layers takes 0.35 ms, as counted for a 4090.
    """
    table = Table.allocate(48, 128, device="cpu")
    shape = LargeBatchShape(512, 8, 128, 1, 8, -(-(128 - resident) // 8))
    clocks = Clocks(shape, resident, each=2.65e6 / 25e9, compute=1.15e-3, decide=1e-4)
    kernel = SimpleNamespace(large_batch_step=lambda *_: clocks)
    slots = {HIGH: [resident] * 48}, {HIGH: 16}, (0,) * 48, {}
    large = LargeBatches(8, table.layers, table, kernel, clocks, torch.zeros(1), *slots)
    for layer in range(48):
        large.forward(layer, torch.empty(512, 1), None, None, Activation.SILU)
        assert large._last[0][0] == shape
        clocks.computing += 3.5e-4
    bound = 48 * (128 - resident) * 2.65e6 / 25e9
    assert clocks.busy == pytest.approx(bound)
    assert clocks.computing / bound < 1.05


class Alternating(Clocks):
    """Clocks that fail if copies and computation overlap."""

    def copy(self, group):
        assert not self._sizes.get(group) or self.copying >= self.computing
        super().copy(group)

    def compute(self, group):
        assert self.computing >= self.copying
        super().compute(group)


def test_without_overlap_copies_and_computations_alternate():
    table, resident = Table.allocate(4, 128, device="cpu"), 32
    shape = LargeBatchShape(512, 8, 128, 1, 8, 12)
    found = []
    for kind, overlaps in ((Alternating, False), (Clocks, True)):
        clocks = kind(shape, resident, each=1e-4, compute=1e-2, decide=1e-4)
        kernel = SimpleNamespace(large_batch_step=lambda *_, made=clocks: made)
        slots = {HIGH: [resident] * 4}, {HIGH: 16}, (0,) * 4, {}
        large = LargeBatches(8, 4, table, kernel, clocks, torch.zeros(1), *slots, overlaps=overlaps)
        for layer in range(4):
            large.forward(layer, torch.empty(512, 1), None, None, Activation.SILU)
        found.append(clocks.computing)
    copies, computed = 4 * (128 - resident) * 1e-4, 4 * (1e-2 + 1e-4)
    assert found[0] == pytest.approx(copies + computed)
    assert found[1] < 0.9 * found[0]


@pytest.mark.parametrize("budget", ["25%", "minimum"])
def test_without_overlap_the_bits_are_the_same(budget):
    policy = OnDemand(overlap=False)
    want = run(make_server(STORES[0], "100%", policy, low=0), STEPS)
    server = device_planned_server(STORES[0], budget, policy, low=0)
    assert server.small_batches.most_rows == 0, "every step is a large batch"
    got = [
        run_large_batch(server, layer, *random_step(seed, tokens, STORES[0].experts)) for seed, layer, tokens in STEPS
    ]
    assert all(map(torch.equal, got, want))
    check_device_planned(server)
