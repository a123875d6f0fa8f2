"""A MoE layer between two CUDA graphs, without an engine.

The graphs are vLLM's compiled pieces, or its breakable graphs. The layer multiplies by a number that changes from step
to step, as residency does; a graph that captured the layer would keep the number of its capture.
"""

import contextlib
import os
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.e2e import replays
from tests.e2e.engines import in_own_process
from tests.e2e.replays import replayed_graphs
from tests.support.launches import Launch, tensors
from vllm_dymoe.options import ConfigError

LAYER, TOKENS, HIDDEN = "layer", 4, 8
STEPS = (1.0, 2.0, 5.0)


def make_layer(*, shared):
    """Return a runner of the plugin's layer, with what ``entry_with_buffers`` reads."""
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    from vllm_dymoe.vllm_plugin.moe_method import DymoeMoEMethod

    class Layer(MoERunner):
        def __init__(self):
            torch.nn.Module.__init__(self)
            self.number = 0.0
            self._shared_experts = torch.nn.Identity() if shared else None
            self.routed_experts = torch.nn.Module()
            self.routed_experts.quant_method = DymoeMoEMethod.__new__(DymoeMoEMethod)

        def _forward_impl(self, hidden_states, router_logits, shared_experts_input, input_ids=None):
            routed = hidden_states * self.number + router_logits
            return (shared_experts_input - self.number, routed) if shared else routed

    return Layer()


def make_model(entry, *, shared):
    """Return a model: a piece, the layer, and a piece that uses the results of both."""
    from vllm.utils.torch_utils import LayerName

    def model(x):
        hidden = torch.sin(x)
        latent = hidden[:, : HIDDEN // 2].contiguous()  # for experts of a latent space
        result = entry(latent, latent + 1, hidden if shared else None, None, LayerName(LAYER), 0)
        if not shared:
            return torch.cat([result, hidden], 1)
        shared_out, out = result
        out *= 3.0  # in place, as vLLM scales it
        return torch.cat([out, shared_out, hidden], 1)

    return model


def expected(x, number, *, shared):
    hidden = torch.sin(x)
    latent = hidden[:, : HIDDEN // 2]
    out = latent * number + (latent + 1)  # added in the layer's order, on which sums close to zero depend
    return torch.cat([out * 3, hidden - number, hidden], 1) if shared else torch.cat([out, hidden], 1)


@contextlib.contextmanager
def context(layer, *, graphs=True):
    """Set a vLLM configuration and the forward context of a step of TOKENS tokens."""
    from vllm.config import CUDAGraphMode, VllmConfig, set_current_vllm_config
    from vllm.forward_context import BatchDescriptor, set_forward_context

    config = VllmConfig()
    mode = CUDAGraphMode.PIECEWISE if graphs else CUDAGraphMode.NONE
    config.compilation_config.cudagraph_mode = mode
    config.compilation_config.static_forward_context[LAYER] = layer
    descriptor = BatchDescriptor(num_tokens=TOKENS)
    with (
        set_current_vllm_config(config),
        set_forward_context(None, config, cudagraph_runtime_mode=mode, batch_descriptor=descriptor),
    ):
        yield config


def vllms_operator(*, shared):
    """Return the operator that vLLM's runner uses on a GPU."""
    return torch.ops.vllm.moe_forward_shared if shared else torch.ops.vllm.moe_forward


def cut_at(operator, config, model):
    from vllm.compilation.backends import split_graph
    from vllm.config import CUDAGraphMode

    from tests.e2e.replays import ReplayedPiece

    def backend(graph, _):
        split, items = split_graph(graph, [operator])
        assert [item.is_splitting_graph for item in items] == [False, True, False]
        for item in items:
            if not item.is_splitting_graph:
                piece = ReplayedPiece(item.graph, config, CUDAGraphMode.PIECEWISE)
                del split._modules[item.submod_name]
                split.__dict__[item.submod_name] = piece
        return split

    torch._dynamo.reset()
    return torch.compile(model, backend=backend, fullgraph=True)


def run_steps(model, layer, x, *, shared):
    replays.seen.replaying = True
    right = []
    for number in STEPS:
        layer.number = number
        x.copy_(torch.randn_like(x))
        right.append(torch.allclose(model(x), expected(x, number, shared=shared)))
    return right


@pytest.mark.parametrize("shared", [False, True], ids=["routed", "shared"])
def test_our_operator_between_pieces_writes_where_the_next_one_reads(shared):
    """With vLLM's own operator, steps are wrong, so the test would find the fault."""
    from vllm_dymoe.vllm_plugin.graphs import OPERATOR
    from vllm_dymoe.vllm_plugin.moe_method import entry_with_buffers

    layer, theirs, rest = make_layer(shared=shared), vllms_operator(shared=shared), len(STEPS) - 1
    for ours in (False, True):
        with replayed_graphs() as seen, context(layer) as config, torch.no_grad():
            operator, entry = (OPERATOR, entry_with_buffers(layer)) if ours else (theirs._qualified_op_name, theirs)
            model = cut_at(operator, config, make_model(entry, shared=shared))
            right = run_steps(model, layer, torch.zeros(TOKENS, HIDDEN), shared=shared)
        assert right == [True, *[ours] * rest]
        assert (len(seen.captures), seen.replays, seen.moved) == (2, 2 * rest, 0 if ours else rest)


def test_layers_without_graphs_keep_vllms_operator():
    from vllm_dymoe.vllm_plugin.moe_method import entry_with_buffers

    layer = make_layer(shared=False)
    with context(layer, graphs=False):
        assert entry_with_buffers(layer) is None
    layer.routed_experts.quant_method = object()  # a layer that the plugin does not serve
    with context(layer):
        assert entry_with_buffers(layer) is None


class Tape(TorchDispatchMode):
    """Records the operators that reach the device, as a capture does.

    Operators in ``host`` run their Python code on the host and are not recorded themselves.
    """

    def __init__(self, host):
        super().__init__()
        self.host = host
        self.recording = None

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in self.host:
            with self:
                return self.host[function](*args)
        result = function(*args, **(kwargs or {}))
        if self.recording is not None:
            self.recording.append(Launch(function, args, kwargs or {}, tensors(result)))
        return result

    def graph(self):
        """Return a class that replaces torch.cuda.CUDAGraph."""
        tape = self

        class Graph:
            def capture_begin(self):
                assert tape.recording is None
                tape.recording = self.recorded = []

            def capture_end(self):
                tape.recording = None

            def replay(self):
                for launch in self.recorded:
                    launch.replay()

        return Graph()


def breakable_steps(choices):
    """Run steps under vLLM's BreakableCUDAGraphWrapper.

    Returns which steps were right, and the graphs and breaks of the capture.

    Runs in a process of its own: vLLM decides at import whether its operators interrupt captures.
    """
    os.environ["VLLM_USE_BREAKABLE_CUDAGRAPH"] = "1"
    return [captured_steps(**chosen) for chosen in choices]


def captured_steps(*, ours, shared):
    from vllm.compilation import breakable_cudagraph as breakable
    from vllm.model_executor.layers.fused_moe.runner import moe_runner

    from vllm_dymoe.vllm_plugin import moe_method

    layer = make_layer(shared=shared)
    theirs = vllms_operator(shared=shared)
    into = torch.ops.vllm_dymoe.moe_forward_into
    host = moe_runner._moe_forward_shared if shared else moe_runner._moe_forward
    tape = Tape({theirs.default: host, into.default: moe_method._interrupting})
    with (
        context(layer) as config,
        torch.no_grad(),
        mock.patch.object(torch.cuda, "CUDAGraph", tape.graph),
        mock.patch.object(torch.accelerator, "empty_cache"),
        mock.patch.object(breakable, "weak_ref_tensor", lambda tensor: tensor),
        mock.patch.object(breakable, "weak_ref_tensors", lambda tensors: tensors),
        mock.patch.object(breakable, "capture_pool", return_value=contextlib.nullcontext()),
        mock.patch.object(type(breakable.current_platform), "get_global_graph_pool", return_value=None),
        tape,
    ):
        entry = moe_method.entry_with_buffers(layer) if ours else theirs
        model = breakable.BreakableCUDAGraphWrapper(make_model(entry, shared=shared), config)
        right = run_steps(model, layer, torch.zeros(TOKENS, HIDDEN), shared=shared)
        (captured,) = model.entries.values()
        return right, captured.capture.num_graphs, captured.capture.num_eager_breaks


def test_our_operator_interrupts_breakable_captures():
    """With vLLM's own operator, steps are wrong, so the test would find the fault."""
    choices = [{"ours": True, "shared": False}, {"ours": True, "shared": True}, {"ours": False, "shared": False}]
    right = [True] * len(STEPS), 2, 1
    assert in_own_process(breakable_steps, choices) == [right, right, ([True, False, False], 1, 0)]


def test_a_process_that_has_loaded_a_model_without_breaks_is_not_given_one_with(monkeypatch):
    from vllm_dymoe.vllm_plugin import moe_method

    if hasattr(moe_method._interrupting, "__wrapped__"):
        pytest.skip("this vLLM decides whether to interrupt a capture when there is one")
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
    layer = make_layer(shared=False)
    with context(layer), pytest.raises(ConfigError, match="in a process of its own"):
        moe_method.entry_with_buffers(layer)


@pytest.mark.parametrize(
    ("numbers", "scattered"),
    [
        (None, ()),
        ([0, 1, -1, -1], ()),
        ([-1, -1, 0, 1], ()),
        ([-1, 0, -1, -1], ()),
        ([0, -1, 1, -1], (0, 2)),
        ([-1, 0, -1, 1], (1, 3)),
    ],
)
def test_a_layer_names_the_experts_of_its_rank_unless_they_are_consecutive(numbers, scattered, monkeypatch):
    """Linear placement gives a rank consecutive experts, round-robin placement others."""
    from vllm_dymoe.vllm_plugin import moe_method

    method = moe_method.DymoeMoEMethod.__new__(moe_method.DymoeMoEMethod)
    ranks = {"enable_eplb": False, "tp_rank": 0, "tp_size": 1, "ep_rank": 0, "ep_size": 2}
    method.moe = SimpleNamespace(
        moe_parallel_config=SimpleNamespace(**ranks), num_experts=4, experts_per_token=2, has_bias=False
    )
    method.loading = mock.Mock()
    method.loading.add_layer.side_effect = ConfigError("no more is needed")
    monkeypatch.setattr(moe_method, "activation_of", lambda layer: None)
    layer = SimpleNamespace(
        layer_name="layer",
        apply_router_weight_on_input=False,
        expert_map=None if numbers is None else torch.tensor(numbers, dtype=torch.int32),
    )
    with pytest.raises(ConfigError):
        method.create_weights(layer, 2, HIDDEN, HIDDEN, torch.bfloat16)
    assert method.loading.add_layer.call_args.args[0].scattered == scattered
