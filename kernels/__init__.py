"""Compute kernels over packed experts: the format of one matrix, and experts computed straight from it."""

from collections.abc import Iterable
from typing import Any

import torch

from vllm_dymoe.experts.matrix import MatrixFormat
from vllm_dymoe.kernels.activation import Activation, Curve
from vllm_dymoe.kernels.base import ExpertKernel
from vllm_dymoe.kernels.combine import combine
from vllm_dymoe.kernels.cpu import CpuKernel
from vllm_dymoe.kernels.pack import dequantize, pack, pack_floats, pack_nested, unpack
from vllm_dymoe.kernels.torch_experts import expert_reference


def make_kernel(
    device: torch.device | str,
    workspace_bytes: int | None = None,
    formats: Iterable[MatrixFormat] = (),
    activations: int = 16,
) -> ExpertKernel:
    """The kernel for a device; ValueError for a smaller workspace, a device that is neither a CPU nor a CUDA device, or
    activations of 8 bits beside the latter.

    Args:
        workspace_bytes: bound on the scratch the kernel holds, at least 320 KiB; None for the kernel's own choice.
        formats: those that work may have, for a kernel that is compiled for them; none if they are not known.
        activations: bits of those that a CPU multiplies codes with, 16 or 8.
    """
    options: dict[str, Any] = {} if workspace_bytes is None else {"workspace_bytes": workspace_bytes}
    device = torch.device(device)
    if device.type == "cpu":
        return CpuKernel(activations=activations, **options)
    if device.type != "cuda":
        raise ValueError(f"device is {device}, expected a CPU or a CUDA device")
    if activations != 16:
        raise ValueError("activations of 8 bits are computed with on a CPU only; leave the option out")
    # Importing triton takes a second, which only a GPU needs.
    from vllm_dymoe.kernels.triton import TritonKernel

    return TritonKernel(device, formats=formats, **options)
