"""The host waits once for the device before it enqueues a layer's experts.

It waits for the experts' numbers. Tensors that would be on a device belong to a class that records every operation
that needs their values on the host.
"""

from typing import ClassVar

import pytest
import torch

from tests.executor.steps import forward, make_server, random_step
from tests.prefetch.gates import random_gates
from tests.prefetch.made_up import trained_on_made_up
from tests.prefetch.streams import RecordedStream
from tests.small_model import make_experts, make_store
from tests.support.happens_before import History
from tests.support.recorded_device import RecordedStreams
from vllm_dymoe.cache.transfer.cuda import StreamDelivery
from vllm_dymoe.cache.transfer.engine import TransferEngine
from vllm_dymoe.experts.identity import ModelIdentity
from vllm_dymoe.planner.routing import Phase, PromptTokens, Routing
from vllm_dymoe.policies.duoserve import DuoServe
from vllm_dymoe.policies.dymoe import Dymoe
from vllm_dymoe.policies.exact import Exact
from vllm_dymoe.policies.firm import Firm
from vllm_dymoe.policies.layer_prefetch import LayerPrefetch
from vllm_dymoe.prefetch import Predictor, RoutedModel

LAYERS, TOP_K, HIDDEN = 4, 2, 64
EXPERTS = 6
STORE = make_store(make_experts(layers=LAYERS, num_experts=EXPERTS, hidden=HIDDEN))
# Operations that need a number from the device. Indexing with a mask needs the size of the result.
WAITS = {"tolist", "item", "cpu", "numpy", "nonzero", "bincount", "masked_select", "argwhere", "equal", "allclose"}
WAITS |= {"__bool__", "__int__", "__float__", "__index__"}


class OnDevice(torch.Tensor):
    """A tensor whose values only the device has, as have results computed from it."""

    log: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func == torch.Tensor.is_cpu.__get__:
            return False
        name = getattr(func, "__name__", str(func))
        mask = name in ("__getitem__", "__setitem__") and any(
            isinstance(index, torch.Tensor) and index.dtype is torch.bool
            for index in (args[1] if isinstance(args[1], tuple) else (args[1],))
        )
        if name in WAITS or "unique" in name or mask:
            cls.log.append(f"wait for {name}")
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result.as_subclass(torch.Tensor) if name == "cpu" else result


class Stream(RecordedStream):
    """The stream of predictions; its results are on the host after a wait."""

    def run(self, compute, inputs):
        return super().run(lambda *given: (part.as_subclass(torch.Tensor) for part in compute(*given)), inputs)

    def wait(self, event):
        super().wait(event)
        OnDevice.log.append("wait for a prediction")


@pytest.fixture(scope="module")
def predictor_file(tmp_path_factory):
    sizes = ModelIdentity("a model", "", LAYERS, EXPERTS, TOP_K, HIDDEN)
    return trained_on_made_up(sizes, tmp_path_factory.mktemp("predictor"))


def serve(policy, tokens, file=None, prompt=None, steps=6):
    """Return, for each layer, the waits for a device and the launches of experts."""
    gates, _ = random_gates(LAYERS, EXPERTS, HIDDEN)
    gates = [type(gate)(lambda x, gate=gate: gate.logits(x.float())) for gate in gates]
    model = RoutedModel(LAYERS, EXPERTS, TOP_K, gates, hidden=HIDDEN, predictor=file)
    predictor = policy.prefetch and policy.prefetch.make(model)
    if isinstance(predictor, Predictor):
        predictor._side_stream = Stream()
    streams = RecordedStreams(History(), lambda: None, lambda: True)
    engine = TransferEngine(StreamDelivery(STORE, streams), 1, eager=True)
    server = make_server(STORE, "50%", policy, predictor=predictor, engine=engine)
    server.kernel.begin = lambda *arguments: None
    server.kernel.compute = lambda *arguments: OnDevice.log.append("experts")
    layers = []
    for number in range(steps * LAYERS):
        x, weights, ids = (part.as_subclass(OnDevice) for part in random_step(number, tokens, STORE.experts))
        OnDevice.log = []
        phase = Phase.DECODE if prompt is None else Phase.PREFILL
        forward(server, number % LAYERS, x, weights, ids, phase=phase, prompt=prompt)
        layers.append(OnDevice.log)
    engine.close()
    return layers


def waits(layer):
    return layer[: layer.index("experts")]


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize(
    ("policy", "trained"),
    [
        (Exact(look_ahead=0), False),
        (Exact(), False),
        (Firm(), False),
        (DuoServe(), False),
        (LayerPrefetch(), False),
        (Exact(), True),
        (DuoServe(), True),
    ],
)
def test_the_host_waits_once_before_experts_are_enqueued(policy, trained, tokens, predictor_file):
    layers = serve(policy, tokens, predictor_file if trained else None)
    assert {len(waits(layer)) for layer in layers} == {1}, layers
    asked = sum("wait for a prediction" in layer for layer in layers)
    assert (asked > 0) == bool(trained or (policy.prefetch and policy.prefetch.needs_gates))


@pytest.mark.parametrize(("tokens", "prompts", "most"), [(1, 0, 2), (5, 0, 2), (5, 5, 2), (5, 3, 2)])
def test_a_policy_that_looks_at_weights_waits_once_more(tokens, prompts, most):
    """This holds for any number of tokens, in any phase."""
    prompt = None
    if prompts:
        rows = (torch.arange(tokens) < prompts).as_subclass(OnDevice)
        prompt = PromptTokens(rows, rows, prompts < tokens)
    layers = serve(Dymoe(retention=0.5), tokens, prompt=prompt)
    assert {len(waits(layer)) for layer in layers[1:]} <= {1, most}, layers
    assert max(len(waits(layer)) for layer in layers) == most


@pytest.mark.parametrize(
    "wait",
    [
        lambda t: t.tolist(),
        lambda t: t.sum().item(),
        lambda t: bool(t.any()),
        lambda t: t[t > 0],
        lambda t: t.flatten().unique(),
        lambda t: torch.unique_consecutive(t, return_counts=True),
        lambda t: torch.bincount(t.flatten()),
        lambda t: t.nonzero(),
        lambda t: t.cpu(),
    ],
)
def test_a_wait_would_be_noted(wait):
    OnDevice.log = []
    wait(torch.ones(2, 2, dtype=torch.int64).as_subclass(OnDevice) * 2)
    assert len(OnDevice.log) >= 1


def test_numbers_of_experts_and_which_weights_are_usable_come_in_one_copy():
    ids, weights = torch.tensor([[3, -1], [0, 5]]), torch.tensor([[0.5, float("nan")], [float("inf"), 0.5]])
    there = Routing(0, 1, torch.zeros(2, 8), ids.as_subclass(OnDevice), weights.as_subclass(OnDevice))
    here = Routing(0, 1, torch.zeros(2, 8), ids, weights)
    OnDevice.log = []
    assert there.host_ids.tolist() == here.host_ids.tolist() == ids.tolist()
    assert there.uses.tolist() == here.uses.tolist() == [0, 0, 0, 1, 0, 1]
    assert OnDevice.log == ["wait for cpu"]
