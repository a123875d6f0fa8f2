"""The model of the benchmark: the shipped one with wide experts, so that routers are real and bytes are many.

Rows that gate and up gain are random, and what down gains for them is zero: no result changes, and no file is easy to
compress. Written as a dymoe checkpoint at 4 bits, and as GGUF at llama.cpp's 4 bits (Q4_0).
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

try:
    import gguf
    import xllamacpp  # noqa: F401
except ImportError as missing:
    raise SystemExit(
        f"llama.cpp is a part of this benchmark, and {missing.name} is missing: pip install xllamacpp gguf"
    ) from None

SHIPPED = Path(__file__).resolve().parents[1] / "tiny_moe" / "model"


def widened(width: int) -> dict[str, torch.Tensor]:
    """All tensors at 16 bits, one layer's experts after the other when they are asked for."""
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
    """Folders and files are there from an earlier run, or written now: the dymoe checkpoint and the GGUF file."""
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
    command = [
        Path(sys.executable).with_name("vllm-dymoe"),
        "quantize",
        plain,
        "-o",
        packed,
        "--hi",
        "4",
        "--overwrite",
    ]
    subprocess.run(list(map(str, command)), check=True)
    (plain / "model.safetensors").unlink()
    gguf.with_suffix(".partial").rename(gguf)
    return packed, gguf


def write_gguf(path: Path, tensors: Mapping[str, Any], config: dict, dense: str = "F32") -> None:
    """What llama.cpp serves: experts in Q4_0, ``dense`` matrices, and words of the shipped model, which may be fewer
    than the model's; tensors are by the names of Qwen3-MoE's checkpoints."""
    writer, layers, experts = gguf.GGUFWriter(path, "qwen3moe"), config["num_hidden_layers"], config["num_experts"]
    theta = config["rope_parameters"]["rope_theta"] if "rope_parameters" in config else config["rope_theta"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(layers)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(theta)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_expert_count(experts)
    writer.add_expert_used_count(config["num_experts_per_tok"])
    _add_words(writer, config)

    def add(name: str, tensor: torch.Tensor, kind: str) -> None:
        data, coded = tensor.float().numpy(), gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, gguf.quants.quantize(data, coded), raw_dtype=coded)

    add("token_embd.weight", tensors["model.embed_tokens.weight"], dense)
    add("output_norm.weight", tensors["model.norm.weight"], "F32")
    if "lm_head.weight" in tensors:
        add("output.weight", tensors["lm_head.weight"], dense)
    names = {
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate": "ffn_gate_inp",
    }  # fmt: skip
    for layer in range(layers):
        for theirs, ours in names.items():
            kind = "F32" if "norm" in ours or ours == "ffn_gate_inp" else dense
            add(f"blk.{layer}.{ours}.weight", tensors[f"model.layers.{layer}.{theirs}.weight"], kind)
        for projection in ("gate", "up", "down"):
            prefix = f"model.layers.{layer}.mlp.experts"
            all_ = torch.stack([tensors[f"{prefix}.{e}.{projection}_proj.weight"] for e in range(experts)])
            add(f"blk.{layer}.ffn_{projection}_exps.weight", all_, "Q4_0")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_words(writer: gguf.GGUFWriter, config: dict) -> None:
    tokenizer = json.loads((SHIPPED / "tokenizer.json").read_text())
    words = {number: word for word, number in tokenizer["model"]["vocab"].items()}
    words |= {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([words.get(number, f"<unused {number}>") for number in range(config["vocab_size"])])
    special = {token["id"] for token in tokenizer["added_tokens"]}
    kinds = [gguf.TokenType.CONTROL if number in special else gguf.TokenType.NORMAL for number in range(len(words))]
    writer.add_token_types(kinds + [gguf.TokenType.UNUSED] * (config["vocab_size"] - len(words)))
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_add_bos_token(False)
