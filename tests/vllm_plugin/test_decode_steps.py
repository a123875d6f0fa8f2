"""Steps that need no host: the code around them, of which none runs inside."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from tests.executor.device_planned import device_planned_server
from tests.executor.steps import forward, make_server, random_step, with_budget
from tests.operations import Operations
from tests.small_model import make_experts, make_store
from tests.support.faulty_store import FaultyStore
from tests.support.no_host import NoHost
from tests.vllm_plugin.steps import rank_of, scheduled
from vllm_dymoe.cache.device_table import DeviceFailures
from vllm_dymoe.cache.host_cache import join
from vllm_dymoe.executor.copy_branch import Branch
from vllm_dymoe.executor.small_batch import SmallBatches, StepMemory
from vllm_dymoe.kernels import Activation
from vllm_dymoe.planner.constants import SMALL_BATCH_ROWS
from vllm_dymoe.planner.routing import Phase
from vllm_dymoe.planner.rule import HIGH
from vllm_dymoe.planner.table import Counter, Table
from vllm_dymoe.policies.dynaexq import DynaExq
from vllm_dymoe.vllm_plugin import rank_server as module
from vllm_dymoe.vllm_plugin import step as step_module
from vllm_dymoe.vllm_plugin.decode_steps import DecodeSteps
from vllm_dymoe.vllm_plugin.expert_ids import bounded_map
from vllm_dymoe.vllm_plugin.failures import FailedStep
from vllm_dymoe.vllm_plugin.observers import Observer
from vllm_dymoe.vllm_plugin.step import RankLayer

LAYERS = [RankLayer(number, Activation.SILU, None) for number in range(2)]


class Listener(Observer):
    def __init__(self, *, needs_inputs=False, needs_all_inputs=False):
        self.needs_inputs, self.needs_all_inputs = needs_inputs, needs_all_inputs
        self.heard = []

    def see(self, routing):
        self.heard.append((routing.layer, routing.ids.clone(), routing.weights.clone(), len(routing.x)))


@pytest.fixture
def server(memory_store):
    return device_planned_server(memory_store, "50%")


def run(rank, seed, rows, tokens=None):
    """Run a step of requests with one token each; return its inputs and outputs."""
    output = scheduled(*[1] * (rows if tokens is None else tokens))
    assert rank.begin_step(output)
    given = random_step(seed, rows, rank.server.experts)
    outputs = [rank.forward(layer, *given) for layer in LAYERS]
    rank.end_model(None, output, None)
    rank.end_step(None)
    return given, outputs


def steps_of(server):
    return server.cache.device_table.table.counters[:, Counter.STEPS].tolist()


@pytest.mark.parametrize("policy", ["exact", "dymoe"])
def test_which_steps_are_wide(memory_store, policy, monkeypatch):
    """Too many rows make a large batch, and so do prompts that the policy measures.

    Drafted tokens are no prompts.
    """
    server = device_planned_server(memory_store, "50%", policy)
    speculating = rank_of(server, drafted=2)
    assert speculating._decode._asks == (policy == "dymoe")
    context = SimpleNamespace(attn_metadata=None, additional_kwargs={})
    monkeypatch.setattr(step_module, "get_forward_context", lambda: context)
    for counts, drafted, small in (
        ((1, 1, 1), {}, True),
        ((3, 1, 3), {"a": 2, "c": 2}, True),
        ((4, 1), {}, policy == "exact"),
        ((1,) * (SMALL_BATCH_ROWS + 1), {}, False),
        ((1,) * SMALL_BATCH_ROWS, {}, True),
    ):
        before = steps_of(server)
        output = scheduled(*counts, drafted=drafted)
        speculating.begin_step(output)
        for layer in LAYERS:
            speculating.forward(layer, *random_step(1, sum(counts), server.experts))
        speculating.end_model(None, output, None)
        assert steps_of(server) == [number + 1 for number in before]
        assert speculating._decode._large is not small
        server.check_integrity()


def test_without_overlap_every_step_is_wide(memory_store):
    rank = rank_of(device_planned_server(memory_store, "50%", "on-demand", low=0, policy_options={"overlap": False}))
    given, outputs = run(rank, 1, 2)
    assert rank._decode._large
    host = make_server(memory_store, "100%", "on-demand", low=0)
    assert all(torch.equal(out, forward(host, layer, *given)) for layer, out in enumerate(outputs))


def test_a_warm_up_changes_nothing(server):
    warming_up = rank_of(server)
    for served in (False, True):
        if served:
            run(warming_up, 2, 3)
            warming_up.step.end()
        stats, table = server.stats(), vars(server.cache.device_table.table)
        before = {name: tensor.clone() for name, tensor in table.items() if name != "planned"}
        for rows in (1, SMALL_BATCH_ROWS, SMALL_BATCH_ROWS + 4):
            assert not warming_up.forward(LAYERS[0], *random_step(1, rows, server.experts)).any()
        assert all(torch.equal(before[name], table[name]) for name in before)
        assert server.stats() == stats


def test_observers_hear_of_a_step_when_it_has_run_unless_they_need_inputs(server):
    observed, hears, looks = rank_of(server), Listener(), Listener(needs_inputs=True)
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
    observed.forward(LAYERS[0], *random_step(2, 20, server.experts))
    assert len(hears.heard) == 3
    assert len(looks.heard) == 1
    observed.end_model(None, output, None)
    assert len(hears.heard) == 3, "a large-batch step is heard of once"
    observed.observation.leave(hears)
    observed.step.end()
    run(observed, 3, 4)
    assert not server.cache.device_table.table.recording.any()


def test_while_an_observer_needs_all_inputs_every_step_is_wide(server, memory_store):
    observed, hears = rank_of(server), Listener()
    looks = Listener(needs_inputs=True, needs_all_inputs=True)
    for observer in (hears, looks):
        observed.observation.join(observer)
    given, outputs = run(observed, 1, 4)
    assert [heard[0] for heard in looks.heard] == [0, 1]
    assert all(torch.equal(heard[1], given[2]) and heard[3] == 4 for heard in looks.heard)
    assert len(hears.heard) == 2, "once"
    assert observed._decode._large
    host = make_server(memory_store, "100%", policy=server.policy)
    assert all(torch.equal(out, forward(host, layer, *given)) for layer, out in enumerate(outputs))
    observed.observation.leave(looks)
    observed.step.end()
    run(observed, 2, 4)
    assert not observed._decode._large
    assert len(hears.heard) == 4


def test_prompts_tell_dynaexq_what_its_layers_change(nested_store):
    """Small batches have no inputs that the host could read, so prompts must do."""
    server = device_planned_server(nested_store, "75%", DynaExq(window_s=0, window_uses=0.1), low=2)
    rank = rank_of(server)
    for seed in range(6):
        output = scheduled(100)
        rank.begin_step(output)
        for layer in LAYERS:
            x, weights, ids = random_step(seed + layer.position, 100, server.experts)
            rank.forward(layer, x, weights, ids)
        rank.end_model(None, output, None)
        rank.end_step(None)
    for _ in range(3):
        server.host_planned.begin_step(Phase.DECODE)
    assert server.host_planned.migration._changes is None


class Passes:
    """A model of two layers and a draft of one layer.

    The draft's layer runs once over the step's rows, then over one row for each request.
    """

    def __init__(self, server, plans_on_device):
        self.rank, self.plans_on_device, self.heard = rank_of(server), plans_on_device, Listener()
        self.rank.observation.join(self.heard)

    def step(self, seed, *tokens, spoil=lambda ids: ids):
        """Run one step; return the outputs of its layers and of the step."""
        rank, output, rows = self.rank, scheduled(*tokens), sum(tokens)
        rank.begin_step(output)
        given = random_step(seed, rows, rank.server.experts)
        outputs = [rank.forward(layer, *given) for layer in LAYERS]
        rank.end_model(None, output, None)
        draft = RankLayer(2, Activation.SILU, None)
        outputs.append(rank.forward(draft, *given))
        x, weights, ids = random_step(seed + 100, len(tokens), rank.server.experts)
        outputs.append(rank.forward(draft, x, weights, spoil(ids)))
        if self.plans_on_device and len(tokens) <= SMALL_BATCH_ROWS:  # as in a graph: not by way of the rank
            path = rank.server.small_batches
            path.tell(rows)
            outputs.append(path.forward(2, x, weights, ids, Activation.SILU))
        answer = ModelRunnerOutput(req_ids=[], req_id_to_index={})
        return outputs, rank.end_step(answer)


@pytest.mark.parametrize("policy", ["exact", "layer-prefetch", "duoserve", "dynaexq"])
def test_a_drafts_layers_are_further_rows_of_the_table(policy):
    low, budget = (2, "85%") if policy == "dynaexq" else (0, "40%")
    make = lambda: join(make_store(make_experts()), make_store(make_experts(layers=1)))  # noqa: E731
    device = Passes(device_planned_server(make(), budget, policy, low=low), True)
    host = Passes(make_server(make(), "100%" if low == 0 else budget, policy, low=low), False)
    assert device.rank.server.small_batches is not None
    kept = 0
    for seed, tokens in enumerate([(1, 1, 1), (5, 1), (30, 1, 1), (1,) * 20, (1, 1), (7,)] * 2):
        (got, answer), (want, _) = device.step(seed, *tokens), host.step(seed, *tokens)
        assert not isinstance(answer, FailedStep)
        if low == 0:
            assert all(map(torch.equal, got, want)), seed
            assert torch.equal(got[-1], want[3]), "a replay computes the rows of its batch"
        kept += int((device.rank.server.cache.device_table.table.precision[2] > 0).sum())
        device.rank.server.check_integrity()
    assert kept > 0 or policy in ("layer-prefetch", "duoserve")
    assert {layer for layer, *_ in device.heard.heard} == {0, 1}, "observers hear of the model's layers"


def test_a_step_fails_if_a_draft_chooses_an_expert_outside_the_model():
    store = join(make_store(make_experts()), make_store(make_experts(layers=1)))
    device = Passes(device_planned_server(store, "50%", low=0), True)
    assert not isinstance(device.step(1, 1, 1)[1], FailedStep)
    failed = device.step(2, 1, 1, spoil=lambda ids: ids.index_fill(1, torch.tensor(0), 77))[1]
    assert isinstance(failed, FailedStep)
    assert "MoE layer 2 (from 0) chose expert 77" in failed.failure
    assert not isinstance(device.step(3, 1, 1)[1], FailedStep)


class Launches:
    name = "launches"

    def forward(self, table, layer, rows, plan, x, weights, ids, activation, cpu_queue, **told):
        assert plan.computed.shape == ids.shape
        return torch.empty_like(x)

    def large_batch_step(self, table, shape, activation, kind):
        assert not shape.streamed_groups, "a graph has one group"
        return Wide(shape)


class Wide:
    def __init__(self, shape):
        self.shape = shape

    def plan(self, layer, x, weights, ids, rows, half, ahead, marks, global_ids):
        self._x = x

    def copy(self, group): ...

    compute = copy

    def finish(self):
        return torch.empty_like(self._x)


def captured(server, kernel, monkeypatch, expert_map=None, rows=8):
    """Return the operations of a captured layer, traced with tensors without data."""
    monkeypatch.setattr(module, "is_captured", lambda x: True)
    experts = server.experts
    capturing = rank_of(server)
    with torch.device("meta"):
        table = Table.allocate(2, 6, rows=SMALL_BATCH_ROWS, top_k=2, depth=1, device="meta")
        memory, slots = StepMemory(experts, table, torch.device("meta")), ({HIGH: [2, 2]}, {HIGH: 8})
        small_batches = SmallBatches(memory, kernel, Branch(), *slots)
        monkeypatch.setattr(DecodeSteps, "path", small_batches)
        x = torch.empty(rows, 64, dtype=torch.bfloat16)
        weights, ids = torch.empty(rows, 2), torch.empty(rows, 2, dtype=torch.int32)
        local = None if expert_map is None else torch.empty(len(expert_map), dtype=torch.int64)
    with NoHost(), Operations() as operations:
        out = capturing.forward(RankLayer(1, Activation.SILU, local), x, weights, ids)
    assert (out.shape, out.device.type) == (x.shape, "meta")
    return operations.names


def test_nothing_of_ours_stands_beside_the_launches_of_a_captured_layer(server, monkeypatch):
    for rows in (8, 40):
        assert captured(server, Launches(), monkeypatch, rows=rows) == ["empty_like"]
    shared = captured(server, Launches(), monkeypatch, expert_map=range(13))
    assert shared == ["clamp", "_to_copy", "index", "empty_like"]


@pytest.mark.parametrize("rows", [3, SMALL_BATCH_ROWS + 4])
@pytest.mark.parametrize("wrong", [65537, -2])
def test_a_step_with_an_expert_outside_the_model_fails_and_no_other(server, rows, wrong):
    rank = rank_of(server)
    rank.observation.join(Listener(needs_inputs=True))
    output = scheduled(*[1] * rows) if rows <= 3 else scheduled(rows)
    answer = ModelRunnerOutput(req_ids=[], req_id_to_index={})

    def step(change, layers=LAYERS):
        rank.begin_step(output)
        x, weights, ids = random_step(1, rows, server.experts)
        ids = ids.long()
        change(ids)
        for layer in layers:
            rank.forward(layer, x, weights, ids)
        return rank.end_model(None, output, answer)

    assert step(lambda ids: None) is answer
    failed = step(lambda ids: ids[-1, -1].fill_(wrong))
    assert isinstance(failed, FailedStep)
    assert f"expert {wrong}" in failed.failure
    assert step(lambda ids: None) is answer
    server.check_integrity()


@pytest.mark.parametrize("rows", [2, SMALL_BATCH_ROWS + 4])
def test_so_does_one_with_an_expert_that_cannot_be_read(memory_store, rows):
    store = FaultyStore(memory_store)
    server = device_planned_server(store, "50%", "exact", low=0)
    rank, output = rank_of(server), scheduled(rows)

    def step(seed):
        rank.begin_step(output)
        for layer in LAYERS:
            rank.forward(layer, *random_step(seed, rows, store.experts))
        return rank.end_model(None, output, ModelRunnerOutput(req_ids=[], req_id_to_index={}))

    assert not isinstance(step(1), FailedStep)
    store.action = lambda number, key: "fail"
    failed = step(2)
    assert isinstance(failed, FailedStep)
    assert "the disk is on fire" in failed.failure
    store.action = lambda number, key: None
    assert not isinstance(step(2), FailedStep)
    server.close()


class Traced(Observer):
    """Keeps what a trace would record."""

    needs_actions = True

    def __init__(self):
        self.heard = []

    def see(self, routing):
        self.heard.append([routing.layer, routing.global_ids.clone(), routing.weights.clone(), routing.actions.clone()])


@pytest.mark.parametrize("rows", [3, SMALL_BATCH_ROWS + 4])
def test_a_trace_of_a_rank_with_some_of_the_experts_is_a_cpus(memory_store, rows, tmp_path):
    """The router's own numbers of all experts, and what became of this rank's."""
    numbers = bounded_map(torch.tensor([-1, 0, 1, -1, 2, 3, -1, 4, 5, -1], dtype=torch.int32))
    layers = [replace(layer, expert_map=numbers) for layer in LAYERS]

    def heard(server):
        rank, traced = rank_of(server), Traced()
        rank.observation.join(traced)
        for seed in range(6):
            generator = torch.Generator().manual_seed(seed)
            ids = torch.rand(rows, len(numbers) - 3, generator=generator).topk(2).indices.int()
            x, weights, _ = random_step(seed, rows, server.experts)
            rank.begin_step(output := scheduled(*[1] * rows))
            for layer in layers:
                rank.forward(layer, x, weights, ids)
            rank.end_model(None, output, None)
            rank.end_step(None)
        return traced.heard

    given = {"policy": "exact", "low": 0, "trace": str(tmp_path)}
    device, host = (heard(make(memory_store, "50%", **given)) for make in (device_planned_server, with_budget))
    assert len(device) == len(host) == 12
    for ours, theirs in zip(device, host, strict=True):
        assert ours[0] == theirs[0]
        assert all(map(torch.equal, ours[1:], theirs[1:]))
    assert {*torch.cat([ids.flatten() for _, ids, *_ in device]).tolist()} == set(range(10))
    assert len({*torch.cat([actions.flatten() for *_, actions in device]).tolist()}) > 2


@pytest.mark.parametrize("rows", [3, SMALL_BATCH_ROWS + 4])
@pytest.mark.parametrize("wrong", [12, 13, 65537, -2, -13])
@pytest.mark.parametrize("on_device", [True, False])
def test_so_does_one_whose_experts_are_shared_out_among_ranks(memory_store, rows, wrong, on_device):
    """Wrong experts include the number of all experts, vLLM's place for padding."""
    server = device_planned_server(memory_store, "50%") if on_device else make_server(memory_store)
    rank, experts = rank_of(server), server.experts.num_experts
    numbers = bounded_map(torch.tensor([*range(experts), *[-1] * (12 - experts)], dtype=torch.int32))
    layers = [replace(layer, expert_map=numbers) for layer in LAYERS]
    output, answer = scheduled(rows), ModelRunnerOutput(req_ids=[], req_id_to_index={})

    def step(one):
        rank.begin_step(output)
        x, weights, ids = random_step(1, rows, server.experts)
        ids = ids.long()
        ids[-1, -1] = one
        for layer in layers:
            rank.forward(layer, x, weights, ids)
        return rank.end_model(None, output, answer)

    for one in (0, 11, -1):
        assert step(one) is answer, "one of this rank's, another's, and padding"
    failed = step(wrong)
    assert isinstance(failed, FailedStep)
    said = "expert 12 or a higher one" if wrong > 0 else "expert -2 or a lower one"
    assert said in failed.failure
    assert "there are 12" in failed.failure
    assert step(0) is answer
    server.check_integrity()


class Arriving:
    """The event of a copy to the host that is still on its way."""

    def __init__(self, on_host):
        self._copied, self._on_host = on_host.clone(), on_host
        on_host.fill_(-1)

    def synchronize(self):
        self._on_host.copy_(self._copied)


@pytest.mark.parametrize("on_its_way", [False, True])
def test_a_step_that_ends_late_fails_when_its_output_is_complete(server, on_its_way, monkeypatch):
    """vLLM begins the next step before this one has ended (asynchronous scheduling).

    What the device has met may arrive on the host after the step's tokens.
    """
    send = DeviceFailures.send

    def send_late(failures, step):
        send(failures, step)
        number, on_host, _ = failures._sent.pop()
        failures._sent.append((number, on_host, Arriving(on_host)))

    if on_its_way:
        monkeypatch.setattr(DeviceFailures, "send", send_late)
    rank, output, answers = rank_of(server), scheduled(1, 1), []

    class Later(AsyncModelRunnerOutput):
        def get_output(self):
            return ModelRunnerOutput(req_ids=[], req_id_to_index={})

    for number in range(3):
        rank.begin_step(output)
        x, weights, ids = random_step(number, 2, server.experts)
        if number == 1:
            ids[0, 0] = server.experts.num_experts
        for layer in LAYERS:
            rank.forward(layer, x, weights, ids)
        answers.append(rank.end_model(None, output, Later()))
    assert [isinstance(answer.get_output(), FailedStep) for answer in answers] == [False, True, False]
