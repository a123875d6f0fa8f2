"""Locates and checks the files of a model's checkpoint."""

import contextlib
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from vllm import envs
from vllm.config import ParallelConfig, VllmConfig
from vllm.model_executor.model_loader.weight_utils import maybe_download_from_modelscope
from vllm.transformers_utils.config import get_safetensors_params_metadata
from vllm.transformers_utils.utils import convert_model_repo_to_path

from vllm_dymoe.cache.store import MANIFEST, Manifest, StoreError
from vllm_dymoe.quantize.checkpoint import check_representatives, group_experts
from vllm_dymoe.quantize.model_config import EXPERT_INPUTS, INTERMEDIATE
from vllm_dymoe.quantize.readers import Reader
from vllm_dymoe.quantize.readers.modules import modules_of
from vllm_dymoe.quantize.tensor_names import read_name
from vllm_dymoe.quantize.tensors import CheckpointError, check_files, check_own_files, weight_files


def local_folder(vllm_config: VllmConfig) -> Path:
    """Return the folder of a model.

    It is the model's path, or its snapshot in the cache of the hub that vLLM uses. For a model in an object store this
    is vLLM's mirror of its small files.
    """
    model = vllm_config.model_config
    if Path(model.model).is_dir():
        return Path(model.model).resolve()
    # vLLM's loader has downloaded the weights, but does not know our shards and manifest.
    patterns = ["*.json", "dymoe-experts-*.safetensors"]
    if found := maybe_download_from_modelscope(model.model, model.revision, allow_patterns=patterns):
        return Path(found).resolve()
    return _snapshot(vllm_config, allow_patterns=patterns)


def read_dtypes(model: str, revision: str | None) -> dict[str, str]:
    """Return the dtypes of a checkpoint's tensors, in safetensors' words, by name.

    Empty if they are not available before vLLM loads the model, as from an object store, or if files are damaged, which
    ``check_checkpoint`` reports.
    """
    if (folder := Path(model)).is_dir():
        with contextlib.suppress(CheckpointError):
            return {place.name: place.dtype for place in check_files(folder)}
        return {}
    try:
        told = get_safetensors_params_metadata(model, revision=revision)
        return {name: about["dtype"] for name, about in told.items()}
    except (OSError, ValueError, HFValidationError):  # it is not on the hub, or the hub cannot be reached
        return {}


def check_checkpoint(vllm_config: VllmConfig, reader: Reader) -> None:
    """Check the files of a checkpoint, if all of them are local.

    Raises:
        CheckpointError: truncated files, mismatches with config.json, or foreign links.
    """
    folder = Path(vllm_config.model_config.model)
    if vllm_config.load_config.load_format not in ("auto", "hf", "safetensors"):
        return
    if not folder.is_dir():
        if envs.VLLM_USE_MODELSCOPE:
            folder = Path(convert_model_repo_to_path(vllm_config.model_config.model))
        else:
            try:
                folder = _snapshot(vllm_config, local_files_only=True)
            except (LocalEntryNotFoundError, HFValidationError):  # not local, or not from the hub
                return
        if not folder.is_dir() or not all(path.is_file() for path in weight_files(folder)):
            return
    check_own_files(folder, {*weight_files(folder), *folder.glob("*.safetensors")}, hub=True)
    places = {place.name: place for place in check_files(folder)}
    if (reader.held or reader.mixed) and (
        layers := getattr(vllm_config.model_config.hf_text_config, "num_hidden_layers", 0)
    ):
        named = ((read_name(name), place) for name, place in places.items())
        # Layers of drafts, which may follow the model's last, may be quantized in another way.
        known = [(name, place) for name, place in named if name and name.projections and name.of_model]
        experts = group_experts(folder, reader, ((name, place) for name, place in known if name.layer < layers))
        text = vllm_config.model_config.hf_text_config
        sizes = (
            next((size for name in names if (size := getattr(text, name, None))), None)
            for names in (EXPERT_INPUTS, INTERMEDIATE)
        )
        hidden, width = sizes
        if isinstance(hidden, int) and isinstance(width, int):
            check_representatives(folder, reader, experts, hidden, width)


def has_drafts(folder: Path, layers: int) -> bool:
    """Return whether a local checkpoint has draft layers with experts.

    Args:
        layers: number of the model's own layers.
    """
    return bool(modules_of({place.name: place.dtype for place in check_files(folder)}, layers)[1])


def check_ranks(folder: Path, ranks: int) -> None:
    """Check that a local store is cut for this number of tensor-parallel ranks.

    Raises:
        StoreError: it is cut for another number.
    """
    if not (folder / MANIFEST).is_file():
        return
    _, packed_for = Manifest.read(folder).tensor_parallel
    if ranks != packed_for:
        raise StoreError(
            f"the experts in {folder} are packed for --tensor-parallel-size {packed_for}, not {ranks}; "
            "serve it with that size, or serve the 16-bit checkpoint that it was made from."
        )


def drafted_by_experts(config: VllmConfig) -> bool:
    draft = getattr(config.speculative_config, "draft_model_config", None)
    # Methods without a draft model, such as ngram, have the target's own config there.
    return draft is not None and draft is not config.model_config and bool(draft.get_num_experts())


def meets(parallel: ParallelConfig) -> bool:
    """Return whether engines exchange tokens before the experts.

    Otherwise each engine has all experts.
    """
    return bool(parallel.data_parallel_size > 1 and parallel.enable_expert_parallel)


def expert_ranks(parallel: ParallelConfig) -> int:
    """Return the number of ranks that share the experts of a layer."""
    return int(parallel.tensor_parallel_size * parallel.data_parallel_size) if parallel.enable_expert_parallel else 1


def replicated(parallel: ParallelConfig) -> bool:
    """Return whether several ranks store the same experts.

    vLLM does not always say how many of them are on this machine.
    """
    return bool(parallel.enable_eplb or (parallel.data_parallel_size > 1 and not parallel.enable_expert_parallel))


def replicas_of_machine(parallel: ParallelConfig) -> int:
    """Return the number of ranks on this machine that store the same experts.

    It is as many as vLLM knows of.
    """
    if parallel.enable_eplb:
        return ranks_of_machine(parallel)
    return max(1, int(parallel.data_parallel_size_local)) if replicated(parallel) else 1


def ranks_of_machine(parallel: ParallelConfig) -> int:
    """Return the number of ranks that share this machine's memory, in all its engines."""
    return int(parallel.local_world_size * max(1, parallel.data_parallel_size_local))


def _snapshot(vllm_config: VllmConfig, **choice: Any) -> Path:
    model, cache = vllm_config.model_config, vllm_config.load_config.download_dir
    return Path(snapshot_download(model.model, revision=model.revision, cache_dir=cache, **choice))
