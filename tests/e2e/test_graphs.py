"""Piecewise CUDA graphs around MoE layers, in real engines on a CPU whose compiled pieces run as replayed graphs do."""

import contextlib
import functools
from unittest import mock

import pytest
import torch

from tests.e2e.architectures import ARCHITECTURES
from tests.e2e.engines import answer, check_first_logprobs_close, random_prompts, runtime_of, small_engine
from tests.e2e.replays import replayed_graphs
from vllm_dymoe.vllm_adapter import graphs

pytestmark = pytest.mark.engine

SIZES = (1, 2, 4, 8, 16, 32, 64)
# One request, three that fill a graph for four, five that fill one for eight; with few and with many tokens to read.
BATCHES = ((5,), (7, 12, 9), (5, 14, 3, 11, 8))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Random models by their names: qwen3-moe has no shared experts, glm-4-moe has some and scales its outputs."""
    return functools.cache(lambda name: ARCHITECTURES[name].save(tmp_path_factory.mktemp(name) / "model"))


def serve(model, **settings):
    return small_engine(model, {"hi": 16, "expert_budget": "50%"}, **settings)


def serve_graphs(model):
    return serve(model, enforce_eager=False, compilation_config={"cudagraph_capture_sizes": list(SIZES)})


def answers(llm, seed):
    """Answers to each batch."""
    return [a for lengths in BATCHES for a in answer(llm, random_prompts(lengths, seed), max_tokens=10)]


def with_and_without_replays(llm, seen):
    """Answers of the same compiled engine; prompts of the second seed meet only graphs that others have captured."""
    without = [answers(llm, seed) for seed in (0, 1)]
    assert (seen.captures, seen.replays) == (0, 0)
    seen.replaying = True
    replayed = [answers(llm, seed) for seed in (0, 1)]
    assert seen.replays > 2 * seen.captures > 0
    return without, replayed


@pytest.mark.parametrize("name", ["qwen3-moe", "glm-4-moe"])
def test_replayed_graphs_give_the_answers_of_the_model(name, checkpoint):
    with serve(checkpoint(name)) as llm:
        eager = answers(llm, 0)
    with replayed_graphs() as seen, serve_graphs(checkpoint(name)) as llm:
        without, replayed = with_and_without_replays(llm, seen)
        runtime_of(llm).check_integrity()
    assert seen.moved == 0
    assert replayed == without
    check_first_logprobs_close(without[0], eager, bound=0.3)  # compiled and eager differ most without AVX-512


@contextlib.contextmanager
def vllms_operator():
    """As this plugin had it: graphs are cut at vLLM's own operator."""
    operator = torch.ops.vllm.moe_forward
    with (
        mock.patch.object(graphs, "OPERATOR", operator._qualified_op_name),
        mock.patch("vllm_dymoe.vllm_adapter.moe_method.entry_with_buffers", return_value=operator),
    ):
        yield


def test_vllms_operator_between_graphs_gives_wrong_answers(checkpoint):
    """The harness sees the fault that there was."""
    with vllms_operator(), replayed_graphs() as seen, serve_graphs(checkpoint("qwen3-moe")) as llm:
        without, replayed = with_and_without_replays(llm, seen)
    assert seen.moved > 0
    wrong = [ours.tokens != theirs.tokens for ours, theirs in zip(replayed[1], without[1], strict=True)]
    assert sum(wrong) > len(wrong) / 2
