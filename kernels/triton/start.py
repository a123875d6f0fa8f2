"""Launching a kernel, or only compiling it."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from enum import IntEnum
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from vllm_dymoe.cgroups import usable_cores

Start = Callable[[Any, tuple[int, ...], Sequence[Tensor | int], dict[str, Any], dict[str, int]], None]
"""(kernel, grid, its tensors and numbers, its constants, and what compiler and driver are told: num_warps, and
num_stages, maxnreg, launch_pdl and enable_fp_fusion where they differ from their own choice and True)"""


class Overlap(IntEnum):
    """How a launch overlaps the one before it in the stream.

    This is programmatic dependent launch, from sm_90 on. The earlier launch says in its program from when on the later
    one may begin; everything before it has ended by then. The later one has to wait for its end in every program: a
    launch that ends without waiting would let the next one begin while the earlier one still runs.
    """

    NONE = 0  # it begins when the launch before has ended
    START = 1  # it waits before it accesses anything that the launch before writes
    WHOLE = 2  # it waits when it has done its work: the launch before writes nothing that it accesses

    @property
    def options(self) -> dict[str, int]:
        """Return the option of a launch that overlaps the one before it."""
        return {"launch_pdl": True} if self is not Overlap.NONE else {}


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
    """Compile only.

    A launch with the same constants, dtypes and alignments then starts at once.
    """
    kernel.warmup(*tensors, grid=grid, **constants, **_FUSED | options)


class PreparedLaunch:
    """A launch that is repeated often.

    From the second time on the driver gets the compiled kernel at once.

    ``JITFunction.run`` takes 12 to 17 us, to bind and look at every argument. Here only addresses change: of the
    tensors that a call gives, before the fixed ones. Where these have other dtypes or alignments than in the first
    call, for which the kernel was compiled, the launch goes the usual way.

    Args:
        tensors: the fixed ones, whose memory stays where it is, and numbers.
        others: see :data:`Start`.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], tensors: Sequence[Tensor | int], constants: dict[str, Any],
        options: dict[str, int],
    ) -> None:  # fmt: skip
        self._kernel, self._tensors, self._constants = kernel, tensors, constants
        self._run = partial(kernel.run, grid=grid, warmup=False, **constants, **_FUSED | options)
        self._grid, self._compiled = (*grid, 1, 1)[:3], None
        self._kinds: list[tuple[torch.dtype, bool]] = []
        self._rest: tuple[Any, ...] = ()

    def __call__(self, *tensors: Tensor) -> None:
        """Launch the kernel.

        Args:
            tensors: those that come before the fixed ones in the kernel's arguments.
        """
        addresses = [tensor.data_ptr() for tensor in tensors]
        kinds = [(tensor.dtype, address % 16 == 0) for tensor, address in zip(tensors, addresses, strict=True)]
        compiled: Any = self._compiled
        if compiled is None or kinds != self._kinds:
            found = self._run(*tensors, *self._tensors)
            if compiled is None and hasattr(found, "packed_metadata"):  # there is none in the interpreter
                self._keep(found, kinds)
            return
        # As JITFunction.run ends, in Triton 3.6 to 3.9, without hooks.
        bound = *self._grid, _current_stream(), compiled.function, compiled.packed_metadata, None, None, None
        compiled.run(*bound, *addresses, *self._rest)

    def _keep(self, compiled: Any, kinds: list[tuple[torch.dtype, bool]]) -> None:
        fixed = [tensor.data_ptr() if isinstance(tensor, Tensor) else tensor for tensor in self._tensors]
        names = self._kernel.arg_names[len(kinds) + len(fixed) :]
        if self._constants.keys() >= set(names):  # others have defaults, which JITFunction.run adds
            self._compiled, self._kinds = compiled, kinds
            self._rest = (*fixed, *(self._constants[name] for name in names))


def _current_stream() -> int:
    active = triton.runtime.driver.active
    stream: int = active.get_current_stream(active.get_current_device())
    return stream


@contextmanager
def compiling_together() -> Iterator[None]:
    """Context in which compile_kernel returns at once.

    At its end everything is compiled in parallel on the CPU cores.
    """
    threads = min(_THREADS, usable_cores())
    with ThreadPoolExecutor(threads) as executor, triton.AsyncCompileMode(executor):
        yield
