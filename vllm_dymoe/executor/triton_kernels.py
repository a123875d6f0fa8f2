"""Device-side planning on a GPU, by Triton kernels.

They are compiled before the first request.
"""

from functools import cache

import torch
from torch import Tensor

from vllm_dymoe.executor.cpu_worker import CpuQueue
from vllm_dymoe.executor.disk_queue import DiskQueue
from vllm_dymoe.experts.format import ModelExperts
from vllm_dymoe.kernels import Activation
from vllm_dymoe.kernels.triton import TritonKernel
from vllm_dymoe.kernels.triton.cpu_queue import DeviceQueue
from vllm_dymoe.kernels.triton.large_batch_step import TritonLargeBatch
from vllm_dymoe.kernels.triton.prefetch import copy_predicted_on_gpu, judge_predicted_on_gpu, list_predicted_on_gpu
from vllm_dymoe.kernels.triton.small_batch_step import SmallBatchStep
from vllm_dymoe.planner.constants import check_experts
from vllm_dymoe.planner.large_batch import LargeBatchShape
from vllm_dymoe.planner.plan import LayerPlan
from vllm_dymoe.planner.prefetch import PrefetchList
from vllm_dymoe.planner.table import Table


class TritonKernels:
    """The SmallBatchKernel of a GPU, or of a CPU in Triton's interpreter.

    ValueError if the kernel's scratch is too small for ``rows`` rows, or if layers have more experts than the planner's
    kernel supports.
    """

    name = "triton"

    def __init__(
        self, kernel: TritonKernel, experts: ModelExperts, rows: int, disk_queue: DiskQueue | None = None
    ) -> None:
        check_experts(experts.num_experts)
        self._kernel, self._kinds, self._given = kernel, experts.kinds, (kernel, experts, rows)
        self._formats = [[fmt.matrices for fmt in formats.values()] for formats in experts.of_kinds]
        self._disk_queue = None
        if disk_queue is not None:
            self._disk_queue = DeviceQueue(disk_queue.queue.shape, disk_queue.turn, disk_queue.turn)
        self._step = cache(self._make_step)
        for kind in range(len(self._formats)):
            step, top_k = self._step(Activation.SILU, kind), experts.top_k
            held, needed, there = step.memory.numel(), step.nbytes(rows, top_k), step.semaphores.numel()
            counted = step.counted(rows, top_k)
            if held < needed or there < counted:
                raise ValueError(
                    f"a decode step of {rows} rows needs {needed} bytes and {counted} semaphores, but the kernel "
                    f"has {held} and {there}"
                )

    def with_disk(self, disk_queue: DiskQueue) -> "TritonKernels":
        """Return the same kernels with a worker that brings what is missing into memory."""
        return TritonKernels(*self._given, disk_queue)

    def forward(
        self,
        table: Table,
        layer: int,
        rows: Tensor,
        plan: LayerPlan,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        activation: Activation,
        cpu_queue: CpuQueue | None,
        *,
        weights_on_input: bool = False,
        global_ids: Tensor | None = None,
    ) -> Tensor:
        out = torch.empty_like(x)
        step = self._step(activation, self._kinds[layer])
        device_queue = None
        if cpu_queue is not None:
            cpu_queue.serve(activation)
            device_queue = DeviceQueue(cpu_queue.queue.shape, cpu_queue.turn, cpu_queue.present)
        given = x, ids, weights, rows, plan.tensors, out, device_queue
        step.run(table.at(layer), layer, *given, weights_on_input=weights_on_input, global_ids=global_ids)
        return out

    def judge_predicted(self, table: Table, layer: int, ids: Tensor, rows: Tensor, listed: PrefetchList) -> None:
        judge_predicted_on_gpu(vars(table), layer, ids, rows, vars(listed))

    def list_predicted(
        self, table: Table, layer: int, rows: Tensor, projections: int, out: PrefetchList, look_ahead: int
    ) -> None:
        list_predicted_on_gpu(table.at(layer), layer, rows, projections, vars(out), look_ahead)

    def copy_predicted(self, table: Table, layer: int, listed: PrefetchList) -> None:
        copy_predicted_on_gpu(table.at(layer), layer, vars(listed))

    def large_batch_step(
        self, table: Table, shape: LargeBatchShape, activation: Activation, kind: int
    ) -> TritonLargeBatch:
        return self._kernel.large_batch_step(table.at, shape, self._formats[kind], activation, self._disk_queue)

    def _make_step(self, activation: Activation, kind: int) -> SmallBatchStep:
        return self._kernel.small_batch_step(self._formats[kind], activation, self._disk_queue)
