"""A decode step of one MoE layer in three launches without the host.

They are plan, gate and up, down. Lattice codes need a fourth launch that rotates their inputs, and a rank that chooses
precision among the experts of all ranks needs one before the plan. Everything that changes from step to step is in
tensors at fixed addresses, so a CUDA graph can capture the step.

From sm_90 on launches may overlap (``start.Overlap``). Sequences, with a tilde where the second launch begins before
the first one ends, and ``/`` where it waits only at its own end:

    misses are fetched            [weight] [rotate] [choose] plan ~ gate and up ~ down
    the CPU executes some         [weight] [rotate] [choose] plan, post / gate and up ~ down, wait, collect, combine
    experts are read from disk    [weight] [rotate] [choose] plan, ask, wait, take sources ~ gate and up ~ down

Inputs are weighted and rotated first, so that nothing lies between. All policies have these sequences; predictions run
on a branch that forks before the plan or after down. Why nothing is read too early:

- The planner is launched normally, so everything before it has ended when gate and up begin, also the last reader of
  the scratch that they write. They access no memory before they have waited for the plan.
- Down reads the plan before it waits. It may begin once all programs of gate and up have said so, which they do after
  their own wait: by then the plan is complete. Post only reads what gate and up read, and was launched normally after
  the plan, so there both begin with a complete plan.
- Every program of gate and up and of down waits, also one without positions. So when down has ended, gate and up, and
  the planner or post, have ended too, and what is launched normally after down follows all of them.
- Between the launch of the planner and the wait nobody reads the plan or what is copied ahead, so no processor has an
  old line of them in its cache.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_dymoe.kernels.activation import Activation
from vllm_dymoe.kernels.base import Decode
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
from vllm_dymoe.kernels.triton.start import Overlap, Start, run_kernel
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
    decode: Decode = Decode.PLAIN  # whether tiles have tensor cores, and which launches overlap
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
        global_ids: Tensor | None = None,
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
            global_ids: see ``plan_small_batch``.
            start: makes the launch.

        Raises:
            TypeError: wrong dtype.
            ValueError: sizes that disagree, or too little memory.
        """
        tokens, top_k = ids.shape
        chained = self.decode is Decode.CHAINED
        needed, held = self.nbytes(tokens, top_k), self.memory.numel()
        if held < needed:
            raise ValueError(f"{tokens} tokens of {top_k} experts need {needed} bytes, but {held} are held")
        inputs = weighted_inputs(x, weights) if weights_on_input else x
        inputs = rotated_inputs(inputs, self.shape.rotation(self.precisions), start=start)
        on_cpu, from_disk = device_queue is not None, self.disk_queue is not None
        plan_small_batch_on_gpu(
            table, layer, ids, weights, rows, plan, on_cpu=on_cpu, weights_on_input=weights_on_input,
            followed=chained and not on_cpu and not from_disk, global_ids=global_ids, start=start,
        )  # fmt: skip
        if self.disk_queue is not None:
            ask(self.disk_queue, layer, plan, start=start)
            take_sources(self.disk_queue, table, layer, plan, followed=chained and not on_cpu, start=start)
        if device_queue is not None:
            given = weights if weights_on_input else None
            post(device_queue, layer, x, ids, rows, plan, given, followed=chained, start=start)
        positions, inner = tokens * top_k, self.shape.intermediate
        hidden = self.memory[: 2 * positions * inner].view(x.dtype).view(positions, inner)
        scratch = Scratch(self.memory[self._hidden_bytes(positions) : needed].view(torch.float32), self.semaphores)
        addresses, destinations = plan["addresses"], plan["destinations"]
        residual = (addresses[-1], destinations[-1]) if self.shape.nested else (None, None)
        experts = ExpertTable(self.shape, self.precisions, addresses[0], plan["bits"], destinations[0], *residual)
        work, at, tiles = plan["work"], (plan["rows"], plan["pairs"]), self.tiles
        if tiles.gate_up.tensor_cores:
            tiles = tiles.on_tensor_cores(tokens, dependent=self.decode >= Decode.DEPENDENT)
        overlap = Overlap.NONE if not chained else Overlap.WHOLE if on_cpu else Overlap.START
        decode_gate_up(
            inputs, hidden, experts, WorkList(work[:-1], *at), self.activation, tiles.gate_up, scratch,
            overlap=overlap, start=start,
        )  # fmt: skip
        if device_queue is not None:
            rows_out = x.new_empty(positions, self.shape.hidden)
            decode_down(hidden, rows_out, experts, WorkList(work[:-1], *at), tiles.down, scratch, start=start)
            collect(device_queue, rows_out, plan["computed"], plan["weights"], out, start=start)
            return
        weighting = Weighting(plan["weights"], plan["computed"])
        decode_down(hidden, out, experts, WorkList(work, *at), tiles.down, scratch, weighting, start=start)

    def _hidden_bytes(self, positions: int) -> int:
        return -(-2 * positions * self.shape.intermediate // 256) * 256
