"""Writing a checkpoint that ``vllm serve`` opens in seconds: dense tensors as they were, experts packed.

The folder is written beside its final place, synced and renamed. What is there
is either complete or, after a crash, a temporary folder that the next run removes; a
folder that was about to be replaced gets its name back.
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_dymoe.experts.layout import BlobKey, ModelExperts, Projection
from vllm_dymoe.quantize.calibration import Calibration
from vllm_dymoe.quantize.checkpoint import Checkpoint
from vllm_dymoe.quantize.journal import Journal, is_journal_of
from vllm_dymoe.quantize.packing import pack, pack_calibrated
from vllm_dymoe.quantize.readers.compatibility import check_compatible, format_fields, quantizer_name
from vllm_dymoe.quantize.tensors import CheckpointError, copy_tensors, write_synced
from vllm_dymoe.store import MANIFEST, STORE_VERSION, ErrorRecord, FileStore, Manifest
from vllm_dymoe.store.manifest import FORMAT_KEYS
from vllm_dymoe.store.writer import ShardFiles, make_partial, put_back, replace_folder, sync_folder
from vllm_dymoe.units import too_small

_WEIGHT_SUFFIXES = frozenset(
    (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".ggml", ".h5", ".msgpack", ".onnx", ".tflite", ".ot")
)
_WEIGHT_INDEX = ".index.json"
_TEMPLATE_FOLDER = "additional_chat_templates"


@dataclass(frozen=True)
class Recipe:
    """How experts are quantized.

    Attributes:
        hi: bits per weight of the high tier.
        lo: bits per weight of the low tier; 0 stores no second version.
        group_size: weights that share one scale and zero.
        quantizer: name of the quantizer.
        dtype: of the scales, and of weights at 16 bits; None takes the checkpoint's.
        calibration: for GPTQ; None for the others.
    """

    hi: int = 4
    lo: int = 0
    group_size: int = 64
    quantizer: str = "rtn"
    dtype: torch.dtype | None = None
    calibration: Calibration | None = None

    @property
    def stored_bits(self) -> tuple[int, ...]:
        """Bit-widths that are stored, the high tier first."""
        return (self.hi,) if self.lo == 0 else (self.hi, self.lo)

    def to_json(self) -> dict[str, Any]:
        """The quantization_config that vLLM finds in config.json, for a checkpoint that had 16 bits."""
        return {
            "quant_method": "dymoe",
            "format_version": STORE_VERSION,
            "hi": self.hi,
            "lo": self.lo,
            "group_size": self.group_size,
            "quantizer": self.quantizer,
        }


@dataclass(frozen=True)
class Conversion:
    """What was written.

    Attributes:
        folder: where.
        experts: what the store holds.
        dense_bytes: bytes of the dense tensors, the same before and after.
        expert_bytes_before: bytes of the experts in the source.
        left_out: tensors that were not copied.
        errors: of the packed experts.
        seconds: how long it took.
    """

    folder: Path
    experts: ModelExperts
    dense_bytes: int
    expert_bytes_before: int
    left_out: int
    errors: ErrorRecord
    seconds: float


def convert(
    checkpoint: Checkpoint,
    out: Path,
    recipe: Recipe,
    *,
    overwrite: bool = False,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> Conversion:
    """Write ``checkpoint`` with packed experts to the folder ``out``.

    With a calibration that takes hours for a large model: what a run that was ended has packed is gone on with.

    Args:
        checkpoint: the source.
        out: a folder that does not exist.
        recipe: how to quantize.
        overwrite: replace ``out`` if it is a dymoe checkpoint.
        progress: called with every number of source bytes done; the whole is dense_bytes + expert_bytes.

    Raises:
        CheckpointError: the folder cannot be written, or the source cannot be read.
        StoreError: experts cannot be quantized.
        CalibrationError: the recipe's calibration is of no use for this model.
    """
    began = time.perf_counter()
    out = out.absolute()
    experts = checkpoint.model_experts(recipe.stored_bits, recipe.group_size, recipe.dtype or checkpoint.dtype)
    if checkpoint.reader is not None:
        check_compatible(checkpoint.reader, recipe.stored_bits, recipe.group_size, 0, 1)
    if recipe.calibration is not None:
        if checkpoint.reader is not None:
            raise CheckpointError(
                f"{checkpoint.folder} is quantized with {checkpoint.reader.method}, and a calibration is for 16-bit "
                "checkpoints; use another quantizer than gptq for the low tier."
            )
        recipe.calibration.check_belongs(checkpoint.fingerprint(), experts)
    quantizer = quantizer_name(checkpoint.reader, recipe.stored_bits, recipe.quantizer)
    manifest = Manifest(experts, quantizer, checkpoint.fingerprint())
    purpose = json.dumps([manifest.to_json(), recipe.to_json(), _described(recipe.calibration)])
    partial: Path | None = None
    keep = False
    try:
        put_back(out)
        _check_target(checkpoint.folder, out, overwrite)
        out.parent.mkdir(parents=True, exist_ok=True)
        _check_space(checkpoint, out, experts)
        partial = make_partial(out, lambda leftover: is_journal_of(leftover, purpose))
        errors = _write(checkpoint, partial, recipe, manifest, purpose, progress)
        _publish(partial, out)
    except KeyboardInterrupt:
        keep = recipe.calibration is not None
        raise
    except OSError as error:
        raise CheckpointError(f"{out} cannot be written: {error}.") from error
    finally:
        if partial is not None and not keep:
            shutil.rmtree(partial, ignore_errors=True)  # gone already if all went well
    return Conversion(
        out,
        experts,
        checkpoint.dense_bytes,
        checkpoint.expert_bytes,
        len(checkpoint.left_out),
        errors,
        time.perf_counter() - began,
    )


class _ShardSink:
    """Packed sections into the folder that the dense tensors are in."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder = folder
        self._shards = ShardFiles(folder, manifest)

    def write(self, key: BlobKey, projection: Projection, part: torch.Tensor, start: int = 0) -> None:
        """Write the part at its offset."""
        self._shards.write(key, projection, part, start)

    def sync(self, layer: int) -> None:
        """Make what is written of one layer durable."""
        self._shards.sync(layer)

    def finish(self, errors: ErrorRecord | None = None) -> FileStore:
        """Complete the shards and open them."""
        self._shards.finish(errors)
        return FileStore(self._folder)

    def discard(self) -> None:
        """Give the files back; whoever made the folder removes it."""
        self._shards.close()

    def close(self) -> None:
        """Give the files back, complete or not."""
        self._shards.close()


def _described(calibration: Calibration | None) -> dict[str, Any] | None:
    return None if calibration is None else asdict(calibration.recording)


def _write(
    checkpoint: Checkpoint,
    folder: Path,
    recipe: Recipe,
    manifest: Manifest,
    purpose: str,
    progress: Callable[[int], None],
) -> ErrorRecord:
    experts = manifest.experts
    _copy_small_files(checkpoint.folder, folder)
    dtype = next(iter(experts.formats.values())).dtype
    config = _with_dtype(checkpoint.config, dtype) | {"quantization_config": _quantization_config(checkpoint, recipe)}
    config.pop("compression_config", None)
    write_synced(folder / "config.json", (json.dumps(config, indent=2) + "\n").encode())
    copy_tensors(checkpoint.dense, folder, progress)
    sink = _ShardSink(folder, manifest)
    try:
        if recipe.calibration is not None:
            journal = Journal(folder, purpose)
            errors = pack_calibrated(checkpoint, experts, recipe.calibration, sink, journal, sink.sync, progress)
            journal.remove()
        else:
            errors = pack(checkpoint, experts, recipe.quantizer, sink, progress)
        sink.finish(errors).close()
    finally:
        sink.close()
    return errors


def _quantization_config(checkpoint: Checkpoint, recipe: Recipe) -> dict[str, Any]:
    """What vLLM finds in config.json: ours, and in it the one of dense tensors that are quantized."""
    ours = recipe.to_json()
    if checkpoint.quantization is None:
        return ours
    fields = format_fields(checkpoint.reader, {}).items()
    held = {FORMAT_KEYS[field]: [bits for bits in recipe.stored_bits if bits in widths] for field, widths in fields}
    return ours | held | {"dense": checkpoint.quantization}


def _with_dtype(config: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The configuration with the dtype that the experts have, so that vLLM's "auto" chooses it for the rest."""
    name = str(dtype).removeprefix("torch.")
    changed = {**config, **{key: name for key in ("dtype", "torch_dtype") if key in config}}
    if isinstance(nested := config.get("text_config"), dict):
        changed["text_config"] = {**nested, **{key: name for key in ("dtype", "torch_dtype") if key in nested}}
    if not {"dtype", "torch_dtype"} & changed.keys():
        changed["dtype"] = name
    return changed


def _check_target(source: Path, out: Path, overwrite: bool) -> None:
    if not out.exists():
        return
    if out.is_dir() and not any(out.iterdir()):
        return
    if out.resolve() == source.resolve():
        raise CheckpointError(f"{out} is the checkpoint to read; write to another folder.")
    if not overwrite:
        raise CheckpointError(f"{out} exists already; name another folder, or replace it with --overwrite.")
    if not (out / MANIFEST).is_file():
        raise CheckpointError(f"{out} is not a dymoe checkpoint, so it is not overwritten; remove it yourself.")


def _check_space(checkpoint: Checkpoint, out: Path, experts: ModelExperts) -> None:
    needed = checkpoint.dense_bytes + sum(experts.nbytes(bits) for bits in experts.formats)
    needed += sum(path.stat().st_size for path in _small_files(checkpoint.folder))
    free = shutil.disk_usage(out.parent).free
    if free < needed:
        raise CheckpointError(f"{out} {too_small(needed, free)}; free some space.")


def _small_files(folder: Path) -> list[Path]:
    """Everything beside the weights: tokenizer, generation config, chat templates, code, licence."""
    return [
        path
        for path in sorted((*folder.iterdir(), *folder.glob(f"{_TEMPLATE_FOLDER}/*")))
        if path.is_file()
        and path.suffix not in _WEIGHT_SUFFIXES
        and not path.name.endswith(_WEIGHT_INDEX)
        and not path.name.startswith(".")
        and path.name != "config.json"
    ]


def _copy_small_files(source: Path, folder: Path) -> None:
    for path in _small_files(source):
        target = folder / path.relative_to(source)
        target.parent.mkdir(exist_ok=True)
        write_synced(target, path.read_bytes())


def _publish(partial: Path, out: Path) -> None:
    """Give the complete folder its name; what had it before is removed afterwards."""
    for path in (partial, *(path for path in partial.iterdir() if path.is_dir())):
        sync_folder(path)
    if out.exists():
        replace_folder(partial, out)
    else:
        os.rename(partial, out)
        sync_folder(out.parent)
