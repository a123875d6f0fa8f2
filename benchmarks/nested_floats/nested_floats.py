"""Does the upper half of an e2m1 code make a low tier? Its error beside 2-bit versions of the dequantized weights.

    python benchmarks/nested_floats/nested_floats.py

The shipped model's experts are rounded to MXFP4 as OCP has it; those weights are what a low tier has to come close to.
The upper two bits of a code are its sign and whether it is at least 2: two magnitudes, fitted by least squares for each
matrix, under the scales that are there already, so 2 + 8/32 bits for a weight. The others are 2-bit codes with a scale
and a zero point for a group. Errors are relative: of the weights, and of what gate and up give for 2048 tokens of text
that the model was not trained on; GPTQ is calibrated on as many others. The bound is the best of them.
"""

import argparse
import json
from pathlib import Path

import torch
import transformers
from torch import Tensor

from vllm_dymoe.kernels import dequantize
from vllm_dymoe.quantize import make_quantizer, quantize_matrix
from vllm_dymoe.quantize.base import Quantizer
from vllm_dymoe.quantize.gptq import Curvature, Gptq
from vllm_dymoe.quantize.held import HeldFloats, blocks
from vllm_dymoe.residency.code import MXFP4, code_of
from vllm_dymoe.residency.matrix import MatrixFormat

MODEL = Path(__file__).resolve().parents[1] / "tiny_moe" / "model"
RESULTS = Path(__file__).with_name("results.json")
TOKENS, GROUPS = 2048, (32, 64)


def as_mxfp4(weight: Tensor) -> HeldFloats:
    """Round to nearest under a power of two for 32 columns, float32 [rows, columns]: OCP MX 1.0, 6.3."""
    rows, columns = weight.shape
    groups = weight.view(rows, -1, 32)
    exponents = groups.abs().amax(2).clamp(2.0**-100).log2().floor() - 2  # 2 is the exponent of e2m1's largest, 6
    magnitudes = MXFP4.levels(torch.arange(8, dtype=torch.uint8))
    scaled = groups / exponents.exp2()[..., None]
    nearest = (scaled.abs()[..., None] - magnitudes).abs().argmin(-1)
    codes = (nearest + 8 * (scaled < 0)).to(torch.uint8).view(rows, columns)
    scales = exponents.exp2().to(torch.float8_e8m0fnu)
    return HeldFloats(MXFP4, codes, scales, torch.arange(rows), blocks(columns, 32))


def upper_half(matrix: HeldFloats) -> Tensor:
    """The weights of two bits: a sign, and one of two magnitudes."""
    levels, weights = MXFP4.levels(matrix.codes), matrix.dequantize()
    scales = matrix.scales.float()[matrix.row_blocks][:, matrix.column_blocks]
    signs, large = torch.where(matrix.codes >= 8, -1.0, 1.0), levels.abs() >= 2
    found = torch.zeros_like(weights)
    for which in (large, ~large):
        base = signs * scales * which
        found += base * (base * weights).sum() / (base * base).sum()
    return found


def two_bits(weight: Tensor, group_size: int, quantizer: Quantizer) -> Tensor:
    """The weights of 2-bit codes."""
    format = MatrixFormat(*weight.shape, code_of(2), group_size, torch.bfloat16)
    section = torch.empty(format.nbytes, dtype=torch.uint8)
    quantize_matrix(weight, format, quantizer, section)
    return dequantize(format.view(section))


def expert_inputs(model: torch.nn.Module, tokens: Tensor) -> list[Tensor]:
    """What each layer's experts read, float32 [tokens, hidden]."""
    found: list[Tensor] = []
    hooks = [
        layer.mlp.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0].flatten(0, 1).float()))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(tokens.view(-1, 256))
    for hook in hooks:
        hook.remove()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=4, help="of each layer")
    arguments = parser.parse_args()
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    texts = "\n".join(path.read_text() for path in sorted((MODEL / "heldout").glob("*.txt")))
    tokens = torch.tensor(transformers.AutoTokenizer.from_pretrained(MODEL)(texts)["input_ids"])
    # One half of the text calibrates GPTQ, the other one is measured.
    chosen = tokens[: len(tokens) // 256 * 256].view(-1, 256)[torch.randperm(len(tokens) // 256)[: TOKENS // 128]]
    read = expert_inputs(model, chosen.flatten())
    sums: dict[str, list[float]] = {}
    for layer, inputs in zip(model.model.layers, read, strict=True):
        calibration, measured = inputs[:TOKENS], inputs[TOKENS:]
        curvature = Curvature.of(calibration.t() @ calibration)
        for expert in range(arguments.experts):
            matrix = as_mxfp4(layer.mlp.experts.gate_up_proj[expert].detach())
            weight = matrix.dequantize()
            low = {"upper half of e2m1, 2.25 bits": upper_half(matrix)}
            for group_size in GROUPS:
                bits = f"2 bits in groups of {group_size}, {2 + 32 / group_size:g} bits"
                quantizers = {name: make_quantizer(name) for name in ("rtn", "hqq")} | {"gptq": Gptq(curvature)}
                low |= {f"{name}, {bits}": two_bits(weight, group_size, made) for name, made in quantizers.items()}
            output = measured @ weight.t()
            for name, weights in low.items():
                squares = [(weights - weight).norm() ** 2, weight.norm() ** 2]
                squares += [(measured @ weights.t() - output).norm() ** 2, output.norm() ** 2]
                total = sums.setdefault(name, [0.0] * 4)
                sums[name] = [a + float(b) for a, b in zip(total, squares, strict=True)]
    rows = {
        name: {"weights": round((a / b) ** 0.5, 4), "outputs": round((c / d) ** 0.5, 4)}
        for name, (a, b, c, d) in sums.items()
    }
    for kind in ("weights", "outputs"):
        print(f"bound, {kind}: {min(row[kind] for row in rows.values())} (the best of them)")
    print(json.dumps(rows, indent=1))
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
