"""Kernels that compute experts straight from their packed bytes."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from vllm_dymoe.experts.matrix import MatrixFormat
from vllm_dymoe.kernels.activation import Activation, Curve
from vllm_dymoe.kernels.base import Decode, Grouped
from vllm_dymoe.kernels.combine import combine
from vllm_dymoe.kernels.cpu import CpuKernel
from vllm_dymoe.kernels.pack import dequantize, pack, pack_floats, pack_nested, unpack
from vllm_dymoe.kernels.torch_experts import expert_reference

if TYPE_CHECKING:
    from vllm_dymoe.kernels.triton import TritonKernel


def make_kernel(
    device: torch.device | str,
    workspace_bytes: int | None = None,
    activations: int = 16,
    *,
    decode: Decode = Decode.PLAIN,
    grouped: Grouped = Grouped.PLAIN,
) -> "CpuKernel | TritonKernel":
    """Return the kernel for a device.

    Args:
        workspace_bytes: upper bound on the scratch that the kernel keeps, at least 320 KiB; None lets the kernel
            choose.
        activations: bits of the quantized activations on a CPU, 16 or 8.
        decode: one of `decode_kernels`, for a CUDA device.
        grouped: one of `grouped_kernels`, for a CUDA device.

    ValueError if the workspace is too small, if the device is neither a CPU nor a CUDA device, or for 8-bit activations
    on a CUDA device.
    """
    options: dict[str, Any] = {} if workspace_bytes is None else {"workspace_bytes": workspace_bytes}
    device = torch.device(device)
    if device.type == "cpu":
        return CpuKernel(activations=activations, **options)
    if device.type != "cuda":
        raise ValueError(f"device is {device}, expected a CPU or a CUDA device")
    if activations != 16:
        raise ValueError("activations of 8 bits are supported on a CPU only; leave the option out")
    # Importing triton takes a second, and only a GPU needs it.
    from vllm_dymoe.kernels.triton import TritonKernel

    return TritonKernel(device, decode=decode, grouped=grouped, **options)


def decode_kernels(device: torch.device, formats: Iterable[MatrixFormat]) -> tuple[Decode, ...]:
    """Return the ways in which a device can decode experts, the fastest first.

    Args:
        formats: of the experts.
    """
    if device.type != "cuda":
        return (Decode.PLAIN,)
    from vllm_dymoe.kernels.triton.kernel import architecture_of
    from vllm_dymoe.kernels.triton.launch import fastest_decode

    fastest = fastest_decode({fmt.encoding.tag for fmt in formats}, architecture_of(device))
    return tuple(Decode)[fastest::-1]


def grouped_kernels(device: torch.device, formats: Iterable[MatrixFormat]) -> tuple[Grouped, ...]:
    """Return the ways to compute experts of more tokens, the fastest first.

    They depend on the device and on the formats of the experts.
    """
    if device.type != "cuda":
        return (Grouped.PLAIN,)
    from vllm_dymoe.kernels.triton.kernel import architecture_of
    from vllm_dymoe.kernels.triton.launch import fastest_grouped

    some = [fmt for fmt in formats if fmt.rows]
    tags, columns = {fmt.encoding.tag for fmt in some}, {fmt.columns for fmt in some}
    ordered = any(fmt.act_order for fmt in some)
    return tuple(Grouped)[fastest_grouped(tags, columns, architecture_of(device), act_order=ordered) :: -1]
