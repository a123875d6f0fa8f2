"""The models of the benchmark: the shipped one, a wide one, and one by format.

The wide one has Qwen3-30B-A3B's sizes and fewer layers. The models for formats are the shipped one with random experts
in the formats of other tools. Their answers mean nothing; their bytes, and the kernels that read them, are those of
real checkpoints.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks" / "budget")]

import model as wide  # noqa: E402

from tests.quantize.readers.kinds import INTEGERS, config_of, dtype_of, random_matrix, tensors_of  # noqa: E402

SHIPPED = ROOT / "benchmarks" / "tiny_moe" / "model"
FORMATS = (
    "awq", "gptq", "compressed-tensors", "mxfp4-compressed-tensors", "nvfp4-modelopt", "fp8-blocks", "mxfp8-modelopt",
)  # fmt: skip
WIDE = "wide"  # with Qwen3-30B-A3B's sizes
LAYERS = 4  # layers of the wide model
NAMES = ("shipped", WIDE, *FORMATS)
SHALLOW = "shallow"  # the first layers of the shipped one
SHALLOW_LAYERS = 2


def folder_of(name: str, work: Path) -> Path:
    """Return a model's folder; it is written unless an earlier run did."""
    if name == "shipped":
        return SHIPPED
    folder = work / "models" / name
    if not (folder / "config.json").is_file():
        partial = folder.with_name(f"{name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        if name == WIDE:
            wide.write(partial, LAYERS)
        elif name == SHALLOW:
            _write_shallow(partial)
        else:
            _write_format(name, partial)
        partial.rename(folder)
    return folder


def _write_shallow(folder: Path) -> None:
    said = _copy_descriptions(folder)
    deeper = tuple(f"model.layers.{layer}." for layer in range(SHALLOW_LAYERS, said["num_hidden_layers"]))
    found = {
        name: tensor
        for name, tensor in load_file(SHIPPED / "model.safetensors").items()
        if not name.startswith(deeper)
    }  # fmt: skip
    save_file(found, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(said | {"num_hidden_layers": SHALLOW_LAYERS}))


def _copy_descriptions(folder: Path) -> dict[str, Any]:
    """Copy everything but weights and config.json; return what config.json says."""
    folder.mkdir(parents=True)
    for path in SHIPPED.iterdir():
        if path.suffix == ".json" and path.name != "config.json":
            shutil.copy(path, folder)
    said: dict[str, Any] = json.loads((SHIPPED / "config.json").read_text())
    return said


def _write_format(kind: str, folder: Path) -> None:
    said, found, left = _copy_descriptions(folder), {}, ["lm_head"]
    for number, (name, tensor) in enumerate(load_file(SHIPPED / "model.safetensors").items()):
        dense = kind in INTEGERS and "self_attn" in name and name.endswith("proj.weight")
        if ".experts." in name or dense:
            found |= tensors_of(kind, {name: random_matrix(kind, *tensor.shape, seed=number)})
        else:
            found[name] = tensor.to(dtype_of(kind))
            left.append(name.removesuffix(".weight"))
    config = config_of(kind)
    if kind not in INTEGERS:
        config |= {"modules_to_not_convert": left, "ignore": left, "exclude": left}
    save_file({name: tensor.contiguous() for name, tensor in found.items()}, folder / "model.safetensors")
    dtype = str(dtype_of(kind)).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(said | {"dtype": dtype, "quantization_config": config}))
