"""The model of the benchmark: the shipped one with wide experts.

So its routers are real, and its bytes are many. Added rows of gate and up are random, and the matching columns of down
are zero, so that no result changes and no file is easy to compress. It is written as a dymoe checkpoint at 4 bits, and
as GGUF at llama.cpp's 4 bits (Q4_0).
"""

import json
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

sys.path.append(str(Path(__file__).resolve().parents[1]))
from gguf_file import SHIPPED, write_gguf


def widened(width: int) -> dict[str, torch.Tensor]:
    """Return all tensors at 16 bits; experts are created layer by layer when read."""
    return {name: _wide(name, tensor, width) for name, tensor in load_file(SHIPPED / "model.safetensors").items()}


def _wide(name: str, tensor: torch.Tensor, width: int) -> torch.Tensor:
    if ".experts." not in name:
        return tensor
    rows, columns = tensor.shape
    if name.endswith("down_proj.weight"):
        return torch.cat((tensor, tensor.new_zeros(rows, width - columns)), dim=1)
    generator = torch.Generator().manual_seed(sum(name.encode()))
    more = torch.randn(width - rows, columns, generator=generator).to(tensor.dtype) * columns**-0.5
    return torch.cat((tensor, more))


def write(folder: Path, width: int) -> tuple[Path, Path]:
    """Write the dymoe checkpoint and the GGUF file, unless an earlier run did.

    Returns their paths.
    """
    packed, gguf = folder / f"packed-{width}", folder / f"model-{width}.gguf"
    if packed.is_dir() and gguf.is_file():
        return packed, gguf
    folder.mkdir(parents=True, exist_ok=True)
    plain = folder / "plain"
    plain.mkdir(exist_ok=True)
    tensors = widened(width)
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    for path in SHIPPED.iterdir():
        if path.suffix == ".json" and path.name != "prompts.json":
            (plain / path.name).write_bytes(path.read_bytes())
    config = json.loads((SHIPPED / "config.json").read_text()) | {"moe_intermediate_size": width}
    (plain / "config.json").write_text(json.dumps(config))
    write_gguf(gguf.with_suffix(".partial"), tensors, config)
    del tensors
    command = (
        Path(sys.executable).with_name("vllm-dymoe"),
        "quantize",
        plain,
        "-o",
        packed,
        "--high",
        "4",
        "--overwrite",
    )
    subprocess.run(list(map(str, command)), check=True)
    (plain / "model.safetensors").unlink()
    gguf.with_suffix(".partial").rename(gguf)
    return packed, gguf
