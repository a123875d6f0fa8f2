"""What is packed once is never packed again, through the real engine."""

import pytest

from tests.e2e.engines import answer, engine, prompts, runtime_of
from vllm_dymoe.quantize.packer import ExpertPacker
from vllm_dymoe.store import FileStore
from vllm_dymoe.transfer import HostLevel

pytestmark = pytest.mark.engine


def test_a_second_start_never_quantizes_again(tmp_path, monkeypatch):
    packed, put, tokens = [], ExpertPacker.put, []
    monkeypatch.setattr(ExpertPacker, "put", lambda self, *what: packed.append(what[:3]) or put(self, *what))
    options = {"store_dir": str(tmp_path), "expert_budget": "50%", "lo": 2}
    for host_store, kind, count in (("pinned", HostLevel, 8 * 32 * 3), ("auto", FileStore, 0)):
        packed.clear()
        with engine(dymoe=options | {"host_store": host_store}) as llm:
            assert type(runtime_of(llm).store) is kind
            tokens.append([a.tokens for a in answer(llm, prompts()[:4], max_tokens=16, logprobs=None)])
            counts = runtime_of(llm).serving.counts
        assert (counts.there > 0) is (host_store == "pinned"), "where all are in memory, a slot is the same memory"
        assert len(packed) == count
    assert tokens[0] == tokens[1]
