"""On a stream of the device predictors say what they say inline, of what the layer was given, and once."""

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
from vllm_dymoe.prefetch.side_stream import Inline

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
    """A layer's routing; what it was given, which belongs to others once the next one runs."""
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
    """Also behind a step that ended in its first layer, whose answer was begun and never read."""
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
