"""AWQ, for comparison: large input channels are scaled up before rounding.

Lin et al., "AWQ: Activation-aware Weight Quantization" (2024), section 3.2: s = a^alpha, where a is the size of a
channel's activations (here their root mean square). alpha is searched in twenty steps for the least error of outputs.
gate and up of a layer share their s, which the norm before them could absorb; each expert's down has its own. Weights
are not clipped.
"""

import torch
from torch import Tensor

from vllm_dymoe.experts.format import ExpertFormat, Projection
from vllm_dymoe.experts.matrix import MatrixFormat
from vllm_dymoe.kernels import dequantize
from vllm_dymoe.quantize.calibration import Calibration
from vllm_dymoe.quantize.checkpoint import Checkpoint
from vllm_dymoe.quantize.gptq import Curvature
from vllm_dymoe.quantize.packer import ExpertPacker
from vllm_dymoe.quantize.quantizers import quantize_matrix, round_to_nearest

STEPS = 20


def put(packer: ExpertPacker, checkpoint: Checkpoint, calibration: Calibration, fmt: ExpertFormat) -> None:
    """Write AWQ's dequantized weights in a format, for all experts."""
    for layer in range(len(calibration.recording.layers)):
        outer: list[Tensor] = []
        curves: list[Curvature] = []
        for expert in range(calibration.recording.num_experts):
            matrices = checkpoint.expert(layer, expert)
            curvature, inner = calibration.curvatures(layer, expert, matrices)
            gate, up, down = (weight.float() for weight, _ in matrices.values() if isinstance(weight, Tensor))
            outer, curves = [*outer, gate, up], [*curves, curvature, curvature]
            packer.put(layer, expert, Projection.DOWN, _searched([down], [inner], fmt.matrices[Projection.DOWN])[0])
        for number, weight in enumerate(_searched(outer, curves, fmt.matrices[Projection.UP])):
            packer.put(layer, number // 2, (Projection.GATE, Projection.UP)[number % 2], weight)


def _searched(weights: list[Tensor], read: list[Curvature], form: MatrixFormat) -> list[Tensor]:
    """Return dequantized weights with a common s, the one with the least total error."""
    size = torch.stack([each.hessian.diagonal() for each in read]).sum(0).sqrt().clamp(min=1e-4)
    least, best, section = float("inf"), weights, torch.empty(form.nbytes, dtype=torch.uint8)
    for step in range(STEPS):
        scale, made, error = size ** (step / STEPS), [], 0.0
        scale /= (scale.max() * scale.min()).sqrt()
        for each, weight in zip(read, weights, strict=True):
            quantize_matrix(weight * scale, form, round_to_nearest, section)
            made.append(dequantize(form.view(section)) / scale)
            error += each.output_norm(weight - made[-1])
        if error < least:
            least, best = error, made
    return best
