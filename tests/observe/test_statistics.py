"""Each number that a trace shows, against the plainest way to count it."""

from collections import OrderedDict
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.observe.test_trace import make_trace
from vllm_dymoe.observe import statistics
from vllm_dymoe.observe.synthetic import synthetic_trace
from vllm_dymoe.residency.identity import ModelIdentity

SMALL = ModelIdentity("small", "synthetic", num_layers=4, num_experts=12, top_k=3, hidden=6)
traces = st.builds(
    make_trace,
    st.builds(
        ModelIdentity, st.just("m"), st.just("f"), st.integers(1, 4), st.integers(3, 9), st.integers(1, 3), st.just(4)
    ),
    tokens=st.integers(1, 30),
    seed=st.integers(0, 999),
)
slow = settings(deadline=None, max_examples=30)


def every_choice(trace):
    for token in range(trace.num_tokens):
        for layer in range(trace.header.num_layers):
            yield token, layer, trace.experts[token, layer].tolist()


@slow
@given(traces)
def test_popularity_is_equation_2(trace):
    counts = torch.zeros(trace.header.num_layers, trace.header.num_experts)
    for _, layer, chosen in every_choice(trace):
        for expert in chosen:
            counts[layer, expert] += 1
    assert torch.equal(statistics.load(trace), counts.double())
    want = counts / counts.sum(1, keepdim=True)
    assert torch.allclose(statistics.popularity(trace).float(), want)


@slow
@given(traces)
def test_affinity_is_equation_3(trace):
    header = trace.header
    counts = torch.zeros(header.num_layers - 1, header.num_experts, header.num_experts)
    for token, layer, chosen in every_choice(trace):
        if layer + 1 < header.num_layers:
            for here in chosen:
                for there in trace.experts[token, layer + 1].tolist():
                    counts[layer, here, there] += 1
    want = counts / counts.sum(2, keepdim=True).clamp(min=1)
    assert torch.allclose(statistics.affinity(trace).float(), want)


@slow
@given(traces)
def test_reuse_is_counted_between_neighbours_only(trace):
    same = total = 0
    for rows in trace.by_request():
        for before, now in zip(rows.tolist(), rows.tolist()[1:], strict=False):
            if trace.position[now] == trace.position[before] + 1:
                total += trace.header.top_k
                own, other = trace.experts[now, 0].tolist(), trace.experts[before, 0].tolist()
                same += len(set(own) & set(other))
    got = statistics.reuse(trace)[0]
    assert got.isnan() if not total else got == pytest.approx(same / total)


def simulated_hits(trace, layer, slots):
    """An LRU cache, as simply as it can be written."""
    cache, hits, uses = OrderedDict(), 0, 0
    for rows in trace.by_request():
        for row in rows.tolist():
            for expert in trace.experts[row, layer].tolist():
                uses += 1
                if expert in cache:
                    hits += 1
                    cache.move_to_end(expert)
                else:
                    if len(cache) == slots:
                        cache.popitem(last=False)
                    cache[expert] = None
    return hits / uses


@slow
@given(traces)
def test_one_pass_tells_the_hits_of_every_cache(trace):
    rates = statistics.lru_hit_rates(trace)
    for layer in range(trace.header.num_layers):
        for slots in range(1, trace.header.num_experts + 1):
            assert rates[layer, slots - 1] == pytest.approx(simulated_hits(trace, layer, slots))


def chain(first, request):
    """Tokens whose experts [tokens, 3] lead to those five farther on in the next layer."""
    experts = torch.stack([(first + 5 * layer) % 12 for layer in range(4)], 1)
    trace = make_trace(SMALL, tokens=len(first))
    return replace(trace, experts=experts.to(trace.experts.dtype), request=request.int())


def test_affinity_foresees_what_follows_and_popularity_does_not():
    first = torch.rand(600, 12, generator=torch.Generator().manual_seed(0)).topk(3).indices
    by_rows, by_popularity = statistics.foreseen_by_affinity(chain(first, torch.arange(600) % 12))
    assert by_rows.min() > 0.8
    assert by_popularity.max() < 0.45
    skewed = synthetic_trace(SMALL, requests=12, prompt=0, decode=60, skew=3, locality=0)
    by_rows, by_popularity = statistics.foreseen_by_affinity(skewed)
    assert by_popularity.min() > 0.6
    assert (by_rows - by_popularity).abs().max() < 0.15


def test_what_is_foreseen_was_not_counted_before():
    """Every request has experts of its own: what was learned of the others says nothing."""
    request = torch.arange(40) % 2
    trace = chain(torch.arange(3) + 6 * request[:, None], request)
    assert statistics.foreseen_by_affinity(trace)[1].max() == 0
    assert statistics.foreseen_by_affinity(trace.select(request == 0))[1].min() == 1


def test_reuse_by_chance_is_what_independent_tokens_have():
    trace = synthetic_trace(SMALL, requests=20, prompt=0, decode=200, skew=1, locality=0)
    assert torch.allclose(statistics.reuse(trace), statistics.reuse_by_chance(trace), atol=0.03)


def test_similarity_of_layers_is_the_cosine_of_their_inputs():
    trace = make_trace(SMALL, tokens=5, inputs=True)
    means = statistics.activation_similarity(trace)
    for layer in range(3):
        cosines = []
        for token in range(5):
            now, then = trace.router_inputs[token, layer].float(), trace.router_inputs[token, layer + 1].float()
            cosines.append(float(now @ then / now.norm() / then.norm()))
        assert means[layer] == pytest.approx(sum(cosines) / 5, abs=1e-3)
    assert statistics.activation_similarity(make_trace()) is None


def test_next_gates_are_compared_with_what_was_chosen():
    trace = make_trace(SMALL, tokens=6, inputs=True)
    assert statistics.next_gate_accuracy(trace).tolist() == [1, 1, 1]
    half = trace.next_gate.clone()
    for token in range(6):
        absent = sorted(set(range(12)) - set(trace.experts[token, 2].tolist()))
        half[token, 1, 1:] = torch.tensor(absent[:2])
    assert statistics.next_gate_accuracy(replace(trace, next_gate=half)).tolist() == pytest.approx([1, 1 / 3, 1])
    assert statistics.next_gate_accuracy(make_trace()) is None
