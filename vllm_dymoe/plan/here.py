"""Chooses how to serve a model on this machine, and keeps the choice.

A choice is kept by machine, card, driver, storage and model, and by the user's arguments; if one of these changes, it
is made again. A choice by rates that others disturbed is not kept.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from vllm_dymoe import __version__
from vllm_dymoe.durable import keep_beside, kept_beside
from vllm_dymoe.options import cache_folder, store_root
from vllm_dymoe.plan.machine import KEPT, Machine, Probe, machine_here
from vllm_dymoe.plan.model import config_folder
from vllm_dymoe.plan.start import Asked, Model, Start, choose

STARTS = "starts.json"  # file name, in the cache folder


def choose_here(
    model: Model, asked: Asked, arguments: Sequence[str] = (), *, retune: bool = False
) -> tuple[Machine, Start]:
    """Return this machine, and what was chosen for a model on it.

    ConfigError if the machine cannot be measured, or if nothing fits.

    Args:
        arguments: further parts of the key, such as the arguments of `vllm serve`.
        retune: measure the machine and choose again.
    """
    store = store_root(Path(asked.options["store_dir"]) if "store_dir" in asked.options else None)
    folder = cache_folder()
    probe = Probe.of(store, model.shape)
    here = machine_here(probe, folder / KEPT, retune=retune)
    key = _key(probe.key, here, model.name, arguments, asked)
    start = None if retune else kept_beside(folder / STARTS, key, Start)
    if start is None:
        start = choose(here, model, asked)
        if not here.disturbed:
            keep_beside(folder / STARTS, key, start)
    return here, start


def _key(probe: str, machine: Machine, model: str, arguments: Sequence[str], asked: Asked) -> str:
    """Return the key of a kept choice; host memory counts in steps of 4 GiB."""
    config = (config_folder(model) / "config.json").read_bytes()
    said = [probe, __version__, machine.host_memory >> 32, model, config.hex(), list(arguments), repr(asked)]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:24]
