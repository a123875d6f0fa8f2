"""Chunked prefill and prefix caching through the real engine: experts are judged by the whole prompt."""

import json

import pytest

from tests.e2e.engines import MODEL, WatchedSystem, answer, engine, runtime_of
from vllm_dymoe.residency.routing import Phase
from vllm_dymoe.systems.dymoe import Dymoe
from vllm_dymoe.systems.importance import step_importance

pytestmark = pytest.mark.engine

CHUNK, LENGTH = 96, 3 * 96 + 1


def hits_of(routing, experts):
    """Of each expert, how many tokens of the prompt use it: with every token a heavy hitter, no attention decides."""
    return {
        e: hits for e, (hits, _) in step_importance(routing.ids, routing.weights, experts, routing.prompt).load.items()
    }


def test_chunks_and_a_cached_prefix_are_judged_as_the_whole_prompt():
    options = {"hi": 4, "lo": 2, "system": "dymoe", "system_options": {"heavy_share": 1.0}, "expert_budget": "100%"}
    with engine(dymoe=options, enable_prefix_caching=True) as llm:
        runtime, scheduler = runtime_of(llm), llm.llm_engine.engine_core.engine_core.scheduler
        experts, top_k = runtime.experts.num_experts, runtime.experts.top_k
        text = "\n".join(entry["prompt"] for entry in json.loads((MODEL / "prompts.json").read_text()))
        tokens = llm.get_tokenizer().encode(text)[:LENGTH]

        def first_layers(ids, chunk):
            """What the first layer's router said in each step of a prompt."""
            scheduler.max_num_scheduled_tokens = chunk
            runtime.serving.system = WatchedSystem(Dymoe(heavy_share=1.0))
            answer(llm, [{"prompt_token_ids": ids}], max_tokens=1, logprobs=None)
            return [routing for routing, _ in runtime.system.seen if routing.layer == 0]

        (whole,) = first_layers(tokens, 512)
        assert llm.reset_prefix_cache()
        chunks = first_layers(tokens, CHUNK)
        assert [len(routing.ids) for routing in chunks] == [CHUNK] * 3 + [1]
        assert all(routing.phase is Phase.PREFILL and not routing.prompt.mixed for routing in chunks)
        assert chunks[0].prompt.before is None
        last, everything = hits_of(chunks[-1], experts), hits_of(whole, experts)
        assert len(last) == top_k
        assert all(abs(count - everything[expert]) <= 2 for expert, count in last.items()), "but for near ties"

        assert llm.reset_prefix_cache()
        first_layers(tokens, 512)
        (behind,) = first_layers([*tokens[:-8], *tokens[:24]], 512)
        cached = LENGTH - 8 + 24 - len(behind.ids)
        assert cached > 0, "nothing was cached"
        assert round(float(behind.prompt.before[0].sum())) == cached * top_k
