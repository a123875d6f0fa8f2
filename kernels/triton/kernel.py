"""What the steps of a GPU share: scratch, and the ways to compute experts."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from vllm_dymoe.kernels.activation import Activation
from vllm_dymoe.kernels.base import Decode, Grouped
from vllm_dymoe.kernels.triton.cpu_queue import DeviceQueue
from vllm_dymoe.kernels.triton.large_batch_step import TritonLargeBatch
from vllm_dymoe.kernels.triton.launch import (
    ExpertShape,
    Formats,
    Kinds,
    Scratch,
    fastest_decode,
    fastest_grouped,
)
from vllm_dymoe.kernels.triton.small_batch_step import SmallBatchStep
from vllm_dymoe.kernels.triton.tiles import Tiles, choose_tiles
from vllm_dymoe.planner.constants import SMALL_BATCH_ROWS
from vllm_dymoe.planner.large_batch import LargeBatchShape

DEFAULT_WORKSPACE_BYTES = 32 << 20
MINIMUM_WORKSPACE_BYTES = 320 << 10
_SEMAPHORES = 1 << 14


def architecture_of(device: torch.device) -> int:
    """Return a card's compute capability times ten; 90 for the interpreter."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


class TritonKernel:
    """Makes the steps of a GPU, which use its scratch in turn.

    How an expert is computed depends on its shape, on the number of rows of the step and on that of its tokens, never
    on the other experts: residency changes no bit.

    Args:
        device: where the experts are; a CPU only in Triton's interpreter.
        workspace_bytes: scratch to keep, at least 320 KiB.
        decode: how experts of few tokens are computed; where precisions or card do not have this way, the next slower
            one is taken, see ``launch.fastest_decode``.
        grouped: how experts of more tokens are computed, if their formats have this way.

    Raises:
        ValueError: the workspace is too small.
    """

    name = "triton"

    def __init__(
        self,
        device: torch.device | str,
        workspace_bytes: int = DEFAULT_WORKSPACE_BYTES,
        *,
        decode: Decode = Decode.PLAIN,
        grouped: Grouped = Grouped.PLAIN,
    ) -> None:
        if workspace_bytes < MINIMUM_WORKSPACE_BYTES:
            raise ValueError(f"workspace has {workspace_bytes} bytes, expected at least {MINIMUM_WORKSPACE_BYTES}")
        self.workspace_bytes, self.device = workspace_bytes, torch.device(device)
        self._semaphores = torch.zeros(_SEMAPHORES, dtype=torch.int32, device=device)
        self._memory = torch.empty(workspace_bytes - 4 * _SEMAPHORES, dtype=torch.uint8, device=device)
        self._floats = self._memory[: len(self._memory) // 4 * 4].view(torch.float32)
        self._larger: Tensor | None = None
        self._architecture, self._decode, self._grouped = architecture_of(self.device), decode, grouped

    def small_batch_step(
        self, formats: Sequence[Formats], activation: Activation, disk_queue: DeviceQueue | None = None
    ) -> SmallBatchStep:
        """Return a whole decode step for experts of some formats.

        Raises ValueError if the formats cannot share a launch.
        """
        shape, precisions = _shape_of(formats)
        return SmallBatchStep(
            shape, precisions, self._tiles_of(shape, precisions), activation, self._memory, self._semaphores,
            decode=self._decode_of(shape, precisions), disk_queue=disk_queue,
        )  # fmt: skip

    def large_batch_step(
        self, table: Callable[[int], Mapping[str, Tensor]], shape: LargeBatchShape, formats: Sequence[Formats],
        activation: Activation, disk_queue: DeviceQueue | None = None,
    ) -> TritonLargeBatch:  # fmt: skip
        """Return a large-batch step for experts of some formats.

        Args:
            table: returns the columns of a Table for a layer.

        Raises ValueError as for :meth:`small_batch_step`.
        """
        experts, precisions = _shape_of(formats)
        tiles = self._tiles_of(experts, precisions)
        return TritonLargeBatch(table, shape, experts, precisions, tiles, activation, self._scratch_of, disk_queue)

    def _scratch_of(self, partials: int, semaphores: int) -> Scratch:
        """Return this kernel's scratch, or larger scratch.

        Larger scratch is kept as long as steps use it.
        """
        own = self._floats
        if partials > len(own):
            if self._larger is None or len(self._larger) < partials:
                self._larger = torch.empty(partials, dtype=torch.float32, device=self.device)
            own = self._larger
        if semaphores > len(self._semaphores):
            self._semaphores = torch.zeros(semaphores, dtype=torch.int32, device=self.device)
        return Scratch(own, self._semaphores)

    def _tiles_of(self, shape: ExpertShape, precisions: frozenset[int]) -> Tiles:
        """Return sizes of programs for experts with up to 16 tokens, and with more."""
        tiles = choose_tiles(self._architecture, shape.hidden, shape.intermediate)
        gate_up, down = shape.codes(precisions)
        ordered, sizes = bool(gate_up.act_order | down.act_order), (shape.hidden, shape.intermediate)
        fastest = fastest_grouped(gate_up.precisions | down.precisions, sizes, self._architecture, act_order=ordered)
        if min(self._grouped, fastest) is Grouped.IN_REGISTERS:
            tiles = tiles.in_registers()
        if self._decode_of(shape, precisions) is Decode.PLAIN:
            return tiles
        return tiles.on_tensor_cores(SMALL_BATCH_ROWS)

    def _decode_of(self, shape: ExpertShape, precisions: frozenset[int]) -> Decode:
        """Return how experts of few tokens are computed.

        Down is computed in the same way as gate and up.
        """
        gate_up, down = shape.codes(precisions)
        return min(self._decode, fastest_decode(gate_up.precisions | down.precisions, self._architecture))


def _shape_of(formats: Sequence[Formats]) -> tuple[ExpertShape, frozenset[int]]:
    """Return the formats' common shape, and the bit-widths of gate and up."""
    return ExpertShape.of(formats), frozenset(kind.bits for kind in Kinds.of(formats).gate_up)
