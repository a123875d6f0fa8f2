"""The kernels' launches as a graph would capture them. All that `make gpu` knows of the kernels' inside is here."""

from collections.abc import Callable

import torch
from torch import Tensor

from parts.stack import DEVICE
from vllm_dymoe.kernels import Activation, ExpertWork, compute_experts
from vllm_dymoe.kernels.triton import TritonKernel
from vllm_dymoe.quantize.dummy import fill_randomly
from vllm_dymoe.residency.format import Format


def fixed_launch(formats: list[Format], x: Tensor, out: Tensor, ids: Tensor) -> tuple[Callable[[], None], ...]:
    """One layer whose experts stay in their slots: its launches alone, and a whole call of the kernel.

    Args:
        formats: of the slots, one expert each.
        x: [tokens, hidden], read at every call.
        out: [tokens * top_k, hidden], written at every call.
        ids: [tokens, top_k] on the host; the routing is the same at every call.

    Returns:
        What a graph can capture, and what computes the same without one. The first is good as long as the second lives.
    """
    generator = torch.Generator().manual_seed(3)
    work = []
    for expert, fmt in enumerate(formats):
        blob = torch.empty(fmt.nbytes, dtype=torch.uint8)
        for matrix, section in zip(fmt.matrices, fmt.sections, strict=True):
            fill_randomly(matrix, blob[section], generator)
        slot = fmt.view(blob.to(DEVICE))
        pairs = (ids.flatten() == expert).nonzero().flatten()
        work.append(ExpertWork(*slot, (pairs // ids.shape[1]).to(DEVICE), pairs.to(DEVICE)))
    kernel = TritonKernel(DEVICE, formats=[matrix for fmt in formats for matrix in fmt.matrices])
    compute_experts(kernel, x, work, out, Activation.SILU)  # compiles

    def launch() -> None:
        kernel.compute(range(len(work)))

    def eager() -> None:  # keeps the slots, of which the step has the addresses only
        compute_experts(kernel, x, work, out, Activation.SILU)

    return launch, eager
