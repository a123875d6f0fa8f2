"""A checkpoint of published floats with layers of Qwen3-30B-A3B: random codes, scales near those of real weights."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parents[1] / "budget"))

import model
from model import EXPERTS, HEAD_DIM, HEADS, HIDDEN, INTERMEDIATE, KV_HEADS

VOCABULARY = 4096
MATRICES = {"gate_proj": (INTERMEDIATE, HIDDEN), "up_proj": (INTERMEDIATE, HIDDEN), "down_proj": (HIDDEN, INTERMEDIATE)}
Parts = dict[str, tuple[torch.dtype, tuple[int, ...]]]
_MXFP4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
# quantization_config, and dtype and shape of the tensors of a matrix [rows, columns].
FORMATS: dict[str, tuple[dict, Callable[[int, int], Parts]]] = {
    "mxfp4": (
        {
            "quant_method": "compressed-tensors",
            "format": "mxfp4-pack-quantized",
            "config_groups": {"experts": {"targets": ["Linear"], "weights": _MXFP4}},
        },
        lambda n, k: {"weight_packed": (torch.uint8, (n, k // 2)), "weight_scale": (torch.uint8, (n, k // 32))},
    ),
    "int4": (
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"experts": {"targets": ["Linear"], "weights": _INT4}},
        },
        lambda n, k: {
            "weight_packed": (torch.int32, (n, k // 8)),
            "weight_scale": (torch.bfloat16, (n, k // 32)),
            "weight_shape": (torch.int64, (2,)),
        },
    ),
    "nvfp4": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
        lambda n, k: {
            "weight": (torch.uint8, (n, k // 2)),
            "weight_scale": (torch.float8_e4m3fn, (n, k // 16)),
            "weight_scale_2": (torch.float32, ()),
        },
    ),
    "fp8": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        lambda n, k: {
            "weight": (torch.float8_e4m3fn, (n, k)),
            "weight_scale_inv": (torch.float32, (n // 128, k // 128)),
        },
    ),
}


def config(fmt: str, layers: int) -> dict:
    """config.json of the model."""
    left = ["lm_head", *(f"model.layers.{n}.mlp.gate" for n in range(layers))]
    left += [f"model.layers.{n}.self_attn.{each}_proj" for n in range(layers) for each in "qkvo"]
    described = {"vocab_size": VOCABULARY, "quantization_config": FORMATS[fmt][0]}
    described["quantization_config"] |= {"ignore": left, "modules_to_not_convert": left}
    return model.config(layers) | described


class RandomTensors:
    """Windows of one pool of random bytes: drawing ten billion takes longer than writing them."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self._pool = torch.randint(0, 256, (1 << 26,), generator=self._generator, dtype=torch.uint8)

    def codes(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """Random codes; of e4m3 none that is NaN."""
        count = torch.Size(shape).numel() * dtype.itemsize
        start = int(torch.randint(len(self._pool) - count, (1,), generator=self._generator))
        start -= start % 8
        codes = self._pool[start : start + count]
        return (codes & 0xB7 if dtype == torch.float8_e4m3fn else codes.clone()).view(dtype).view(shape)

    def dense(self, *shape: int) -> Tensor:
        """A matrix, or the ones of a norm."""
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16)
        return (torch.randn(shape, generator=self._generator) * shape[-1] ** -0.5).bfloat16()


def scale(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Equal scales: 2^-9 as an exponent, 0.5 in e4m3, otherwise about 0.01."""
    if dtype == torch.uint8:
        return torch.full(shape, 118, dtype=dtype)
    return torch.full(shape, 0.5 if dtype == torch.float8_e4m3fn else 0.01).to(dtype)


def layer(fmt: str, prefix: str, random: RandomTensors) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of one layer."""
    width, narrow = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    for name, shape in {
        "q": (width, HIDDEN),
        "k": (narrow, HIDDEN),
        "v": (narrow, HIDDEN),
        "o": (HIDDEN, width),
    }.items():
        yield f"{prefix}.self_attn.{name}_proj.weight", random.dense(*shape)
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{prefix}.{name}.weight", random.dense(HIDDEN)
    for name in ("q_norm", "k_norm"):
        yield f"{prefix}.self_attn.{name}.weight", random.dense(HEAD_DIM)
    yield f"{prefix}.mlp.gate.weight", random.dense(EXPERTS, HIDDEN)
    for expert in range(EXPERTS):
        for projection, shape in MATRICES.items():
            for part, described in FORMATS[fmt][1](*shape).items():
                if part == "weight_shape":
                    made = torch.tensor(shape)
                else:
                    made = scale(*described) if "scale" in part else random.codes(*described)
                yield f"{prefix}.mlp.experts.{expert}.{projection}.{part}", made


def write(folder: Path, fmt: str, gigabytes: float) -> int:
    """Write a checkpoint with about so many gigabytes of experts; bytes of its files."""
    random = RandomTensors()
    described = [part for shape in MATRICES.values() for part in FORMATS[fmt][1](*shape).values()]
    layers = max(1, round(gigabytes * 1e9 / EXPERTS / sum(d.itemsize * torch.Size(s).numel() for d, s in described)))
    dense = {name: random.dense(VOCABULARY, HIDDEN) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    weight_map: dict[str, str] = {}

    def save(file: str, tensors: dict[str, Tensor]) -> None:
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file))

    save("dense.safetensors", dense | {"model.norm.weight": random.dense(HIDDEN)})
    for number in range(layers):
        save(f"layer-{number:03d}.safetensors", dict(layer(fmt, f"model.layers.{number}", random)))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "generation_config.json").write_text("{}")
    (folder / "config.json").write_text(json.dumps(config(fmt, layers), indent=2))
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))
