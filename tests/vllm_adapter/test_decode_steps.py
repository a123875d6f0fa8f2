"""What stands around a step that needs no host, and that nothing of it stands inside."""

from types import SimpleNamespace

import pytest
import torch

from tests.operations import Operations
from tests.runtime.decided import decided_runtime
from tests.runtime.steps import make_runtime, random_step
from tests.support.no_host import NoHost
from tests.vllm_adapter.steps import rank_of, scheduled
from vllm_dymoe.kernels import Activation
from vllm_dymoe.residency.table import Counter, Table
from vllm_dymoe.runtime.branch import Branch
from vllm_dymoe.runtime.decode_path import DECODE_ROWS, DecodePath
from vllm_dymoe.vllm_adapter import running as module
from vllm_dymoe.vllm_adapter import step as step_module
from vllm_dymoe.vllm_adapter.observers import Observer
from vllm_dymoe.vllm_adapter.step import RankLayer

LAYERS = [RankLayer(f"layers.{number}", number, Activation.SILU, None) for number in range(2)]


class Listener(Observer):
    def __init__(self, *, needs_inputs=False):
        self.needs_inputs = needs_inputs
        self.heard = []

    def see(self, routing):
        self.heard.append((routing.layer, routing.ids.clone(), routing.weights.clone(), len(routing.x)))


@pytest.fixture
def runtime(memory_store):
    return decided_runtime(memory_store, "50%")


def run(rank, seed, rows, tokens=None):
    """One step of requests of one token each; returns what its layers were given, and gave."""
    output = scheduled(*[1] * (rows if tokens is None else tokens))
    assert rank.begin_step(output)
    given = random_step(seed, rows, rank.runtime.experts)
    outputs = [rank.forward(layer, *given) for layer in LAYERS]
    rank.end_model(None, output, None)
    return given, outputs


def steps_of(runtime):
    return runtime.memory.device_side.table.counters[:, Counter.STEPS].tolist()


@pytest.mark.parametrize("system", ["exact", "dymoe"])
def test_which_steps_are_wide(memory_store, system, monkeypatch):
    """More rows than decode kernels are for, and prompts that count otherwise; drafted tokens are none."""
    runtime = decided_runtime(memory_store, "50%", system)
    speculating = rank_of(runtime, drafted=2)
    assert speculating._decode._asks == (system == "dymoe")
    context = SimpleNamespace(attn_metadata=None, additional_kwargs={})
    monkeypatch.setattr(step_module, "get_forward_context", lambda: context)
    for counts, drafted, narrow in (
        ((1, 1, 1), {}, True),
        ((3, 1, 3), {"a": 2, "c": 2}, True),
        ((4, 1), {}, system == "exact"),
        ((1,) * (DECODE_ROWS + 1), {}, False),
        ((1,) * DECODE_ROWS, {}, True),
    ):
        before = steps_of(runtime)
        output = scheduled(*counts, drafted=drafted)
        speculating.begin_step(output)
        for layer in LAYERS:
            speculating.forward(layer, *random_step(1, sum(counts), runtime.experts))
        speculating.end_model(None, output, None)
        assert steps_of(runtime) == [number + 1 for number in before]
        assert speculating._decode._wide is not narrow
        runtime.check_integrity()


def test_a_warm_up_changes_nothing(runtime):
    warming_up = rank_of(runtime)
    for served in (False, True):
        if served:
            run(warming_up, 2, 3)
            warming_up.step.end()
        stats, table = runtime.stats(), vars(runtime.memory.device_side.table)
        before = {name: tensor.clone() for name, tensor in table.items()}
        for rows in (1, DECODE_ROWS, DECODE_ROWS + 4):
            assert not warming_up.forward(LAYERS[0], *random_step(1, rows, runtime.experts)).any()
        assert all(torch.equal(before[name], table[name]) for name in before)
        assert runtime.stats() == stats


def test_observers_hear_of_a_step_when_it_has_run_unless_they_need_inputs(runtime):
    observed, hears, looks = rank_of(runtime), Listener(), Listener(needs_inputs=True)
    observed.observation.join(hears)
    observed.observation.join(looks)
    (_, weights, ids), _ = run(observed, 1, 4)
    assert [layer for layer, *_ in hears.heard] == [0, 1]
    for _, heard_ids, heard_weights, rows in hears.heard:
        assert torch.equal(heard_ids, ids)
        assert torch.equal(heard_weights, weights)
        assert rows == 4
    assert looks.heard == []
    observed.step.end()
    output = scheduled(20)
    observed.begin_step(output)
    observed.forward(LAYERS[0], *random_step(2, 20, runtime.experts))
    assert len(hears.heard) == 3
    assert len(looks.heard) == 1
    observed.end_model(None, output, None)
    assert len(hears.heard) == 3, "a wide step is heard of once"
    observed.observation.leave(hears)
    observed.step.end()
    run(observed, 3, 4)
    assert not runtime.memory.device_side.table.recording.any()


def test_behind_a_draft_with_experts_the_host_decides(runtime, memory_store):
    extended = rank_of(runtime)
    run(extended, 1, 3)
    extended.extend(make_runtime(memory_store))
    before = steps_of(runtime)
    run(extended, 2, 3)
    assert steps_of(runtime) == before
    assert sum(extended.runtime.stats().planned.values())


class Launches:
    name = "launches"

    def forward(self, table, layer, rows, decision, x, weights, ids, activation):
        assert decision.computed.shape == ids.shape
        return torch.empty_like(x)

    def wide_step(self, table, shape, activation):
        assert not shape.passes, "a graph has one group"
        return Wide(shape)


class Wide:
    def __init__(self, shape):
        self.shape = shape

    def plan(self, layer, x, weights, ids, rows, half, activation, marks):
        self._x = x

    def copy(self, group): ...

    compute = copy

    def finish(self):
        return torch.empty_like(self._x)


def captured(runtime, kernel, monkeypatch, expert_map=None, rows=8):
    """The operations of a layer's capture, traced with tensors that have no values."""
    monkeypatch.setattr(module, "is_captured", lambda x: True)
    experts = runtime.experts
    capturing = rank_of(runtime)
    with torch.device("meta"):
        table = Table.allocate(2, 6, rows=DECODE_ROWS, top_k=2, depth=1, device="meta")
        capturing._decode.path = DecodePath(experts, table, kernel, torch.device("meta"), Branch())
        x = torch.empty(rows, 64, dtype=torch.bfloat16)
        weights, ids = torch.empty(rows, 2), torch.empty(rows, 2, dtype=torch.int32)
        local = None if expert_map is None else torch.empty(len(expert_map), dtype=torch.int64)
    with NoHost(), Operations() as operations:
        out = capturing.forward(RankLayer("layers.1", 1, Activation.SILU, local), x, weights, ids)
    assert (out.shape, out.device.type) == (x.shape, "meta")
    return operations.names


def test_nothing_of_ours_stands_beside_the_launches_of_a_captured_layer(runtime, monkeypatch):
    for rows in (8, 40):
        assert captured(runtime, Launches(), monkeypatch, rows=rows) == ["empty_like"]
    shared = captured(runtime, Launches(), monkeypatch, expert_map=range(13))
    assert shared == ["_to_copy", "index", "empty_like"]
