"""A CUDA graph on a CPU: calls recorded in a capture and replayed later.

A replay runs them on the memory that they had in the capture.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from vllm_dymoe.executor.plain_kernels import PlainKernels, PlainLargeBatch
from vllm_dymoe.prefetch import on_device


def tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@dataclass
class Launch:
    """A recorded call, and the tensors that it returned in the capture.

    A replay writes its results into these tensors, so whoever reads them sees the replay's values.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    results: list[torch.Tensor]

    def replay(self) -> None:
        for kept, now in zip(self.results, tensors(self.function(*self.arguments, **self.options)), strict=True):
            if now.data_ptr() != kept.data_ptr() and "empty" not in str(self.function):
                kept.copy_(now)


def as_launch(plain: Callable[..., Any], capturing: Callable[[], list[Launch] | None]) -> Callable[..., Any]:
    """Return a function that a running capture records as one call.

    It replaces a kernel: the capture does not see the operations inside.
    """

    def launched(*arguments: Any, **options: Any) -> Any:
        launches = capturing()
        if launches is None:
            return plain(*arguments, **options)
        with _disable_current_modes():
            results = plain(*arguments, **options)
            launches.append(Launch(plain, arguments, options, tensors(results)))
        return results

    return launched


def decode_as_launches(put: Callable[[Any, str, Any], object], capturing: Callable[[], list[Launch] | None]) -> None:
    """Make parts of the small-batch path's plain twin record as launches.

    ``put`` is ``setattr`` or a similar function, such as that of ``monkeypatch``.
    """
    put(PlainKernels, "forward", as_launch(PlainKernels.forward, capturing))
    put(PlainKernels, "copy_predicted", as_launch(PlainKernels.copy_predicted, capturing))
    for name in ("list_predicted", "judge_predicted"):
        put(PlainKernels, name, staticmethod(as_launch(getattr(PlainKernels, name), capturing)))
    put(on_device, "name_experts", as_launch(on_device.name_experts, capturing))
    for name in ("plan", "copy", "compute", "finish"):
        put(PlainLargeBatch, name, as_launch(getattr(PlainLargeBatch, name), capturing))
