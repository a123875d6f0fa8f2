"""Experts on disk with an emulated card and device planning, in a real engine."""

import pytest

from tests.e2e.engines import answer, engine, prompts, resize, server_of
from vllm_dymoe.cache.store import StoreError
from vllm_dymoe.kernels import native

pytestmark = [pytest.mark.engine, pytest.mark.skipif(native.load() is None, reason="the native library was not built")]

OPTIONS = {"high": 4, "expert_budget": "25%", "host_store": "file", "link_gbps": 8.0, "misses": "fetch"}


def test_the_device_waits_for_the_disk_and_a_failed_read_fails_its_requests_alone():
    texts = prompts()[:4]
    with engine(dymoe=OPTIONS | {"planning": "host"}) as llm:
        want = answer(llm, texts, max_tokens=12)
    with engine(dymoe=OPTIONS) as llm:
        server = server_of(llm)
        assert server.disk_queue is not None, server.host_plans_because
        for budget in ("25%", "100%", "50%"):
            resize(llm, budget)
            assert answer(llm, texts, max_tokens=12) == want
            server.check_integrity()
        store = server.store

        def fail(*arguments, **settings):
            raise StoreError("the disk is on fire")

        store.read_into = fail
        resize(llm, "25%")
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=4)
        failed = [output.outputs[0] for output in llm.generate(texts[:2], sampling, use_tqdm=False)]
        assert [one.finish_reason for one in failed] == ["error"] * 2
        assert all("the disk is on fire" in one.stop_reason for one in failed)
        del store.read_into
        assert answer(llm, texts, max_tokens=12) == want
        server.check_integrity()
