"""Experts are packed once and never again, through the real engine."""

import pytest

from tests.e2e.engines import answer, engine, prompts, server_of
from vllm_dymoe.cache.host_cache import HostCache
from vllm_dymoe.cache.store import FileStore
from vllm_dymoe.options import ConfigError
from vllm_dymoe.quantize.packer import ExpertPacker

pytestmark = pytest.mark.engine


def test_a_second_start_never_quantizes_again(tmp_path, monkeypatch):
    packed, put, tokens = [], ExpertPacker.put, []
    monkeypatch.setattr(ExpertPacker, "put", lambda self, *what: packed.append(what[:3]) or put(self, *what))
    options = {"store_dir": str(tmp_path), "expert_budget": "50%", "low": 2}
    for host_store, kind, count in (("pinned", HostCache, 8 * 32 * 3), ("auto", FileStore, 0)):
        packed.clear()
        with engine(dymoe=options | {"host_store": host_store}) as llm:
            assert type(server_of(llm).store) is kind
            tokens.append([a.tokens for a in answer(llm, prompts()[:4], max_tokens=16, logprobs=None)])
            counts = server_of(llm).host_planned.counts
            assert (counts.cpu_executed > 0) is server_of(llm).store.mapped, "in memory a slot is the same memory"
            for level in (1, 2):
                llm.sleep(level)  # tests/server/test_sleep.py measures what sleep frees, with large slots
                assert not server_of(llm).cache.pools
                assert kind is FileStore or (server_of(llm).store.slots.nbytes == 0) is (level == 2)
                llm.wake_up()
                if level == 2:  # level 2 discards dense weights on a device with its own memory
                    llm.collective_rpc("reload_weights")
                tokens.append([a.tokens for a in answer(llm, prompts()[:4], max_tokens=16, logprobs=None)])
                server_of(llm).check_integrity()
            with pytest.raises(ConfigError, match="weights cannot be replaced"):
                llm.collective_rpc("reload_weights", kwargs={"weights_path": "/another"})
        assert len(packed) == count
    assert all(said == tokens[0] for said in tokens), tokens
