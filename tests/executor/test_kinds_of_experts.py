"""Unusual experts: without a gate, weighted before computation, or of a draft."""

from dataclasses import replace

import pytest
import torch

from tests.cache.store.stores import read, write
from tests.executor.device_planned import decode, device_planned_server, run_device_planned
from tests.executor.steps import BUDGETS, STEPS, ByNumber, equal, forward, make_server, random_step, run, with_budget
from tests.small_model import make_experts, make_store
from vllm_dymoe.cache.host_cache import join
from vllm_dymoe.experts.format import ModelExperts, SliceKey
from vllm_dymoe.kernels import Activation, Curve, expert_reference
from vllm_dymoe.planner.precision import Precision
from vllm_dymoe.planner.routing import Routing
from vllm_dymoe.policies.dymoe import Dymoe

RELU2 = Activation(Curve.RELU2, has_gate=False)


def without_gate(experts: ModelExperts) -> ModelExperts:
    return replace(experts, formats={bits: replace(fmt, has_gate=False) for bits, fmt in experts.formats.items()})


def reference(store, routing, activation):
    fmt, want = store.experts.formats[4], torch.zeros(routing.x.shape, dtype=torch.float64)
    for token, (x, ids, weights) in enumerate(zip(routing.x, routing.ids, routing.weights, strict=True)):
        for expert, weight in zip(ids.tolist(), weights.double(), strict=True):
            packed = fmt.view(read(store, SliceKey(routing.layer, expert, 4)))
            before, after = (weight, 1) if routing.weights_on_input else (1, weight)
            want[token] += after * expert_reference((x.double() * before)[None], *packed, activation)[0]
    return want


@pytest.mark.parametrize(
    ("activation", "told"),
    [
        (Activation.SILU, {}),
        (RELU2, {}),
        (Activation.SILU, {"weights_on_input": True}),
        (Activation(Curve.SWIGLU, limit=0.5), {}),
    ],
    ids=["usual", "without a gate", "weights on the input", "clamped"],
)
def test_no_budget_changes_a_bit_and_the_sum_is_right(activation, told):
    experts = make_experts()
    store = make_store(experts if activation.has_gate else without_gate(experts))
    want = run(with_budget(store, "100%"), STEPS, activation, **told)
    for budget in BUDGETS[1:]:
        server = with_budget(store, budget, ByNumber(low=frozenset({0, 3})) if budget == "50%" else None)
        got = run(server, STEPS, activation, **told)
        if budget == "50%":  # another precision
            continue
        assert equal(want, got), budget
    for budget in BUDGETS:
        server = device_planned_server(store, budget)
        assert equal(want, run_device_planned(server, STEPS, activation, **told)), budget
    for (seed, layer, tokens), got in zip(STEPS, want, strict=True):
        x, weights, ids = random_step(seed, tokens, experts)
        right = reference(store, Routing(layer, 2, x, ids, weights, **told), activation)
        # The tolerance is bf16's: rounding the input's product, the inner activation, each expert's output and the sum.
        assert (got.double() - right).norm() / right.norm() < 1e-2


@pytest.mark.parametrize("skipped_weights", ["keep", "renormalize"])
@pytest.mark.parametrize("low", [0, 2])
def test_a_device_plans_weights_on_inputs_as_the_host_does(low, skipped_weights):
    """The router's weights choose precisions, although outputs weigh 1.

    This also holds where experts are skipped.
    """
    chosen = {"retention": 0.5, "high_by": "depth", "reuse_high": False, "skipped_weights": skipped_weights}
    store, told = make_store(make_experts(num_experts=8, top_k=3)), {"weights_on_input": True}
    want = run(make_server(store, "100%", Dymoe(**chosen), low=low), STEPS, **told)
    for budget in ("50%", "minimum"):
        server = device_planned_server(store, budget, Dymoe(**chosen), low=low)
        assert equal(want, run_device_planned(server, STEPS, **told)), budget
    unscaled = run(make_server(store, "100%", Dymoe(**chosen), low=low), STEPS)
    assert not any(map(torch.equal, want, unscaled))


@pytest.mark.parametrize("top_k", [1, 3])
def test_the_cpu_worker_of_a_device_multiplies_inputs_as_the_device_does(top_k):
    """In one step after another that does not, whose rows are in the same entries."""
    store = make_store(make_experts(num_experts=8, top_k=top_k))
    server = device_planned_server(store, "minimum", low=0, misses="compute")
    host = make_server(store, low=0)
    for number, (seed, layer, tokens) in enumerate(STEPS):
        told = {"weights_on_input": number % 3 > 0}
        given = random_step(seed, min(tokens, 16), store.experts)
        assert torch.equal(decode(server, layer, *given, **told), forward(host, layer, *given, **told))
    assert server.stats().cpu_executed > 10
    server.close()


@pytest.mark.parametrize("in_files", [False, True])
def test_a_drafts_layers_lie_behind_the_models_and_change_none_of_its_bits(tmp_path, in_files):
    """A draft's layers are numbered after the model's, and experts keep their owners.

    In the checkpoint a draft layer has the index of a model layer.
    """
    model, draft = make_experts(), make_experts(layers=1)
    parts = [write(tmp_path / name, e) for name, e in (("model", model), ("draft", draft))] if in_files else None
    alone = run(make_server(make_store(model)), STEPS)
    store = join(*(parts or (make_store(model), different(draft))))
    assert (store.experts.layers, store.experts.draft_layers) == ((1, 2, 4), 1)
    server = with_budget(store, "30%")
    together = []
    for seed, layer, tokens in STEPS:
        x, weights, ids = random_step(seed, tokens, server.experts)
        together.append(server.host_planned.forward(Routing(layer, 2, x, ids, weights), Activation.SILU))
        drafted = Routing(2, 2, x, ids, weights)
        got = server.host_planned.forward(drafted, Activation.SILU)
        right = reference(store, drafted, Activation.SILU)
        assert (got.double() - right).norm() / right.norm() < 1e-2
    server.check_integrity()
    assert equal(alone, together)
    server.close()


def different(experts):
    store = make_store(experts)
    packed = store.packed(SliceKey(0, 0, 4))
    packed.copy_(store.packed(SliceKey(0, 1, 4)).clone())
    return store


def test_a_draft_changes_no_precision_of_the_model():
    policy, experts = Dymoe(), make_experts(layers=5)
    want = policy.precision.shares(4, experts.top_k)
    shares = policy.precision.all_shares(replace(experts, draft_layers=1))
    assert set(want) == {Precision.HIGH, Precision.LOW}
    for precision in want:
        assert shares[precision] == [*want[precision], want[precision][-1]]
    assert policy.precision.schedule.ratio(4, 4) == policy.precision.schedule.ratio(3, 4)


def test_a_server_makes_room_for_one_with_more_layers():
    first = make_server(make_store(make_experts()))
    held = first.cache
    first.close(keep_store=True)
    store = first.store
    assert not held.pools
    assert run(make_server(store), STEPS)
