"""The steps that a served predictor learns from, and when its file is written."""

import pytest
import torch

from tests.prefetch.made_up import WIDE, gates_of, residual_stream
from tests.support.patience import becomes
from tests.vllm_plugin.steps import prompt, scheduled
from vllm_dymoe.prefetch import PredictorError, TrainedPredictor
from vllm_dymoe.prefetch.checkpoint import load_predictor, read_card
from vllm_dymoe.prefetch.online import OnlineTraining
from vllm_dymoe.vllm_plugin.step import RunningStep
from vllm_dymoe.vllm_plugin.training import ServedTraining

TRACE = residual_stream(requests=40)


def make(file, gates=None):
    online = OnlineTraining(
        WIDE, 1, torch.device("cpu"), torch.float16, torch.float32, 1 << 20, first_tokens=512, judged_tokens=256
    )
    known = gates_of(TRACE) if gates is None else gates
    return ServedTraining(online, WIDE, lambda: known, file)


def serve(training, tokens, step=None, batch=10):
    """Observe decode steps with this many tokens in total."""
    found = []
    for at in range(tokens.start, tokens.stop, batch):
        running = RunningStep()
        running.begin(step or scheduled(*[1] * batch))
        for layer in range(WIDE.num_layers):
            rows = slice(at, at + batch)
            training.see(layer, TRACE.router_inputs[rows, layer], TRACE.experts[rows, layer])
        found.append(training.end_step(running))
    return [predictor for predictor in found if predictor is not None]


def test_a_better_network_becomes_a_predictor_and_a_file(tmp_path):
    file = tmp_path / "folder" / "predictor"
    training = make(file)
    assert serve(training, range(600)) == []
    assert training.report() == {"file": str(file), "written": False, "tokens": 600}
    assert not file.exists(), "nothing is better than the next gate so far"
    (predictor,) = serve(training, range(600, 1000))
    assert isinstance(predictor, TrainedPredictor)
    assert predictor.network is training.online.network
    report = training.report()
    assert report["written"]
    assert report["accuracy"] > report["next_gate"]
    assert read_card(file).metrics["trained"]["accuracy"] == report["accuracy"]
    file.unlink()
    training.close()
    assert not file.exists(), "it has not become better since"


def test_a_better_network_is_on_disk_soon_without_being_asked_for(tmp_path):
    training = make(tmp_path / "predictor")
    serve(training, range(1000))
    assert becomes((tmp_path / "predictor").exists)


def test_the_end_writes_and_another_rank_does_not(tmp_path, monkeypatch):
    training, other = make(tmp_path / "predictor"), make(None)
    serve(training, range(1000)), serve(other, range(1000))
    training.close(), other.close()
    assert torch.equal(load_predictor(tmp_path / "predictor")[1].gates, training.online.network.gates.half())
    assert [path.name for path in tmp_path.iterdir()] == ["predictor"]


def test_a_file_that_cannot_be_written_is_one_sentence_and_stops_nothing(tmp_path):
    (tmp_path / "taken").write_text("no folder")
    training = make(tmp_path / "taken" / "predictor")
    serve(training, range(1000))
    with pytest.raises(PredictorError):
        training.report()
    training.close()


@pytest.mark.parametrize(
    "step",
    [
        scheduled(10, new=[prompt("a", range(10))]),
        scheduled(*[1] * 9, 30, new=[prompt("j", range(30))]),
        None,
    ],
    ids=["a prompt", "both", "gates that are not checked"],
)
def test_other_steps_are_not_learnt_from(step, tmp_path):
    training = make(tmp_path / "predictor", gates=() if step is None else None)
    serve(training, range(100), step)
    assert training.online.tokens == 0


def test_a_warm_up_is_not_learnt_from():
    training = make(None)
    assert training.end_step(RunningStep()) is None
    assert training.online.tokens == 0
