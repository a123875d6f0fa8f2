"""Writing a checkpoint that ``vllm serve`` opens in seconds: dense tensors as they were, experts packed.

The folder is written beside its final place, synced and renamed. What is there
is either complete or, after a crash, a temporary folder that the next run removes; a
folder that was about to be replaced gets its name back.
"""

import json
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_dymoe.experts.layout import ModelExperts, Projection
from vllm_dymoe.experts.store import MANIFEST, STORE_VERSION, BlobKey, FileStore, Manifest
from vllm_dymoe.quantize import make_quantizer
from vllm_dymoe.quantize.checkpoint import Checkpoint
from vllm_dymoe.quantize.experts import ExpertPacker, Sink
from vllm_dymoe.quantize.shards import ShardFiles, make_partial, put_back, replace_folder, sync_folder
from vllm_dymoe.quantize.tensors import CheckpointError, copy_tensors, write_synced

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
    """

    hi: int = 4
    lo: int = 0
    group_size: int = 64
    quantizer: str = "rtn"
    dtype: torch.dtype | None = None

    @property
    def stored_bits(self) -> tuple[int, ...]:
        """Bit-widths that are stored, the high tier first."""
        return (self.hi,) if self.lo == 0 else (self.hi, self.lo)

    def to_json(self) -> dict[str, Any]:
        """The quantization_config that vLLM finds in config.json."""
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
        seconds: how long it took.
    """

    folder: Path
    experts: ModelExperts
    dense_bytes: int
    expert_bytes_before: int
    left_out: int
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

    Args:
        checkpoint: the source.
        out: a folder that does not exist.
        recipe: how to quantize.
        overwrite: replace ``out`` if it is a dymoe checkpoint.
        progress: called with every number of source bytes done; the whole is dense_bytes + expert_bytes.

    Raises:
        CheckpointError: the folder cannot be written, or the source cannot be read.
        StoreError: experts cannot be quantized.
    """
    began = time.perf_counter()
    out = out.absolute()
    experts = checkpoint.model_experts(recipe.stored_bits, recipe.group_size, recipe.dtype or checkpoint.dtype)
    partial: Path | None = None
    try:
        put_back(out)
        _check_target(checkpoint.folder, out, overwrite)
        out.parent.mkdir(parents=True, exist_ok=True)
        _check_space(checkpoint, out, experts)
        partial = make_partial(out)
        _write(checkpoint, partial, recipe, experts, progress)
        _publish(partial, out)
    except OSError as error:
        raise CheckpointError(f"{out} cannot be written: {error}.") from error
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)  # gone already if all went well
    return Conversion(
        out,
        experts,
        checkpoint.dense_bytes,
        checkpoint.expert_bytes,
        len(checkpoint.left_out),
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

    def finish(self) -> FileStore:
        """Complete the shards and open them."""
        self._shards.finish()
        return FileStore(self._folder)

    def discard(self) -> None:
        """Give the files back; whoever made the folder removes it."""
        self._shards.close()

    def close(self) -> None:
        """Give the files back, complete or not."""
        self._shards.close()


def _write(
    checkpoint: Checkpoint, folder: Path, recipe: Recipe, experts: ModelExperts, progress: Callable[[int], None]
) -> None:
    _copy_small_files(checkpoint.folder, folder)
    dtype = next(iter(experts.formats.values())).dtype
    config = _with_dtype(checkpoint.config, dtype) | {"quantization_config": recipe.to_json()}
    write_synced(folder / "config.json", (json.dumps(config, indent=2) + "\n").encode())
    copy_tensors(checkpoint.dense, folder, progress)
    sink = _ShardSink(folder, Manifest(experts, recipe.quantizer, checkpoint.fingerprint()))
    try:
        _pack(checkpoint, experts, recipe, sink, progress)
        sink.finish().close()
    finally:
        sink.close()


def _pack(
    checkpoint: Checkpoint, experts: ModelExperts, recipe: Recipe, sink: Sink, progress: Callable[[int], None]
) -> None:
    """Quantize projections side by side, each on one core, with at most two for each core in memory.

    Quantizing is many small operations: spreading each of them over the cores costs more in waiting than it gains.
    """
    cores = len(os.sched_getaffinity(0))
    own = threading.local()

    def put(layer: int, expert: int, projection: Projection, weight: torch.Tensor, bias: torch.Tensor | None) -> int:
        if not hasattr(own, "packer"):
            own.packer = ExpertPacker(experts, make_quantizer(recipe.quantizer), sink)
        own.packer.put(layer, expert, projection, weight)
        if bias is None:
            return weight.nbytes
        own.packer.put_bias(layer, expert, projection, bias)
        return weight.nbytes + bias.nbytes

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    pool = ThreadPoolExecutor(cores)
    pending: deque[Future[int]] = deque()
    try:
        for projection in checkpoint.projections():
            pending.append(pool.submit(put, *projection))
            if len(pending) == 2 * cores:
                progress(pending.popleft().result())
        while pending:
            progress(pending.popleft().result())
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)


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
        raise CheckpointError(
            f"{out} needs {needed / 1e9:.1f} GB, but its disk has {free / 1e9:.1f} GB left; free some space."
        )


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
