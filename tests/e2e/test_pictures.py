"""Models that read pictures, with vLLM's own vision tower.

Answers have to be stock vLLM's at every budget.
"""

from unittest import mock

import pytest

from tests.e2e.engines import answer, answers_at_budgets, check_logprobs_close, equal_share, server_of, small_engine
from tests.e2e.pictures import SEEING, TAKES_PICTURES

pytestmark = pytest.mark.engine


def methods_of_tower(worker):
    modules = worker.model_runner.model.named_modules()
    return {type(m.quant_method).__name__ for name, m in modules if "visual." in name and hasattr(m, "quant_method")}


@pytest.mark.parametrize("name", ["qwen3-vl-moe", "qwen3.5-moe"])
def test_answers_about_pictures_are_vllms_at_every_budget(name, tmp_path):
    folder = SEEING[name].save(tmp_path / name)
    prompts = SEEING[name].prompts()
    with small_engine(folder, **TAKES_PICTURES) as llm:
        want = answer(llm, prompts, 8)
        other = [prompt | {"multi_modal_data": prompts[2]["multi_modal_data"]} for prompt in prompts[:1]]
        (unlike,) = answer(llm, other, 8)
    with small_engine(folder, {"high": 16}, **TAKES_PICTURES) as llm:
        assert len(server_of(llm).experts.layers) == 2
        (methods,) = llm.collective_rpc(methods_of_tower)
        assert methods == {"UnquantizedLinearMethod"}, "the vision tower is vLLM's"
        got = answers_at_budgets(llm, ("100%", "30%"), lambda: answer(llm, prompts, 8))
    check_logprobs_close(got, want)
    assert equal_share(got, want) > 0.8
    assert unlike.logprobs != want[0].logprobs, "the picture changes nothing"


def test_a_pictures_tokens_are_read_as_a_large_batch(tmp_path):
    """On an emulated card, which plans steps as a GPU does."""
    seeing = SEEING["qwen3-vl-moe"]
    folder, prompts = seeing.save(tmp_path / "model"), seeing.prompts((5,))
    with small_engine(folder, {"high": 16}, **TAKES_PICTURES) as llm:
        want = answer(llm, prompts, 8)
    with small_engine(folder, {"high": 16, "link_gbps": 20.0}, **TAKES_PICTURES) as llm:
        steps = server_of(llm).small_batches
        with mock.patch.object(steps, "forward_large", wraps=steps.forward_large) as large:
            answer(llm, prompts, 8)
        rows = {len(call.args[1]) for call in large.call_args_list}
        got = answers_at_budgets(llm, ("100%", "30%"), lambda: answer(llm, prompts, 8))
    assert min(rows) > max(16, len(prompts[0]["prompt_token_ids"])), "the picture has no tokens"
    check_logprobs_close(got, want)
    assert equal_share(got, want) > 0.8
