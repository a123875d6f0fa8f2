"""Compute kernels over packed experts: the format of one matrix, and experts computed straight from it.

Only torch is needed here: nothing of vLLM, nothing of the rest of vllm_dymoe.
"""

from collections.abc import Iterable
from typing import Any

import torch

from vllm_dymoe.kernels.activation import Activation, Curve
from vllm_dymoe.kernels.base import ExpertKernel, ExpertWork, Group, Groups, LayerWork
from vllm_dymoe.kernels.codebook import Codebook
from vllm_dymoe.kernels.combine import combine
from vllm_dymoe.kernels.cpu import CpuKernel
from vllm_dymoe.kernels.packed import MatrixFormat, PackedMatrix, dequantize, pack, pack_floats, pack_nested, unpack
from vllm_dymoe.kernels.reference import expert_reference
from vllm_dymoe.kernels.torch_ops import TorchKernel

__all__ = [
    "Activation",
    "Codebook",
    "CpuKernel",
    "Curve",
    "ExpertKernel",
    "ExpertWork",
    "Group",
    "Groups",
    "LayerWork",
    "MatrixFormat",
    "PackedMatrix",
    "TorchKernel",
    "combine",
    "dequantize",
    "expert_reference",
    "make_kernel",
    "pack",
    "pack_floats",
    "pack_nested",
    "unpack",
]


def make_kernel(
    device: torch.device | str,
    workspace_bytes: int | None = None,
    formats: Iterable[MatrixFormat] = (),
) -> ExpertKernel:
    """The kernel for a device.

    Args:
        device: where the experts are.
        workspace_bytes: bound on the scratch the kernel holds, at least 320 KiB; None for the kernel's own choice.
        formats: those that work may have, for a kernel that is compiled for them; none if they are not known.

    Raises:
        ValueError: a smaller workspace.
    """
    options: dict[str, Any] = {} if workspace_bytes is None else {"workspace_bytes": workspace_bytes}
    device = torch.device(device)
    if device.type == "cpu":
        return CpuKernel(**options)
    if device.type == "cuda":
        # Here and not above: importing triton takes a second, and nobody without a GPU needs it.
        from vllm_dymoe.kernels.triton import TritonKernel

        return TritonKernel(device, formats=formats, **options)
    return TorchKernel(device, **options)
