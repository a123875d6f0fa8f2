"""The header of a safetensors file: where each tensor is."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from vllm_dymoe.cache.store.base import DamagedStoreError, StoreError

_MOST_HEADER_BYTES = 100_000_000  # as in safetensors


@dataclass(frozen=True)
class TensorPlace:
    """Location of a tensor: bytes ``begin`` to ``end`` of a file."""

    name: str
    path: Path
    dtype: str  # as safetensors writes it, "BF16"
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


def make_header(
    tensors: Iterable[tuple[str, str, Sequence[int], int]],
    metadata: Mapping[str, str] | None = None,
    alignment: int = 8,
) -> tuple[bytes, dict[str, int], int]:
    """Lay out tensors one after the other, in a file with ``metadata``.

    Each tensor is a name, dtype, shape and number of bytes. Returns the file's first bytes, the first byte of each
    tensor, and the size of the file.
    """
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
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
    """Return the places of the tensors in a safetensors file, by name.

    safetensors itself checks header and length first. DamagedStoreError if they are invalid, StoreError if the file
    cannot be read.
    """
    length = int.from_bytes(os.pread(file, 8, 0), "little")
    try:
        if not 0 < length <= _MOST_HEADER_BYTES:
            raise ValueError(f"its header has {length} bytes")
        header = json.loads(os.pread(file, length, 8))
        header.pop("__metadata__", None)
        places = {}
        for name, tensor in header.items():
            begin, end = (8 + length + offset for offset in tensor["data_offsets"])
            if not 8 + length <= begin <= end:
                raise ValueError(f"a tensor ranges from byte {begin} to byte {end}")
            places[name] = TensorPlace(name, path, tensor["dtype"], tuple(tensor["shape"]), begin, end)
        size, reserved = os.fstat(file).st_size, max((place.end for place in places.values()), default=0)
    except OSError as error:
        raise StoreError(f"{path} cannot be read ({error.strerror or error}); check its disk.") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedStoreError(f"{path} is not a safetensors file ({error}); write the store again.") from error
    if reserved > size:
        raise DamagedStoreError(
            f"{path} has {size} bytes, but its header describes {reserved}; the file was truncated: write the store "
            "again."
        )
    _validate(path, file)
    return places


def read_metadata(file: int) -> dict[str, str]:
    """Return the metadata of a safetensors file.

    Empty if there is none, or if it is not such a file.
    """
    try:
        length = int.from_bytes(os.pread(file, 8, 0), "little")
        found = json.loads(os.pread(file, min(length, _MOST_HEADER_BYTES), 8))["__metadata__"]
        return found if isinstance(found, dict) else {}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}


def _validate(path: Path, file: int) -> None:
    """Check the header of an open file with safetensors.

    Tensors must fill the file without a gap. DamagedStoreError if it is invalid, StoreError if it could not be read.
    """
    try:
        with safe_open(f"/proc/self/fd/{file}", framework="np"):  # the open file, whatever has its name by now
            pass
    except SafetensorError as error:
        raise DamagedStoreError(f"{path} is not a safetensors file ({error}); write the store again.") from error
    except OSError as error:
        raise StoreError(f"{path} cannot be read ({error.strerror or error}); check its disk.") from error
