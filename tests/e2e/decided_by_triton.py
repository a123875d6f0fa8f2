"""One engine with vLLM's second model runner, whose decode steps the very program decides that a GPU runs.

Run by ``test_model_runner_v2``, because Triton's interpreter has to be chosen before vLLM is imported. What the program
has decided is computed by a CPU's kernels, which are faster there than interpreted ones.
"""

from unittest import mock

import pytest

from tests.e2e.engines import answer, engine, prompts, runtime_of
from tests.runtime.decided import check_decided
from vllm_dymoe.kernels.triton.decide import decide
from vllm_dymoe.residency.decode_rule import decide_plain
from vllm_dymoe.runtime.decode_plain import PlainDecode

OPTIONS = {
    "hi": 4,
    "lo": 2,
    "expert_budget": "50%",
    "host_store": "pinned",
    "decisions": "device",
    "system": "dymoe",
    "system_options": {"retention": 0.5, "high_by": "depth", "reuse_high": False},
}
SETTINGS = {"max_num_batched_tokens": 128, "max_num_seqs": 4}
TOKENS = 4


@pytest.fixture(scope="module")
def llm():
    with engine(dymoe=OPTIONS, **SETTINGS) as llm:
        yield llm


def decided_by_the_program(table, layer, ids, weights, rows, decision):
    decide(vars(table), layer, ids, weights.contiguous(), rows, decision.tensors)


def served(llm, budget, program):
    """Answers, counts, and what layers keep in the end."""
    runtime = runtime_of(llm)
    runtime.resize(budget)
    runtime.reset_stats()
    llm.reset_prefix_cache()
    with mock.patch.object(PlainDecode, "decide", staticmethod(program)):
        answers = answer(llm, prompts()[:2], max_tokens=TOKENS)
    check_decided(runtime)
    table, stats = runtime.memory.device_side.table, runtime.stats()
    kept = {name: getattr(table, name).tolist() for name in ("tier", "slot", "heat", "used_at", "step")}
    return answers, (stats.planned, stats.hits, stats.misses, stats.promotions, stats.evictions), kept


def test_the_program_decides_as_its_twin_and_budgets_change_nothing(llm):
    assert llm.llm_engine.model_executor.driver_worker.worker.use_v2_model_runner
    by_budget = [served(llm, budget, decided_by_the_program) for budget in ("50%", "25%")]
    assert by_budget[0][0] == by_budget[1][0]
    assert by_budget[1] == served(llm, "25%", decide_plain)
    assert by_budget[1][1][4] > 0, "nothing was evicted"
