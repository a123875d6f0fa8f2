"""Where experts live on the host, through the real engine: what is packed once is never packed again."""

import pytest

from tests.e2e.engines import answer, engine, prompts, runtime_of
from vllm_dymoe.quantize.packer import ExpertPacker
from vllm_dymoe.store import FileStore, MemoryStore
from vllm_dymoe.vllm_adapter.announcements import logger
from vllm_dymoe.vllm_adapter.automatic_budget import kv_cache_bytes

pytestmark = pytest.mark.engine

TOKENS = 16


def start(folder, host_store, said):
    """Tokens of a server, its store, and the line at start."""
    options = {"store_dir": str(folder), "expert_budget": "50%", "lo": 2} | (
        {"host_store": host_store} if host_store else {}
    )
    said.clear()
    with engine(dymoe=options) as llm:
        store = runtime_of(llm).store
        kind = type(store)
        vllm_config = llm.llm_engine.vllm_config
        cache = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
        one_block = sum(tensor.size for tensor in cache.kv_cache_tensors) // cache.num_blocks
        blocks = -(-vllm_config.model_config.max_model_len // vllm_config.cache_config.block_size)
        assert kv_cache_bytes(vllm_config) == (blocks + 1) * one_block, "as vLLM allocates it"
        tokens = [a.tokens for a in answer(llm, prompts()[:4], max_tokens=TOKENS, logprobs=None)]
    (line,) = (text for text in said if "is active" in text)
    return tokens, kind, line


def test_a_second_start_never_quantizes_again(tmp_path, monkeypatch):
    said, packed, put = [], [], ExpertPacker.put
    monkeypatch.setattr(logger, "info", lambda text, *values: said.append(text % values))

    def counted(self, *what):
        packed.append(what[:3])
        return put(self, *what)

    monkeypatch.setattr(ExpertPacker, "put", counted)
    tokens, kind, line = start(tmp_path, "pinned", said)
    assert kind is MemoryStore
    assert len(packed) == 8 * 32 * 3
    assert "host store: host memory (not page-locked" in line
    packed.clear()

    again, kind, line = start(tmp_path, None, said)
    assert (again, kind) == (tokens, FileStore)
    assert packed == [], "quantized again"
    assert "host store: files in " in line
    assert "(auto: there is no CUDA device)" in line
