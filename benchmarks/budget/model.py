"""The synthetic model: layer shapes of Qwen3-30B-A3B with random weights.

It has as many layers as fit. Attention, norms and router have the real model's shapes. The vocabulary shrinks with the
number of layers, so that the output head keeps its share of a token's time. A layer adds little to its input, as at the
start of training (GPT-2's scaling); otherwise attention's average over the text, nearly the same for every token, would
choose the experts. So a random router chooses experts evenly, and repeats them for the next token by chance alone: the
worst case for any cache.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

REAL_LAYERS, REAL_VOCABULARY = 48, 151_936
HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 2048, 32, 4, 128
EXPERTS, TOP_K, INTERMEDIATE = 128, 8, 768
ADDED = (2 * REAL_LAYERS) ** -0.5
"""Size of what attention or experts add to a token in one layer: all layers together add as much as the token
itself.
"""


def vocabulary(layers: int) -> int:
    """Return the vocabulary size that keeps the output head's share of the time."""
    return -(-REAL_VOCABULARY * layers // REAL_LAYERS // 64) * 64


def config(layers: int) -> dict:
    """Return the config.json of the model."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "torch_dtype": "bfloat16",
        "hidden_size": HIDDEN,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": 3 * HIDDEN,
        "moe_intermediate_size": INTERMEDIATE,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "max_position_embeddings": 4096,
        "vocab_size": vocabulary(layers),
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


def write(folder: Path, layers: int) -> None:
    """Write the bf16 checkpoint.

    config.json comes last, so a folder with one is complete.
    """
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    # Weights are windows of one random pool, because drawing ten billion numbers takes longer than writing them.
    pool = torch.randn(1 << 25, generator=generator).bfloat16()

    def weight(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        """Return a matrix [rows, columns] that maps inputs of rms 1 to rms ``gain``."""
        count = rows * columns
        start = int(torch.randint(pool.numel(), (1,), generator=generator))
        numbers = pool[start : start + count]
        if len(numbers) < count:
            numbers = torch.cat((numbers, pool.repeat(-(-count // pool.numel()))))
        return (numbers[:count] * (gain * columns**-0.5)).view(rows, columns)

    weight_map: dict[str, str] = {}
    size = 0

    def save(name: str, tensors: dict[str, torch.Tensor]) -> None:
        nonlocal size
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, name))
        size += sum(tensor.nbytes for tensor in tensors.values())

    ones = torch.ones(HIDDEN, dtype=torch.bfloat16)
    save("dense.safetensors", {
        "model.embed_tokens.weight": weight(vocabulary(layers), HIDDEN, gain=HIDDEN**0.5),  # a token has rms 1
        "lm_head.weight": weight(vocabulary(layers), HIDDEN),
        "model.norm.weight": ones,
    })  # fmt: skip
    keys = KV_HEADS * HEAD_DIM
    for layer in range(layers):
        tensors = {
            "input_layernorm": ones,
            "post_attention_layernorm": ones.clone(),
            "self_attn.q_proj": weight(HEADS * HEAD_DIM, HIDDEN),
            "self_attn.k_proj": weight(keys, HIDDEN),
            "self_attn.v_proj": weight(keys, HIDDEN),
            "self_attn.o_proj": weight(HIDDEN, HEADS * HEAD_DIM, ADDED),
            "self_attn.q_norm": torch.ones(HEAD_DIM, dtype=torch.bfloat16),
            "self_attn.k_norm": torch.ones(HEAD_DIM, dtype=torch.bfloat16),
            "mlp.gate": weight(EXPERTS, HIDDEN),
        }
        for expert in range(EXPERTS):
            tensors[f"mlp.experts.{expert}.gate_proj"] = weight(INTERMEDIATE, HIDDEN)
            tensors[f"mlp.experts.{expert}.up_proj"] = weight(INTERMEDIATE, HIDDEN)
            tensors[f"mlp.experts.{expert}.down_proj"] = weight(HIDDEN, INTERMEDIATE, ADDED)
        named = {f"model.layers.{layer}.{name}.weight": tensor for name, tensor in tensors.items()}
        save(f"layer-{layer:02d}.safetensors", named)
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "generation_config.json").write_text("{}")
    (folder / "config.json").write_text(json.dumps(config(layers), indent=2))
