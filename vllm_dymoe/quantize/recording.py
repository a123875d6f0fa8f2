"""Records the inputs of a running model's experts, and every layer's routing.

A Hessian for each expert of Qwen3-30B-A3B would take 48 * 128 * (2048^2 + 768^2) * 4 bytes = 118 GB, and the inputs of
down exist only inside a kernel. The inputs of 131072 tokens take 26 GB and are written to disk; every Hessian follows
from them and the weights, one expert at a time (``calibration``). A recording is a folder of parts, safetensors files
with the inputs of some whole texts. A part gets its name when it is complete and synced, so a killed run can resume.
"""

import fcntl
import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Self

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from vllm_dymoe.cache.store.header import make_header
from vllm_dymoe.durable import create, disk_bytes, replace_file, write_at
from vllm_dymoe.kernels import Activation
from vllm_dymoe.units import too_small

MANIFEST = "dymoe_calibration.json"


class CalibrationError(RuntimeError):
    """A calibration cannot be made or used.

    The message is one sentence for the user.
    """


@dataclass(frozen=True)
class Recording:
    """The manifest of a folder of recorded inputs."""

    model: str  # fingerprint of the checkpoint
    texts: str  # fingerprint of the tokens
    parts: tuple[int, ...]  # tokens in each part
    layers: tuple[int, ...]  # index of each MoE layer in the model
    num_experts: int  # in each layer, over all ranks
    top_k: int
    hidden_size: int
    dtype: str  # of the inputs, ``"bfloat16"`` or ``"float16"``
    activation: str | tuple[str, ...]
    """Activation of each layer, by the name of :class:`~vllm_dymoe.kernels.Activation`; a single name stands for
    all.
    """
    format: Literal["vllm-dymoe calibration"] = "vllm-dymoe calibration"
    version: Literal[1] = 1

    @property
    def nbytes(self) -> int:
        return sum(self.parts) * len(self.layers) * self.bytes_per_token

    @property
    def bytes_per_token(self) -> int:
        """Bytes per token and layer: the input, and for each expert its id and weight."""
        return 2 * self.hidden_size + 6 * self.top_k

    def activation_of(self, layer: int) -> Activation:
        return Activation.parse(self.activation if isinstance(self.activation, str) else self.activation[layer])

    def part(self, folder: Path, number: int) -> Path:
        return folder / f"part-{number:05d}.safetensors"

    def missing(self, folder: Path) -> list[int]:
        return [number for number in range(len(self.parts)) if not self.part(folder, number).is_file()]

    def write(self, folder: Path) -> None:
        replace_file(folder / MANIFEST, (json.dumps(asdict(self), indent=2) + "\n").encode())

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the manifest of a folder.

        Raises CalibrationError if there is none that this version can read.
        """
        path = folder / MANIFEST
        try:
            return TypeAdapter(cls).validate_json(path.read_bytes())
        except OSError as error:
            raise CalibrationError(
                f"{folder} holds no calibration: {MANIFEST} cannot be read ({error.strerror}); "
                "make one with `vllm-dymoe calibrate`."
            ) from error
        except ValidationError as error:
            first = error.errors()[0]
            why = ": ".join(map(str, (*first["loc"], first["msg"])))
            raise CalibrationError(f"{path} cannot be used ({why}); calibrate again, into another folder.") from error


def check_space(recording: Recording, folder: Path) -> None:
    """Raise CalibrationError if the disk is too small for the missing parts.

    A part that an ended run began is written again in its place.
    """
    missing = recording.missing(folder)
    tokens = sum(recording.parts[number] for number in missing)
    needed = tokens * len(recording.layers) * recording.bytes_per_token
    needed -= disk_bytes(_unfinished(recording.part(folder, number)) for number in missing)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise CalibrationError(
            f"recording the inputs of {tokens} tokens in {folder} {too_small(needed, free)}; "
            "free some space, or record fewer tokens."
        )


def _unfinished(part: Path) -> Path:
    """Return the name of a part until it is complete."""
    return part.with_name(f"{part.name}.unfinished")


class PartWriter:
    """Takes the inputs of every layer, step by step, up to a number of tokens.

    Only one step is in memory. Raises CalibrationError if the file cannot be written, or another process is writing it.
    """

    def __init__(self, path: Path, layers: int, hidden_size: int, top_k: int, dtype: torch.dtype, tokens: int) -> None:
        self._path, self._tokens = path, tokens
        self._unfinished = _unfinished(path)
        self._row_bytes = 2 * hidden_size, 4 * top_k, 2 * top_k
        self._done = [0] * layers
        kind = {torch.bfloat16: "BF16", torch.float16: "F16"}[dtype]
        kinds = ("inputs", kind, hidden_size), ("weights", "F32", top_k), ("experts", "I16", top_k)
        header, self._begin, _ = make_header(
            (f"{layer}.{name}", of, (tokens, width), tokens * row_bytes)
            for layer in range(layers)
            for (name, of, width), row_bytes in zip(kinds, self._row_bytes, strict=True)
        )
        try:
            self._file = create(self._unfinished, exclusive=False)
        except OSError as error:
            raise self._refused(error) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._file, 0)  # left by a killed run
            write_at(self._file, header, 0)
        except BlockingIOError:
            os.close(self._file)
            raise CalibrationError(f"another process is recording to {path.parent}; wait for it.") from None
        except OSError as error:
            os.close(self._file)
            raise self._refused(error) from error

    def add(self, layer: int, inputs: Tensor, weights: Tensor, experts: Tensor) -> None:
        """Record one step of a layer.

        ``layer`` is an index, ``inputs`` [tokens, hidden], ``weights`` and ``experts`` [tokens, top_k].
        """
        done = self._done[layer]
        rows = min(len(inputs), self._tokens - done)
        if rows <= 0:
            return
        values = {"inputs": inputs, "weights": weights.float(), "experts": experts.to(torch.int16)}
        try:
            for (name, seen), width in zip(values.items(), self._row_bytes, strict=True):
                data = seen[:rows].detach().cpu().contiguous().view(torch.uint8).numpy().reshape(-1).data
                write_at(self._file, data, self._begin[f"{layer}.{name}"] + done * width)
        except OSError as error:
            raise self._refused(error) from error
        self._done[layer] += rows

    def finish(self) -> None:
        """Sync the part and give it its name.

        Raises CalibrationError if tokens are missing.
        """
        if missing := self._tokens - min(self._done):
            self.discard()
            raise CalibrationError(
                f"the model computed {missing} tokens fewer than the {self._tokens} of {self._path.name}; "
                "serve it with enable_prefix_caching=False."
            )
        try:
            os.fsync(self._file)
            os.replace(self._unfinished, self._path)
        except OSError as error:
            raise self._refused(error) from error
        os.close(self._file)

    def discard(self) -> None:
        os.close(self._file)
        self._unfinished.unlink(missing_ok=True)

    def _refused(self, error: OSError) -> CalibrationError:
        return CalibrationError(
            f"{self._path} cannot be written ({error.strerror}); free some space or choose another folder, "
            "and start again: complete parts are kept."
        )
