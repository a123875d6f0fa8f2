"""``vllm-dymoe train``: from a trace to a file, and the sentences for traces that will not do."""

from dataclasses import replace

import pytest

from tests.cli.checkpoints import command
from tests.prefetch.made_up import SIZES, made_up
from vllm_dymoe import __version__
from vllm_dymoe.prefetch.checkpoint import load_predictor


def invoke(*arguments):
    return command("train", *arguments)


def test_a_trace_becomes_a_predictor_with_a_card(tmp_path):
    trace, out = tmp_path / "trace.safetensors", tmp_path / "predictor.safetensors"
    made_up().save(trace)
    result = invoke(trace, "--out", out, "--architecture", "linear", "--epochs", 3)
    assert result.exit_code == 0, result.output
    card, network = load_predictor(out)
    assert card.header == SIZES
    assert card.version == __version__
    assert card.architecture["name"] == "linear"
    assert card.trace == {"path": str(trace), "tokens": [720, 80], "requests": [18, 2]}
    assert set(card.metrics) == {"trained", "affinity", "popularity"}
    assert network.num_layers == SIZES.num_layers
    for words in ("18 requests", f"{card.metrics['trained']['all_k']:.1%}", f'{{"predictor": "{out}"}}'):
        assert words in result.output.replace("\n", " ")


@pytest.mark.parametrize(("inputs", "architecture"), [(False, "linear"), (True, "linear+input")])
def test_the_trace_decides_what_can_be_seen(inputs, architecture, tmp_path):
    trace, out = tmp_path / "trace.safetensors", tmp_path / "predictor.safetensors"
    made_up(inputs=inputs).save(trace)
    result = invoke(trace, "--out", out, "--epochs", 1)
    assert result.exit_code == 0, result.output
    assert load_predictor(out)[0].architecture["name"] == architecture
    assert f"Trained {architecture} in" in result.output


@pytest.mark.parametrize("right", [True, False])
def test_a_predictor_that_is_worth_less_than_the_next_gate_is_said_to_be(right, tmp_path):
    made, path = made_up(), tmp_path / "trace.safetensors"
    said = made.experts[:, 1:] if right else (made.experts[:, 1:].int() + 1) % SIZES.num_experts
    replace(made, next_gate=said.to(made.experts.dtype)).save(path)
    result = invoke(path, "--out", tmp_path / "predictor", "--architecture", "linear", "--epochs", 1)
    card, _ = load_predictor(tmp_path / "predictor")
    assert (card.metrics["next gate"]["accuracy"] == 1.0) is right
    assert ("predicts more: serve without a predictor" in result.output) is right


@pytest.mark.parametrize(
    ("make", "arguments", "words"),
    [
        (lambda path: None, (), "does not exist"),
        (lambda path: path.write_bytes(b"nothing"), (), "cannot be read as a trace"),
        (lambda path: made_up(requests=5).save(path), (), "holds 5 requests"),
        (lambda path: made_up().save(path), ("--architecture", "linear+input"), "has no router inputs"),
    ],
)
def test_what_will_not_do_is_one_sentence_and_no_file(tmp_path, make, arguments, words):
    trace, out = tmp_path / "trace.safetensors", tmp_path / "predictor.safetensors"
    make(trace)
    result = invoke(trace, "--out", out, *arguments)
    assert result.exit_code == 1
    assert result.output.startswith("vllm-dymoe: ")
    assert words in result.output
    assert not out.exists()
