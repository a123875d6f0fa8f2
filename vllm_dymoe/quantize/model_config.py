"""Reads config.json of a Mixture-of-Experts model.

Only what serving, packing and planning the experts need is read. The names below are the only table of the names that
families of models give their sizes, and where they nest them.
"""

import json
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from vllm_dymoe.durable import read_regular
from vllm_dymoe.quantize.readers.configurations import with_expert_dtype
from vllm_dymoe.quantize.tensors import CheckpointError

# Names of a size, the most reliable first.
NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_top_k", "moe_topk", "moe_k")
INTERMEDIATE = ("moe_intermediate_size", "expert_ffn_hidden_size", "expert_intermediate_size", "intermediate_size")
# Latent experts have fewer inputs than the model is wide (Nemotron-H, Kimi-K3).
EXPERT_INPUTS = ("moe_latent_size", "routed_expert_hidden_size", "hidden_size")
# Keys under which multimodal models keep their language model's configuration: Qwen3-Omni's thinker has a text_config
# of its own.
_NESTED = ("thinker_config", "text_config", "llm_config", "language_config")

_LARGEST = 1 << 24  # upper bound of sizes in config.json
_MOST_EXPERTS = 1 << 15


def may_be_of_hub(model: str) -> bool:
    """Return whether a string may name a model on the Hugging Face hub.

    Paths do not.
    """
    return re.fullmatch(r"(\w[\w.-]*/)?\w[\w.-]*", model) is not None


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json of a checkpoint.

    Raises CheckpointError if there is none, or it is not a JSON object.
    """
    if not folder.is_dir():
        how = f"; download the model first, with `hf download {folder} --local-dir FOLDER`"
        if not folder.exists() and not may_be_of_hub(str(folder)):
            raise CheckpointError(f"{folder} does not exist.")
        raise CheckpointError(f"{folder} is not a folder{'' if folder.exists() else how}.")
    config = folder / "config.json"
    if not config.exists() and not config.is_symlink():
        raise CheckpointError(f"{folder} has no config.json, so it is not a Hugging Face checkpoint.")
    return read_json(config)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises CheckpointError if the file cannot be read, or holds something else.
    """
    try:
        found = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}).") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} is not a JSON object.")
    return found


def nested_configs(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """Return a configuration and those nested in it.

    Only multimodal models have nested ones; the language model's is the last.
    """
    found = [config]
    while inner := next((found[-1][key] for key in _NESTED if isinstance(found[-1].get(key), Mapping)), None):
        found.append(inner)
    return tuple(found)


def modalities_of(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return how many experts each modality has in a layer; () for most models.

    Ernie-4.5-VL has experts for text and others for pictures.
    """
    found = config.get("moe_num_experts")
    if not isinstance(found, list) or len(found) != 2:
        return ()
    return tuple(found) if all(isinstance(one, int) and one > 0 for one in found) else ()


def has_gate(model_type: object) -> bool:
    """Return whether experts have a gate projection in addition to up and down."""
    return not str(model_type).startswith("nemotron_h")


class ModelConfig:
    """config.json of one checkpoint; CheckpointError if it cannot be read."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "config.json"
        self.json = read_config(folder)
        self._nested = nested_configs(self.json)
        self._text = self._nested[-1]

    @cached_property
    def quantization(self) -> dict[str, Any] | None:
        """How another tool has quantized the checkpoint; None for 16 bits.

        Raises CheckpointError for a checkpoint in the plugin's own format.
        """
        beside = self._path.with_name("hf_quant_config.json")  # of ModelOpt before 0.31
        found = self.json.get("quantization_config") or self.json.get("compression_config")
        found = found or self._text.get("quantization_config") or (read_json(beside) if beside.is_file() else None)
        if not found:
            return None
        if not isinstance(found, dict):
            raise CheckpointError(
                f"quantization_config in {self._path} is {found!r}, not an object; download the checkpoint again."
            )
        if found.get("quant_method") == "dymoe":
            raise CheckpointError(
                f"{self._path.parent} is already a dymoe checkpoint; quantize the original checkpoint."
            )
        return with_expert_dtype(found, self.json)

    @property
    def dtype(self) -> torch.dtype | None:
        for config in reversed(self._nested):
            for key in ("dtype", "torch_dtype"):
                if config.get(key):
                    named = getattr(torch, str(config[key]).removeprefix("torch."), None)
                    return named if isinstance(named, torch.dtype) else None
        return None

    def with_dtype(self, dtype: torch.dtype) -> dict[str, Any]:
        """Return config.json with the experts' dtype.

        vLLM's "auto" then chooses it for the rest, too.
        """
        name = str(dtype).removeprefix("torch.")

        def renamed(config: Mapping[str, Any]) -> dict[str, Any]:
            return {**config, **{key: name for key in ("dtype", "torch_dtype") if key in config}}

        changed: dict[str, Any] = {}
        for config in reversed(self._nested):
            inner = next((key for key in _NESTED if isinstance(config.get(key), Mapping)), None)
            changed = renamed(config) | ({} if inner is None else {inner: changed})
        if not {"dtype", "torch_dtype"} & changed.keys():
            changed["dtype"] = name
        return changed

    @property
    def num_experts(self) -> int:
        """Number of experts of a layer, of the modality that has most."""
        return max(self.modalities)

    @cached_property
    def modalities(self) -> tuple[int, ...]:
        """Number of experts of a layer for each modality; most models have one.

        Raises CheckpointError if 16-bit ids cannot name them.
        """
        counts = modalities_of(self._text) or (self.size(*NUM_EXPERTS),)
        if (count := max(counts)) > _MOST_EXPERTS:
            raise CheckpointError(
                f"{self._path} says that a layer has {count} experts, but at most {_MOST_EXPERTS} are supported; "
                "correct it, or download the checkpoint again."
            )
        return counts

    @property
    def widths(self) -> tuple[int, ...]:
        """Width of an expert for each modality."""
        width = next((self._text[key] for key in INTERMEDIATE if key in self._text), None)
        if isinstance(width, list) and len(width) == len(self.modalities) > 1:
            return tuple(width)
        return (self.size(*INTERMEDIATE),) * len(self.modalities)

    @property
    def num_layers(self) -> int:
        """Number of the model's own layers.

        Layers of drafts, which may come after them, do not count.
        """
        return self.size("num_hidden_layers", "num_layers")

    @property
    def model_type(self) -> str | None:
        found = self._text.get("model_type")
        return found if isinstance(found, str) else None

    def size(self, *keys: str) -> int:
        """Return the first of some keys that the configuration has.

        If each layer has its own, the largest. Raises CheckpointError if there is none.
        """
        for key in keys:
            value = self._text.get(key)
            if value is not None:
                if isinstance(value, list) and value and all(isinstance(each, int) for each in value):
                    value = max(value)
                if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _LARGEST:
                    raise CheckpointError(f"{key} in {self._path} is {value!r}, not a size.")
                return value
        raise CheckpointError(f"{self._path} has no {' or '.join(keys)}.")
