"""What the kernels are compared with: dequantize and matmul, and vLLM's own 4-bit MoE kernel where it is installed."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from layers import GROUP, Layer
from measure import seconds
from torch import Tensor

from vllm_dymoe.kernels import ExpertWork, dequantize


def dequantize_matmul(x: Tensor, work: Sequence[ExpertWork], out: Tensor) -> None:
    """Each expert dequantized to bf16 in device memory, then torch's products."""
    for expert in work:
        rows = x[expert.tokens]
        gate, up, down = (dequantize(packed, x.dtype) for packed in (expert.gate, expert.up, expert.down))
        out[expert.pairs] = F.linear(F.silu(F.linear(rows, gate)) * F.linear(rows, up), down)


class VllmKernel:
    """vLLM's fused_experts with 4-bit weights and 16-bit activations (its wna16 Triton kernel), on random weights.

    Attributes:
        note: a sentence for the report: what was measured, or why nothing was.
    """

    def __init__(self) -> None:
        self.note = "fused_experts with int4_w4a16, one set of weights, so that small layers come from the cache."
        self._weights: tuple[Layer, tuple[Tensor, ...]] | None = None
        try:
            from vllm.model_executor.layers.fused_moe import fused_experts
            from vllm.model_executor.layers.fused_moe.config import int4_w4a16_moe_quant_config
        except ImportError as error:
            self._run = None
            self.note = f"not measured, it cannot be imported here ({error})."
            return
        self._run, self._config = fused_experts, int4_w4a16_moe_quant_config

    def microseconds(self, layer: Layer, x: Tensor, routing: list[list[int]]) -> float | None:
        """Of one layer; None if there is no vLLM, or it fails, which the note then says."""
        if self._run is None:
            return None
        if self._weights is None or self._weights[0] != layer:
            self._weights = layer, _random_weights(layer)
        w1, w2, scale1, scale2 = self._weights[1]
        config = self._config(scale1, scale2, block_shape=[0, GROUP])
        ids = torch.tensor(routing, dtype=torch.int32, device="cuda")
        weights = torch.full(ids.shape, 1 / layer.top_k, device="cuda")

        def step() -> None:
            self._run(hidden_states=x, w1=w1, w2=w2, topk_weights=weights, topk_ids=ids, quant_config=config)

        try:
            return seconds(step, 0.05) * 1e6
        except Exception as error:  # another version's interface: the note says it, and our table is still made
            self.note = f"not measured, it failed ({type(error).__name__}: {error})."
            self._run = None
            return None


def _random_weights(layer: Layer) -> tuple[Tensor, ...]:
    experts, hidden, inner = layer.experts, layer.hidden, layer.intermediate
    options = {"dtype": torch.uint8, "device": "cuda"}
    return (
        torch.randint(0, 256, (experts, 2 * inner, hidden // 2), **options),
        torch.randint(0, 256, (experts, hidden, inner // 2), **options),
        torch.rand(experts, 2 * inner, hidden // GROUP, device="cuda").mul_(0.01).bfloat16(),
        torch.rand(experts, hidden, inner // GROUP, device="cuda").mul_(0.01).bfloat16(),
    )
