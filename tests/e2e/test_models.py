"""Architectures through the real engine: vLLM's own tokens at 16 bits, its gates, and the same bits at every budget.

A model costs three starts of an engine: vLLM without the plugin, 16 bits and 4 bits. Budgets are changed while it runs.
"""

import functools
import random
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.e2e.architectures import ARCHITECTURES, VOCABULARY
from tests.e2e.engines import (
    answer,
    check_first_logprobs_close,
    check_logprobs_close,
    engine,
    gates_compared,
    recorded_layers,
    runtime_of,
)
from vllm_dymoe.quantize.checkpoint import Checkpoint
from vllm_dymoe.quantize.convert import Recipe, convert

pytestmark = pytest.mark.engine

BUDGETS = ("100%", "50%", "minimum")
TOKENS = 12
# vLLM reads these with both sets of tensor names: one for each projection of each expert, or one for all of a layer.
FUSED = ("olmoe", "qwen3-moe")
CONVERTED = ("mixtral", "deepseek-v2", "gpt-oss", "llama-4", "granite-moe", "ernie-4.5-moe")


def prompts():
    """Random tokens: the models have no tokenizer, and nothing to say."""
    chosen = random.Random(0)
    return [{"prompt_token_ids": chosen.choices(range(2, VOCABULARY), k=length)} for length in (5, 33, 12, 20)]


@pytest.fixture(scope="module")
def folder():
    root = Path(tempfile.mkdtemp(prefix="dymoe-test-models-"))
    yield root
    shutil.rmtree(root)


@functools.cache
def checkpoint(root, name, *, fused=False):
    return ARCHITECTURES[name].save(root / (f"{name}-fused" if fused else name), fused=fused)


def serve(model, dymoe=None):
    return engine(model, dymoe, skip_tokenizer_init=True, max_num_seqs=8, max_model_len=128)


def its_neighbour(gate):
    """A wrong gate: it has every score that the right one has, for the expert behind."""
    return replace(gate, logits=lambda x: gate.logits(x).roll(1, -1))


def answers_at_every_budget(llm):
    """Answers, after a check that every budget gives the same tokens and the same bits of every layer."""
    runtime = runtime_of(llm)
    want = want_layers = None
    for budget in BUDGETS:
        runtime.resize(runtime.minimum_budget if budget == "minimum" else budget)
        with recorded_layers(runtime) as layers:
            got = answer(llm, prompts(), TOKENS)
        runtime.check_integrity()
        assert runtime.budget.peak <= runtime.budget.limit
        if want is None:
            want, want_layers = got, layers
            assert len(layers) >= TOKENS * len(runtime.experts.layers)
        assert [a.tokens for a in got] == [a.tokens for a in want], budget
        assert all(torch.equal(a, b) for a, b in zip(layers, want_layers, strict=True)), budget
    return want


@functools.cache
def tokens_at_four_bits(root, name):
    """Tokens at 4 bits, quantized while the checkpoint loads."""
    with serve(checkpoint(root, name), {"hi": 4}) as llm:
        return [a.tokens for a in answers_at_every_budget(llm)]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_sixteen_bits_agree_with_vllm_at_every_budget(name, folder):
    with serve(checkpoint(folder, name)) as llm:
        theirs = answer(llm, prompts(), TOKENS)
    with serve(checkpoint(folder, name), {"hi": 16}) as llm:
        with gates_compared(llm) as shares:
            answer(llm, prompts(), max_tokens=2)
        with gates_compared(llm, its_neighbour) as planted:
            answer(llm, prompts(), max_tokens=2)
        ours = answers_at_every_budget(llm)
    # The gate that was found for a layer, given that layer's own input, chooses what vLLM chose, or a near tie of it.
    assert min(shares) == 1
    assert min(planted) < 0.9, "a wrong gate passes for the right one"
    check_logprobs_close(ours, theirs)
    check_first_logprobs_close(ours, theirs)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_four_bits_give_the_same_bits_at_every_budget(name, folder):
    assert tokens_at_four_bits(folder, name)


@pytest.mark.parametrize("name", FUSED)
def test_fused_and_separate_tensors_are_the_same_model(name, folder):
    with serve(checkpoint(folder, name, fused=True), {"hi": 4}) as llm:
        assert [a.tokens for a in answer(llm, prompts(), TOKENS)] == tokens_at_four_bits(folder, name)


@pytest.mark.parametrize("name", CONVERTED)
def test_a_converted_checkpoint_is_the_same_model(name, folder):
    out = folder / f"{name}-converted"
    convert(Checkpoint(checkpoint(folder, name)), out, Recipe())
    with serve(out, {"expert_budget": "50%"}) as llm:
        assert [a.tokens for a in answer(llm, prompts(), TOKENS)] == tokens_at_four_bits(folder, name)
