"""The kernel for any device that torch has: nothing but plain torch operations."""

from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_dymoe.kernels.activation import Activation
from vllm_dymoe.kernels.base import ExpertWork, ForwardedWork, Group, Groups, Receive, forward_experts
from vllm_dymoe.kernels.tiled import TiledLinear


class TorchKernel:
    """Experts on any device, dequantized tile by tile.

    Args:
        device: where the experts are.
        workspace_bytes: scratch that is held, at least 320 KiB. Bigger tiles mean fewer launches.

    Raises:
        ValueError: a smaller workspace.
    """

    name = "torch, dequantizing"

    def __init__(self, device: torch.device, workspace_bytes: int = 32 << 20) -> None:
        workspace = torch.empty(workspace_bytes, dtype=torch.uint8, device=device)
        self.workspace_bytes = workspace_bytes
        self.asynchronous = device.type != "cpu"
        self._tiled = TiledLinear(workspace)

    def begin(
        self, x: Tensor, groups: Groups, order: Sequence[int], out: Tensor, activation: Activation
    ) -> ForwardedWork:
        """See :class:`vllm_dymoe.kernels.base.ExpertKernel`."""
        moved = {
            expert: Group(tokens.to(x.device), pairs.to(x.device), size)
            for expert, (tokens, pairs, size) in groups.items()
        }
        return ForwardedWork(self, x, moved, out, activation)

    def forward(
        self,
        x: Tensor,
        work: Sequence[ExpertWork],
        out: Tensor,
        activation: Activation,
        receive: Receive | None = None,
    ) -> None:
        """See :class:`vllm_dymoe.kernels.base.ExpertKernel`."""
        forward_experts(lambda format, tokens: self._tiled, x, work, out, activation, receive)
