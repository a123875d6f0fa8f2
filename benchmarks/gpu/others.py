"""What the kernels are compared with: dequantize and matmul, and vLLM's own 4-bit MoE kernels where they are."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from layers import GROUP, Layer
from measure import DTYPE, seconds
from torch import Tensor

from vllm_dymoe.kernels import ExpertWork, dequantize

Prepare = Callable[[Layer], tuple[Callable[..., Any], dict[str, Any]]]
"""A kernel of vLLM, and its arguments for a layer but for hidden_states, topk_weights and topk_ids."""


def dequantize_matmul(x: Tensor, work: Sequence[ExpertWork], out: Tensor) -> None:
    """Each expert dequantized to bf16 in device memory, then torch's products."""
    for expert in work:
        rows = x[expert.tokens]
        gate, up, down = (dequantize(packed, x.dtype) for packed in (expert.gate, expert.up, expert.down))
        out[expert.pairs] = F.linear(F.silu(F.linear(rows, gate)) * F.linear(rows, up), down)


class VllmKernel:
    """One of vLLM's MoE kernels for 4-bit weights and 16-bit activations, on one set of random weights.

    Args:
        name: for the report.
        find: imports it.

    Attributes:
        note: a sentence for the report: what was measured, or why nothing was.
    """

    def __init__(self, name: str, find: Callable[[], Prepare]) -> None:
        self._name = name
        self._ready: tuple[Layer, Callable[..., Any], dict[str, Any]] | None = None
        self._prepare: Prepare | None = None
        self.note = f"{name}: one set of weights, so that small layers come from the cache."
        try:
            self._prepare = find()
        except ImportError as error:
            self.note = f"{name}: not measured, it cannot be imported here ({error})."

    def microseconds(self, layer: Layer, x: Tensor, routing: list[list[int]]) -> float | None:
        """Of one layer; None if there is no vLLM, or it fails, which the note then says."""
        if self._prepare is None:
            return None
        ids = torch.tensor(routing, dtype=torch.int32, device="cuda")
        weights = torch.full(ids.shape, 1 / layer.top_k, device="cuda")
        try:
            if self._ready is None or self._ready[0] != layer:
                self._ready = None  # the old layer's weights go before the new ones come
                self._ready = layer, *self._prepare(layer)
            _, run, arguments = self._ready
            return seconds(lambda: run(hidden_states=x, topk_weights=weights, topk_ids=ids, **arguments), 0.05) * 1e6
        except Exception as error:  # another version's interface: the note says it, and our table is still made
            self.note = f"{self._name}: not measured, it failed ({type(error).__name__}: {error})."
            self._prepare = None
            return None


def find_wna16() -> Prepare:
    """vLLM's Triton kernel."""
    from vllm.model_executor.layers.fused_moe import fused_experts
    from vllm.model_executor.layers.fused_moe.config import int4_w4a16_moe_quant_config

    def prepare(layer: Layer) -> tuple[Callable[..., Any], dict[str, Any]]:
        experts, hidden, inner = layer.experts, layer.hidden, layer.intermediate
        config = int4_w4a16_moe_quant_config(
            _scales(experts, 2 * inner, hidden // GROUP),
            _scales(experts, hidden, inner // GROUP),
            block_shape=[0, GROUP],
        )
        w1 = torch.randint(0, 256, (experts, 2 * inner, hidden // 2), dtype=torch.uint8, device="cuda")
        w2 = torch.randint(0, 256, (experts, hidden, inner // 2), dtype=torch.uint8, device="cuda")
        return fused_experts, {"w1": w1, "w2": w2, "quant_config": config}

    return prepare


def find_marlin() -> Prepare:
    """Marlin for MoE: symmetric 4-bit weights in its own order, which for random bytes does not matter."""
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe
    from vllm.scalar_type import scalar_types

    def prepare(layer: Layer) -> tuple[Callable[..., Any], dict[str, Any]]:
        experts, hidden, inner = layer.experts, layer.hidden, layer.intermediate
        return fused_marlin_moe, {
            "w1": _tiles(experts, hidden, 2 * inner),
            "w2": _tiles(experts, inner, hidden),
            "bias1": None,
            "bias2": None,
            "w1_scale": _scales(experts, hidden // GROUP, 2 * inner),
            "w2_scale": _scales(experts, inner // GROUP, hidden),
            "quant_type_id": scalar_types.uint4b8.id,
        }

    return prepare


def _tiles(experts: int, columns: int, rows: int) -> Tensor:
    """Random weights of 4 bits as gptq_marlin_moe_repack leaves them: tiles of 16 columns."""
    return torch.randint(
        -(1 << 31), 1 << 31, (experts, columns // 16, 2 * rows), dtype=torch.int64, device="cuda"
    ).int()


def _scales(*shape: int) -> Tensor:
    return torch.rand(*shape, device="cuda").mul_(0.01).to(DTYPE)
