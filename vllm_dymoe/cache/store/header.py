"""The header of a safetensors file: where each tensor lies."""

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_dymoe.cache.store.base import StoreError


@dataclass(frozen=True)
class TensorPlace:
    """Where one tensor lies: bytes ``begin`` to ``end`` of a file."""

    name: str
    path: Path
    dtype: str  # in safetensors' words, "BF16"
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


def make_header(
    tensors: Iterable[tuple[str, str, Sequence[int], int]], metadata: str = "", alignment: int = 8
) -> tuple[bytes, dict[str, int], int]:
    """Lay out tensors (name, dtype, shape, bytes) one behind the other, in a file whose ``format`` is ``metadata``:
    what the file begins with, the first byte of each tensor in it, and the bytes of the whole file."""
    entries: dict[str, Any] = {"__metadata__": {"format": metadata}} if metadata else {}
    begins = {}
    end = 0
    for name, dtype, shape, nbytes in tensors:
        begins[name] = end
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + nbytes]}
        end += nbytes
    text = json.dumps(entries).encode()
    start = -(-(8 + len(text)) // alignment) * alignment
    header = (start - 8).to_bytes(8, "little") + text.ljust(start - 8)
    return header, {name: start + begin for name, begin in begins.items()}, start + end


def read_header(path: Path, file: int) -> dict[str, TensorPlace]:
    """Where the tensors of a safetensors file lie, by name; StoreError if it is none."""
    length = int.from_bytes(os.pread(file, 8, 0), "little")
    try:
        if not 0 < length <= 100_000_000:
            raise ValueError(f"a header of {length} bytes")
        header = json.loads(os.pread(file, length, 8))
        header.pop("__metadata__", None)
        places = {}
        for name, tensor in header.items():
            begin, end = (8 + length + offset for offset in tensor["data_offsets"])
            places[name] = TensorPlace(name, path, tensor["dtype"], tuple(tensor["shape"]), begin, end)
        return places
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(f"{path} is not a safetensors file ({error}); write the store again.") from error
