"""Vision-language models with experts: vLLM's own vision tower, and answers about pictures as stock vLLM gives them."""

import pytest

from tests.e2e.engines import answer, answers_at_budgets, check_logprobs_close, equal_share, server_of
from tests.e2e.pictures import MODELS, save, seeing_engine, seen_prompts

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("name", MODELS)
def test_answers_about_pictures_are_vllms_at_every_budget(tmp_path, name):
    """A picture's tokens are read as a large batch."""
    save(name, tmp_path)
    with seeing_engine(tmp_path) as llm:
        want = answer(llm, seen_prompts(), 8)
        blind = answer(llm, [{"prompt_token_ids": one["prompt_token_ids"][:3]} for one in seen_prompts()], 8)
    with seeing_engine(tmp_path, {"high": 16}) as llm:
        assert len(server_of(llm).experts.layers) == 2
        got = answers_at_budgets(llm, ("100%", "30%"), lambda: answer(llm, seen_prompts(), 8))
    check_logprobs_close(got, want)
    assert equal_share(got, want) > 0.8
    assert equal_share(blind, want) < 0.5, "pictures and what follows them change the answers"
