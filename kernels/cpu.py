"""The kernel for experts in a CPU's memory.

Few tokens go through torch's int4 kernel, which reads the packed bytes once and
is bound by memory; many share one dequantization into float32 tiles and a matrix
product. At 16 bits it is torch's own linear for few tokens, and float32 tiles for
many. Small experts, where operations cost more than products, share one compiled
call. Which path a matrix takes depends on its format and on the number of its
tokens, never on where it lies.
"""

import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_dymoe.kernels.activation import Activation
from vllm_dymoe.kernels.base import (
    ExpertWork,
    Linear,
    Receive,
    check_activations,
    check_formats,
    check_tokens,
    forward_experts,
)
from vllm_dymoe.kernels.combine import compiled_operations
from vllm_dymoe.kernels.int4 import Int4Linear, int4_available
from vllm_dymoe.kernels.tiled import TiledLinear
from vllm_dymoe.residency.decision import Decision
from vllm_dymoe.residency.matrix import MatrixFormat, PackedMatrix

DEFAULT_WORKSPACE_BYTES = 1 << 20


# Measured with groups of 64 on AVX512 without bfloat16 instructions, one thread,
# 768 x 2048: at 4 bits tiles cost 1.6 times the int4 kernel for 32 tokens, 1.0 for
# 64, 0.6 for 128; at 8 bits 1.5 for 16 and 0.9 for 32; at 2 bits 1.8 for 32 and
# 1.1 for 64. At 16 bits they cost 1.25 times torch's linear for 4 tokens and 0.85
# for 8. Smaller matrices prefer the int4 kernel for longer.
_INT4_TOKENS = 56
_LINEAR_TOKENS = 4


class CpuKernel:
    """Experts on a CPU.

    On the int4 path and in the compiled call a token's result is the same, bit for
    bit, whatever else is in the batch; on the others its last bit may depend on how
    many tokens the expert got.

    Args:
        workspace_bytes: scratch that is held, at least 320 KiB.
        int4_tokens: most tokens of one expert that take the int4 kernel, at 8 bits half as many; 0 turns it off.
            Ignored without AVX512, where that kernel reads another layout.
        linear_tokens: most tokens of one expert that take torch's 16-bit linear. None for this machine's default.
        small: whether small experts in bfloat16 are computed together in one compiled call, where there is numba.

    Raises:
        ValueError: a smaller workspace.
    """

    asynchronous = False
    _step: tuple[Any, ...]

    def __init__(
        self,
        workspace_bytes: int = DEFAULT_WORKSPACE_BYTES,
        int4_tokens: int = _INT4_TOKENS,
        linear_tokens: int | None = None,
        small: bool = True,
    ) -> None:
        workspace = torch.empty(workspace_bytes, dtype=torch.uint8)
        self.workspace_bytes = workspace_bytes
        self._int4 = Int4Linear(workspace)
        self._tiled = TiledLinear(workspace)
        self._int4_tokens = int4_tokens if int4_available() else 0
        if linear_tokens is None:
            linear_tokens = sys.maxsize if has_bfloat16_instructions() else _LINEAR_TOKENS
        self._linear_tokens = linear_tokens
        self._small = compiled_operations() if small else None
        if self._small is not None:
            self._small.compile_everything()
        self.name = f"cpu, int4 up to {int4_tokens} tokens" if self._int4_tokens else "cpu, dequantizing"

    def begin(self, x: Tensor, decision: Decision, out: Tensor, activation: Activation) -> None:
        """Begin a layer's step, see :class:`vllm_dymoe.kernels.base.ExpertKernel`."""
        check_activations(x, out)
        sizes = [after - before for before, after in pairwise(decision.bounds)]
        parts = zip(decision.rows.split(sizes), decision.pairs.split(sizes), strict=True)
        self._step = x, decision.views, list(parts), out, activation

    def compute(self, items: Sequence[int], receive: Receive | None = None) -> None:
        """Compute some items, see :class:`vllm_dymoe.kernels.base.ExpertKernel`."""
        x, views, parts, out, activation = self._step
        work = [ExpertWork(*views[item], *parts[item]) for item in items]
        if self._small is None or x.dtype is not torch.bfloat16:
            forward_experts(self._choose, x, work, out, activation, receive)
            return
        small, others = self._small.Call(), []
        formats, most = None, 0
        for expert in work:
            if formats != (these := (expert.gate.format, expert.up.format, expert.down.format)):
                formats = these
                check_formats(*formats, x, activation)
                most = self._small.most_tokens(*formats, _INT4_TOKENS // 2 if formats[0].bits == 8 else _INT4_TOKENS)
            count = check_tokens(expert)
            if count > most:
                others.append(expert)
            elif count > 0:
                small.add(expert, formats[1], count)
        if len(others) < len(work):
            small.run(x, out, activation, receive)
        if others:
            forward_experts(self._choose, x, others, out, activation, receive)

    def _choose(self, format: MatrixFormat, tokens: int) -> Linear:
        """The path of a matrix: a matter of its format and of the number of its tokens."""
        if format.bits == 16:
            if tokens <= self._linear_tokens:
                return _plain_linear
        elif (2 * tokens if format.bits == 8 else tokens) <= self._int4_tokens and self._int4.supports(format):
            return self._int4.linear(format)
        return self._tiled


def _plain_linear(x: Tensor, packed: PackedMatrix) -> Tensor:
    tokens = len(x)
    rows = _rows_of_a_product(tokens)
    if rows == tokens:  # even an empty pad is a copy, and with the cut half as dear as the product of a small matrix
        return F.linear(x, packed.weight, packed.bias)
    return F.linear(F.pad(x, (0, 0, 0, rows - tokens)), packed.weight, packed.bias)[:tokens]


def _rows_of_a_product(tokens: int) -> int:
    """At least as many rows as tokens, at most a quarter more from 32 on, and few different numbers of them.

    For each new number of rows oneDNN compiles a 16-bit product and keeps what it has compiled: 0.7 MiB and 30 ms for
    each matrix shape were measured, so that 635 numbers of tokens took 470 MiB. These are 8 up to 8, and then 4 from
    each power of two to the next.
    """
    if tokens <= 8:
        return tokens
    step = max(8, 1 << (tokens - 1).bit_length() - 3)
    return -(-tokens // step) * step


def has_bfloat16_instructions() -> bool:
    """Whether a bfloat16 product is faster than a float32 one, whatever the number of tokens."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
