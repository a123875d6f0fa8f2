"""Training while steps run: which networks are adopted, and what it costs."""

from dataclasses import replace

import pytest
import torch

from tests.prefetch.made_up import WIDE, gates_of, residual_stream
from vllm_dymoe.prefetch.checkpoint import load_predictor
from vllm_dymoe.prefetch.linear import LeastSquares, train_on
from vllm_dymoe.prefetch.online import OnlineTraining, network_bytes

TRACE = residual_stream(requests=80)
GATES = gates_of(TRACE)
EVERYTHING = 1 << 20


def make(memory=EVERYTHING, **options):
    options = {"first_tokens": 512, "judged_tokens": 256} | options
    cpu = torch.device("cpu")
    return OnlineTraining(WIDE, 2, cpu, torch.float16, torch.float32, memory, **options)


def serve(training, tokens, batch=3, trace=TRACE, gates=GATES):
    """Run steps of one batch each; return those that adopted a better network."""
    better = []
    for step, at in enumerate(range(tokens.start, tokens.stop, batch)):
        for layer in range(WIDE.num_layers):
            training.see(layer, trace.router_inputs[at : at + batch, layer], trace.experts[at : at + batch, layer])
        if training.end_step(len(trace.router_inputs[at : at + batch]), gates):
            better.append(step)
    return better


def test_a_candidate_is_judged_on_later_tokens_and_adopted_in_place():
    training = make()
    assert serve(training, range(600)) == []
    network, before = training.network, training.network.gates.clone()
    assert len(serve(training, range(600, 1200))) == 1
    (verdict,) = training.verdicts
    assert training.trained
    assert verdict.adopted
    assert 512 <= verdict.trained_on < 600
    assert 256 <= verdict.judged_on < 256 + 64
    candidate, incumbent, gate = verdict.accuracy
    assert candidate > gate + 0.03
    assert incumbent == pytest.approx(gate, abs=0.01), "nothing was trained: it is the next gate"
    assert training.network is network
    assert not torch.equal(network.gates, before)
    # Training on all these tokens at once gives the same result.
    seen = slice(0, verdict.trained_on)
    whole = train_on(TRACE.gates, WIDE, TRACE.experts[seen], TRACE.router_inputs[seen], torch.zeros(4, 8), 2)
    for name in ("tables", "gates", "tables.2", "gates.2"):
        assert torch.allclose(network.tensors[name], whole.tensors[name], atol=1e-3), name
    assert network.popularity.sum(1).tolist() == pytest.approx([1.0] * WIDE.num_layers)


def test_what_names_no_more_than_the_next_gate_is_not_adopted():
    still = residual_stream(moves=0.0)  # the layers do not change what the next gate reads
    training = make(first_tokens=64, judged_tokens=64)
    assert serve(training, range(1000), trace=still, gates=gates_of(still)) == []
    assert training.verdicts
    assert not training.trained
    assert all(verdict.accuracy[2] == 1.0 for verdict in training.verdicts)


def test_rounds_have_twice_as_many_tokens_and_the_network_only_becomes_better():
    training = make(first_tokens=128, judged_tokens=128)
    serve(training, range(4800), batch=50)
    assert len(training.verdicts) >= 4
    assert training.due == 128 * 2 ** len(training.verdicts)
    for number, verdict in enumerate(training.verdicts):
        assert verdict.trained_on >= 128 * 2**number
    for verdict in training.verdicts:
        assert verdict.adopted == (verdict.accuracy[0] > max(verdict.accuracy[1:]))


def test_with_little_memory_layers_are_trained_in_turn():
    training = make(memory=2 * LeastSquares.layer_bytes(WIDE, 2), first_tokens=256)
    serve(training, range(700), batch=20)
    (verdict,) = training.verdicts
    assert (verdict.layers, verdict.adopted) == (range(2), True)
    gate = TRACE.gates.weights[3].T.float()
    assert torch.equal(training.network.gates[2], gate), "its turn has not come"
    serve(training, range(700, 2400), batch=20)
    assert [verdict.layers for verdict in training.verdicts[:3]] == [range(2), range(2, 3), range(2)]
    assert not torch.equal(training.network.gates[2], gate)


def test_a_nan_of_one_request_spoils_nothing():
    training, spoiled = make(), TRACE.router_inputs.clone()
    spoiled[100:110] = torch.nan
    serve(training, range(1200), trace=replace(TRACE, router_inputs=spoiled))
    assert training.trained
    assert all(tensor.isfinite().all() for tensor in training.network.tensors.values())


def test_all_its_memory_is_counted_and_there_from_the_start():
    for memory in (EVERYTHING, 1):
        training = make(memory=memory)
        counted = OnlineTraining.nbytes(WIDE, 2, 4, memory) + network_bytes(WIDE, 2, 4)

        def held(training=training):
            tensors = [value for value in vars(training).values() if isinstance(value, torch.Tensor)]
            tensors += [*training.network.tensors.values(), *training._candidate.tensors.values()]
            sums = training._sums
            return sum(tensor.nbytes for tensor in [*tensors, sums._gram, *sums._cross])

        before = held()
        serve(training, range(1200))
        assert held() <= before <= counted


def test_the_file_says_what_it_is_worth_and_the_next_start_goes_on_from_it(tmp_path):
    training, path = make(), tmp_path / "predictor"
    serve(training, range(1200))
    training.save(path, WIDE, "9.9")
    card, network = load_predictor(path)
    verdict = training.verdicts[0]
    assert card.metrics["trained"]["accuracy"] == pytest.approx(verdict.accuracy[0], abs=1e-6)
    assert card.metrics["next gate"]["all_k"] == pytest.approx(verdict.whole[2], abs=1e-6)
    assert (card.architecture["name"], card.version, card.header) == ("linear+input", "9.9", WIDE)
    later = make(before=network)
    serve(later, range(3))
    assert torch.equal(later.network.gates, network.gates.float())
    serve(later, range(1200, 2400))
    assert later.verdicts[0].accuracy[1] > later.verdicts[0].accuracy[2], "what was loaded is better than the gate"
