"""Steps on a CPU whose layers torch's operator runs without Python."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.executor.steps import kept_by, random_step, with_budget
from tests.support.faulty_store import FaultyStore
from tests.vllm_plugin.steps import rank_of, scheduled
from vllm_dymoe.cache.transfer import TransferError
from vllm_dymoe.kernels import Activation, native
from vllm_dymoe.vllm_plugin import moe_method
from vllm_dymoe.vllm_plugin.observers import Observer
from vllm_dymoe.vllm_plugin.step import RankLayer

pytestmark = pytest.mark.skipif(native.load() is None, reason="the native library was not built")

LAYERS = [RankLayer(number, Activation.SILU, None) for number in range(2)]
ROWS = (1, 1, 7, 1, 40, 3, 1)  # of the steps


class Rank:
    """A rank whose layers are called through torch's operator, as in a compiled model."""

    def __init__(self, monkeypatch, server, layers=LAYERS, observation=None):
        self.rank, self.server, self.layers = rank_of(server, observation=observation), server, layers
        self.python = []  # layers that Python ran, in order
        forward = self.rank.forward

        def noted(layer, *given):
            self.python.append(layer.position)
            return forward(layer, *given)

        monkeypatch.setattr(self.rank, "forward", noted)
        loading = SimpleNamespace(rank_server=self.rank)
        methods = {
            moe_method._context_key(layer.position): SimpleNamespace(loading=loading, layer=layer) for layer in layers
        }
        context = SimpleNamespace(no_compile_layers=methods)
        monkeypatch.setattr(moe_method, "get_forward_context", lambda: context)

    def step(self, given, tokens=None):
        """Run a step of requests with one token each, and return its layers' outputs."""
        output = scheduled(*[1] * (len(given[0]) if tokens is None else tokens))
        assert self.rank.begin_step(output)
        outputs = [torch.ops.vllm_dymoe.moe(*given, layer.position) for layer in self.layers]
        self.rank.end_native()
        self.failed = self.rank.failures.sentence
        self.rank.end_model(None, output, None)
        self.rank.end_step(None)
        return outputs


def in_python(server, given, tokens=None):
    """Run the same step with Python."""
    rank, output = rank_of(server), scheduled(*[1] * (len(given[0]) if tokens is None else tokens))
    rank.begin_step(output)
    rank.end_native()
    outputs = [rank.forward(layer, *given) for layer in LAYERS]
    rank.end_model(None, output, None)
    rank.end_step(None)
    return outputs


@pytest.mark.parametrize("misses", ["compute", "fetch"])
@pytest.mark.parametrize("budget", ["100%", "25%", "minimum"])
@pytest.mark.parametrize("policy", ["exact", "dymoe", "adaptive", "dynaexq"])
def test_native_steps_compute_decide_and_count_as_python_does(monkeypatch, nested_store, policy, budget, misses):
    options = {"misses": misses}
    if policy in ("adaptive", "dynaexq"):
        options["policy_options"] = {"high_set": "layer"}  # else Python measures the layers first
        if budget == "25%":
            budget = "75%"  # they keep every expert in some version
    ours, theirs = (with_budget(nested_store, budget, policy, **options) for _ in range(2))
    rank = Rank(monkeypatch, ours)
    for seed, rows in enumerate(ROWS):
        given = random_step(seed, rows, ours.experts)
        for got, want in zip(rank.step(given), in_python(theirs, given), strict=True):
            assert torch.equal(got, want)
    counts = [{name: n for name, n in one.stats().to_dict().items() if "seconds" not in name} for one in (ours, theirs)]
    assert counts[0] == counts[1]
    assert kept_by(ours) == kept_by(theirs)
    ours.check_integrity()
    if misses == "compute" and budget != "100%":
        assert len(rank.python) <= 5, "after the first step, only reads and larger scratch need Python"


def test_a_native_step_runs_no_python_of_ours(monkeypatch, memory_store):
    rank = Rank(monkeypatch, with_budget(memory_store, "25%", misses="compute"))
    given, calls = random_step(0, 1, rank.server.experts), []

    def seen(frame, event, argument):
        if event == "call" and "vllm_dymoe" in frame.f_code.co_filename:
            calls.append(frame.f_code.co_qualname)

    rank.step(given)
    rank.rank.begin_step(output := scheduled(1))
    sys.setprofile(seen)
    for layer in LAYERS:
        torch.ops.vllm_dymoe.moe(*given, layer.position)
    sys.setprofile(None)
    rank.rank.end_native()
    rank.rank.end_model(None, output, None)
    assert calls == []


def _wider(x, weights, ids):
    return x, weights, ids.long()


def _strided(x, weights, ids):
    return torch.stack([x, x], 1)[:, 0], weights, ids


def _sixteen_bits(x, weights, ids):
    return x, weights.bfloat16(), ids


@pytest.mark.parametrize(("changed", "by_python"), [(_wider, False), (_strided, True), (_sixteen_bits, True)])
def test_tensors_that_the_library_does_not_read_go_to_python(monkeypatch, memory_store, changed, by_python):
    ours, theirs = (with_budget(memory_store, "25%", misses="compute") for _ in range(2))
    rank, given = Rank(monkeypatch, ours), random_step(0, 3, ours.experts)
    rank.step(given), in_python(theirs, given)
    rank.python.clear()
    given = changed(*given)
    for got, want in zip(rank.step(given), in_python(theirs, given), strict=True):
        assert torch.equal(got, want)
    assert bool(rank.python) == by_python


def test_rows_behind_a_steps_tokens_are_zeros(monkeypatch, memory_store):
    ours, theirs = (with_budget(memory_store, "25%", misses="compute") for _ in range(2))
    rank, given = Rank(monkeypatch, ours), random_step(0, 5, ours.experts)
    for tokens in (5, 3):
        for got, want in zip(rank.step(given, tokens), in_python(theirs, given, tokens), strict=True):
            assert torch.equal(got, want)
            assert not got[tokens:].any()


def test_router_weights_may_multiply_the_inputs(monkeypatch, memory_store):
    layers = [replace(layer, weights_on_input=True) for layer in LAYERS]
    server = with_budget(memory_store, "25%", misses="compute")
    rank, given = Rank(monkeypatch, server, layers), random_step(0, 3, server.experts)
    first, second = rank.step(given), rank.step(given)
    assert all(map(torch.equal, first, second))
    assert rank.python == [0, 1], "the second step was native"
    plain = Rank(monkeypatch, with_budget(memory_store, "25%", misses="compute")).step(given)
    assert not torch.equal(first[0], plain[0])


def test_layers_with_two_activations_stay_with_python(monkeypatch, memory_store):
    layers = [LAYERS[0], replace(LAYERS[1], activation=Activation.GELU)]
    server = with_budget(memory_store, "25%", misses="compute")
    rank, given = Rank(monkeypatch, server, layers), random_step(0, 3, server.experts)
    outputs = [rank.step(given) for _ in range(3)]
    assert all(torch.equal(*pair) for later in outputs[1:] for pair in zip(outputs[0], later, strict=True))
    assert rank.python == [0, 1] * 3


def test_an_observer_sees_every_layer(monkeypatch, memory_store):
    class Listener(Observer):
        heard = 0

        def see(self, routing):
            self.heard += 1

    rank = Rank(monkeypatch, with_budget(memory_store, "25%", misses="compute"))
    given, listener = random_step(0, 1, rank.server.experts), Listener()
    rank.step(given)
    rank.rank.observation.join(listener)
    rank.step(given)
    assert listener.heard == len(LAYERS)


def test_an_expert_that_the_model_does_not_have_fails_the_step(monkeypatch, memory_store):
    rank = Rank(monkeypatch, with_budget(memory_store, "25%", misses="compute"))
    x, weights, ids = random_step(0, 1, rank.server.experts)
    rank.step((x, weights, ids))
    outputs = rank.step((x, weights, torch.full_like(ids, 10**6)))
    assert "chose expert 1000000" in rank.failed
    assert not any(out.any() for out in outputs)
    assert rank.step((x, weights, ids))[0].any(), "the next step is served"
    assert rank.failed is None


def test_a_read_that_fails_fails_only_its_step(monkeypatch, memory_store):
    failing = []
    store = FaultyStore(memory_store, lambda number, key: "fail" if failing else None)
    rank = Rank(monkeypatch, with_budget(store, "minimum", misses="fetch"))
    rank.step(random_step(0, 1, rank.server.experts))
    failing.append(True)
    rank.step(random_step(1, 1, rank.server.experts))
    assert rank.failed
    failing.clear()
    assert rank.step(random_step(1, 1, rank.server.experts))[0].any()


def test_an_error_outside_of_requests_ends_the_start_with_its_sentence(monkeypatch, memory_store):
    rank = Rank(monkeypatch, with_budget(memory_store, "25%", misses="compute"))

    def broken(*_):
        raise TransferError("expert 3 of layer 0 could not be read")

    monkeypatch.setattr(rank.rank, "forward", broken)
    with pytest.raises(RuntimeError, match="expert 3 of layer 0 could not be read"):
        torch.ops.vllm_dymoe.moe(*random_step(0, 1, rank.server.experts), 0)
