"""The kernel for experts in a CPU's memory.

Few tokens go through torch's int4 kernel, which reads the packed bytes once and
is bound by memory; many share one dequantization into float32 tiles and a matrix
product. At 16 bits it is torch's own linear for few tokens, and float32 tiles for
many. Which path a matrix takes depends on its format and on the number of its
tokens, never on where it lies.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_dymoe.kernels.activation import Activation
from vllm_dymoe.kernels.base import ExpertWork, forward_experts
from vllm_dymoe.kernels.int4 import Int4Linear, int4_available
from vllm_dymoe.kernels.packed import PackedMatrix
from vllm_dymoe.kernels.tiled import TiledLinear

DEFAULT_WORKSPACE_BYTES = 1 << 20


class CpuKernel:
    """Experts on a CPU.

    Up to `int4_tokens` tokens of an expert the results of its rows are those of any
    other batch, bit for bit; beyond that, and at 16 bits, their last bit may depend
    on how many tokens the expert got.

    Args:
        workspace_bytes: scratch that is held, at least 320 KiB.
        int4_tokens: most tokens of one expert that take the int4 kernel; 0 turns it off. Ignored without AVX512,
            where that kernel reads another layout.
        linear_tokens: most tokens of one expert that take torch's 16-bit linear.

    Raises:
        ValueError: a smaller workspace.
    """

    def __init__(
        self, workspace_bytes: int = DEFAULT_WORKSPACE_BYTES, int4_tokens: int = 32, linear_tokens: int = 1
    ) -> None:
        workspace = torch.empty(workspace_bytes, dtype=torch.uint8)
        self.workspace_bytes = workspace_bytes
        self._int4_tokens = int4_tokens if int4_available() else 0
        self._linear_tokens = linear_tokens
        self._int4 = Int4Linear(workspace)
        self._tiled = TiledLinear(workspace)
        self.name = f"cpu, int4 up to {int4_tokens} tokens" if self._int4_tokens else "cpu, dequantizing"

    def forward(self, x: Tensor, work: Sequence[ExpertWork], out: Tensor, activation: Activation) -> None:
        """See :class:`vllm_dymoe.kernels.base.ExpertKernel`."""
        forward_experts(self._linear, x, work, out, activation)

    def _linear(self, x: Tensor, packed: PackedMatrix) -> Tensor:
        count = x.shape[0]
        if packed.format.bits == 16:
            if count <= self._linear_tokens:
                return F.linear(x, packed.weight)
        elif count <= self._int4_tokens and self._int4.supports(packed.format):
            return self._int4(x, packed)
        return self._tiled(x, packed)
