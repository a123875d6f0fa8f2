"""Writes a checkpoint that ``vllm serve`` opens in seconds.

Dense tensors are unchanged, experts packed. Everything goes into the temporary folder of the store's writer, which is
renamed when it is complete.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from vllm_dymoe.cache.store import MANIFEST, STORE_VERSION, Manifest
from vllm_dymoe.cache.store.manifest import describe_encodings
from vllm_dymoe.cache.store.writer import StoreWriter
from vllm_dymoe.durable import put_back, sync_folder, write_synced
from vllm_dymoe.options import CHECKPOINT_OPTIONS, Options
from vllm_dymoe.quantize.calibration import Calibration
from vllm_dymoe.quantize.checkpoint import Checkpoint
from vllm_dymoe.quantize.packer import Journal, journal_purpose, leave, pack
from vllm_dymoe.quantize.readers.base import check_compatible, quantizer_name
from vllm_dymoe.quantize.tensors import CheckpointError, check_own_files, copy_tensors, weight_files

_WEIGHT_SUFFIXES = frozenset(
    (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".ggml", ".h5", ".msgpack", ".onnx", ".tflite", ".ot")
)
_WEIGHT_INDEX = ".index.json"
_TEMPLATE_FOLDER = "additional_chat_templates"


def quantization_config(options: Options) -> dict[str, Any]:
    """Return the entry in config.json for experts that were quantized from 16 bits."""
    said = {key: getattr(options, option) for key, option in CHECKPOINT_OPTIONS.items()}
    return {"quant_method": "dymoe", "format_version": STORE_VERSION} | said


def convert(
    checkpoint: Checkpoint,
    out: Path,
    options: Options,  # only high, low, group_size and quantizer count; with a calibration the quantizer is GPTQ
    dtype: torch.dtype | None = None,  # of the scales, and of weights at 16 bits; None for the checkpoint's
    calibration: Calibration | None = None,
    *,
    overwrite: bool = False,  # replace ``out`` if it is a dymoe checkpoint
    progress: Callable[[int], None] = lambda nbytes: None,
) -> Manifest:
    """Write ``checkpoint`` with packed experts to the folder ``out``.

    Progress is reported in source bytes, dense_bytes + expert_bytes in total. A run with a calibration, which takes
    hours for a large model, resumes where an earlier run was interrupted.
    """
    out = out.absolute()
    manifest = _plan(checkpoint, options, dtype or checkpoint.dtype, calibration)
    ours = quantization_config(options)
    purpose = json.dumps([manifest.to_json(), ours, calibration and asdict(calibration.recording)])
    writer: StoreWriter | None = None
    try:
        put_back(out)
        _check_target(checkpoint.folder, out, overwrite)
        small = _small_files(checkpoint.folder)
        check_own_files(
            checkpoint.folder, (*weight_files(checkpoint.folder), *small, checkpoint.folder / "config.json")
        )
        writer = StoreWriter(
            out,
            manifest,
            others=checkpoint.dense_bytes + sum(path.stat().st_size for path in small),
            resume=lambda leftover: journal_purpose(leftover) == purpose,
            advice="free some space, or write to another disk",
        )
        _write_rest(checkpoint, ours, manifest, small, writer.partial, progress)
        journal = None if calibration is None else Journal(writer, purpose)
        errors = pack(checkpoint, manifest.experts, options.quantizer, writer, calibration, journal, progress)
        store = writer.finish(errors, overwrite=overwrite)
        store.close()
        return store.manifest
    except BaseException as error:
        if writer is not None:
            leave(writer, error)
        if not isinstance(error, OSError):
            raise
        kept = "" if writer is None else writer.kept
        raise CheckpointError(f"{out} cannot be written: {error}.{kept}") from error


def _plan(checkpoint: Checkpoint, options: Options, dtype: torch.dtype, calibration: Calibration | None) -> Manifest:
    bits = options.stored_bits
    experts = checkpoint.model_experts(bits, options.group_size, dtype, options.quantizer)
    reader = checkpoint.reader
    check_compatible(reader, bits, options.group_size, 0, 1)
    model = checkpoint.fingerprint()
    if calibration is not None:
        if reader.held:
            raise CheckpointError(
                f"{checkpoint.folder} is quantized with {reader.method}, but a calibration is for 16-bit "
                f"checkpoints; use another quantizer than {options.quantizer} for the low precision."
            )
        calibration.check_belongs(model, experts)
        experts = replace(experts, curves=calibration.curves())
    return Manifest(experts, quantizer_name(reader, bits, options.quantizer), model)


def _write_rest(
    checkpoint: Checkpoint,
    ours: dict[str, Any],
    manifest: Manifest,
    small: list[Path],
    folder: Path,
    progress: Callable[[int], None],
) -> None:
    for path in small:
        target = folder / path.relative_to(checkpoint.folder)
        target.parent.mkdir(exist_ok=True)
        write_synced(target, path.read_bytes())
        sync_folder(target.parent)
    fmt = next(iter(manifest.experts.formats.values()))
    if (quantization := checkpoint.config.quantization) is not None or fmt.encoding.lattice:
        ours |= describe_encodings(manifest.experts.formats)
    if quantization is not None:
        ours["dense"] = quantization  # how vLLM reads the layers without experts
    config = checkpoint.config.with_dtype(fmt.dtype) | {"quantization_config": ours}
    config.pop("compression_config", None)
    write_synced(folder / "config.json", (json.dumps(config, indent=2) + "\n").encode())
    copy_tensors(checkpoint.dense.values(), folder, progress)


def _check_target(source: Path, out: Path, overwrite: bool) -> None:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if out.resolve() == source.resolve():
        raise CheckpointError(f"{out} is the source checkpoint; write to another folder.")
    if not overwrite:
        raise CheckpointError(f"{out} exists already; name another folder, or replace it with --overwrite.")
    if not (out / MANIFEST).is_file():
        raise CheckpointError(f"{out} is not a dymoe checkpoint, so it is not overwritten; remove it yourself.")


def _small_files(folder: Path) -> list[Path]:
    """Return all files except the weights: tokenizer, chat templates, code, licence.

    Raises CheckpointError for dangling links.
    """
    paths = sorted((*folder.iterdir(), *folder.glob(f"{_TEMPLATE_FOLDER}/*")))
    if lost := [path for path in paths if path.is_symlink() and not path.exists()]:
        raise CheckpointError(f"{lost[0]} is a link to a missing file; download the checkpoint again.")
    return [
        path
        for path in paths
        if path.is_file()
        and path.suffix not in _WEIGHT_SUFFIXES
        and not path.name.endswith(_WEIGHT_INDEX)
        and not path.name.startswith(".")
        and path.name != "config.json"
    ]
