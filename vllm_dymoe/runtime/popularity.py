"""Which experts are hot at start: those of a recorded trace, or those that were when the model was served before."""

import contextlib
import logging
import os
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vllm_dymoe.config import ConfigError
from vllm_dymoe.observe import statistics
from vllm_dymoe.observe.trace import Trace, TraceError
from vllm_dymoe.residency.format import ModelExperts
from vllm_dymoe.residency.hotness import even_shares
from vllm_dymoe.runtime.migration import Agree
from vllm_dymoe.systems import System

_logger = logging.getLogger("vllm.plugins.dymoe")


def read_popularity(
    experts: ModelExperts, system: System, kept: Path | None = None, agree: Agree = list
) -> NDArray[np.float64] | None:
    """Float64 [layers, experts] in even shares, 0 in a draft's layers; None where nothing is known or wanted.
    ConfigError if the trace cannot be read, or is of other layers or experts than this rank has.

    Args:
        kept: what :func:`keep_hotness` wrote, used where the system names none.
        agree: with ranks that have other parts of the same experts, which have to begin with the same ones.
    """
    migrating = system.residency.migrating
    if migrating is None:
        return None
    if migrating.popularity is None:
        return _kept(kept, (len(experts.layers), experts.num_experts), agree)
    try:
        trace = Trace.load(migrating.popularity.expanduser())
    except TraceError as error:
        raise ConfigError(f"vllm-dymoe: popularity: {error}") from error
    own = len(experts.layers) - experts.draft_layers
    sizes = trace.header.num_layers, trace.header.num_experts
    if sizes != (own, experts.num_experts):
        raise ConfigError(
            f"vllm-dymoe: popularity: {migrating.popularity} is a trace of {sizes[0]} layers with {sizes[1]} experts, "
            f"but this rank has {own} with {experts.num_experts}; record one of this model, and leave popularity out "
            "where ranks share the experts of a layer."
        )
    found = np.zeros((len(experts.layers), experts.num_experts))
    found[:own] = even_shares((statistics.gate_load if migrating.by_gates else statistics.load)(trace).numpy())
    return found


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


def _kept(path: Path | None, shape: tuple[int, int], agree: Agree) -> NDArray[np.float64] | None:
    if path is None:
        return None
    found, digest = None, 0
    with contextlib.suppress(OSError, ValueError, EOFError):  # none, cut off, or not ours
        found = np.load(path, allow_pickle=False)
    if found is not None and found.shape == shape and found.dtype == np.float64 and np.isfinite(found).all():
        digest = zlib.crc32(found.tobytes())
    least, most = agree([digest, -digest])
    return found if digest and least == -most else None
