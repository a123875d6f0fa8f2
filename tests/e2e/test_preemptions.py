"""A KV cache that is too small, what the log proposes, and a server that does it."""

import re

import pytest

from tests.e2e.engines import answer, engine, random_prompts, server_of
from vllm_dymoe.units import size
from vllm_dymoe.vllm_plugin.announcements import logger

pytestmark = pytest.mark.engine

TOKEN = 8 * 2 * 2 * 64 * 2  # bytes in the KV cache: layers, keys and values, heads, their width, bfloat16
BLOCK, BLOCKS = 32, 8  # tokens, and blocks; vLLM keeps one of them for itself
PROMPT, ANSWER, REQUESTS = 30, 6, 4  # each request ends with two blocks, so all of them would need eight


def test_a_running_server_does_what_it_proposes(monkeypatch):
    """The log proposes exact numbers; with that budget the answers are the same.

    The emulated card stands for a GPU, whose memory is shared by KV cache and experts.
    """
    said: list[str] = []
    monkeypatch.setattr(logger, "handle", lambda record: said.append(record.getMessage()))
    settings = {"max_model_len": 128, "block_size": BLOCK, "num_gpu_blocks_override": BLOCKS, "max_num_seqs": REQUESTS}
    options = {"expert_budget": "75%", "host_store": "pinned", "link_gbps": 100.0, "misses": "fetch"}
    asked = random_prompts([PROMPT] * REQUESTS)
    with engine(dymoe=options, **settings) as llm:
        server = server_of(llm)
        before, least = server.slot_plan.limit, server.minimum_budget
        answers = answer(llm, asked, ANSWER, logprobs=None)
        proposed = proposal_in(said, before)
        assert least <= proposed < before
        llm.collective_rpc("dymoe_resize", args=(proposed,))
        assert server_of(llm).slot_plan.limit == proposed
        said.clear()
        assert answer(llm, asked, ANSWER, logprobs=None) == answers
        assert proposal_in(said, proposed) < proposed, "there is one proposal for each budget"
        llm.collective_rpc("dymoe_check_integrity")


def proposal_in(said, limit):
    """Return the budget that the only proposal names, after checking its numbers."""
    (line,) = [line for line in said if "preempted" in line]
    preempted, asked = map(int, re.search(r"preempted (\d+) of (\d+) requests", line).groups())
    assert 0 < preempted < asked <= REQUESTS
    cache = BLOCKS * BLOCK * TOKEN
    needed = -(-cache * asked // (asked - preempted))
    assert f"KV cache of {size(cache)} is full; all of them need about {size(needed)}." in line
    proposed, before = map(int, re.search(r"dymoe_resize\((\d+)\), from (\d+)", line).groups())
    assert before == limit
    assert before - proposed == needed - cache
    assert f"start with expert_budget {proposed} " in line
    assert f"--max-num-seqs {asked - preempted} " in line
    return proposed
