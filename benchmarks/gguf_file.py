"""Writes GGUF models for llama.cpp, with experts in Q4_0."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

try:
    import gguf
    import xllamacpp  # noqa: F401
except ImportError as missing:
    raise SystemExit(
        f"llama.cpp is a part of this benchmark, and {missing.name} is missing: pip install xllamacpp gguf"
    ) from None

SHIPPED = Path(__file__).resolve().parent / "tiny_moe" / "model"


def write_gguf(path: Path, tensors: Mapping[str, Any], config: dict, dense: str = "F32") -> None:
    """Write a GGUF file with experts in Q4_0 and other matrices as ``dense``.

    Tensors have the names of Qwen3-MoE's checkpoints. The vocabulary is the shipped model's, which may be smaller than
    the model's.
    """
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
