"""vLLM's own graph manager of Model Runner V2: capture, dispatch and padding.

The host plays the card. All classes are vLLM's, including the wrapper of a piece. Replaced are calls to CUDA and to
distributed groups, the metadata of attention, and the check whether the model is compiled. A graph keeps the operations
of its capture (``host_card``), and the small-batch path launches its plain twin.
"""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.compilation import cuda_graph
from vllm.config import CompilationConfig, CUDAGraphMode
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.v1.worker.gpu import cudagraph_utils

from tests.executor.device_planned import device_planned_server
from tests.executor.steps import forward, make_server, random_step
from tests.kernels import host_card
from tests.small_model import make_experts, make_store
from tests.support.launches import decode_as_launches
from tests.vllm_plugin.test_prepare import configure
from vllm_dymoe.kernels import Activation, native
from vllm_dymoe.planner.constants import SMALL_BATCH_ROWS
from vllm_dymoe.vllm_plugin.graphs import settle_graphs

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
        "current_platform": SimpleNamespace(get_global_graph_pool=object), "has_compiled_submodule": lambda model: True,
        "prepare_inputs_to_capture": lambda *_, **__: (None, None),
        "validate_cudagraph_capturing_enabled": lambda: None, "weak_ref_tensors": lambda output: output,
    }.items():  # fmt: skip
        monkeypatch.setattr(cudagraph_utils, name, value, raising=False)
        monkeypatch.setattr(cuda_graph, name, value, raising=False)
    monkeypatch.setattr(CompilationConfig, "is_attention_compiled_piecewise", lambda settings: True)
    monkeypatch.setattr(torch.cuda, "graph", host_card.graph)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", host_card.Graph)
    decode_as_launches(monkeypatch.setattr, host_card.capturing)


class Runner:
    """Two MoE layers in fixed buffers, and the graphs that contain them.

    With everything resident, the model also has a graph of its own piece.
    """

    def __init__(self, query, budget, **options):
        self.config = config = configure(max_num_seqs=32)
        settings = config.compilation_config
        settings.cudagraph_mode, settings.cudagraph_capture_sizes = CUDAGraphMode.FULL_AND_PIECEWISE, SIZES
        settings.max_cudagraph_capture_size = SIZES[-1]
        if query > 1:
            dynamic = {"uses_dynamic_speculative_decoding": lambda: False}
            config.speculative_config = SimpleNamespace(method="ngram", num_speculative_tokens=query - 1, **dynamic)
        settle_graphs(config, needs_no_host=True, complete=budget == "100%")
        assert settings.cudagraph_mode == getattr(
            CUDAGraphMode, "FULL_AND_PIECEWISE" if budget == "100%" else "FULL_DECODE_ONLY"
        )
        self.server = device_planned_server(STORE, budget, **options)
        self.path = self.server.small_batches
        self.buffers = [torch.zeros_like(part) for part in random_step(0, 128, STORE.experts)]
        inputs = torch.zeros(128, dtype=torch.int32), torch.zeros(128, dtype=torch.int64), torch.zeros(128) > 0
        self.inputs = SimpleNamespace(**dict(zip(("input_ids", "positions", "is_padding"), inputs, strict=True)))
        self.piece = cuda_graph.CUDAGraphWrapper(self.model, config, CUDAGraphMode.PIECEWISE)
        arguments = config, torch.device("cpu"), settings.cudagraph_mode, query
        self.manager = cudagraph_utils.ModelCudaGraphManager(*arguments)
        state = SimpleNamespace(prepare_dummy_inputs=lambda requests, tokens: {})
        self.manager.capture(self.piece, state, self.inputs, None, *[None] * 3)

    def model(self, input_ids, **others):
        """Return the outputs of both layers, [rows, 2 * hidden]."""
        rows, captured = len(input_ids), host_card.capturing() is not None
        x, weights, ids = (part[:rows] for part in self.buffers)
        if rows <= SMALL_BATCH_ROWS and captured:
            outs = [self.path.forward(layer, x, weights, ids, Activation.SILU) for layer in range(2)]
        else:
            large = {"captured": captured}
            outs = [self.path.forward_large(layer, x, weights, ids, Activation.SILU, **large) for layer in range(2)]
        return torch.cat(outs, 1)

    def step(self, given, lengths):
        """Run requests with these numbers of tokens.

        Returns the mode of the graph, its rows, and the layers' outputs.
        """
        tokens, uniform = sum(lengths), lengths[0] if len(set(lengths)) == 1 else None
        for buffer, part in zip(self.buffers, given, strict=True):
            buffer[:tokens] = part
        self.path.settle()
        self.path.tell(tokens)
        desc = self.manager.dispatch(len(lengths), tokens, uniform, 0)
        rows, mode, inputs = desc.num_tokens, desc.cg_mode, vars(self.inputs)
        if mode == CUDAGraphMode.FULL:
            out = self.manager.run_fullgraph(desc)
        else:  # as the runner does
            padded = {"batch_descriptor": BatchDescriptor(num_tokens=rows)} if mode == CUDAGraphMode.PIECEWISE else {}
            with set_forward_context(None, self.config, num_tokens=rows, cudagraph_runtime_mode=mode, **padded):
                out = self.manager.run_pw_graph(self.piece, {name: part[:rows] for name, part in inputs.items()})
        return mode.name, rows, out[:tokens].chunk(2, 1)


ONE_EACH = [([1] * 4, 4), ([1] * 3, 4), ([1, 1, 40], 0), ([1], 1), ([1] * 19, 24), ([1] * 3, 4), ([30], 0)]
DRAFTS = [([3] * 2, 6), ([3] * 1, 3), ([3, 1, 20], 0), ([3] * 3, 9), ([3] * 5, 15), ([3] * 7, 24), ([3] * 2, 6)]


@pytest.mark.parametrize(
    ("query", "steps", "misses", "budget"),
    [
        (1, ONE_EACH, "fetch", "50%"),
        pytest.param(1, ONE_EACH, "compute", "50%", marks=needs_library),
        (3, DRAFTS, "fetch", "50%"),
        (1, ONE_EACH, "fetch", "100%"),
        (3, DRAFTS, "fetch", "100%"),
    ],
    ids=["decode", "misses computed by the CPU", "drafts", "pieces", "pieces and drafts"],
)
@torch.inference_mode()
def test_a_replay_has_the_bits_of_the_hosts_way_for_as_many_tokens_as_there_are(card, query, steps, misses, budget):
    """Uses are counted as on the host path; padding is not counted.

    Where the CPU executes misses, 24 rows are two small batches.
    """
    runner, host = Runner(query, budget, misses=misses), make_server(STORE, "100%")
    host.resize(budget)
    for number, (lengths, rows) in enumerate(steps):
        given, tokens = random_step(number, sum(lengths), STORE.experts), sum(lengths)
        mode, ran, outputs = runner.step(given, lengths)
        fits = next((size for size in SIZES if size >= tokens), 0)
        want = ("FULL", rows) if rows else ("PIECEWISE", fits) if budget == "100%" and fits else ("NONE", tokens)
        assert (mode, ran) == want, lengths
        for layer, out in enumerate(outputs):
            assert torch.equal(out, forward(host, layer, *given)), (lengths, layer)
    runner.server.cache.read_device()
    assert (runner.server.stats().cpu_executed > 0) == (misses == "compute")
    if misses == "compute":  # another test covers what the table holds then
        return runner.server.close(keep_store=True)
    for name in ("precision", "score", "used_at", "step"):
        ours, theirs = (getattr(server.cache.table, name) for server in (runner.server, host))
        np.testing.assert_array_equal(ours, theirs, name)
