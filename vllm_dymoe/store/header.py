"""The header of a safetensors file: where each tensor lies."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_dymoe.store.base import StoreError


def make_header(
    tensors: Iterable[tuple[str, str, Sequence[int], int]], metadata: str = "", alignment: int = 8
) -> tuple[bytes, dict[str, int], int]:
    """Lay out tensors one behind the other.

    Args:
        tensors: name, dtype, shape and bytes of each.
        metadata: the ``format`` that the file names; empty for none.
        alignment: of the first data byte.

    Returns:
        What the file begins with, the first byte of each tensor in it, and the bytes of the whole file.
    """
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


def read_header(path: Path, file: int) -> tuple[dict[str, Any], int]:
    """Parse the header of a safetensors file.

    Returns:
        The header, and the offset of the first data byte.

    Raises:
        StoreError: it is not a safetensors file.
    """
    length = int.from_bytes(os.pread(file, 8, 0), "little")
    try:
        if not 0 < length <= 100_000_000:
            raise ValueError(f"a header of {length} bytes")
        return json.loads(os.pread(file, length, 8)), 8 + length
    except ValueError as error:
        raise StoreError(f"{path} is not a safetensors file ({error}); write the store again.") from error


def data_offsets(entry: Mapping[str, Any]) -> tuple[int, int]:
    """Where a header says that a tensor lies; nothing for the entry of metadata."""
    begin, end = entry.get("data_offsets", (0, 0))
    return begin, end
