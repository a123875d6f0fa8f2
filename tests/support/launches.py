"""What a CUDA graph keeps of its capture, on a CPU: calls that are run again on the same memory."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from vllm_dymoe.executor.plain_kernels import PlainKernels, PlainLargeBatch


def tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@dataclass
class Launch:
    """A call, and the tensors that it returned in the capture: whatever reads them reads what a replay computes."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    results: list[torch.Tensor]

    def replay(self) -> None:
        for kept, now in zip(self.results, tensors(self.function(*self.arguments, **self.options)), strict=True):
            if now.data_ptr() != kept.data_ptr() and "empty" not in str(self.function):
                kept.copy_(now)


def as_launch(plain: Callable[..., Any], capturing: Callable[[], list[Launch] | None]) -> Callable[..., Any]:
    """A function that stands in for a kernel: a running capture gets the call, and looks at nothing in it."""

    def launched(*arguments: Any) -> Any:
        launches = capturing()
        if launches is None:
            return plain(*arguments)
        with _disable_current_modes():
            results = plain(*arguments)
            launches.append(Launch(plain, arguments, {}, tensors(results)))
        return results

    return launched


def decode_as_launches(put: Callable[[type, str, Any], object], capturing: Callable[[], list[Launch] | None]) -> None:
    """Put launches in place of what the plain twin of the small-batch path does, by ``setattr`` or something like
    it."""
    put(PlainKernels, "forward", as_launch(PlainKernels.forward, capturing))
    for name in ("plan", "copy", "compute", "finish"):
        put(PlainLargeBatch, name, as_launch(getattr(PlainLargeBatch, name), capturing))
