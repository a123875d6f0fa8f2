"""Replays vLLM's compiled pieces as CUDA graphs do, in a real engine on a CPU.

A graph replays its capture: it reads and writes the addresses of the capture, whatever its caller passes, and copies
nothing. ``ReplayedPiece`` replaces vLLM's ``CUDAGraphWrapper`` and does the same with tensors. The tensors of a capture
are kept alive, so that a new tensor cannot get the address of one of them by chance.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from vllm.compilation.passes.utility.fix_functionalization import FixFunctionalizationPass
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.platforms.cpu import CpuPlatform

from tests.support.launches import tensors


@dataclass
class Replays:
    """Counts since the engine started: of pieces, or of steps in ``full_replays``."""

    replaying: bool = False  # whether pieces are captured and replayed; before, they run as plain functions
    captures: list[int] = field(default_factory=list)  # numbers of tokens, one for each capture
    replays: int = 0
    moved: int = 0  # replays called with a tensor at another address than in their capture
    capturing: Any = None  # the capture of the step that is running


seen = Replays()


class ReplayedPiece:
    def __init__(self, runnable: Callable[..., Any], vllm_config: Any, runtime_mode: CUDAGraphMode, **_: Any) -> None:
        self.runnable = runnable
        self._mode = runtime_mode
        self._captures: dict[Any, tuple[tuple[Any, ...], Any]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runnable, name)

    def __call__(self, *arguments: Any) -> Any:
        context = get_forward_context() if is_forward_context_available() else None
        if not seen.replaying or context is None or context.cudagraph_runtime_mode != self._mode:
            return self.runnable(*arguments)
        if context.batch_descriptor not in self._captures:
            seen.captures.append(context.batch_descriptor.num_tokens)
            outputs = self.runnable(*arguments)
            self._captures[context.batch_descriptor] = arguments, outputs
            return outputs
        captured, outputs = self._captures[context.batch_descriptor]
        seen.replays += 1
        seen.moved += any(
            isinstance(now, torch.Tensor) and now.data_ptr() != then.data_ptr()
            for now, then in zip(arguments, captured, strict=True)
        )
        for output, result in zip(tensors(outputs), tensors(self.runnable(*captured)), strict=True):
            output.copy_(result)
        return outputs


@contextlib.contextmanager
def platform_with_graphs() -> Iterator[None]:
    """Make vLLM capture graphs and compile in pieces on a CPU, as on a GPU."""
    original = CpuPlatform.check_and_update_config.__func__  # type: ignore[attr-defined]

    def check_and_update_config(cls: type[CpuPlatform], config: Any) -> None:
        settings = config.compilation_config
        kept = {name: getattr(settings, name) for name in ("mode", "backend", "cudagraph_capture_sizes")}
        original(cls, config)
        for name, value in kept.items():
            setattr(settings, name, value)

    replaced = {
        "check_and_update_config": classmethod(check_and_update_config),
        "support_static_graph_mode": classmethod(lambda cls: True),
        "get_static_graph_wrapper_cls": classmethod(lambda cls: f"{__name__}.{ReplayedPiece.__name__}"),
    }
    with contextlib.ExitStack() as stack:
        for name, value in replaced.items():
            stack.enter_context(mock.patch.object(CpuPlatform, name, value))
        # This pass looks for CUDA operators in every piece, and a CPU build lacks some of them.
        stack.enter_context(mock.patch.object(FixFunctionalizationPass, "__call__", return_value=None))
        yield


@contextlib.contextmanager
def replayed_graphs() -> Iterator[Replays]:
    """Let engines started in the ``with`` block use piecewise graphs.

    Yields the counts of captures and replays.
    """
    seen.__init__()  # type: ignore[misc]
    with platform_with_graphs(), mock.patch.dict("os.environ", {"VLLM_DISABLE_COMPILE_CACHE": "1"}):
        yield seen
