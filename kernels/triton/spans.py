"""Copies that a device lists and makes by itself.

They go from host memory that it can read to its own memory.
"""

import triton
import triton.language as tl
from torch import Tensor

from vllm_dymoe.kernels.triton.planner import WARPS
from vllm_dymoe.kernels.triton.start import Start, run_kernel

# Programs per expert. Each has 8 KiB in flight, and a PCIe link of 50 GB/s with 2 us of latency needs 100 KB.
_PROGRAMS = 16
_WORDS = tl.constexpr(2048)  # int32 words that a program copies at a time: 16 bytes four times for each thread


def copy_spans(spans: Tensor, *, start: Start = run_kernel) -> None:
    """Copy every span, in one launch.

    Args:
        spans: int64 [any, 3]: source address, destination address, bytes (a multiple of 16).
        start: makes the launch.
    """
    start(copy_spans_kernel, (_PROGRAMS, len(spans)), (spans,), {"PROGRAMS": _PROGRAMS}, {"num_warps": WARPS})


@triton.jit(do_not_specialize_on_alignment=["spans"])
def copy_spans_kernel(spans, PROGRAMS: tl.constexpr):
    """Copy spans[:, 2] bytes from spans[:, 0] to spans[:, 1]; grid [PROGRAMS, spans]."""
    span = spans + 3 * tl.program_id(1)
    source = tl.multiple_of(tl.load(span).to(tl.pointer_type(tl.int32)), 16)
    destination = tl.multiple_of(tl.load(span + 1).to(tl.pointer_type(tl.int32)), 16)
    words = tl.multiple_of((tl.load(span + 2) // 4).to(tl.int32), 4)
    for first in range(tl.program_id(0) * _WORDS, words, PROGRAMS * _WORDS):
        offset = first + tl.arange(0, _WORDS)
        inside = offset < words
        tl.store(destination + offset, tl.load(source + offset, mask=inside), mask=inside)
