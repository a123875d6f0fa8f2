"""A model's sizes, from config.json alone."""

import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from vllm_dymoe.experts.encoding import encoding_of
from vllm_dymoe.experts.format import ExpertFormat, ModelExperts, stored_formats
from vllm_dymoe.options import ConfigError
from vllm_dymoe.quantize.model_config import (
    INTERMEDIATE,
    NUM_EXPERTS,
    TOP_K,
    ModelConfig,
    may_be_of_hub,
    modalities_of,
    nested_configs,
)
from vllm_dymoe.quantize.readers.base import Reader
from vllm_dymoe.quantize.readers.configurations import make_dense_reader
from vllm_dymoe.quantize.readers.modules import dense_aliases
from vllm_dymoe.quantize.tensors import CheckpointError

ITEM = 2  # bytes of a weight outside of experts
_LARGEST, _MOST_LAYERS = 1 << 24, 1 << 14  # upper bounds of sizes in config.json
_RECURRENT = "mamba_", "ssm_", "linear_", "attn_layer_period", "hybrid_override_pattern", "conv_l_"
_LENGTHS = (
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length", "max_target_positions",
    "max_sequence_length", "max_seq_length", "seq_len",
)  # fmt: skip
# Kinds of RoPE whose lengths in config.json are scaled already.
_SCALED = "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling", "telechat3-yarn"
_MOST_SCALED = 1024  # upper bound of a scaling factor
_FLASHINFER_HEADS = 64, 128, 256, 512
_SINKS = "gpt_oss", "granitemoe"  # have attention sinks without saying so; the latter in some checkpoints
Attention = Literal["full", "latent", "recurrent"]
"""What a model keeps of earlier tokens: keys and values, MLA's compressed ones, or in some layers a state."""


@dataclass(frozen=True)
class HeldDense:
    """Weights outside of experts that a checkpoint stores in a tool's format.

    They are of attention, shared experts, and layers without experts. Routers and the output head have 16 bits. If
    such weights have several formats, all count as the one that most have.
    """

    format: str  # in a few words
    bits: float  # of a weight, with its share of a scale
    weights: int
    layer: str  # name of one of these matrices
    folder: str = ""  # of the model's config.json

    @property
    def nbytes(self) -> int:
        return int(self.weights * self.bits / 8)


@dataclass(frozen=True)
class ModelShape:
    """The sizes that determine bytes and time."""

    layers: int
    moe_layers: int
    experts: int  # in each of the `moe_layers`
    top_k: int
    hidden: int
    intermediate: int  # width of an expert
    attention_weights: int  # of one layer
    token_weights: int  # weights outside of experts that each token is multiplied with, the output head included
    dense_weights: int  # those, and the embedding
    attention_width: int  # of a token's queries, keys and values together
    kv_bytes: int  # bytes of KV cache per token in all layers, at 16 bits
    kv_heads: int  # number of parts into which ranks can split the KV cache
    vocabulary: int  # logits of a token
    longest: int  # tokens of a context, as vLLM has them by default; 0 if config.json names no length
    fp8_from: tuple[int, int] = 8, 9  # compute capability from which vLLM can halve the KV cache
    kept: ExpertFormat | None = None  # format of a quantized checkpoint's experts, which keep their codes
    held: HeldDense | None = None  # what it stores in the same way of the rest
    unknown: str = ""  # why that is not known, if it is not
    dtype: str = "bfloat16"  # of activations: that, or "float16"

    @property
    def dense_bytes(self) -> int:
        return self.memory_of_dense(16)

    def memory_of_dense(self, bits: int) -> int:
        """Return the bytes of everything but experts, with the option ``dense``."""
        return self.dense_weights * ITEM - self._saved(bits)

    def read_of_dense(self, bits: int) -> int:
        """Return the bytes of everything but experts that a step reads."""
        return self.token_weights * ITEM - self._saved(bits)

    def _saved(self, bits: int) -> int:
        """Return the bytes that ``dense`` and the checkpoint's own format save.

        An output head that is also the embedding keeps its 16 bits.
        """
        tied, held = self.dense_weights == self.token_weights, self.held or HeldDense("", 16, 0, "")
        plain = self.token_weights - held.weights - tied * self.vocabulary * self.hidden
        return plain * (16 - bits) // 8 + held.weights * ITEM - held.nbytes

    def token_bytes(self, expert_bytes: float, dense: int) -> float:
        """Return the bytes of device memory that a decode step of one request reads."""
        return self.read_of_dense(dense) + self.moe_layers * self.top_k * expert_bytes

    def packed(self, bits: tuple[int, ...], group_size: int = 64) -> ModelExperts:
        def make(width: int) -> ExpertFormat:
            if self.kept is not None and width == self.kept.bits:
                return replace(self.kept, hidden=self.hidden, intermediate=self.intermediate)
            dtype = getattr(torch, self.dtype)
            return ExpertFormat(self.hidden, self.intermediate, encoding_of(width), group_size, dtype)

        layers = tuple(range(self.moe_layers))
        return ModelExperts(layers, self.experts, self.top_k, stored_formats(bits, make))


def read_shape(model: str) -> ModelShape:
    """Return the sizes of a model, as ``config_folder`` finds it.

    Raises:
        ConfigError: it has no experts.
    """
    folder = config_folder(model)
    config = ModelConfig(folder)
    said, unknown = config.json.get("quantization_config"), ""
    try:
        if isinstance(said, Mapping) and said.get("quant_method") == "dymoe":
            said = said.get("dense")
        else:
            said = config.quantization
    except CheckpointError as error:
        said, unknown = None, str(error)
    shape = shape_of(dict(nested_configs(config.json)[-1]), str(folder / "config.json"), said)
    held = shape.held and replace(shape.held, folder=str(folder))
    dtype = "float16" if config.dtype is torch.float16 else "bfloat16"
    return replace(shape, held=held, unknown=shape.unknown or unknown, dtype=dtype)


def config_folder(model: str) -> Path:
    """Return a model's folder, or one into which its config.json is fetched.

    It is fetched from Hugging Face's hub, or from ModelScope if vLLM uses that.

    Raises:
        ConfigError: there is no folder, and config.json cannot be fetched.
    """
    folder = Path(model)
    if not folder.is_dir() and may_be_of_hub(model):
        try:
            folder = _fetch_config(model)
        except Exception as error:
            raise ConfigError(
                f"{model} is not a folder, and its config.json cannot be fetched ({str(error).splitlines()[0]}); name "
                "a folder that contains it."
            ) from error
    return folder


def _fetch_config(model: str) -> Path:
    """Return the folder of a model's config.json.

    It comes from ModelScope where vLLM would take the model from there.
    """
    if os.environ.get("VLLM_USE_MODELSCOPE", "").strip().lower() in ("1", "true"):
        from modelscope.hub.snapshot_download import snapshot_download

        return Path(snapshot_download(model_id=model, allow_patterns=["config.json"]))
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(model, "config.json")).parent


def shape_of(config: dict[str, Any], where: str, said: Mapping[str, Any] | None = None) -> ModelShape:
    """Return the sizes that a config.json gives.

    Args:
        where: its path, for messages.
        said: how weights outside of experts are quantized, as a quantization_config; None for 16 bits.

    Raises:
        ConfigError: a size is missing.
    """

    def size(*names: str, default: int | None = None) -> int:
        for name in names:
            value = config.get(name)
            if isinstance(value, list) and value:
                value = value[0]  # Ernie-4.5-VL has one for each modality
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                if value > _LARGEST:
                    raise ConfigError(f"{where} sets {name} to {value}, which is not plausible; download it again.")
                return value
        if default is None:
            raise ConfigError(f"{where} has no {' or '.join(names)}, so it is not a Mixture-of-Experts model's.")
        return default

    layers, hidden, experts, intermediate = (
        size("num_hidden_layers"), size("hidden_size"), size(*NUM_EXPERTS), size(*INTERMEDIATE)
    )  # fmt: skip
    experts = sum(modalities_of(config)) or experts  # a token uses those of one modality, and all take memory
    if layers > _MOST_LAYERS:
        raise ConfigError(f"{where} sets {layers} layers, which is not plausible; download it again.")
    dense_width = size("intermediate_size_mlp", "intermediate_size", default=0)
    moe = sum(is_moe(config, layer) for layer in range(layers))
    shared = size("shared_expert_intermediate_size", "shared_intermediate_size", default=0)
    shared = shared or size("n_shared_experts", "moe_num_shared_experts", default=0) * intermediate
    attention, width, cached = _attention(hidden, size("num_attention_heads"), size)
    head = size("vocab_size") * hidden
    others = {"shared": 3 * hidden * shared, "mlp": 3 * hidden * dense_width}  # in a layer, in addition to attention
    kinds = ["shared" if is_moe(config, layer) else "mlp" for layer in range(layers)]
    per_token = layers * attention + moe * hidden * experts + sum(others[kind] for kind in kinds)
    held, unknown = None, ""
    try:
        if isinstance(said, Mapping):
            parts = [(layer, part) for layer, kind in enumerate(kinds) for part in ("attention", kind)]
            held = _held(said, {at: {"attention": attention, **others}[at[1]] for at in parts})
    except CheckpointError as error:
        unknown = str(error)
    return ModelShape(
        layers, moe, experts, size(*TOP_K), hidden, intermediate,
        attention_weights=attention,
        token_weights=per_token + head,
        dense_weights=per_token + head * (1 if config.get("tie_word_embeddings") else 2),
        attention_width=width,
        kv_bytes=ITEM * layers * cached,
        kv_heads=1 if config.get("kv_lora_rank") else size("num_key_value_heads", "num_attention_heads"),
        vocabulary=size("vocab_size"),
        longest=_longest(config, size),
        fp8_from=_fp8_from(config, size),
        held=held,
        unknown=unknown,
    )  # fmt: skip


def _held(said: Mapping[str, Any], parts: Mapping[tuple[int, str], int]) -> HeldDense | None:
    """Return what a quantization_config says of weights outside of experts.

    None if all of them have 16 bits.

    Args:
        parts: number of weights by layer and part, see ``dense_aliases``.

    Raises:
        CheckpointError: it is not supported.
    """
    found: dict[str, tuple[Reader, str]] = {}
    weights = Counter[str]()
    for (layer, part), count in parts.items():
        names = dense_aliases(layer, part)
        reader = make_dense_reader(said, names)
        if reader.held and count:
            found.setdefault(reader.summary, (reader, names[0]))
            weights[reader.summary] += count
    if not weights:
        return None
    ((summary, _),) = weights.most_common(1)
    reader, name = found[summary]
    scale = (8 if reader.encoding.floats else 16) / reader.group_size if reader.group_size else 0.0
    return HeldDense(summary, reader.bits + scale, weights.total(), name)


def _attention(hidden: int, heads: int, size: Callable[..., int]) -> tuple[int, int, int]:
    """Return three sizes of a layer.

    They are the number of weights, the width of queries, keys and values, and the numbers per token in the KV cache.
    """
    if latent := size("kv_lora_rank", default=0):  # MLA
        rope, nope, value = size("qk_rope_head_dim"), size("qk_nope_head_dim"), size("v_head_dim")
        query, low = heads * (nope + rope), size("q_lora_rank", default=0)
        asked = hidden * low + low * query if low else hidden * query
        weights = asked + hidden * (latent + rope) + latent * heads * (nope + value) + heads * value * hidden
        return weights, query + heads * (nope + value), latent + rope
    kv_heads = size("num_key_value_heads", default=heads)
    head = size("head_dim", default=hidden // heads)
    width = head * (heads + 2 * kv_heads)
    if out := size("o_lora_rank", default=0):  # DeepSeek-V4: keys are values, and outputs are reduced group by group
        low = size("q_lora_rank")
        reduced = heads * head * out + size("o_groups") * out * hidden
        return low * (hidden + heads * head) + hidden * kv_heads * head + reduced, width, kv_heads * head
    return 2 * hidden * head * (heads + kv_heads), width, 2 * kv_heads * head


def _longest(config: Mapping[str, Any], size: Callable[..., int]) -> int:
    """Return the tokens of a context that vLLM takes by default.

    They are the smallest length in config.json, times RoPE's factor. For LongRoPE they are the length before it was
    extended: a longer context changes the answers to short prompts, too. 0 if config.json names no length.
    """
    lengths = [length for name in _LENGTHS if (length := size(name, default=0))]
    longest, factor = size("model_max_length", default=min(lengths, default=0)), 1.0
    said = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(said, Mapping):
        return longest
    nested = [rope for rope in said.values() if isinstance(rope, Mapping)]  # by kinds of layers
    for rope in nested or [said]:
        kind, scaled = rope.get("rope_type", rope.get("type")), rope.get("factor")
        if kind in ("su", "longrope"):
            return size("original_max_position_embeddings", default=longest)
        if kind not in _SCALED and isinstance(scaled, int | float) and 0 < scaled <= _MOST_SCALED:
            factor = scaled
    return int(longest * factor)


def _fp8_from(config: Mapping[str, Any], size: Callable[..., int]) -> tuple[int, int]:
    """Return the compute capability from which vLLM can store keys and values in FP8.

    Cards before 8.9 need FlashInfer for it, which has kernels for heads of some sizes, without attention sinks.
    """
    head = size("head_dim", default=size("hidden_size") // size("num_attention_heads"))
    sinks = config.get("model_type") in _SINKS or any(value and "sink" in name for name, value in config.items())
    return (8, 0) if head in _FLASHINFER_HEADS and not sinks else (8, 9)


def attention_of(config: Mapping[str, Any]) -> Attention:
    """Return what a model keeps of earlier tokens.

    Layers with a state, as Mamba's and linear attention's, are known by their parameters.
    """
    kinds = config.get("attn_type_list")
    some_linear = isinstance(kinds, list) and 0 in kinds  # MiniMax-M2 has a list of ones
    if some_linear or any(value and name.lower().startswith(_RECURRENT) for name, value in config.items()):
        return "recurrent"
    return "latent" if config.get("kv_lora_rank") else "full"


def is_moe(config: dict[str, Any], layer: int) -> bool:
    dense = config.get("first_k_dense_replace") or config.get("num_dense_layers") or 0
    if layer in (config.get("mlp_only_layers") or ()) or layer < dense:
        return False
    if isinstance(chosen := config.get("moe_layers"), list):  # Llama 4
        return layer in chosen
    step = config.get("decoder_sparse_step") or config.get("interleave_moe_layer_step") or 1
    first = config.get("moe_layer_start_index") or 0
    # Ernie-4.5-VL has one for each modality; any of them makes it a MoE layer.
    return (layer + 1) % step == 0 and layer >= (min(first) if isinstance(first, list) else first)
