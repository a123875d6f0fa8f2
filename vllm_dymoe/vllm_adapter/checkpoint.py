"""Where the files of a model's checkpoint lie, and whether they are what they say."""

from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from vllm.config import VllmConfig

from vllm_dymoe.quantize.expert_parts import check_expert_parts
from vllm_dymoe.quantize.readers import Reader
from vllm_dymoe.quantize.tensors import check_files, weight_files


def local_folder(vllm_config: VllmConfig) -> Path:
    """The folder of the model's checkpoint: itself if it is a path, else its snapshot in the hub's cache."""
    model = vllm_config.model_config.model
    if Path(model).is_dir():
        return Path(model).resolve()
    # The loader has downloaded the weights by now. What it does not know of is our shards and manifest.
    return _snapshot(vllm_config, allow_patterns=["*.json", "dymoe-experts-*.safetensors"])


def check_checkpoint(vllm_config: VllmConfig, reader: Reader | None) -> None:
    """Refuse files that are cut off or not what config.json says, before hours of loading them.

    Of a model from the hub only where all of them have been downloaded; then they may have been damaged since.

    Raises:
        CheckpointError: there are such files.
    """
    folder = Path(vllm_config.model_config.model)
    if vllm_config.load_config.load_format not in ("auto", "hf", "safetensors"):
        return
    if not folder.is_dir():
        try:
            folder = _snapshot(vllm_config, local_files_only=True)
        except (LocalEntryNotFoundError, HFValidationError):  # not here, or not from there
            return
        if not all(path.is_file() for path in weight_files(folder)):
            return
    tensors = check_files(folder)
    if reader is not None and (layers := getattr(vllm_config.model_config.hf_text_config, "num_hidden_layers", 0)):
        check_expert_parts(folder, tensors, reader, layers)


def _snapshot(vllm_config: VllmConfig, **choice: Any) -> Path:
    model, cache = vllm_config.model_config, vllm_config.load_config.download_dir
    return Path(snapshot_download(model.model, revision=model.revision, cache_dir=cache, **choice))
