"""Predictors on a side stream predict what they predict inline.

They read the layer's inputs once.
"""

from itertools import pairwise

import pytest
import torch

from tests.prefetch.gates import random_gates, random_inputs
from tests.prefetch.streams import RecordedStream
from vllm_dymoe.planner.routing import Phase, Routing
from vllm_dymoe.prefetch import TrainedPredictor
from vllm_dymoe.prefetch.folded import FoldedMLP
from vllm_dymoe.prefetch.meeting_of_layers import MeetingOfLayers
from vllm_dymoe.prefetch.next_gate import NextGate
from vllm_dymoe.prefetch.side_stream import MOST_ROWS, Inline

LAYERS, EXPERTS, TOP_K, HIDDEN = 4, 8, 2, 16
GATES, _ = random_gates(LAYERS, EXPERTS, HIDDEN)
PREDICTORS = {
    "gate": lambda stream: NextGate(GATES, TOP_K, layers=2, side_stream=stream),
    "meeting of one": lambda stream: MeetingOfLayers(GATES, 5, 1, side_stream=stream),
    "meeting of three": lambda stream: MeetingOfLayers(GATES, 5, 3, side_stream=stream),
    "network": lambda stream: TrainedPredictor(random_network(2), TOP_K, stream),
}


def random_network(history):
    generator = torch.Generator().manual_seed(history)
    sizes = (3, history * EXPERTS, 12), (3, HIDDEN, 12), (3, 12, EXPERTS), (3, EXPERTS), (LAYERS, EXPERTS)
    names = "tables", "gates", "matrix.0", "bias.0", "popularity"
    return FoldedMLP({name: torch.randn(size, generator=generator) for name, size in zip(names, sizes, strict=True)})


def observe(predictor, layer, seed, tokens, phase):
    """Observe a layer's routing; return its tensors, which the test overwrites later."""
    x = random_inputs(1, tokens, HIDDEN, 10 * seed + layer)[0] + 2 * random_inputs(1, tokens, HIDDEN, seed)[0]
    ids = torch.randint(0, EXPERTS, (tokens, TOP_K), generator=torch.Generator().manual_seed(10 * seed + layer))
    predictor.observe(Routing(layer, LAYERS, x, ids, torch.ones(tokens, TOP_K), phase))
    return x, ids


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize(
    "phases", [[Phase.DECODE] * 3, [Phase.PREFILL] * 3, [Phase.DECODE, Phase.PREFILL] * 2], ids=str
)
@pytest.mark.parametrize("name", PREDICTORS)
def test_a_side_stream_changes_no_answer(name, phases, tokens):
    """A step that ended in its first layer leaves a prediction that nobody reads."""
    stream, named = RecordedStream(), []
    inline, later = PREDICTORS[name](Inline()), PREDICTORS[name](stream)
    assert (inline.answers_later, later.answers_later) == (False, True)
    for seed, (broken, phase) in enumerate(pairwise(phases)):
        observe(later, 0, 100 + seed, tokens, broken)
        later.begin(0)
        for layer in range(LAYERS):
            observe(inline, layer, seed, tokens, phase)
            waits, copies = stream.waits, len(stream.copies)
            given = observe(later, layer, seed, tokens, phase)
            assert len(stream.copies) == copies, "no answer has been asked for yet"
            later.begin(layer)
            for tensor in given:
                tensor.fill_(torch.nan if tensor.is_floating_point() else 0)
            assert stream.waits == waits
            named.append(inline.predict(layer))
            assert later.predict(layer) == named[-1]
            if name == "gate":
                assert later.predict(layer) == [], "it is said once"
    assert any(named)


@pytest.mark.parametrize("kind", [NextGate, MeetingOfLayers])
def test_copies_of_a_prompts_inputs_are_what_the_budget_has_for_them(kind):
    hidden, tokens = 5, 3 * MOST_ROWS + 7
    gates, _ = random_gates(3, 8, hidden)
    stream = RecordedStream()
    how = {"top_k": 2} if kind is NextGate else {"k": 2, "p": 3}
    predictor = kind(gates, side_stream=stream, hidden=hidden, **how)
    for layer in range(2):
        x = torch.randn(tokens, hidden)
        predictor.observe(Routing(layer, 3, x, torch.zeros(0, 0).int(), torch.zeros(0, 0), Phase.PREFILL))
        predictor.begin(layer)
    copies = [tensor for copies in stream.copies for tensor in copies[:1]][-1:] or list(predictor._inputs)
    taken = sum(2 * tensor.numel() for tensor in copies)  # copies have 16 bits
    assert 0 < taken <= predictor.nbytes < 2 * 3 * tokens * hidden
    assert kind(gates, hidden=hidden, **how).nbytes == 0, "without a stream of its own nothing is copied for it"
