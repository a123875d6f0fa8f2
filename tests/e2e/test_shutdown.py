"""Engines start and shut down in turns in one process, and leave nothing behind."""

import gc
import os
import threading
from pathlib import Path

import pytest

from tests.e2e.architectures import ARCHITECTURES
from tests.e2e.engines import in_own_process, random_prompts, small_engine

pytestmark = pytest.mark.engine


def alive(stores):
    """Return the plugin's objects, threads, open files and mappings in this process."""
    from vllm_dymoe.cache.store import HostStore
    from vllm_dymoe.server import ExpertServer
    from vllm_dymoe.trace.recorder import Recorder

    gc.collect()
    kinds = ExpertServer, Recorder, HostStore
    found = [type(one).__name__ for one in gc.get_objects() if issubclass(type(one), kinds)]
    found += [one.name for one in threading.enumerate() if "dymoe" in one.name]
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue
        found += [target] * ("dymoe" in target or target.startswith(str(stores)))
    found += [line for line in Path("/proc/self/maps").read_text().splitlines() if str(stores) in line]
    return found


def left_behind(folder, stores, kinds):
    """Return what is alive while each engine serves, and what is alive after it."""
    from tests.e2e.engines import server_of

    serving, left = [], []
    for options in kinds:
        with small_engine(folder, options) as llm:
            llm.generate(random_prompts()[:1], use_tqdm=False)
            server_of(llm)
            serving.append(alive(stores))
        del llm
        left.append(alive(stores))
    return serving, left


def test_three_engines_leave_nothing_alive(tmp_path):
    folder, stores = ARCHITECTURES["qwen3-moe"].save(tmp_path / "model"), tmp_path / "stores"
    some = {"high": 4, "store_dir": str(stores), "expert_budget": "50%"}
    kinds = [
        some | {"misses": "fetch", "trace": str(tmp_path / "trace")},
        some | {"host_store": "file"},
        some | {"link_gbps": 1.0, "host_store": "pinned", "misses": "share", "planning": "device"},
    ]
    serving, left = in_own_process(left_behind, folder, stores, kinds)
    assert all(any("dymoe" in one for one in found) for found in serving), "vLLM hides objects of a running engine"
    assert left == [[], [], []]
