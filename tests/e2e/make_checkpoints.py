"""Writes checkpoints/: small random models, quantized by ModelOpt itself.

Run by hand:

    pip install --target modelopt --no-deps nvidia-modelopt==0.47.0
    pip install --target modelopt --no-deps scipy omegaconf pulp antlr4-python3-server==4.9.3
    PYTHONPATH=.:modelopt python -m tests.e2e.make_checkpoints
"""

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
import transformers

from tests.e2e.architectures import ARCHITECTURES
from tests.e2e.engines import VOCABULARY

FOLDER = Path(__file__).parent / "checkpoints"
MADE = {"qwen3-moe-nvfp4": ("qwen3-moe", "NVFP4_EXPERTS_ONLY_CFG")}
_SMALL = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
_KEPT = ("config.json", "hf_quant_config.json", "model.safetensors")


def calibrate(model: torch.nn.Module) -> None:
    """Run random tokens, from which ModelOpt chooses the activations' scales."""
    torch.manual_seed(0)
    for _ in range(4):
        model(torch.randint(2, VOCABULARY, (2, 128)))


def export(name: str, recipe: str, folder: Path) -> None:
    import modelopt.torch.quantization as quantization
    from modelopt.torch.export import export_hf_checkpoint

    architecture = ARCHITECTURES[name]
    with tempfile.TemporaryDirectory() as temporary:
        source = replace(architecture, sizes=architecture.sizes | _SMALL).save(Path(temporary))
        model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    quantization.quantize(model, getattr(quantization, recipe), calibrate)
    with tempfile.TemporaryDirectory() as temporary:
        export_hf_checkpoint(model, export_dir=temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for file in _KEPT:
            shutil.copy(Path(temporary) / file, folder)
            (folder / file).chmod(0o644)


if __name__ == "__main__":
    for name, made in MADE.items():
        export(*made, FOLDER / name)
        print(name, {path.name: path.stat().st_size for path in (FOLDER / name).iterdir()})
