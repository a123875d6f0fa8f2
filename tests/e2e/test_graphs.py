"""Piecewise CUDA graphs around MoE layers, replayed in real engines on a CPU."""

import pytest

from tests.e2e.architectures import ARCHITECTURES
from tests.e2e.engines import answer, check_first_logprobs_close, random_prompts, server_of, small_engine
from tests.e2e.replays import replayed_graphs

pytestmark = pytest.mark.engine

SIZES = (1, 2, 4, 8, 16, 32, 64)
# One request, three that fill a graph for four, and five that fill one for eight; with short and with long prompts.
BATCHES = ((5,), (7, 12, 9), (5, 14, 3, 11, 8))


def answers(llm, seed):
    return [a for lengths in BATCHES for a in answer(llm, random_prompts(lengths, seed), max_tokens=10)]


def test_replayed_graphs_give_the_answers_of_the_model(tmp_path):
    """A model with shared experts and scaled outputs.

    ``vllm_plugin/test_moe_method`` covers layers without them, and shows that replayed pieces are wrong with vLLM's
    own operator between them.
    """
    model, options = ARCHITECTURES["glm-4-moe"].save(tmp_path / "model"), {"high": 16, "expert_budget": "50%"}
    with small_engine(model, options) as llm:
        eager = answers(llm, 0)
    compilation = {"cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": list(SIZES)}
    graphs = {"enforce_eager": False, "compilation_config": compilation}
    with replayed_graphs() as seen, small_engine(model, options, **graphs) as llm:
        without = [answers(llm, seed) for seed in (0, 1)]
        assert (seen.captures, seen.replays) == ([], 0)
        seen.replaying = True  # prompts of the second seed run only graphs captured with other prompts
        assert [answers(llm, seed) for seed in (0, 1)] == without
        assert seen.replays > 2 * len(seen.captures) > 0
        server_of(llm).check_integrity()
    assert seen.moved == 0
    check_first_logprobs_close(without[0], eager, bound=0.3)  # compiled and eager differ most without AVX-512
