"""Launching a kernel, or only compiling it."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import triton
from torch import Tensor

from vllm_dymoe.cgroups import usable_cores

Start = Callable[[Any, tuple[int, ...], Sequence[Tensor | int], dict[str, Any], dict[str, int]], None]
"""Starts a kernel: (kernel, grid, tensors and numbers, constants, options for the compiler).

Options are num_warps, and num_stages, maxnreg and enable_fp_fusion if they differ from the compiler's choice and True.
"""

_THREADS = 8
_FUSED = {"enable_fp_fusion": True}


def run_kernel(
    kernel: Any,
    grid: tuple[int, ...],
    tensors: Sequence[Tensor | int],
    constants: dict[str, Any],
    options: dict[str, int],
) -> None:
    """Launch a kernel; compile it first if needed."""
    kernel[grid](*tensors, **constants, **_FUSED | options)


def compile_kernel(
    kernel: Any,
    grid: tuple[int, ...],
    tensors: Sequence[Tensor | int],
    constants: dict[str, Any],
    options: dict[str, int],
) -> None:
    """Compile only: a launch with the same constants, dtypes and alignments then starts at once."""
    kernel.warmup(*tensors, grid=grid, **constants, **_FUSED | options)


def prepared(
    kernel: Any, grid: tuple[int, ...], constants: dict[str, Any], options: dict[str, int]
) -> Callable[..., None]:
    """Return a launch that takes only its tensors, in half the time: for launches that are repeated often."""
    return partial(kernel.run, grid=grid, warmup=False, **constants, **_FUSED | options)


@contextmanager
def compiling_together() -> Iterator[None]:
    """Context in which compile_kernel returns at once.

    At its end everything is compiled in parallel on the CPU cores.
    """
    threads = min(_THREADS, usable_cores())
    with ThreadPoolExecutor(threads) as executor, triton.AsyncCompileMode(executor):
        yield
