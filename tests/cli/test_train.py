"""``vllm-dymoe train``: a predictor file from a trace; errors for unusable traces."""

from dataclasses import replace

import pytest

from tests.cli.checkpoints import command
from tests.prefetch.made_up import SIZES, WIDE, made_up, residual_stream
from vllm_dymoe import __version__
from vllm_dymoe.prefetch.checkpoint import load_predictor, read_card


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
    for words in ("18 requests", f"{card.metrics['trained']['all_k']:.1%}", f'"predictor": "{out}"'):
        assert words in result.output.replace("\n", " ")


def test_linear_with_inputs_is_the_default_and_says_what_the_next_gate_is_worth(tmp_path):
    trace, out = tmp_path / "trace.safetensors", tmp_path / "predictor.safetensors"
    residual_stream().save(trace)
    result = invoke(trace, "--out", out)
    assert result.exit_code == 0, result.output
    card, network = load_predictor(out)
    assert card.architecture["name"] == "linear+input"
    assert network.look_ahead == WIDE.num_layers - 1
    assert card.metrics["trained"]["accuracy"] > card.metrics["next gate"]["accuracy"]


def test_a_predictor_that_is_worth_less_than_the_next_gate_is_refused_with_both_numbers(tmp_path):
    made, path, out = made_up(), tmp_path / "trace.safetensors", tmp_path / "predictor"
    wrong = (made.experts[:, 1:].int() + 1) % SIZES.num_experts
    for right, said in ((True, made.experts[:, 1:]), (False, wrong)):
        out.unlink(missing_ok=True)
        replace(made, next_gate=said.to(made.experts.dtype)).save(path)
        result = invoke(path, "--out", out, "--architecture", "linear", "--epochs", 1)
        assert out.exists() is not right
        assert result.exit_code == right
        assert ("100.0%" in result.output) is right
    assert read_card(out).metrics["next gate"]["accuracy"] < read_card(out).metrics["trained"]["accuracy"]


@pytest.mark.parametrize(
    ("make", "arguments", "words"),
    [
        (lambda path: None, (), "does not exist"),
        (lambda path: path.write_bytes(b"nothing"), (), "cannot be read as a trace"),
        (lambda path: residual_stream(requests=5).save(path), (), "holds 5 requests"),
        (lambda path: made_up().save(path), (), "has no router inputs"),
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
