"""Each statistic of a trace, compared with the plainest way to count it."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trace.test_trace import make_trace
from vllm_dymoe.experts.identity import ModelIdentity
from vllm_dymoe.trace import statistics

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
