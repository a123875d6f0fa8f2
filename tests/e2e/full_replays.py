"""Replays whole steps as CUDA graphs do, but on a CPU.

A capture runs the model once and keeps every operation with its tensors. A replay runs these operations again on the
same memory, and nothing else: no Python code of the model, of vLLM's layers or of the plugin. Two launches stand for
more than one torch operation: attention, which on a CPU reads the step's metadata from the forward context, and the
small-batch path, whose plain twin replaces the kernels. A capture fails at an operation that a graph cannot hold.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from tests.e2e.replays import Replays, platform_with_graphs, seen
from tests.support.launches import Launch, decode_as_launches, tensors
from tests.support.no_host import NoHost
from vllm_dymoe.vllm_plugin import moe_method, rank_server


class Capture(NoHost):
    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Launch] = []

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        """Run an operation and keep it; a MoE layer's operation is also inspected."""
        options = options or {}
        if function is torch.ops.vllm_dymoe.moe_forward_into.default:
            with self:
                return moe_method._moe_forward_into(*arguments, **options)
        results = super().__torch_dispatch__(function, types, arguments, options)
        self.launches.append(Launch(function, arguments, options, tensors(results)))
        return results


class ReplayedStep:
    """A model with captured steps; replaces vLLM's ``CUDAGraphWrapper``."""

    def __init__(self, model: Any) -> None:
        self.replayed_model = model
        self._captures: dict[Any, tuple[list[Launch], list[int], Any]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.replayed_model, name)

    def __call__(self, **inputs: Any) -> Any:
        context = get_forward_context() if is_forward_context_available() else None
        if not seen.replaying or context is None or context.cudagraph_runtime_mode != CUDAGraphMode.FULL:
            return self.replayed_model(**inputs)
        addresses = [tensor.data_ptr() for tensor in inputs.values() if isinstance(tensor, torch.Tensor)]
        key = context.batch_descriptor
        if key not in self._captures:
            seen.captures.append(key.num_tokens)
            seen.capturing = Capture()
            with seen.capturing:
                outputs = self.replayed_model(**inputs)
            self._captures[key] = seen.capturing.launches, addresses, outputs
            seen.capturing = None
            return outputs
        launches, captured, outputs = self._captures[key]
        seen.replays += 1
        seen.moved += addresses != captured
        for launch in launches:
            launch.replay()
        return outputs


@contextlib.contextmanager
def replayed_steps() -> Iterator[Replays]:
    """Let engines started in the ``with`` block capture whole decode steps.

    Yields the counts of captures and replays.
    """
    seen.__init__()  # type: ignore[misc]
    load = CPUModelRunner.load_model

    def load_model(self: Any, *arguments: Any, **options: Any) -> None:
        load(self, *arguments, **options)
        self.model = ReplayedStep(self.model)

    replaced = (
        (CPUModelRunner, "load_model", load_model),
        (CPUModelRunner, "get_model", lambda self: getattr(self.model, "replayed_model", self.model)),
        (rank_server, "is_captured", lambda x: seen.capturing is not None),
        (CPUAttentionMetadataBuilder, "get_cudagraph_support", lambda *_: AttentionCGSupport.UNIFORM_BATCH),
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(platform_with_graphs())

        def put(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(owner, name, value))

        for owner, name, value in replaced:
            put(owner, name, value)
        decode_as_launches(put, lambda: seen.capturing and seen.capturing.launches)
        yield seen
