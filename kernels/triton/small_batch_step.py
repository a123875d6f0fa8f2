"""A decode step of one MoE layer in three launches without the host.

They are plan, gate and up, down. Lattice codes need a fourth launch that rotates their inputs. Everything that changes
from step to step is in tensors at fixed addresses, so a CUDA graph can capture the step.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_dymoe.kernels.activation import Activation
from vllm_dymoe.kernels.triton.cpu_queue import DeviceQueue, ask, collect, post, take_sources
from vllm_dymoe.kernels.triton.launch import (
    ExpertShape,
    ExpertTable,
    Scratch,
    Weighting,
    WorkList,
    decode_down,
    decode_gate_up,
)
from vllm_dymoe.kernels.triton.planner import plan_small_batch_on_gpu
from vllm_dymoe.kernels.triton.rotate import rotated_inputs
from vllm_dymoe.kernels.triton.start import Start, run_kernel
from vllm_dymoe.kernels.triton.tiles import Tiles
from vllm_dymoe.planner.weights import weighted_inputs


@dataclass(frozen=True, eq=False)
class SmallBatchStep:
    """What the decode steps of all layers share."""

    shape: ExpertShape
    precisions: frozenset[int]  # bit-widths, or encodings' tags, of gate and up that may occur
    tiles: Tiles
    activation: Activation
    memory: Tensor  # uint8, at least :meth:`nbytes`; one layer at a time uses it
    semaphores: Tensor  # int32, zeros before and after every step, at least :meth:`counted`
    dependent: bool = False  # where tiles have tensor cores: down begins while gate and up run, see DecodeTile
    disk_queue: DeviceQueue | None = None  # brings what is missing into memory; None if all of it is there

    def nbytes(self, tokens: int, top_k: int) -> int:
        """Return the bytes of memory for hidden states and partial sums."""
        positions, shape = tokens * top_k, self.shape
        partials, _ = self.tiles.shared(shape.hidden, shape.intermediate, weighted=True)
        return self._hidden_bytes(positions) + 4 * positions * partials

    def counted(self, tokens: int, top_k: int) -> int:
        """Return the number of semaphores that a step needs."""
        return tokens * max(top_k * -(-self.shape.intermediate // 64), -(-self.shape.hidden // 64))

    def run(
        self,
        table: Mapping[str, Tensor],
        layer: int,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        rows: Tensor,
        plan: Mapping[str, Tensor],
        out: Tensor,
        device_queue: DeviceQueue | None = None,
        *,
        weights_on_input: bool = False,
        start: Start = run_kernel,
    ) -> None:
        """Compute out[token] = weighted sum over the token's experts, zero without any.

        Misses are fetched on the way.

        Args:
            table: the tensors of a Table, by name.
            layer: index of the layer in the table.
            x: [tokens, hidden] in the experts' dtype.
            ids: int32 or int64 [tokens, top_k], negative where another rank has the expert.
            weights: float32 [tokens, top_k].
            rows: int32 [1], the number of real tokens; they come first.
            plan: the tensors of a LayerPlan for these tokens, by name.
            out: [tokens, hidden], dtype of x, overwritten.
            device_queue: the queue of the CPU worker, waited for before tokens are summed; None if all misses are
                fetched.
            weights_on_input: weights multiply the experts' inputs, which are made by torch first.
            start: launch, or only compile.

        Raises:
            TypeError: wrong dtype.
            ValueError: sizes that disagree, or too little memory.
        """
        tokens, top_k = ids.shape
        needed, held = self.nbytes(tokens, top_k), self.memory.numel()
        if held < needed:
            raise ValueError(f"{tokens} tokens of {top_k} experts need {needed} bytes, but {held} are held")
        plan_small_batch_on_gpu(
            table, layer, ids, weights, rows, plan, on_cpu=device_queue is not None, weights_on_input=weights_on_input,
            start=start,
        )  # fmt: skip
        if self.disk_queue is not None:
            ask(self.disk_queue, layer, plan, start=start)
            take_sources(self.disk_queue, table, layer, plan, start=start)
        if device_queue is not None:
            post(device_queue, layer, x, ids, rows, plan, weights if weights_on_input else None, start=start)
        positions, inner = tokens * top_k, self.shape.intermediate
        hidden = self.memory[: 2 * positions * inner].view(x.dtype).view(positions, inner)
        scratch = Scratch(self.memory[self._hidden_bytes(positions) : needed].view(torch.float32), self.semaphores)
        addresses, destinations = plan["addresses"], plan["destinations"]
        residual = (addresses[-1], destinations[-1]) if self.shape.nested else (None, None)
        experts = ExpertTable(self.shape, self.precisions, addresses[0], plan["bits"], destinations[0], *residual)
        work, at, tiles = plan["work"], (plan["rows"], plan["pairs"]), self.tiles
        if tiles.gate_up.tensor_cores:
            tiles = tiles.on_tensor_cores(tokens, dependent=self.dependent)
        if weights_on_input:
            x = weighted_inputs(x, weights)
        x = rotated_inputs(x, self.shape.rotation(self.precisions), start=start)
        decode_gate_up(
            x, hidden, experts, WorkList(work[:-1], *at), self.activation, tiles.gate_up, scratch, start=start
        )
        if device_queue is not None:
            rows_out = x.new_empty(positions, self.shape.hidden)
            decode_down(hidden, rows_out, experts, WorkList(work[:-1], *at), tiles.down, scratch, start=start)
            collect(device_queue, rows_out, plan["computed"], plan["weights"], out, start=start)
            return
        weighting = Weighting(plan["weights"], plan["computed"])
        decode_down(hidden, out, experts, WorkList(work, *at), tiles.down, scratch, weighting, start=start)

    def _hidden_bytes(self, positions: int) -> int:
        return -(-2 * positions * self.shape.intermediate // 256) * 256
