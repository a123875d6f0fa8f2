"""The header of a safetensors file: where each tensor lies."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_dymoe.store.base import StoreError


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
    """Where a safetensors header says that a tensor lies; nothing for the entry of metadata."""
    begin, end = entry.get("data_offsets", (0, 0))
    return begin, end
