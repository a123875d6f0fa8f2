"""The decode path on a GPU: three launches of Triton kernels for each layer, compiled before the first request."""

from functools import cache

import torch
from torch import Tensor

from vllm_dymoe.kernels import Activation, ExpertKernel
from vllm_dymoe.kernels.triton import TritonKernel
from vllm_dymoe.kernels.triton.doorbell import Door
from vllm_dymoe.kernels.triton.step import DecodeStep
from vllm_dymoe.kernels.triton.wide_step import TritonWide
from vllm_dymoe.residency.constants import check_experts
from vllm_dymoe.residency.decision import Decision
from vllm_dymoe.residency.format import ModelExperts
from vllm_dymoe.residency.table import Table
from vllm_dymoe.residency.wide_rule import WideShape
from vllm_dymoe.runtime.there import Doorbell


class TritonDecode:
    """A layer's decode step where the experts' memory is a GPU's; on a CPU only in Triton's interpreter. Scratch is
    that of the kernel of the host's steps: both run on one stream. ValueError if it has too little for so many rows, or
    a layer more experts than a device decides for."""

    name = "triton"
    doorbell: Doorbell | None = None

    def __init__(self, kernel: ExpertKernel, experts: ModelExperts, rows: int) -> None:
        assert isinstance(kernel, TritonKernel)
        check_experts(experts.num_experts)
        self._kernel, self._formats = kernel, [fmt.matrices for fmt in experts.formats.values()]
        self._step = cache(self._make_step)
        step, top_k = self._step(Activation.SILU), experts.top_k
        held, needed, there = step.memory.numel(), step.nbytes(rows, top_k), step.semaphores.numel()
        counted = step.counted(rows, top_k)
        if held < needed or there < counted:
            raise ValueError(
                f"a decode step of {rows} rows needs {needed} bytes and {counted} semaphores, but the kernel "
                f"has {held} and {there}"
            )

    def forward(
        self,
        table: Table,
        layer: int,
        rows: Tensor,
        decision: Decision,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        activation: Activation,
    ) -> Tensor:
        out = torch.empty_like(x)
        step = self._step(activation)
        door = None
        if (doorbell := self.doorbell) is not None:
            doorbell.serve(activation)
            door = Door(doorbell.ring.shape, doorbell.turn, doorbell.present)
        step.run(vars(table), layer, x, ids, weights, rows, decision.tensors, out, door)
        return out

    def wide_step(self, table: Table, shape: WideShape, activation: Activation) -> TritonWide:
        return self._kernel.wide_step(vars(table), shape, self._formats, activation)

    def _make_step(self, activation: Activation) -> DecodeStep:
        return self._kernel.decode_step(self._formats, activation)
