"""Store faults in a real engine: they fail the requests of their step only."""

import contextlib
import os
import threading

import pytest
from vllm import SamplingParams

from tests.e2e.engines import CORES, answer, engine, needs_two_cores, prompts, server_of
from tests.support.faulty_store import FaultyStore
from tests.support.patience import becomes
from vllm_dymoe.cache.store.files import file_name
from vllm_dymoe.trace.trace import Trace

pytestmark = pytest.mark.engine

LAYERS = 8


class FaultyReads(FaultyStore):
    """Breaks reads of a server's store while armed.

    From the ``nth`` read of a layer on, all reads of this layer break.
    """

    def arm(self, layer, nth=1, how="fail"):
        self.broken, begin = False, len(self.reads)

        def action(number, key):
            if key.layer != layer or [key.layer for _, key in self.reads[begin:]].count(layer) < nth - 1:
                return "cold"  # every read goes to a thread
            self.broken = True
            return how

        self.action = action

    def disarm(self):
        self.action = lambda number, key: "cold"


@pytest.fixture(scope="module")
def llm():
    """An engine with a quarter of the experts resident and prefix caching.

    Steps have at most 64 tokens and 8 requests.
    """
    settings = {"enable_prefix_caching": True, "max_num_batched_tokens": 64, "max_num_seqs": 8}
    with engine(dymoe={"high": 4, "expert_budget": "25%", "misses": "fetch"}, **settings) as llm:
        yield llm


@pytest.fixture(scope="module")
def want(llm):
    return [a.tokens for a in answer(llm, prompts()[:6], max_tokens=12)]


@pytest.fixture
def reads(llm):
    server = server_of(llm)
    reads = FaultyReads(server.store)
    reads.disarm()
    server.store.read_into = reads.read_into
    yield reads
    reads.gate.set()
    del server.store.read_into


def start(llm, numbers, **settings):
    sampling = SamplingParams(**({"temperature": 0, "max_tokens": 12, "ignore_eos": True} | settings))
    start.count = getattr(start, "count", 0) + 1
    for number in numbers:
        prompt = number if isinstance(number, str) else prompts()[number]
        llm.llm_engine.add_request(f"{start.count}-{number}"[:40], prompt, sampling)


def step(llm, times=1):
    done = {}
    for _ in range(times):
        done |= {output.request_id: output for output in llm.llm_engine.step() if output.finished}
    return done


def finish(llm):
    done = {}
    while llm.llm_engine.has_unfinished_requests():
        done |= step(llm)
    return list(done.values())


def check_failed(outputs, sentence):
    for output in outputs:
        for completion in output.outputs:
            assert completion.finish_reason == "error"
            assert completion.stop_reason.startswith("vllm-dymoe: ")
            assert sentence in completion.stop_reason


def check_well(llm, want):
    """Check that no slot is lost and that the same prompts give the same tokens.

    They are asked twice: the second time, the prefix cache has them.
    """
    server = server_of(llm)
    server.check_integrity()
    for _ in range(2):
        assert [a.tokens for a in answer(llm, prompts()[: len(want)], max_tokens=12)] == want
    server.check_integrity()


@pytest.mark.parametrize("phase", ["prefill", "decode", "mixed"])
def test_a_fault_in_any_layer_fails_the_requests_of_its_step(llm, want, reads, phase):
    for layer in range(LAYERS):
        start(llm, [0] if phase == "mixed" else [0, 1])
        if phase != "prefill":
            assert not step(llm, 3)
        if phase == "mixed":
            start(llm, [1])
        server_of(llm).cache.clear()
        reads.arm(layer, nth=1 + layer % 3)
        done = finish_with_fault(llm, reads)
        assert len(done) == 2
        check_failed(done, "the disk is on fire")
        reads.disarm()
        server_of(llm).check_integrity()
    check_well(llm, want)


def finish_with_fault(llm, reads):
    """Step until a read breaks; that step must end every request."""
    done = {}
    while not reads.broken:
        done |= step(llm)
    assert not llm.llm_engine.has_unfinished_requests()
    return list(done.values())


@contextlib.contextmanager
def damaged(path, damage):
    """Damage a shard and repair it at the end; the inode stays the same."""
    whole = path.read_bytes()
    with path.open("r+b") as file:
        damage(file, len(whole))
    try:
        yield
    finally:
        with path.open("r+b") as file:
            file.write(whole)


def cut(file, size):
    os.truncate(file.fileno(), size // 16)


@pytest.mark.parametrize("budget", ["25%", "minimum"])
def test_a_read_that_does_not_end_fails_its_step_and_keeps_its_slot(llm, want, reads, budget, monkeypatch):
    server = server_of(llm)
    monkeypatch.setattr(server.engine, "_timeout", 0.5)
    threads = threading.active_count()
    server.resize(server.minimum_budget if budget == "minimum" else budget)
    free = {precision: pool.count for precision, pool in server.cache.pools.items()}
    reads.arm(4, how="hang")
    check_failed(llm.generate(prompts()[:2], SamplingParams(max_tokens=4), use_tqdm=False), "transfer_timeout_s")
    reads.disarm()
    server.check_integrity()
    assert server.host_planned.fetcher.orphaned
    with pytest.raises(ValueError, match="have not ended"):
        server.resize("50%")
    if budget == "minimum":  # the hung read holds the only slot
        check_failed(llm.generate(prompts()[:1], SamplingParams(max_tokens=4), use_tqdm=False), "has not ended")
    else:
        assert answer(llm, prompts()[:1], max_tokens=12)[0].tokens == want[0]
    assert server.host_planned.fetcher.orphaned
    reads.gate.set()
    assert becomes(server.host_planned.fetcher.settle_all, 30)
    check_well(llm, want)
    server.cache.clear()
    assert {precision: pool.free for precision, pool in server.cache.pools.items()} == free
    assert threading.active_count() == threads
    server.resize("25%")


@needs_two_cores
def test_another_ranks_fault_fails_the_step(monkeypatch, tmp_path):
    """A truncated file of either rank fails the step on both.

    Only rank 0's output is collected, so rank 0 has to learn of it, and no rank may wait forever.
    """
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "|".join(map(str, CORES)))
    traces = tmp_path / "traces"
    options = {"high": 4, "expert_budget": "2%", "store_dir": str(tmp_path), "trace": str(traces),
               "misses": "fetch"}  # fmt: skip
    settings = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", "enable_prefix_caching": True}
    with engine(dymoe=options, **settings) as llm:
        want = [a.tokens for a in answer(llm, prompts()[:2], max_tokens=8)]
        for rank in (1, 0):
            (path,) = tmp_path.rglob(f"rank-{rank}-*/{file_name(5)}")
            with damaged(path, cut):
                outputs = llm.generate(prompts()[:2], SamplingParams(max_tokens=8, temperature=0), use_tqdm=False)
                check_failed(outputs, f"{path} ends at byte")
            llm.collective_rpc("dymoe_check_integrity")
            for _ in range(2):
                assert [a.tokens for a in answer(llm, prompts()[:2], max_tokens=8)] == want
        llm.collective_rpc("dymoe_trace")
    # Two requests at a time: answered, failed on rank 1, answered twice, failed on rank 0, answered twice.
    assert set(Trace.load(traces).request.tolist()) == {0, 1, *range(4, 8), *range(10, 14)}
