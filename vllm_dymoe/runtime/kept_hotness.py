"""Which experts were hot when the model was served before: a file beside the store."""

import contextlib
import logging
import os
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vllm_dymoe.residency.format import ModelExperts
from vllm_dymoe.runtime.migration import Agree

_logger = logging.getLogger("vllm.plugins.dymoe")


def read_hotness(path: Path, experts: ModelExperts, agree: Agree = list) -> NDArray[np.float64] | None:
    """Float64 [layers, experts] as :func:`keep_hotness` wrote it; None where nothing is known, or of other experts, or
    not the same on all ranks that have parts of the same experts, which have to begin with the same ones."""
    shape, digest, found = (len(experts.layers), experts.num_experts), 0, None
    with contextlib.suppress(OSError, ValueError, EOFError):  # none, cut off, or not ours
        found = np.load(path, allow_pickle=False)
    if found is not None and found.shape == shape and found.dtype == np.float64 and np.isfinite(found).all():
        digest = zlib.crc32(found.tobytes())
    least, most = agree([digest, -digest])
    return found if digest and least == -most else None


def keep_hotness(path: Path, hotness: NDArray[np.float64]) -> None:
    """For the next start; the file is there whole or as it was. A disk that fails costs no step."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            np.save(file, hotness)
        os.replace(partial, path)
    except OSError as error:
        _logger.warning("vllm-dymoe: %s cannot be written (%s), so the next start knows no hot experts.", path, error)
