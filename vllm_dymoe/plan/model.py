"""A model's sizes, from config.json alone."""

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from vllm_dymoe.experts.encoding import encoding_of
from vllm_dymoe.experts.format import ExpertFormat, ModelExperts, stored_formats
from vllm_dymoe.options import ConfigError
from vllm_dymoe.quantize.model_config import (
    EXPERT_INPUTS,
    INTERMEDIATE,
    NUM_EXPERTS,
    TOP_K,
    ModelConfig,
    has_gate,
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
_KV_HEADS = "num_key_value_heads", "num_attention_groups"  # the latter in Step-3.5
# Width of an MLP in layers without experts, where `intermediate_size` may be that of experts.
_DENSE_WIDTHS = (
    "intermediate_size_mlp", "dense_intermediate_size", "prefix_dense_intermediate_size", "ffn_hidden_size",
    "intermediate_size",
)  # fmt: skip
_SHARED_WIDTHS = "shared_expert_intermediate_size", "shared_intermediate_size", "share_expert_dim"  # of all together
_SHARED_COUNTS = "n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts"
_BLOCKS = {"E": "moe", "-": "mlp"}  # letters of Nemotron-H's layers
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
    inputs: int  # of an expert: `hidden`, or fewer if experts are latent
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
    gated: bool = True  # experts have a gate projection

    @property
    def expert_weights(self) -> int:
        return (2 + self.gated) * self.inputs * self.intermediate

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
                return replace(self.kept, hidden=self.inputs, intermediate=self.intermediate)
            dtype = getattr(torch, self.dtype)
            sizes = self.inputs, self.intermediate
            return ExpertFormat(*sizes, encoding_of(width), group_size, dtype, has_gate=self.gated)

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


def config_folder(model: str, revision: str | None = None, token: str | bool | None = None) -> Path:
    """Return a model's folder, or one into which its config.json is fetched.

    It is fetched from Hugging Face's hub, or from ModelScope if vLLM uses that.

    Args:
        revision: vLLM's ``--revision``.
        token: vLLM's ``--hf-token``.

    Raises:
        ConfigError: there is no folder, and config.json cannot be fetched.
    """
    folder = Path(model)
    if not folder.is_dir() and may_be_of_hub(model):
        try:
            folder = _fetch_config(model, revision, token)
        except Exception as error:
            raise ConfigError(
                f"{model} is not a folder, and its config.json cannot be fetched ({str(error).splitlines()[0]}); name "
                "a folder that contains it."
            ) from error
    return folder


def _fetch_config(model: str, revision: str | None, token: str | bool | None) -> Path:
    """Return the folder of a model's config.json.

    It comes from ModelScope where vLLM would take the model from there.
    """
    if os.environ.get("VLLM_USE_MODELSCOPE", "").strip().lower() in ("1", "true"):
        from modelscope.hub.snapshot_download import snapshot_download

        return Path(snapshot_download(model_id=model, revision=revision, allow_patterns=["config.json"]))
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(model, "config.json", revision=revision, token=token)).parent


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

    blocks = _blocks(config)
    layers = len(blocks) or size("num_hidden_layers", "num_layers")
    hidden, experts, intermediate = size("hidden_size"), size(*NUM_EXPERTS), size(*INTERMEDIATE)
    experts = sum(modalities_of(config)) or experts  # a token uses those of one modality, and all take memory
    if layers > _MOST_LAYERS:
        raise ConfigError(f"{where} sets {layers} layers, which is not plausible; download it again.")
    inputs, gated = size(*EXPERT_INPUTS), has_gate(config.get("model_type"))
    attention, width, cached = _attention(hidden, size("num_attention_heads"), size)
    matrix = (2 + gated) * hidden  # weights of an MLP for each of its inner values
    weights = {
        "attention": attention,
        "mlp": matrix * size(*_DENSE_WIDTHS, default=0),
        "shared": matrix * _shared_width(config, intermediate, size) + (inputs < hidden) * 2 * hidden * inputs,
    }
    moe = sum(is_moe(config, layer) for layer in range(layers))
    parts = [_parts(config, layer, blocks) for layer in range(layers)]
    counts = Counter(part for of_layer in parts for part in of_layer)
    per_token = moe * hidden * experts + sum(weights[part] * count for part, count in counts.items())
    head = size("vocab_size") * hidden
    held, unknown = None, ""
    try:
        if isinstance(said, Mapping):
            held = _held(said, {
                (layer, part): weights[part] * of_layer.count(part)
                for layer, of_layer in enumerate(parts) for part in of_layer
            })  # fmt: skip
    except CheckpointError as error:
        unknown = str(error)
    return ModelShape(
        layers, moe, experts, size(*TOP_K), hidden, inputs, intermediate,
        attention_weights=attention,
        token_weights=per_token + head,
        dense_weights=per_token + head * (1 if config.get("tie_word_embeddings") else 2),
        attention_width=width,
        kv_bytes=ITEM * counts["attention"] * cached,
        kv_heads=1 if config.get("kv_lora_rank") else size(*_KV_HEADS, "num_attention_heads"),
        vocabulary=size("vocab_size"),
        longest=_longest(config, size),
        fp8_from=_fp8_from(config, size),
        held=held,
        unknown=unknown,
        gated=gated,
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
    kv_heads = size(*_KV_HEADS, default=heads)
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


def _shared_width(config: Mapping[str, Any], intermediate: int, size: Callable[..., int]) -> int:
    """Return the width of shared experts, or of an MLP beside the experts."""
    if config.get("intermediate_size_mlp") or config.get("enable_moe_block"):  # Llama 4, and Gemma 4's MLP
        return size("intermediate_size")
    each = size("moe_shared_expert_intermediate_size", default=intermediate)
    return size(*_SHARED_WIDTHS, default=0) or size(*_SHARED_COUNTS, default=0) * each


def _blocks(config: Mapping[str, Any]) -> list[str]:
    """Return what each layer of Nemotron-H is: "moe", "mlp", or attention or a state.

    Empty for other models, whose layers have attention and an MLP or experts.
    """
    found = config.get("layers_block_type") or config.get("hybrid_override_pattern")
    blocks = [_BLOCKS.get(str(block), str(block)) for block in found] if isinstance(found, str | list) else []
    return blocks if "moe" in blocks else []


def _parts(config: dict[str, Any], layer: int, blocks: Sequence[str]) -> tuple[str, ...]:
    """Return a layer's parts that each token passes, named as in ``dense_aliases``.

    A layer's state, as Mamba's, counts as attention.
    """
    if blocks:
        return ({"moe": "shared", "mlp": "mlp"}.get(blocks[layer], "attention"),)
    if str(config.get("model_type")).startswith("longcat"):  # experts beside two of each
        return ("attention", "mlp") * 2
    return "attention", "shared" if is_moe(config, layer) else "mlp"


def is_moe(config: dict[str, Any], layer: int) -> bool:
    """Return whether a layer has experts, by all that config.json says of it."""

    def number(*names: str) -> int:
        return next((value for name in names if isinstance(value := config.get(name), int) and value > 0), 0)

    def listed(name: str) -> Any:
        """Return a layer's entry; None if there is none."""
        return found[layer] if isinstance(found := config.get(name), list) and layer < len(found) else None

    if blocks := _blocks(config):
        return layer < len(blocks) and blocks[layer] == "moe"
    if layer in (config.get("mlp_only_layers") or ()) or listed("mlp_layer_types") == "dense":
        return False
    dense = number("first_k_dense_replace", "num_dense_layers", "dense_mlp_idx")
    if layer < (dense or int("share_expert_dim" in config)):  # one, if Step-3.5 does not list its MoE layers
        return False
    if listed("moe_layer_freq") == 0 or layer % (number("moe_layer_freq") or 1):
        return False
    chosen = config.get("moe_layers") or config.get("moe_layers_enum")  # Llama 4; Step-3.5: "3,4,5"
    if isinstance(chosen, str | list | tuple):
        return str(layer) in [str(one).strip() for one in (chosen.split(",") if isinstance(chosen, str) else chosen)]
    if period := number("expert_layer_period"):
        return layer % period == number("expert_layer_offset")
    step = number("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval") or 1
    first = config.get("moe_layer_start_index") or 0
    # Ernie-4.5-VL has one for each modality; any of them makes it a MoE layer.
    return (layer + 1) % step == 0 and layer >= (min(first) if isinstance(first, list) else first)
