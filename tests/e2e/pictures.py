"""Small random models that see pictures, with the tokenizer and the processor that vLLM asks for.

Processors of videos need torchvision, which the CPU build of torch does without, so models here see pictures only.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers.models.qwen2_vl import Qwen2VLImageProcessor
from transformers.models.qwen3_vl import Qwen3VLProcessor
from transformers.processing_utils import ProcessorMixin
from vllm.model_executor.models.qwen3_vl import Qwen3VLProcessingInfo

from tests.e2e.architectures import COMMON, QWEN3_NEXT, fill
from tests.e2e.engines import VOCABULARY, random_prompts, small_engine

_NAMES = ("<|endoftext|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_IDS = {name: VOCABULARY - len(_NAMES) + number for number, name in enumerate(_NAMES)}
_SIZE = {"shortest_edge": 32 * 32, "longest_edge": 256 * 256}  # pixels
_PATCH, _MERGE = 16, 2
_VISION = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 4,
    "patch_size": _PATCH,
    "spatial_merge_size": _MERGE,
    "temporal_patch_size": 2,
    "num_position_embeddings": 64,
    "out_hidden_size": 128,
    "deepstack_visual_indexes": [0],
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
_MOE = {"moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 32}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-vl-moe": ("Qwen3VLMoe", _MOE | {"rope_parameters": _ROPE, "decoder_sparse_step": 1, "mlp_only_layers": []}),
    "qwen3.5-moe": (
        "Qwen3_5Moe",
        QWEN3_NEXT.sizes | {"rope_parameters": _ROPE | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25}},
    ),
}


class PicturesOnly(Qwen3VLProcessor):
    """The processor without one of videos."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, **settings: Any) -> None:
        ProcessorMixin.__init__(self, image_processor, tokenizer, **settings)
        self.video_processor = SimpleNamespace(
            size=_SIZE, temporal_patch_size=2, patch_size=_PATCH, merge_size=_MERGE, fps=2, min_frames=2, max_frames=4
        )
        names = {"image_token": _NAMES[3], "video_token": _NAMES[4]}
        names |= {"vision_start_token": _NAMES[1], "vision_end_token": _NAMES[2]}
        for name, token in names.items():
            setattr(self, name, token)
            setattr(self, f"{name}_id", _IDS[token])


def save(name: str, folder: Path) -> None:
    """Write a random bf16 checkpoint, the same weights every time, and its tokenizer."""
    family, sizes = MODELS[name]
    text = COMMON | sizes
    ids = {"image_token_id": _IDS[_NAMES[3]], "video_token_id": _IDS[_NAMES[4]]}
    ids |= {"vision_start_token_id": _IDS[_NAMES[1]], "vision_end_token_id": _IDS[_NAMES[2]]}
    config = getattr(transformers, f"{family}Config")(text_config=text, vision_config=_VISION, **ids)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config).bfloat16()
    for key, tensor in model.state_dict().items():
        fill(key, tensor)
    model.save_pretrained(folder)
    tokenizer = _tokenizer()
    tokenizer.save_pretrained(folder)
    _image_processor().save_pretrained(folder)


def _tokenizer() -> Any:
    vocabulary = {f"t{number}": number for number in range(VOCABULARY - len(_NAMES))} | _IDS
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token=_NAMES[0], pad_token=_NAMES[0], additional_special_tokens=list(_NAMES[1:])
    )


def _image_processor() -> Any:
    return Qwen2VLImageProcessor(patch_size=_PATCH, temporal_patch_size=2, merge_size=_MERGE, size=_SIZE)


@contextlib.contextmanager
def seeing_engine(model: Path, dymoe: dict[str, Any] | None = None, **settings: Any) -> Iterator[Any]:
    """An engine of a model that sees pictures."""
    processor = PicturesOnly(_image_processor(), _tokenizer())
    limits = {"limit_mm_per_prompt": {"image": 1, "video": 0}, "skip_tokenizer_init": False}
    with (
        mock.patch.object(Qwen3VLProcessingInfo, "get_hf_processor", return_value=processor),
        small_engine(model, dymoe, **(limits | settings)) as llm,
    ):
        yield llm


def seen_prompts() -> list[dict[str, Any]]:
    """Random tokens; in every second prompt with a picture, of 20 tokens, between them."""
    random = np.random.default_rng(0)
    found: list[dict[str, Any]] = []
    for number, prompt in enumerate(random_prompts()):
        tokens = [token for token in prompt["prompt_token_ids"] if token < VOCABULARY - len(_NAMES)]
        if number % 2:
            found.append({"prompt_token_ids": tokens})
            continue
        picture = Image.fromarray(random.integers(0, 256, (128, 160, 3), dtype=np.uint8))
        place = [_IDS[name] for name in (_NAMES[1], _NAMES[3], _NAMES[2])]
        found.append({"prompt_token_ids": [*tokens[:3], *place, *tokens[3:]], "multi_modal_data": {"image": picture}})
    return found
