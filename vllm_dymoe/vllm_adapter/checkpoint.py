"""Where the files of a model's checkpoint lie, and whether they are what they say."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from vllm.config import VllmConfig

from vllm_dymoe.quantize.readers import Reader
from vllm_dymoe.quantize.tensor_names import ExpertName, read_name
from vllm_dymoe.quantize.tensors import CheckpointError, check_files, weight_files
from vllm_dymoe.store import MANIFEST, Manifest, StoreError
from vllm_dymoe.store.header import TensorPlace


def local_folder(vllm_config: VllmConfig) -> Path:
    """The model's path, or its snapshot in the hub's cache."""
    model = vllm_config.model_config.model
    if Path(model).is_dir():
        return Path(model).resolve()
    # vLLM's loader has downloaded the weights; it does not know our shards and manifest.
    return _snapshot(vllm_config, allow_patterns=["*.json", "dymoe-experts-*.safetensors"])


def check_checkpoint(vllm_config: VllmConfig, reader: Reader) -> None:
    """Refuse files that are cut off or not what config.json says, before hours of loading them; CheckpointError.

    Of a model from the hub only where all of them have been downloaded already.
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
    if reader.held and (layers := getattr(vllm_config.model_config.hf_text_config, "num_hidden_layers", 0)):
        _check_expert_parts(folder, tensors, reader, layers)


def _check_expert_parts(folder: Path, tensors: Iterable[TensorPlace], reader: Reader, layers: int) -> None:
    """Refuse experts of another format than the configuration's, and incomplete ones; not of multi-token prediction."""
    matrices: dict[ExpertName, dict[str, str]] = {}
    wanted = {reader.parts[0]: reader.code_dtypes, reader.parts[1]: reader.scale_dtypes}
    for place in tensors:
        named = read_name(place.name)
        if named is None or not named.projections or named.layer >= layers or "mtp" in place.name.split("."):
            continue
        part = reader.spellings.get(named.part, named.part)
        if part == "bias":
            continue
        dtypes = wanted.get(part, ())
        if part not in reader.known_parts or (dtypes and place.dtype not in dtypes):
            expected = f"{part} of {' or '.join(dtypes)}" if dtypes else " and ".join(reader.known_parts)
            raise CheckpointError(
                f"{place.name} ({place.dtype}) in {folder} is not what config.json says: {reader.method} has "
                f"{expected} there; download the checkpoint again, or correct its quantization_config."
            )
        matrices.setdefault(replace(named, part=""), {})[part] = place.name
    for parts in matrices.values():
        if missing := [part for part in reader.parts if part not in parts]:
            raise CheckpointError(
                f"{folder} has {next(iter(parts.values()))} without {' and '.join(missing)}, which {reader.method} has "
                "beside it; the checkpoint is damaged or half converted: download it again."
            )


def check_ranks(folder: Path, ranks: int) -> None:
    """Refuse a local store that is cut for another number of tensor-parallel ranks; StoreError."""
    if not (folder / MANIFEST).is_file():
        return
    _, packed_for = Manifest.read(folder).tensor_parallel
    if ranks != packed_for:
        raise StoreError(
            f"the experts in {folder} are packed for --tensor-parallel-size {packed_for}, not {ranks}; "
            "serve them with that, or serve the 16-bit checkpoint that they were made from."
        )


def drafted_by_experts(config: VllmConfig) -> bool:
    """Whether a draft model with experts proposes tokens."""
    draft = getattr(config.speculative_config, "draft_model_config", None)
    # Methods without a draft model, such as ngram, have the target's own config there.
    return draft is not None and draft is not config.model_config and bool(draft.get_num_experts())


def _snapshot(vllm_config: VllmConfig, **choice: Any) -> Path:
    model, cache = vllm_config.model_config, vllm_config.load_config.download_dir
    return Path(snapshot_download(model.model, revision=model.revision, cache_dir=cache, **choice))
