"""AWQ as a row to compare with: input channels are larger while they are rounded where their activations are large.

Lin et al., "AWQ: Activation-aware Weight Quantization" (2024), section 3.2: s = a^alpha, alpha by a search in twenty
steps for the least error of outputs, where a is how large a channel's activations are (their root mean square here).
gate and up of a layer share their s, which the norm before them would take; down's is its expert's. No clipping.
"""

from pathlib import Path

import torch
from torch import Tensor

from vllm_dymoe.kernels import dequantize
from vllm_dymoe.quantize.calibration import Calibration
from vllm_dymoe.quantize.checkpoint import Checkpoint
from vllm_dymoe.quantize.gptq import Curvature
from vllm_dymoe.quantize.packer import ExpertPacker
from vllm_dymoe.quantize.quantizers import QUANTIZERS, quantize_matrix, round_to_nearest
from vllm_dymoe.residency.format import Format, Projection
from vllm_dymoe.residency.matrix import MatrixFormat
from vllm_dymoe.store import HostStore, Manifest
from vllm_dymoe.store.writer import StoreWriter

STEPS = 20


def pack(checkpoint: Checkpoint, calibration: Calibration, fmt: Format, folder: Path) -> HostStore:
    """What is read of AWQ's codes of a format, at 16 bits, in a new store."""
    experts = checkpoint.model_experts((16,), fmt.matrices[Projection.UP].group_size, torch.bfloat16)
    packer = ExpertPacker(experts, QUANTIZERS["rtn"], StoreWriter(folder, Manifest(experts, "rtn", "measured")))
    for layer in range(len(experts.layers)):
        for expert, weights in enumerate(layer_weights(checkpoint, calibration, fmt, layer)):
            for projection, weight in zip(Projection, weights, strict=True):
                packer.put(layer, expert, projection, weight)
    return packer.finish()


def layer_weights(checkpoint: Checkpoint, calibration: Calibration, fmt: Format, layer: int) -> list[list[Tensor]]:
    """What is read of a layer's experts' codes: float32 [rows, columns], by expert and projection."""
    read, experts = [], []
    for expert in range(calibration.recording.num_experts):
        matrices = checkpoint.expert(layer, expert)
        read.append(calibration.curvatures(layer, expert, matrices))
        experts.append([weight.float() for weight, _ in matrices.values() if isinstance(weight, Tensor)])
    outer = _searched(
        [weight for gate, up, _ in experts for weight in (gate, up)],
        [each for each, _ in read for _ in range(2)],
        fmt.matrices[Projection.UP],
    )
    form = fmt.matrices[Projection.DOWN]
    inner = [_searched([down], [each], form)[0] for (*_, down), (_, each) in zip(experts, read, strict=True)]
    return [[*outer[2 * expert : 2 * expert + 2], down] for expert, down in enumerate(inner)]


def _searched(weights: list[Tensor], read: list[Curvature], form: MatrixFormat) -> list[Tensor]:
    """What is read of weights with one s, that of the least error together."""
    size = torch.stack([each.hessian.diagonal() for each in read]).sum(0).sqrt().clamp(min=1e-4)
    least, best = float("inf"), weights
    for step in range(STEPS):
        scale = size ** (step / STEPS)
        scale /= (scale.max() * scale.min()).sqrt()
        made = [_rounded(weight * scale, form) / scale for weight in weights]
        error = sum(each.output_norm(weight - one) for each, weight, one in zip(read, weights, made, strict=True))
        if error < least:
            least, best = error, made
    return best


def _rounded(weight: Tensor, form: MatrixFormat) -> Tensor:
    section = torch.empty(form.nbytes, dtype=torch.uint8)
    quantize_matrix(weight, form, round_to_nearest, section)
    return dequantize(form.view(section))
