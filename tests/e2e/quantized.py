"""Small random checkpoints as other tools quantize them, and the same weights at 16 bits."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.e2e.architectures import Architecture
from tests.quantize.readers import packing

# How each kind of checkpoint is made: its quantization_config, how a matrix is packed, and what is random about it.
KINDS = {
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
        packing.awq,
        {"dtype": torch.float16},
    ),
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False},
        packing.gptq,
        {"dtype": torch.float16, "symmetric": True},
    ),
    # Columns quantized in the order of their activations: vLLM 0.32 runs no dense layers that are quantized so.
    "gptq-ordered": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": True},
        packing.gptq,
        {"dtype": torch.float16, "symmetric": True, "shuffled": True},
    ),
    "compressed-tensors": (
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "ignore": ["lm_head", "re:.*gate$"],
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {
                        "num_bits": 4,
                        "type": "int",
                        "strategy": "group",
                        "group_size": 32,
                        "symmetric": True,
                    },
                }
            },
        },
        packing.compressed_tensors,
        {"dtype": torch.bfloat16, "symmetric": True},
    ),
}


def write_quantized(architecture: Architecture, kind: str, folder: Path, *, dense: bool) -> dict:
    """Write folder/quantized and folder/plain, with the same weights.

    Args:
        architecture: of the model.
        kind: a name of KINDS.
        folder: where to.
        dense: quantize the attention's layers too.

    Returns:
        The experts' matrices, by the name of their 16-bit weight.
    """
    config, pack, settings = KINDS[kind]
    architecture.save(folder / "plain")
    tensors = load_file(folder / "plain" / "model.safetensors")
    plain, quantized, experts = {}, {}, {}
    for number, (name, tensor) in enumerate(tensors.items()):
        is_expert = ".experts." in name
        if not is_expert and not (dense and "self_attn" in name and name.endswith("proj.weight")):
            plain[name] = quantized[name] = tensor.to(settings["dtype"])
            continue
        rows, columns = tensor.shape
        matrix = packing.random_prequantized(rows, columns, 32, seed=number, **settings)
        plain[name] = matrix.weights()
        stem = name.removesuffix(".weight")
        quantized |= {f"{stem}.{part}": packed.contiguous() for part, packed in pack(matrix).items()}
        if is_expert:
            experts[name] = matrix
    described = json.loads((folder / "plain" / "config.json").read_text())
    described["dtype"] = str(settings["dtype"]).removeprefix("torch.")
    save(folder / "plain", described, plain)
    save(folder / "quantized", described | {"quantization_config": config}, quantized)
    return experts


def save(folder: Path, config: dict, tensors: dict[str, torch.Tensor]) -> None:
    """Write a checkpoint."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
