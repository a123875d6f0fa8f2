"""vLLM's own manager of Model Runner V2's graphs over the host in place of a card: capture, dispatch, and padding.

The class is vLLM's. Replaced are what it asks CUDA and distributed groups for: a graph keeps the operations of its
capture (``host_card``), and launches of the decode path are the plain twin's.
"""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu import cudagraph_utils

from tests.kernels import host_card
from tests.runtime.decided import decided_runtime
from tests.runtime.steps import forward, make_runtime, random_step
from tests.small_model import make_experts, make_store
from tests.support.launches import decode_as_launches
from tests.vllm_adapter.test_prepare import configure
from vllm_dymoe.kernels import Activation, native
from vllm_dymoe.runtime.decode_path import DECODE_ROWS
from vllm_dymoe.vllm_adapter.graphs import settle_graphs

needs_library = pytest.mark.skipif(native.load() is None, reason="the native library was not built here")
STORE = make_store(make_experts(layers=2, num_experts=8))
SIZES = [1, 2, 4, 8, 16, 24, 32]


@pytest.fixture
def card(monkeypatch):
    group = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    offloader = SimpleNamespace(sync_prev_onload=lambda: None, join_after_forward=lambda: None)
    for name, value in {
        "get_pp_group": lambda: group, "graph_capture": lambda device: contextlib.nullcontext(),
        "capture_pool": lambda *_: contextlib.nullcontext(), "get_offloader": lambda: offloader,
        "current_stream": host_card.Stream, "is_global_first_rank": lambda: False,
        "current_platform": SimpleNamespace(get_global_graph_pool=object),
    }.items():  # fmt: skip
        monkeypatch.setattr(cudagraph_utils, name, value, raising=False)
    monkeypatch.setattr(torch.cuda, "graph", host_card.graph)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", host_card.Graph)
    decode_as_launches(monkeypatch.setattr, host_card.capturing)


class Runner:
    """Two MoE layers in buffers that stay, and the graphs over them."""

    def __init__(self, query, **options):
        config = configure(max_num_seqs=32)
        settings = config.compilation_config
        settings.cudagraph_mode, settings.cudagraph_capture_sizes = CUDAGraphMode.FULL_AND_PIECEWISE, SIZES
        settings.max_cudagraph_capture_size = SIZES[-1]
        if query > 1:
            dynamic = {"uses_dynamic_speculative_decoding": lambda: False}
            config.speculative_config = SimpleNamespace(method="ngram", num_speculative_tokens=query - 1, **dynamic)
        settle_graphs(config, device_decides=True)
        assert settings.cudagraph_mode == CUDAGraphMode.FULL_DECODE_ONLY
        self.runtime = decided_runtime(STORE, "50%", **options)
        self.path = self.runtime.decode
        self.buffers = [torch.zeros_like(part) for part in random_step(0, 128, STORE.experts)]
        self.outputs = {}
        self.manager = cudagraph_utils.CudaGraphManager(config, torch.device("cpu"), settings.cudagraph_mode, query)
        self.manager.capture(lambda desc, warmup: lambda mode: self.outputs.update({desc: self.model(desc.num_tokens)}))

    def model(self, rows, *, captured=True):
        x, weights, ids = (part[:rows] for part in self.buffers)
        if rows <= DECODE_ROWS and captured:
            return [self.path.forward(layer, x, weights, ids, Activation.SILU) for layer in range(2)]
        return [
            self.path.forward_wide(layer, x, weights, ids, Activation.SILU, captured=captured) for layer in range(2)
        ]

    def step(self, given, lengths):
        """Of requests with so many tokens each: what was run, and the layers' outputs."""
        tokens, uniform = sum(lengths), lengths[0] if len(set(lengths)) == 1 else None
        for buffer, part in zip(self.buffers, given, strict=True):
            buffer[:tokens] = part
        self.path.settle()
        self.path.tell(tokens)
        desc = self.manager.dispatch(len(lengths), tokens, uniform, 0)
        if desc.cg_mode == CUDAGraphMode.FULL:
            self.manager.run_fullgraph(desc)
            return desc.num_tokens, [out[:tokens] for out in self.outputs[desc]]
        return 0, self.model(tokens, captured=False)


ONE_EACH = [([1] * 4, 4), ([1] * 3, 4), ([1, 1, 40], 0), ([1], 1), ([1] * 19, 24), ([1] * 3, 4), ([30], 0)]


@pytest.mark.parametrize(
    ("query", "steps", "misses"),
    [
        (1, ONE_EACH, "fetch"),
        pytest.param(1, ONE_EACH, "compute", marks=needs_library),
        (
            3,
            [([3] * 2, 6), ([3] * 1, 3), ([3, 1, 20], 0), ([3] * 3, 9), ([3] * 5, 15), ([3] * 7, 24), ([3] * 2, 6)],
            "fetch",
        ),
    ],
    ids=["decode", "misses computed there", "drafts"],
)
@torch.inference_mode()
def test_a_replay_has_the_bits_of_the_hosts_way_for_as_many_tokens_as_there_are(card, query, steps, misses):
    """And the same uses are counted: padding is none. Where the host computes misses 24 rows are two narrow steps."""
    runner, host = Runner(query, misses=misses), make_runtime(STORE, "100%")
    host.resize("50%")
    for number, (lengths, rows) in enumerate(steps):
        given = random_step(number, sum(lengths), STORE.experts)
        found, outputs = runner.step(given, lengths)
        assert found == rows, lengths
        for layer, out in enumerate(outputs):
            assert torch.equal(out, forward(host, layer, *given)), (lengths, layer)
    runner.runtime.memory.read_device()
    assert (runner.runtime.stats().there > 0) == (misses == "compute")
    if misses == "compute":  # which of the host's steps those are is another question
        return runner.runtime.close(keep_store=True)
    for name in ("tier", "heat", "used_at", "step"):
        ours, theirs = (getattr(runtime.memory.table, name) for runtime in (runner.runtime, host))
        np.testing.assert_array_equal(ours, theirs, name)
