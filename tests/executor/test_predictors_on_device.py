"""Gates and trained networks that predict experts in device-planned steps."""

from dataclasses import replace
from functools import cache, cached_property

import pytest
import torch

from tests.executor.device_planned import check_device_planned, decode, device_planned_server, run_large_batch
from tests.executor.steps import forward, make_server
from tests.executor.test_host_syncs import OnDevice
from tests.prefetch.gates import random_gates
from tests.small_model import make_experts, make_store
from vllm_dymoe.executor.plain_kernels import PlainKernels
from vllm_dymoe.experts.identity import ModelIdentity
from vllm_dymoe.planner.constants import SMALL_BATCH_ROWS
from vllm_dymoe.planner.routing import Routing
from vllm_dymoe.policies.duoserve import DuoServe
from vllm_dymoe.policies.dymoe import Dymoe
from vllm_dymoe.policies.exact import Exact
from vllm_dymoe.policies.firm import Firm
from vllm_dymoe.prefetch import Measured, RoutedModel, TrainedPredictor
from vllm_dymoe.prefetch.expert_mlp import ARCHITECTURES, Architecture, ExpertMLP, States
from vllm_dymoe.prefetch.folded import fold
from vllm_dymoe.prefetch.gate import weights_of
from vllm_dymoe.prefetch.linear import ask_next_gates, make_network
from vllm_dymoe.prefetch.meeting_of_layers import MeetingOfLayers
from vllm_dymoe.prefetch.next_gate import NextGate
from vllm_dymoe.prefetch.pace import StepPace
from vllm_dymoe.prefetch.tuner import Heop, Setting
from vllm_dymoe.server import expert_server

CPU = torch.device("cpu")
LAYERS, EXPERTS = 5, 16
STORE = make_store(make_experts(layers=LAYERS, num_experts=EXPERTS))
NESTED = make_store(make_experts(layers=LAYERS, num_experts=EXPERTS, nested=True))
SHAPE = STORE.experts
HIDDEN = SHAPE.formats[4].hidden
GATES, _ = random_gates(LAYERS, EXPERTS, HIDDEN)
for gate in GATES:
    gate.logits.keywords["weight"] /= HIDDEN**0.5
SIZES = ModelIdentity("", "", LAYERS, EXPERTS, SHAPE.top_k, HIDDEN)
TOKENS = 1, 1, 2, 20, 1, 16, 3, 1, 1, 1


class Steady(Exact):
    """A policy that prefetches in every step, whatever time that takes."""

    def staging_slots(self, slots):
        return min(8, slots)

    @cached_property
    def prefetch(self):
        found = super().prefetch
        return found and replace(found, paced=False)


def routed_steps(tokens=TOKENS, seed=0):
    """Return steps (layer, x, weights, ids) whose routers agree from layer to layer.

    They choose by a residual stream that changes little.
    """
    generator, steps = torch.Generator().manual_seed(seed), []
    for count in tokens:
        x = torch.randn(count, HIDDEN, generator=generator)
        for layer in range(LAYERS):
            x = x + 0.3 * torch.randn(count, HIDDEN, generator=generator)
            given = x.to(torch.bfloat16)
            weights, ids = GATES[layer].scores(given.float()).topk(SHAPE.top_k)
            steps.append((layer, given, weights / weights.sum(1, keepdim=True), ids.int()))
    return steps


def few():
    """Return only small batches."""
    return [step for step in routed_steps() if len(step[1]) <= SMALL_BATCH_ROWS]


def in_float(gate):
    return type(gate)(lambda x: gate.logits(x.float()))


FLOATS = [in_float(gate) for gate in GATES]


@cache
def network_of(kind):
    if kind in ("linear+input", "far"):
        network = make_network(SIZES, 1 + (kind == "far"), CPU, torch.float32)
        ask_next_gates(network, weights_of(GATES, HIDDEN, CPU), SIZES.top_k)
        return network
    torch.manual_seed(0)
    architecture = Architecture((32,)) if kind == "layers" else ARCHITECTURES[kind]
    popularity = torch.rand(LAYERS, EXPERTS)
    return fold(ExpertMLP(States(SIZES, architecture, popularity, torch.rand(LAYERS - 1, EXPERTS, EXPERTS))).eval())


MAKES = {
    "next gate": lambda: NextGate(FLOATS, SHAPE.top_k),
    "next gates": lambda: NextGate(FLOATS, SHAPE.top_k, 2),
    "linear+input, far": lambda: TrainedPredictor(network_of("far"), SHAPE.top_k),
    "voting": lambda: MeetingOfLayers(FLOATS, 4, 2),
    "linear+input": lambda: TrainedPredictor(network_of("linear+input"), SHAPE.top_k),
    "linear": lambda: TrainedPredictor(network_of("linear"), SHAPE.top_k),
    "layers": lambda: TrainedPredictor(network_of("layers"), SHAPE.top_k),
    "paper-shared": lambda: TrainedPredictor(network_of("paper-shared"), SHAPE.top_k),
}


def served(server, steps):
    outputs = []
    for layer, *given in steps:
        run = decode if len(given[0]) <= SMALL_BATCH_ROWS else run_large_batch
        outputs.append(run(server, layer, *given))
        check_device_planned(server)
    return outputs


@pytest.fixture(scope="module")
def exact():
    server = make_server(STORE, "100%", "exact", low=0)
    return [forward(server, *step) for step in routed_steps()]


@pytest.mark.parametrize("budget", ["100%", "50%", "25%", "minimum"])
@pytest.mark.parametrize("kind", MAKES)
def test_no_prediction_changes_a_bit(kind, budget, exact):
    server = device_planned_server(STORE, budget, Steady(), low=0, predictor=MAKES[kind]())
    assert all(map(torch.equal, served(server, routed_steps()), exact))
    assert server.budget.reserved <= server.budget.limit


@pytest.mark.parametrize("kind", [kind for kind in MAKES if kind not in ("next gates", "linear+input, far")])
def test_the_device_names_what_the_host_would_name(kind):
    """The counts are those of the same predictor on the host.

    They are counts of predicted, needed and correct experts.
    """
    server = device_planned_server(STORE, "25%", Steady(), low=0, predictor=MAKES[kind]())
    steps = few()
    host = Measured(MAKES[kind]())
    for layer, x, weights, ids in steps:
        host.observe(Routing(layer, LAYERS, x, ids, weights))
        host.predict(layer)
    served(server, steps)
    stats = server.stats()
    assert stats.predictions == vars(host.stats)
    assert stats.predictions["correct"] > 0
    assert stats.prefetches["useful"] > 0
    assert stats.bytes_moved["prefetch"] > 0
    assert stats.predictor_bytes == server.small_batches.memory.predictor.nbytes > 0
    server.reset_stats()
    assert sum(server.stats().predictions.values()) == 0
    served(server, steps[:LAYERS])
    assert 0 < server.stats().predictions["needed"] <= LAYERS * SHAPE.top_k


@pytest.mark.parametrize("kind", ["next gate", "linear+input"])
def test_more_arrives_in_time_by_looking_two_layers_ahead(kind):
    """Each layer's experts are predicted twice, and all that have a slot arrive."""
    useful = []
    for other in (kind, {"next gate": "next gates", "linear+input": "linear+input, far"}[kind]):
        server = device_planned_server(STORE, "25%", Steady(), low=0, predictor=MAKES[other]())
        assert server.small_batches.memory.predictor.look_ahead == 1 + (other != kind)
        served(server, few())
        useful.append(server.stats().prefetches["useful"])
    assert useful[1] > useful[0]


def test_the_next_gate_is_mostly_right():
    server = device_planned_server(STORE, "25%", Steady(), low=0, predictor=MAKES["next gate"]())
    served(server, routed_steps())
    found = server.stats().predictions
    assert found["correct"] / found["needed"] > 0.7


def test_a_graph_that_was_captured_with_all_resident_prefetches_after_a_resize():
    server, decoded = device_planned_server(STORE, "100%", Steady(), low=0, predictor=MAKES["next gate"]()), few()
    memory, prefetch = server.small_batches.memory, server.small_batches.prefetch
    assert prefetch is not None, "a capture would leave the branch out"
    assert not prefetch.has_slots
    expected = served(server, decoded)
    assert server.stats().bytes_moved["prefetch"] == 0
    server.resize("25%")
    assert server.small_batches.memory is memory
    assert memory.table.prefetch_slots.any()
    assert all(map(torch.equal, served(server, decoded), expected))
    assert server.stats().prefetches["useful"] > 0


def test_a_predictor_that_is_dropped_fetches_nothing_more(exact):
    server = device_planned_server(STORE, "25%", Steady(), low=0, predictor=MAKES["next gate"]())
    server.drop_predictor()
    served(server, few())
    assert server.stats().bytes_moved["prefetch"] == 0
    assert all(map(torch.equal, served(server, routed_steps()), exact))
    assert server.small_batches.prefetch is not None, "graphs still have the branch"


@pytest.mark.parametrize(("options", "kind"), [({}, "fetch"), ({"misses": "compute"}, "compute")])
def test_slices_of_nested_versions_are_fetched(options, kind):
    """At two precisions, an expert's base may be resident without its residual slice."""
    policy = Dymoe(retention=0.5, high_by="depth", reuse_high=False)
    want = make_server(NESTED, "100%", policy)
    expected = [forward(want, *step) for step in routed_steps()]
    server = device_planned_server(NESTED, "40%", policy, predictor=MAKES["next gate"](), **options)
    assert server.cache.nested
    assert all(map(torch.equal, served(server, routed_steps()), expected))
    assert server.stats().prefetches["useful"] > 0
    server.cpu_execution.close()


def test_heop_moves_k_and_p_between_steps():
    start, largest = Setting(3, 1), Setting(6, 3)
    tuner = Heop(LAYERS, start, largest, update_every=2, rounds=4)
    predictor = MeetingOfLayers(FLOATS, *start, tuner, hidden=HIDDEN)
    server = device_planned_server(STORE, "25%", Firm(), low=0, predictor=predictor)
    asked, settings = server.small_batches.memory.predictor._asked, []
    for seed in range(40):
        server.small_batches.begin_step(1, large=False)
        served(server, routed_steps((1,), seed))
        settings.append(tuple(map(tuple, asked.tolist())))
    assert settings[0] == ((3, 1),) * LAYERS
    assert len(set(settings)) > 3
    assert tuner.settled
    assert settings[-1] == tuple(map(tuple, map(tuner.setting, range(LAYERS))))
    server.resize("50%")
    assert not any(group.fixed for group in tuner._groups), "hits are others from now on"


def test_a_predictor_is_made_where_it_is_asked_and_is_in_the_budget():
    told = []

    def make(on_device):
        told.append(on_device)
        return MAKES["linear+input"]()

    assert make_server(STORE, "50%", "exact", low=0, predictor=make).predictor is None
    assert told == [], "nobody asks it"
    server = device_planned_server(STORE, "50%", "exact", low=0, predictor=make)
    assert told == [True]
    plain = device_planned_server(STORE, "50%", "exact", low=0)
    names, listed = server.small_batches.memory.predictor, server.small_batches.memory.listed
    added = names.nbytes + sum(tensor.nbytes for tensor in vars(listed).values())
    added -= sum(tensor.nbytes for tensor in vars(plain.small_batches.memory.listed).values())
    assert names.nbytes > network_of("linear+input").nbytes
    assert server.overhead - plain.overhead == added
    assert server.budget.limit - plain.budget.limit == added


def test_steps_that_do_not_pay_are_dropped_between_steps(monkeypatch):
    """On this test's clock, a step with prefetch takes longer."""
    now = [0.0]
    monkeypatch.setattr(expert_server, "StepPace", lambda: StepPace(lambda: now[0]))
    server = device_planned_server(STORE, "25%", DuoServe(), low=0, predictor=MAKES["next gate"]())
    table, acted = server.small_batches.table, []
    for _ in range(80):
        server.small_batches.begin_step(1, large=False)
        acted.append(bool(table.prefetch_slots.any()))
        now[0] += 1.1 if acted[-1] else 1.0
    assert acted[:16] == [True] * 16
    assert sum(acted[40:]) < 20
    assert server.stats().prefetch_interval["decode"] > 1
    assert server.stats().resident_experts["high"] == 0


@pytest.mark.parametrize("kind", MAKES)
def test_no_predictor_waits_for_the_device(kind, monkeypatch):
    """Launches do nothing here, and only the device has the numbers."""
    nothing = {"forward": lambda self, table, layer, rows, plan, x, *_, **__: x}
    nothing |= dict.fromkeys(("judge_predicted", "list_predicted", "copy_predicted"), lambda *_: None)
    for name, does in nothing.items():
        monkeypatch.setattr(PlainKernels, name, does)
    monkeypatch.setattr("vllm_dymoe.prefetch.on_device.name_experts", lambda *_: None)
    server = device_planned_server(STORE, "50%", Steady(), low=0, predictor=MAKES[kind]())
    OnDevice.log = []
    for layer, *given in routed_steps((3,)):
        decode(server, layer, *(part.as_subclass(OnDevice) for part in given))
    assert OnDevice.log == []


def test_a_policy_with_gates_is_made_from_a_model():
    """A server makes it like this: from the policy, with the gates of a model."""
    model = RoutedModel(LAYERS, EXPERTS, SHAPE.top_k, gates=FLOATS, hidden=HIDDEN)
    for policy in (Exact(), Firm(), Dymoe(retention=1)):
        server = device_planned_server(STORE, "25%", policy, low=0, predictor=policy.prefetch.make(model))
        served(server, routed_steps())
        assert server.stats().predictions["correct"] > 0, policy.name
