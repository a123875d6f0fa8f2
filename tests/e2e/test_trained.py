"""A predictor trained on what a running engine recorded, taken over by that engine: only time depends on it."""

import time

import pytest
import torch
from typer.testing import CliRunner

from tests.e2e.engines import MODEL, answer, engine, prompts, recorded_layers, runtime_of
from vllm_dymoe.cli import app
from vllm_dymoe.predict.checkpoint import load_predictor
from vllm_dymoe.predict.popularity import Popularity

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    return tmp_path_factory.mktemp("traces") / "live"


@pytest.fixture(scope="module")
def llm(traces):
    options = {"hi": 4, "system": "duoserve", "expert_budget": "25%"}
    with engine(dymoe=options | {"link_gbps": 0.03, "trace": str(traces)}) as llm:
        yield llm


def answered(llm):
    """Tokens and every layer's output, from an empty cache."""
    runtime = runtime_of(llm)
    runtime.resize("25%")
    runtime.reset_stats()
    with recorded_layers(runtime) as layers:
        answers = [answer(llm, [text], max_tokens=16)[0] for text in prompts()[:2]]
    runtime.check_integrity()
    return [a.tokens for a in answers], layers, runtime.stats()


def test_a_server_records_and_takes_over_what_was_trained_on_it(llm, traces, tmp_path):
    assert isinstance(runtime_of(llm).predictor.predictor, Popularity), "until there is a predictor"
    (before,) = llm.collective_rpc("dymoe_predictor")
    assert before == {"file": None, "card": None}
    answer(llm, prompts()[2:], max_tokens=32)
    tokens, layers, popular = answered(llm)
    llm.collective_rpc("dymoe_trace")

    file = tmp_path / "predictor.safetensors"
    result = CliRunner().invoke(app, ["train", str(traces), "--out", str(file), "--epochs", "6"])
    assert result.exit_code == 0, result.output

    (damaged := tmp_path / "damaged").write_bytes(file.read_bytes()[:-100])
    with pytest.raises(Exception, match=r"vllm-dymoe: .*damaged cannot be read as a predictor"):
        llm.collective_rpc("dymoe_predictor", kwargs={"file": str(damaged)})
    assert isinstance(runtime_of(llm).predictor.predictor, Popularity), "the old one goes on"

    (taken,) = llm.collective_rpc("dymoe_predictor", kwargs={"file": str(file)})
    assert taken["file"] == str(file)
    assert taken["card"]["header"]["num_layers"] == 8
    begin = time.perf_counter()
    new_tokens, new_layers, trained = answered(llm)
    seconds = time.perf_counter() - begin
    assert new_tokens == tokens
    assert all(torch.equal(a, b) for a, b in zip(new_layers, layers, strict=True))

    def accuracy(stats):
        return stats.predictions["right"] / stats.predictions["wanted"]

    assert accuracy(trained) > accuracy(popular)
    assert trained.predictor_bytes == load_predictor(file)[1].nbytes * 2  # float32 on a CPU, float16 in the file
    assert trained.predictor_bytes < trained.peak_expert_bytes <= trained.budget_bytes
    assert 0 < trained.prediction_seconds < seconds


def test_a_start_with_another_models_predictor_is_refused(llm, traces, tmp_path):
    """The same sentence as while it serves, before the model is loaded or right after."""
    file = tmp_path / "predictor.safetensors"
    assert CliRunner().invoke(app, ["train", str(traces), "--out", str(file), "--epochs", "1"]).exit_code == 0
    model = llm.llm_engine.vllm_config.quant_config.loading._model
    fingerprint, model.__dict__["model_fingerprint"] = model.model_fingerprint, "f" * 16
    try:
        with pytest.raises(Exception, match=f"was trained for {MODEL} with the weights {fingerprint}"):
            llm.collective_rpc("dymoe_predictor", kwargs={"file": str(file)})
    finally:
        model.__dict__["model_fingerprint"] = fingerprint
