"""Launches that do nothing, without a GPU.

Driver, compiler and compiled kernels are replaced, but Triton's own runtime is real: it takes as long on the host as
with a card, until the driver is called.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from vllm_dymoe.executor.triton_kernels import TritonKernels
from vllm_dymoe.kernels import Decode, Grouped
from vllm_dymoe.kernels.triton import TritonKernel
from vllm_dymoe.planner.constants import SMALL_BATCH_ROWS
from vllm_dymoe.server import Parts

_LAUNCHED: list[str] = []  # of all contexts, because Triton keeps compiled kernels


class _Driver:
    """A Hopper card's, on whose stream nothing happens."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class _Compiled:
    """A compiled kernel that notes its launches."""

    function = packed_metadata = None

    def __init__(self, name: str) -> None:
        self._name = name

    def launch_metadata(self, *arguments: Any) -> None:
        return None

    def run(self, *arguments: Any) -> None:
        _LAUNCHED.append(self._name)


class CardParts(Parts):
    """A card's kernels, for a device that is a CPU.

    Args:
        decode: how experts of few tokens are computed; the fastest way of a Hopper card is the default.
        grouped: likewise, of more tokens.
    """

    def __init__(self, device, decode=Decode.CHAINED, grouped=Grouped.IN_REGISTERS):
        super().__init__(device)
        self._ways = {"decode": decode, "grouped": grouped}

    def decode_kernel(self, kernel, experts, link_gbps=None):
        """Return the card's kernels, with their own scratch."""
        return TritonKernels(TritonKernel("cpu", **self._ways), experts, SMALL_BATCH_ROWS)


@contextmanager
def no_launches() -> Iterator[list[str]]:
    """Context in which launches do nothing; yields their kernels' names."""

    def compile_nothing(kernel: Any, key: Any, signature: Any, device: int, *rest: Any, **others: Any) -> _Compiled:
        compiled = _Compiled(kernel.__name__)
        kernel.device_caches[device][0][key] = compiled
        return compiled

    before = driver._active
    driver.set_active(_Driver())
    try:
        with mock.patch.object(JITFunction, "_do_compile", compile_nothing):
            _LAUNCHED.clear()
            yield _LAUNCHED
    finally:
        driver._active = before
