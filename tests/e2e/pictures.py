"""Small random models that read pictures, with tokenizers and processors."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers.models.qwen3_vl import Qwen3VLProcessor, Qwen3VLVideoProcessor

from tests.e2e.architectures import ARCHITECTURES, COMMON, GEMMA4, QWEN3_NEXT, fill
from tests.e2e.engines import VOCABULARY, random_prompts

_END = "<|endoftext|>"
_PATCH = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2}
_PIXELS = {"shortest_edge": 32 * 32, "longest_edge": 256 * 256}
_QWEN_VISION = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 4,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 64,
    "out_hidden_size": 128,
}
_DEEPSTACK = {"deepstack_visual_indexes": [0]}  # Qwen3.5 has none
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
_MOE = {"moe_intermediate_size": 96, "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 32}


def _qwen(tokenizer: Any) -> Any:
    images = transformers.Qwen2VLImageProcessor(**_PATCH, size=_PIXELS)
    return Qwen3VLProcessor(images, tokenizer, Qwen3VLVideoProcessor(**_PATCH, size=_PIXELS))


def _glm(tokenizer: Any) -> Any:
    sizes = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
    pixels = {"shortest_edge": 56 * 56, "longest_edge": 2 * 112 * 112}
    images = transformers.Glm4vImageProcessor(**sizes, size=pixels)
    return transformers.Glm4vProcessor(images, tokenizer, transformers.Glm4vVideoProcessor(**sizes, size=pixels))


def _llama(tokenizer: Any) -> Any:
    images = transformers.Llama4ImageProcessor(size={"height": 112, "width": 112}, max_patches=2)
    return transformers.Llama4Processor(images, tokenizer)


def _gemma(tokenizer: Any) -> Any:
    images = transformers.Gemma4ImageProcessor(max_soft_tokens=70)
    videos, sounds = transformers.Gemma4VideoProcessor(), transformers.Gemma4AudioFeatureExtractor()
    return transformers.Gemma4Processor(sounds, images, tokenizer, videos, image_seq_length=70)


def _omni(tokenizer: Any) -> Any:
    images = transformers.Qwen2VLImageProcessor(**_PATCH, size=_PIXELS)
    videos, sounds = Qwen3VLVideoProcessor(**_PATCH, size=_PIXELS), transformers.WhisperFeatureExtractor(128)
    return transformers.Qwen3OmniMoeProcessor(images, videos, sounds, tokenizer)


def _transpose_stacks(folder: Path) -> None:
    """Write stacks of experts with columns first, as in published checkpoints.

    transformers reads this order, but writes the other one.
    """
    tensors = load_file(folder / "model.safetensors")
    turned = {name: x.mT.contiguous() if ".experts." in name else x for name, x in tensors.items()}
    save_file(turned, folder / "model.safetensors", {"format": "pt"})


def _as_thinker(folder: Path) -> None:
    """Make a model the thinker of Qwen3-Omni, whose other parts vLLM does not load."""
    path = folder / "config.json"
    described = {"architectures": ["Qwen3OmniMoeForConditionalGeneration"], "model_type": "qwen3_omni_moe"}
    thinker = json.loads(path.read_text())
    thinker["vision_config"] |= {"image_size": 128, "apply_vit_abs_pos_embed": True}  # which transformers drops
    path.write_text(json.dumps(described | {"dtype": "bfloat16", "thinker_config": thinker}))
    tensors = load_file(folder / "model.safetensors")
    named = {f"thinker.{name}": tensor for name, tensor in tensors.items()}
    save_file(named, folder / "model.safetensors", {"format": "pt"})


def _without_norms(folder: Path) -> None:
    """Say that queries and keys have no norms, which transformers leaves out."""
    path = folder / "config.json"
    described = json.loads(path.read_text())
    described["text_config"]["use_qk_norm"] = False
    path.write_text(json.dumps(described))


def last_ids(words: Iterable[str]) -> dict[str, int]:
    """Give words the last ids of the vocabulary, after one for the end of a text."""
    several = dict.fromkeys((_END, *words))
    return {word: VOCABULARY - len(several) + number for number, word in enumerate(several)}


def make_tokenizer(special: dict[str, int], names: dict[str, str]) -> Any:
    """Return a tokenizer of numbered words and special ones.

    Args:
        special: words that are no text, by their ids, see :func:`last_ids`.
        names: words by their names in the tokenizer's configuration.
    """
    vocabulary = {f"t{number}": number for number in range(VOCABULARY - len(special))} | special
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens(list(special))  # they need no blanks between them
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token=_END, pad_token=_END, extra_special_tokens=names
    )


@dataclass(frozen=True)
class Seeing:
    """A model that reads pictures."""

    family: str  # prefix of its class names in transformers
    text: dict[str, Any]  # sizes of the language model that differ from the common ones
    vision: dict[str, Any]
    ids: dict[str, str]  # words by the keys of config.json that hold their token ids
    picture: tuple[str, ...]  # words that stand for a picture in a prompt
    processor: Callable[[Any], Any]  # returns the processor for a tokenizer
    names: dict[str, str] = field(default_factory=dict)  # words by their names in the tokenizer's configuration
    others: dict[str, Any] = field(default_factory=dict)  # further keys of config.json
    change: Callable[[Path], None] = lambda folder: None  # makes the checkpoint look like published ones

    @property
    def tokens(self) -> dict[str, int]:
        """Token ids of the words that are no text; the last ids of the vocabulary."""
        return last_ids((*self.ids.values(), *self.picture, *self.names.values()))

    def save(self, folder: Path) -> Path:
        """Write a random bf16 checkpoint with its tokenizer and processor.

        The weights are the same every time.
        """
        ids = {key: self.tokens[word] for key, word in self.ids.items()}
        described = {"text_config": COMMON | self.text, "vision_config": self.vision, **ids, **self.others}
        config = getattr(transformers, f"{self.family}Config")(**described)
        torch.manual_seed(0)
        model = getattr(transformers, f"{self.family}ForConditionalGeneration")(config).bfloat16()
        for name, tensor in model.state_dict().items():
            fill(name, tensor)
        model.save_pretrained(folder)
        self.processor(make_tokenizer(self.tokens, self.names)).save_pretrained(folder)
        self.change(folder)
        return folder

    def prompts(self, lengths: Iterable[int] = (5, 33, 12, 20)) -> list[dict[str, Any]]:
        """Return prompts of random tokens; the first, third, ... contain a picture."""
        random, texts = np.random.default_rng(0), VOCABULARY - len(self.tokens)
        found: list[dict[str, Any]] = []
        for number, prompt in enumerate(random_prompts(lengths, seed=1)):
            words = [token for token in prompt["prompt_token_ids"] if token < texts]
            if number % 2:
                found.append({"prompt_token_ids": words})
                continue
            picture = Image.fromarray(random.integers(0, 256, (128, 160, 3), dtype=np.uint8))
            place = [self.tokens[word] for word in self.picture]
            found.append({"prompt_token_ids": [*words[:3], *place, *words[3:]], "multi_modal_data": {"image": picture}})
        return found


_QWEN_IDS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
_QWEN_PICTURE = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
_LLAMA_WORDS = {"tile_x": "<|tile_x_separator|>", "tile_y": "<|tile_y_separator|>"}
_GEMMA_WORDS = {
    "image_token": "<|image|>",
    "boi_token": "<|image>",
    "eoi_token": "<image|>",
    "audio_token": "<|audio|>",
    "boa_token": "<|audio>",
    "eoa_token": "<audio|>",
}
SEEING = {
    "qwen3-vl-moe": Seeing(
        "Qwen3VLMoe",
        _MOE | {"rope_parameters": _ROPE, "norm_topk_prob": True},
        _QWEN_VISION | _DEEPSTACK,
        _QWEN_IDS,
        _QWEN_PICTURE,
        _qwen,
        change=_transpose_stacks,
    ),
    "qwen3.5-moe": Seeing(
        "Qwen3_5Moe",
        QWEN3_NEXT.sizes | {"rope_parameters": _ROPE | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25}},
        _QWEN_VISION,
        _QWEN_IDS,
        _QWEN_PICTURE,
        _qwen,
    ),
    "glm-4.5v": Seeing(
        "Glm4vMoe",
        {
            "moe_intermediate_size": 64,
            "intermediate_size": 128,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "head_dim": 32,
            "rope_parameters": _ROPE | {"mrope_section": [4, 2, 2], "partial_rotary_factor": 0.5},
        },
        {
            "depth": 2,
            "hidden_size": 64,
            "num_heads": 4,
            "intermediate_size": 128,
            "out_hidden_size": 128,
            "image_size": 112,
        },
        {
            "image_token_id": "<|image|>",
            "video_token_id": "<|video|>",
            "image_start_token_id": "<|begin_of_image|>",
            "image_end_token_id": "<|end_of_image|>",
            "video_start_token_id": "<|begin_of_video|>",
            "video_end_token_id": "<|end_of_video|>",
        },
        ("<|begin_of_image|>", "<|image|>", "<|end_of_image|>"),
        _glm,
        change=_without_norms,
    ),
    "llama-4": Seeing(
        "Llama4",
        ARCHITECTURES["llama-4"].sizes,
        {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 256,
            "vision_output_dim": 64,
            "image_size": 112,
            "projector_input_dim": 64,
            "projector_output_dim": 64,
        },
        {
            "boi_token_index": "<|image_start|>",
            "eoi_token_index": "<|image_end|>",
            "image_token_index": "<|patch|>",
        },
        ("<|image|>",),
        _llama,
        _LLAMA_WORDS,
    ),
    "gemma4": Seeing(
        "Gemma4",
        GEMMA4.sizes,
        {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 16,
            "intermediate_size": 128,
            "position_embedding_size": 64,
            "default_output_length": 70,
        },
        {
            "image_token_id": "<|image|>",
            "boi_token_id": "<|image>",
            "eoi_token_id": "<image|>",
            "audio_token_id": "<|audio|>",
            "boa_token_id": "<|audio>",
            "eoa_token_index": "<audio|>",
            "video_token_id": "<|video|>",
        },
        ("<|image|>",),
        _gemma,
        _GEMMA_WORDS,
    ),
    "qwen3-omni": Seeing(
        "Qwen3OmniMoeThinker",
        _MOE | {"rope_parameters": _ROPE, "norm_topk_prob": True, "shared_expert_intermediate_size": 0},
        _QWEN_VISION | _DEEPSTACK,
        _QWEN_IDS
        | {
            "audio_token_id": "<|audio_pad|>",
            "audio_start_token_id": "<|audio_start|>",
            "audio_end_token_id": "<|audio_end|>",
        },
        _QWEN_PICTURE,
        _omni,
        {
            "image_token": "<|image_pad|>",
            "audio_token": "<|audio_pad|>",
            "video_token": "<|video_pad|>",
            "vision_bos_token": "<|vision_start|>",
            "vision_eos_token": "<|vision_end|>",
            "audio_bos_token": "<|audio_start|>",
            "audio_eos_token": "<|audio_end|>",
        },
        {
            "audio_config": {
                "encoder_layers": 1,
                "encoder_attention_heads": 4,
                "encoder_ffn_dim": 64,
                "d_model": 64,
                "output_dim": 128,
                "downsample_hidden_size": 32,
            },
        },
        _as_thinker,
    ),
}

TAKES_PICTURES: dict[str, Any] = {
    "limit_mm_per_prompt": {"image": 1, "video": 0, "audio": 0},
    "skip_tokenizer_init": False,
    "max_model_len": 256,
}
"""Settings of an engine that takes one picture with a prompt."""
