"""The automatic budget, compared with vLLM's own sizing of its KV cache."""

from types import SimpleNamespace

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from tests.small_model import make_experts
from tests.vllm_plugin.test_prepare import configure
from vllm_dymoe.options import ConfigError, Options
from vllm_dymoe.policies import make_policy
from vllm_dymoe.vllm_plugin import automatic_budget as module
from vllm_dymoe.vllm_plugin.automatic_budget import (
    automatic_budget,
    budget_in_host_memory,
    kv_cache_bytes,
    leave_room,
    step_shape,
)

GIB = 2**30
LAYERS, LENGTH = 48, 40960
# Qwen3-30B-A3B at 4 bits.
EXPERTS = make_experts(layers=LAYERS, num_experts=128, top_k=8, hidden=2048, intermediate=768, bits=(4,), group_size=64)
LEAST = 32 * 2**20 + EXPERTS.formats[4].nbytes
CUDA = torch.device("cuda")


class Layer(AttentionLayerBase):
    """One attention layer of a model, as vLLM describes it."""

    def __init__(self, spec):
        self.spec = spec

    def get_attn_backend(self):
        raise NotImplementedError

    def get_kv_cache_spec(self, vllm_config):
        return self.spec


def full(**changes):
    settings = {"block_size": 16, "num_kv_heads": 4, "head_size": 128, "dtype": torch.bfloat16} | changes
    return FullAttentionSpec(**settings)


@pytest.fixture
def config(monkeypatch):
    config = configure(enforce_eager=True)
    config.model_config.max_model_len = LENGTH
    config.cache_config.gpu_memory_utilization = 0.92
    config.cache_config.kv_cache_memory_bytes = None
    config.scheduler_config.max_num_batched_tokens, config.scheduler_config.max_num_seqs = 2048, 256
    sizes = {"get_hidden_size": 2048, "get_vocab_size": 151936, "get_head_size": 128}
    for name, value in sizes.items():
        monkeypatch.setattr(type(config.model_config), name, lambda self, value=value: value)
    monkeypatch.setattr(type(config.model_config), "get_num_attention_heads", lambda self, parallel: 32)
    monkeypatch.setattr(type(config.model_config), "get_num_kv_heads", lambda self, parallel: 4)
    if hasattr(config.cache_config, "kv_cache_layout"):  # chosen by the engine core
        config.cache_config.kv_cache_layout = "LBNHC"
    layers = {f"model.layers.{number}.attn": Layer(full()) for number in range(LAYERS)}
    monkeypatch.setattr(config.compilation_config, "static_forward_context", layers)
    return config


def card(monkeypatch, gigabytes, dense=3 * GIB, context=GIB // 2):
    total = gigabytes * GIB
    free = total - dense - context
    monkeypatch.setattr(module, "CudaMemory", lambda device: SimpleNamespace(available=lambda: free))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, total))
    return free - int(0.08 * total)


def vllm_accepts(config, available):
    specs = {name: layer.spec for name, layer in config.compilation_config.static_forward_context.items()}
    kv_cache_utils.check_enough_kv_cache_memory(config, specs, available)


@pytest.mark.parametrize("gigabytes", [16, 24, 80])
def test_vllm_starts_with_what_the_budget_leaves(config, monkeypatch, gigabytes):
    allowed = card(monkeypatch, gigabytes)
    budget = automatic_budget(config, CUDA, EXPERTS, LEAST)
    activations = step_shape(config, EXPERTS).nbytes
    vllm_accepts(config, allowed - budget - activations)
    assert budget > 5 * GIB


def test_several_requests_have_their_kv_cache(config, monkeypatch):
    free = card(monkeypatch, 24)
    budget = automatic_budget(config, CUDA, EXPERTS, LEAST, requests=3)
    assert budget == free - step_shape(config, EXPERTS).nbytes - 3 * kv_cache_bytes(config)
    assert budget < automatic_budget(config, CUDA, EXPERTS, LEAST)


def test_the_cache_is_as_large_as_vllm_says_and_no_larger(config):
    needed = kv_cache_bytes(config)
    one_block = LAYERS * full().page_size_bytes
    assert needed == LAYERS * 2 * 4 * 128 * 2 * LENGTH + one_block
    vllm_accepts(config, needed)
    with pytest.raises(ValueError, match="KV cache"):
        vllm_accepts(config, needed - one_block - 1)


def test_layers_of_several_kinds_fill_up_their_groups(config):
    """vLLM groups eight full and seventeen window layers by eight.

    The last group holds one layer, but takes the memory of eight.
    """
    window = SlidingWindowSpec(block_size=16, num_kv_heads=4, head_size=128, dtype=torch.bfloat16, sliding_window=1024)
    layers = {f"full.{number}": Layer(full()) for number in range(8)}
    layers |= {f"window.{number}": Layer(window) for number in range(17)}
    config.compilation_config.static_forward_context.clear()
    config.compilation_config.static_forward_context.update(layers)
    needed = kv_cache_bytes(config)
    page = full().page_size_bytes
    assert needed == 8 * (full().max_memory_usage_bytes(config) + page) + 24 * (
        window.max_memory_usage_bytes(config) + page
    )
    vllm_accepts(config, needed)


def test_layers_that_share_or_keep_nothing_cost_nothing(config):
    layers = config.compilation_config.static_forward_context
    needed = kv_cache_bytes(config)
    layers["shared"] = Layer(full())
    layers["shared"].kv_sharing_target_layer_name = "model.layers.0.attn"
    layers["encoder"] = Layer(None)
    assert kv_cache_bytes(config) == needed
    layers.clear()
    assert kv_cache_bytes(config) == 0


def test_a_cache_that_the_user_has_sized_is_left_its_size(config, monkeypatch):
    allowed = card(monkeypatch, 24)
    config.cache_config.kv_cache_memory_bytes = GIB
    beyond = int(0.08 * 24 * GIB)  # above this size vLLM uses the card's size instead of gpu_memory_utilization
    spare = allowed + beyond - step_shape(config, EXPERTS).nbytes
    assert automatic_budget(config, CUDA, EXPERTS, LEAST) == min(int(0.8 * spare), spare - GIB)


def test_a_length_that_vllm_is_to_choose_is_no_reason_to_refuse(config, monkeypatch):
    card(monkeypatch, 8)
    with pytest.raises(ConfigError, match="--max-model-len"):
        automatic_budget(config, CUDA, EXPERTS, LEAST)
    monkeypatch.setattr(config.model_config, "original_max_model_len", -1)
    assert automatic_budget(config, CUDA, EXPERTS, LEAST) > LEAST


def test_graphs_are_counted_where_there_are_any(config, monkeypatch):
    eager = step_shape(config, EXPERTS)
    assert (eager.graphs, eager.graph_tokens) == (0, 0)
    monkeypatch.setattr(config.model_config, "enforce_eager", False)
    config.compilation_config.cudagraph_mode = CUDAGraphMode.PIECEWISE
    config.compilation_config.cudagraph_capture_sizes = [1, 2, 512]
    captured = step_shape(config, EXPERTS)
    assert captured.graph_tokens == 512
    assert captured.graphs % 3 == 0 < captured.graphs
    assert captured.nbytes > eager.nbytes


def test_on_a_cpu_it_is_half_of_what_the_machine_has(monkeypatch):
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=10 * GIB))
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")

    def budget(ranks):
        config = SimpleNamespace(parallel_config=SimpleNamespace(local_world_size=ranks, data_parallel_size_local=1))
        return automatic_budget(config, torch.device("cpu"), EXPERTS, LEAST)

    assert budget(1) == 4 * GIB
    assert budget(2) == 3 * GIB // 2, "two ranks share the machine's memory"
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "20")
    assert budget(1) == 0


@pytest.mark.parametrize(
    ("options", "budget"),
    [
        ({}, 7 * GIB),
        ({"host_memory": "2GiB"}, 2 * GIB),
        ({"host_memory": "25%"}, EXPERTS.stored_nbytes // 4),
        ({"host_memory": "25%", "expert_budget": "1GiB"}, EXPERTS.stored_nbytes // 4),
    ],
)
def test_on_a_cpu_host_memory_is_the_budget(options, budget):
    assert budget_in_host_memory(Options(**options), EXPERTS, 7 * GIB, 0) == budget
    options, share = Options(host_memory="1GiB", expert_budget="25%"), EXPERTS.stored_nbytes // 4
    with pytest.raises(ConfigError, match=f"expert_budget is {share} bytes and host_memory {GIB}"):
        budget_in_host_memory(options, EXPERTS, 7 * GIB, 0)


@pytest.mark.parametrize(
    ("available", "asked", "ranks", "left"),
    [
        (GIB, "auto", False, GIB),  # enough
        (GIB // 4, "auto", False, GIB // 2),
        (GIB // 4, "auto for 3 requests", False, 3 * GIB // 2),
        (GIB // 4, "8GiB", False, GIB // 4),  # set by the user
        (GIB // 4, "auto", True, GIB // 4),
        (-8 * GIB, "auto", False, -8 * GIB),  # more than the experts hold
    ],
)
def test_experts_give_up_what_the_profile_run_found_missing(monkeypatch, available, asked, ranks, left):
    monkeypatch.setattr(module, "kv_cache_bytes", lambda config: GIB // 2)
    options, resized = Options(expert_budget=asked), []
    server = SimpleNamespace(
        options=options, experts=EXPERTS, policy=make_policy(options), ranks_add_up=ranks, resize=resized.append,
        slot_plan=SimpleNamespace(limit=4 * GIB, workspace_bytes=32 * 2**20),
    )  # fmt: skip
    config = SimpleNamespace(model_config=SimpleNamespace(original_max_model_len=4096, max_model_len=4096))
    assert leave_room(config, server, available) == left
    assert resized == ([4 * GIB - (left - available)] if left > available else [])
    config.model_config.original_max_model_len = -1  # vLLM chooses the length itself
    assert leave_room(config, server, available) == available
