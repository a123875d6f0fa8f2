"""Two engines with data and expert parallelism, on two cores."""

import contextlib
import itertools
import os
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from tests.cache.store.test_shared import pss
from tests.e2e.engines import (
    Answer,
    answer,
    check_logprobs_close,
    engine,
    needs_two_cores,
    prepare_rank,
    prompts,
    server_of,
)
from tests.support.forked import FORKED
from tests.support.ports import free_port
from vllm_dymoe.cache.store import StoreError

pytestmark = [pytest.mark.engine, needs_two_cores]

OPTIONS = {"high": 16, "expert_budget": "25%", "misses": "fetch", "policy_options": {"look_ahead": 0}}
TOKENS = 12


def resize(worker, budget):
    server = worker.vllm_config.quant_config.loaded_model().server
    server.resize(budget)
    server.reset_stats()


def break_disk(worker, broken):
    store = worker.vllm_config.quant_config.loaded_model().server.store

    def fail(*arguments, **settings):
        raise StoreError("the disk is on fire")

    if broken:
        store.read_into = fail
    else:
        del store.read_into


def describe(worker):
    server = worker.vllm_config.quant_config.loaded_model().server
    return server.experts.num_experts, server.store.description, pss()


def precisions(worker):
    """Return the numbers of experts served at each precision, and the threshold."""
    server = worker.vllm_config.quant_config.loaded_model().server
    return server.stats().planned, server.small_batches.table.threshold.tolist()


def choose_otherwise(worker, high_by):
    server = worker.vllm_config.quant_config.loaded_model().server
    server.set_precision(high_by=high_by)
    server.reset_stats()


def serve(scenario, rank, port, folder, options, settings):
    """Return what a scenario finds out about one of the two engines."""
    from vllm import SamplingParams

    prepare_rank(folder / f"log-{rank}")
    os.environ |= {"VLLM_DP_RANK": str(rank), "VLLM_DP_RANK_LOCAL": str(rank), "VLLM_DP_SIZE": "2"}
    os.environ |= {"VLLM_DP_MASTER_IP": "127.0.0.1", "VLLM_DP_MASTER_PORT": str(port)}
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    os.environ["DYMOE_STORE_DIR"] = str(folder / "stores")
    configurable = contextlib.nullcontext
    if "enable_eplb" in settings:
        from tests.e2e.balanced import SETTINGS, configurable

        settings |= SETTINGS
    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=5)
    with configurable(), engine(dymoe=options, max_num_batched_tokens=128, **settings) as llm:
        core, asked = llm.llm_engine, itertools.count()

        def together(texts):
            """Return the completions of this engine's prompts when both engines are idle."""
            names = [str(next(asked)) for _ in texts]
            for name, text in zip(names, texts, strict=True):
                core.add_request(name, text, sampling)
            finished = {}
            while core.has_unfinished_requests():
                finished |= {output.request_id: output.outputs[0] for output in core.step() if output.finished}
            llm.collective_rpc("dymoe_check_integrity")
            return [finished[name] for name in names]

        together([])  # wait until both are up
        return scenario(rank, llm, together, balanced="enable_eplb" in settings)


def everything(rank, llm, together, *, balanced):
    """Return one engine's answers.

    It answers its own prompts, no prompts, and prompts while an expert cannot be read.
    """

    def answers(texts):
        return list(map(Answer.of, together(texts)))

    numbers, result = [llm.collective_rpc("numbers")[0]] if balanced else [], {}
    result["experts"] = llm.collective_rpc(describe)[0]
    own = prompts()[:5] if rank == 0 else prompts()[5:7]
    for budget in ("100%", "25%"):
        llm.collective_rpc(resize, args=(budget,))
        result["both", budget] = answers(own)
        llm.collective_rpc("dymoe_reset_stats")
        result["first alone", budget] = answers(prompts()[:1] if rank == 0 else [])
        (stats,) = llm.collective_rpc("dymoe_stats")
        result["uses", budget] = stats["hits"] + stats["misses"]
    llm.collective_rpc(resize, args=("25%",))
    llm.sleep(2)
    result["asleep"] = llm.collective_rpc(describe)[0][2]
    llm.wake_up()
    result["awake"] = answers(own)
    if rank == 1:
        llm.collective_rpc(break_disk, args=(True,))
    result["failed"] = [
        (c.finish_reason, c.stop_reason) for c in together(prompts()[7:9] if rank == 0 else prompts()[9:10])
    ]
    if rank == 1:
        llm.collective_rpc(break_disk, args=(False,))
    result["after"] = answers(own)
    result["numbers"] = [*numbers, *(llm.collective_rpc("numbers")[0] for _ in numbers)]
    return result


def choices(rank, llm, together, *, balanced):
    """Return :func:`precisions` by the way in which high experts are chosen, while two requests run on each engine."""
    result = {}
    for high_by in ("threshold", "equal"):
        llm.collective_rpc(choose_otherwise, args=(high_by,))
        together(prompts()[2 * rank : 2 * rank + 2])
        result[high_by] = llm.collective_rpc(precisions)[0]
    return result


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    return serve_two(tmp_path_factory.mktemp("data-parallel"), OPTIONS, enable_expert_parallel=True)


def serve_two(folder, options, scenario=everything, **settings):
    port = free_port(10)  # vLLM takes the next ones too
    with ProcessPoolExecutor(2, mp_context=FORKED) as pool:
        running = [pool.submit(serve, scenario, rank, port, folder, options, settings) for rank in (0, 1)]
        try:
            return [one.result(400) for one in running]
        except BaseException:
            for process in pool._processes.values():
                process.kill()  # the other engine would wait for this one
            print(*((folder / f"log-{rank}").read_text()[-6000:] for rank in (0, 1)), sep="\n----\n")
            raise


@pytest.fixture(scope="module")
def alone():
    with engine(dymoe=OPTIONS | {"expert_budget": "100%"}) as llm:
        server = server_of(llm)
        texts = answer(llm, prompts()[:7], max_tokens=TOKENS)
        server.reset_stats()
        answer(llm, prompts()[:1], max_tokens=TOKENS)
        stats = server.stats()
        return texts, stats.hits + stats.misses


def test_each_engine_has_half_of_the_experts_and_answers_as_one_with_all(engines, alone):
    texts, _ = alone
    assert [result["experts"][0] for result in engines] == [16, 16]
    assert engines[0]["experts"][1] != engines[1]["experts"][1]
    check_logprobs_close(texts, engines[0]["both", "100%"] + engines[1]["both", "100%"])


def test_the_budget_changes_no_bit_and_tokens_that_fill_up_are_no_uses(engines, alone):
    for result in engines:
        for which in ("both", "first alone"):
            assert result[which, "100%"] == result[which, "25%"]
        assert result["awake"] == result["both", "25%"]
    assert engines[1]["first alone", "25%"] == []
    for budget in ("100%", "25%"):
        # Sums in another order choose another expert where two are nearly tied. Padding tokens, if they were counted,
        # would add half as many uses.
        assert abs(sum(result["uses", budget] for result in engines) - alone[1]) < 0.05 * alone[1]
        assert all(result["uses", budget] > 0 for result in engines)


def test_an_expert_that_one_engine_cannot_read_fails_the_requests_of_both(engines):
    for number, result in enumerate(engines):
        assert len(result["failed"]) == 2 - number
        for reason, sentence in result["failed"]:
            assert reason == "error"
            assert "the disk is on fire" in sentence
        assert result["after"] == result["both", "25%"]


def test_engines_with_all_experts_each_have_one_copy_of_them_and_fail_alone(tmp_path, alone):
    """One engine packs the store, and host memory holds its experts once.

    On a CPU, which does the reads that fail.
    """
    options = OPTIONS | {"host_store": "pinned", "misses": "fetch"}
    engines = serve_two(tmp_path, options)
    said = [(tmp_path / f"log-{rank}").read_text() for rank in (0, 1)]
    assert sorted("the experts are packed already" in log for log in said) == [False, True]
    assert [result["experts"][0] for result in engines] == [32, 32]
    assert all("shared by ranks" in result["experts"][1] for result in engines)
    store = next((tmp_path / "stores").glob("*/rank-0-0"))
    nbytes = sum(path.stat().st_size for path in store.glob("*.safetensors"))
    assert sum(result["experts"][2] for result in engines) == pytest.approx(nbytes, rel=0.1)
    for which in (("both", "100%"), ("both", "25%"), "awake"):
        check_logprobs_close(alone[0], engines[0][which] + engines[1][which])
    for budget in ("100%", "25%"):
        assert engines[1]["uses", budget] == 0, "tokens that were made up, or another engine's"
    assert [reason for reason, _ in engines[0]["failed"]] == ["length"] * 2
    ((reason, sentence),) = engines[1]["failed"]
    assert (reason, "the disk is on fire" in sentence) == ("error", True)
    assert engines[1]["after"] == engines[1]["both", "25%"]


def test_engines_whose_device_plans_answer_as_one_with_all_experts(tmp_path, alone):
    """Device planning on the emulated card, with no host code in a step.

    Padding tokens are not counted as uses of experts here either.
    """
    options = OPTIONS | {"host_store": "pinned", "link_gbps": 8.0}
    engines = serve_two(tmp_path, options, enable_expert_parallel=True)
    for rank in (0, 1):
        assert "decode is planned by the device" in (tmp_path / f"log-{rank}").read_text()
    for which in (("both", "100%"), ("both", "25%"), "awake", "after"):
        check_logprobs_close(alone[0], engines[0][which] + engines[1][which])
    for result in engines:
        for which in ("both", "first alone"):
            assert result[which, "100%"] == result[which, "25%"]
        assert result["awake"] == result["after"] == result["both", "25%"]
        assert all(reason == "length" for reason, _ in result["failed"]), "nothing is read but memory"
    for budget in ("100%", "25%"):
        assert abs(sum(result["uses", budget] for result in engines) - alone[1]) < 0.05 * alone[1]


def test_retention_holds_over_the_experts_of_two_engines(tmp_path):
    """The device of each chooses among the experts of both, so both have the same threshold."""
    retention = 0.25
    options = {"policy": "dymoe", "expert_budget": "50%", "host_store": "pinned", "link_gbps": 8.0, "misses": "fetch"}
    options["policy_options"] = {"retention": retention, "look_ahead": 0}
    engines = serve_two(tmp_path, options, choices, enable_expert_parallel=True)
    for high_by in ("threshold", "equal"):
        (one, threshold), (other, same) = (result[high_by] for result in engines)
        assert threshold == same
        high, low = (one[name] + other[name] for name in ("high", "low"))
        assert high / (high + low) == pytest.approx(retention, abs=0.05), high_by


def test_vllm_balances_experts_of_two_engines(tmp_path, alone):
    """vLLM moves experts between two engines; the machine stores each expert once.

    Budgets change only the order of sums.
    """
    options = OPTIONS | {"host_store": "pinned", "link_gbps": 8.0, "misses": "fetch"}
    engines = serve_two(tmp_path, options, enable_expert_parallel=True, enable_eplb=True)
    for which in (("both", "100%"), ("both", "25%"), "awake", "after"):
        check_logprobs_close(alone[0], engines[0][which] + engines[1][which])
    before, after = zip(*(result["numbers"] for result in engines), strict=True)
    for everywhere, mine in (zip(*ranks, strict=True) for ranks in (before, after)):
        assert torch.equal(*everywhere), "engines differ about who has which expert"
        assert torch.equal(torch.cat(mine, 1), everywhere[0])
        assert all(set(layer.tolist()) == set(range(32)) for layer in everywhere[0])
    assert not torch.equal(before[0][0], after[0][0]), "vLLM moved nothing"
    assert all(result["experts"][0] == 32 and "shared by ranks" in result["experts"][1] for result in engines)
    assert all(result["uses", "25%"] > 0 for result in engines)
    for number, result in enumerate(engines):
        assert [reason for reason, _ in result["failed"]] == ["length"] * (2 - number), "the device reads memory"
