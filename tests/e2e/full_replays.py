"""A whole step as a CUDA graph would hold it, on a CPU: the operations of its capture, run again on the same memory.

A capture runs the model once and keeps every operation with its tensors. A replay runs these operations and nothing
else: no Python of the model, of vLLM's layers or of ours. Two things are more than an operation of torch, and are
launches here: attention, which on a CPU reads the step's metadata from the forward context, and the decode path, whose
plain twin stands in for kernels. What a graph cannot hold ends the capture.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from tests.e2e.replays import Replays, platform_with_graphs, seen, tensors
from tests.support.no_host import NoHost
from vllm_dymoe.runtime.decode_plain import PlainDecode, PlainWide
from vllm_dymoe.vllm_adapter import moe_method, running


@dataclass
class Launch:
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    results: list[torch.Tensor]

    def replay(self) -> None:
        for kept, now in zip(self.results, tensors(self.function(*self.arguments, **self.options)), strict=True):
            if now.data_ptr() != kept.data_ptr():
                kept.copy_(now)


class Capture(NoHost):
    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Launch] = []

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        """Run an operation and keep it; that of a MoE layer is looked into."""
        options = options or {}
        if function is torch.ops.vllm_dymoe.moe_forward_into.default:
            with self:
                return moe_method._moe_forward_into(*arguments, **options)
        results = super().__torch_dispatch__(function, types, arguments, options)
        return self.keep(results, function, arguments, options)

    def keep(self, results: Any, function: Any, arguments: Any, options: Any) -> Any:
        self.launches.append(Launch(function, arguments, options, tensors(results)))
        return results


class ReplayedStep:
    """A model; stands in for vLLM's ``CUDAGraphWrapper`` around it."""

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


def as_launch(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A function that stands in for a kernel: a capture keeps the call, and looks at nothing in it."""

    def launched(*arguments: Any) -> Any:
        if seen.capturing is None:
            return plain(*arguments)
        with torch.utils._python_dispatch._disable_current_modes():
            return seen.capturing.keep(plain(*arguments), plain, arguments, {})

    return launched


@contextlib.contextmanager
def replayed_steps() -> Iterator[Replays]:
    """Engines that start in a ``with`` block capture whole decode steps; the counts of what they do."""
    seen.__init__()  # type: ignore[misc]
    load = CPUModelRunner.load_model

    def load_model(self: Any, *arguments: Any, **options: Any) -> None:
        load(self, *arguments, **options)
        self.model = ReplayedStep(self.model)

    replaced = (
        (CPUModelRunner, "load_model", load_model),
        (CPUModelRunner, "get_model", lambda self: getattr(self.model, "replayed_model", self.model)),
        (PlainDecode, "forward", as_launch(PlainDecode.forward)),
        (PlainDecode, "name_ahead", staticmethod(as_launch(PlainDecode.name_ahead))),
        (PlainDecode, "fetch_ahead", as_launch(PlainDecode.fetch_ahead)),
        *((PlainWide, name, as_launch(getattr(PlainWide, name))) for name in ("plan", "copy", "compute", "finish")),
        (running, "is_captured", lambda x: seen.capturing is not None),
        (CPUAttentionMetadataBuilder, "get_cudagraph_support", lambda *_: AttentionCGSupport.UNIFORM_BATCH),
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(platform_with_graphs())
        for owner, name, value in replaced:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield seen
