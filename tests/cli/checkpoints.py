"""Small random MoE checkpoints in every style that ``vllm-dymoe quantize`` reads."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from typer.testing import CliRunner, Result

from vllm_dymoe.cache.store import FileStore
from vllm_dymoe.cli import app
from vllm_dymoe.experts.format import Projection, SliceKey
from vllm_dymoe.experts.matrix import MatrixFormat

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 96, 80, 4, 2
MOE_LAYERS = (1, 2)  # layer 0 is dense
NAMES = {
    "separate": ("gate_proj", "up_proj", "down_proj"),
    "mixtral": ("w1", "w3", "w2"),
    "biases": ("gate_proj", "up_proj", "down_proj"),
}
MODEL_TYPES = {"gpt-oss": "gpt_oss", "llama-4": "llama4_text"}
WITH_BIASES = ("biases", "gpt-oss")
STYLES = (*NAMES, "fused", "gpt-oss", "llama-4")


@dataclass
class Model:
    """A checkpoint on disk.

    Experts and biases are stored by (layer position, expert, projection), other tensors by name.
    """

    folder: Path
    config: dict[str, Any]
    experts: dict[tuple[int, int, Projection], torch.Tensor]
    biases: dict[tuple[int, int, Projection], torch.Tensor]
    dense: dict[str, torch.Tensor]
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def save(self, *, shards: int = 1) -> None:
        self.folder.mkdir(exist_ok=True)
        (self.folder / "config.json").write_text(json.dumps(self.config))
        if shards == 1:
            save_file(self.tensors, self.folder / "model.safetensors")
            return
        weight_map = {name: f"part-{number % shards}.safetensors" for number, name in enumerate(self.tensors)}
        for file in set(weight_map.values()):
            save_file({n: t for n, t in self.tensors.items() if weight_map[n] == file}, self.folder / file)
        (self.folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def make_model(folder: Path, style: str = "separate", *, dtype: torch.dtype = torch.bfloat16) -> Model:
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * 0.05).to(dtype)

    shapes = {
        Projection.GATE: (INTERMEDIATE, HIDDEN),
        Projection.UP: (INTERMEDIATE, HIDDEN),
        Projection.DOWN: (HIDDEN, INTERMEDIATE),
    }
    experts = {
        (position, expert, projection): random(*shape)
        for position in range(len(MOE_LAYERS))
        for expert in range(EXPERTS)
        for projection, shape in shapes.items()
    }
    dense = {
        "model.layers.0.mlp.odd_bytes": torch.arange(7, dtype=torch.int8),  # the tensor after it must still be aligned
        "model.embed_tokens.weight": random(50, HIDDEN),
        "model.layers.0.mlp.gate_proj.weight": random(128, HIDDEN),
        "model.norm.weight": torch.linspace(0.5, 2, HIDDEN),  # float32 among bfloat16
    }
    for layer in MOE_LAYERS:
        dense[f"model.layers.{layer}.mlp.gate.weight"] = random(EXPERTS, HIDDEN)
        dense[f"model.layers.{layer}.mlp.shared_expert.gate_proj.weight"] = random(INTERMEDIATE, HIDDEN)
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "dtype": str(dtype).removeprefix("torch."),
        "hidden_size": HIDDEN,
        "intermediate_size": 128,
        "moe_intermediate_size": INTERMEDIATE,
        "num_hidden_layers": 3,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
    }
    if style in MODEL_TYPES:
        config["model_type"] = MODEL_TYPES[style]
    biases = {}
    if style in WITH_BIASES:
        biases = {place: random(weight.shape[0]) for place, weight in experts.items()}
    model = Model(folder, config, experts, biases, dense)
    model.tensors = dense | expert_tensors(experts, style)
    if biases:
        model.tensors |= {
            name.replace(".weight", ".bias") if name.endswith(".weight") else f"{name}_bias": bias
            for name, bias in expert_tensors(biases, style).items()
        }
    return model


def expert_tensors(experts: dict[tuple[int, int, Projection], torch.Tensor], style: str) -> dict[str, torch.Tensor]:
    if style in NAMES:
        return {
            f"model.layers.{MOE_LAYERS[position]}.mlp.experts.{expert}.{NAMES[style][projection]}.weight": weight
            for (position, expert, projection), weight in experts.items()
        }
    tensors = {}
    for position, layer in enumerate(MOE_LAYERS):
        prefix = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (torch.stack([experts[position, e, p] for e in range(EXPERTS)]) for p in Projection)
        gate_up = torch.cat((gate, up), dim=1)
        if style == "gpt-oss":  # rows of gate and up alternate
            gate_up = torch.stack((gate, up), dim=2).flatten(1, 2)
        turned = style in ("gpt-oss", "llama-4") and gate.dim() == 3
        tensors[f"{prefix}.gate_up_proj"] = gate_up.mT.contiguous() if turned else gate_up
        tensors[f"{prefix}.down_proj"] = down.mT.contiguous() if turned else down
    return tensors


# Output is compared as on a wide device that is no terminal: without colours and progress bars.
TERMINAL = {"COLUMNS": "120"} | dict.fromkeys(("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"))


def command(*arguments: object) -> Result:
    return CliRunner(env=TERMINAL).invoke(app, [str(argument) for argument in arguments])


def refused(*arguments: object) -> str:
    """Run a command that must be refused with one sentence; return the sentence."""
    result = command(*arguments)
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    sentence = result.stderr.strip()
    assert sentence.startswith("vllm-dymoe: "), sentence
    assert sentence.endswith("."), sentence
    assert "\n" not in sentence, sentence
    return sentence


def quantized(model: Model, out: Path, *options: object) -> str:
    result = command("quantize", model.folder, "-o", out, *options)
    assert result.exit_code == 0, result.output + result.stderr
    return result.stdout


def sections(out: Path, bits: int) -> Iterator[tuple[tuple[int, int, Projection], MatrixFormat, torch.Tensor]]:
    """Return the format and bytes of every stored section.

    Keys are (layer position, expert, projection).
    """
    store = FileStore(out)
    fmt = store.experts.formats[bits]
    for layer in range(len(store.experts.layers)):
        for expert in range(store.experts.num_experts):
            packed = torch.full((fmt.nbytes,), 0xEE, dtype=torch.uint8)
            store.read_into(SliceKey(layer, expert, bits), packed)
            for projection in Projection:
                yield (layer, expert, projection), fmt.matrices[projection], packed[fmt.sections[projection]]
    store.close()
