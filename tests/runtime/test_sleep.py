"""Slots go and come back, with host memory at level 2: the same bits behind it, and the memory is really gone."""

import psutil
import pytest
import torch

from tests.runtime.decided import run_decided
from tests.runtime.steps import make_runtime, run
from tests.small_model import make_experts
from vllm_dymoe.config import ConfigError
from vllm_dymoe.host_memory import map_bytes
from vllm_dymoe.quantize.dummy import random_store
from vllm_dymoe.runtime.moe import resize_host_memory, sleep, wake
from vllm_dymoe.store import FileStore, Manifest, StoreError, whole_level
from vllm_dymoe.store.writer import StoreWriter
from vllm_dymoe.transfer import HostLevel

EXPERTS = make_experts(layers=2, num_experts=32, hidden=1024, intermediate=512, bits=(4, 2))
STEPS = [(seed, seed % 2, (1, 7, 40)[seed % 3]) for seed in range(8)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sleep") / "store"
    random_store(EXPERTS, StoreWriter(folder, Manifest(EXPERTS, "dummy", "a model")), seed=1).close()
    return folder


def make_level(folder, part):
    level = HostLevel(FileStore(folder), int(whole_level(EXPERTS) * part))
    if part == 1:
        level.fill()
    return level


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("part", "decisions"), [(1, "host"), (1, "device"), (0.4, "host")])
def test_memory_goes_at_its_level_and_the_bits_are_the_same_behind_it(folder, part, decisions, depth):
    level = make_level(folder, part)
    runtime = make_runtime(level, "50%", decisions=decisions, link_gbps=50.0)
    ask = run_decided if decisions == "device" else run
    want, process = ask(runtime, STEPS), psutil.Process()
    slots, there, before = runtime.memory.pools.values(), level.slots.nbytes, process.memory_info().rss
    gone = sum(pool.nbytes for pool in slots) + there * (depth == 2)
    sleep(runtime, depth)
    assert before - process.memory_info().rss > 0.9 * gone > 10 << 20
    assert level.slots.nbytes == there * (depth == 1)
    elsewhere = [map_bytes(arena) for arena in (there, there // 2, there // 2)]  # other memory takes its addresses
    runtime.check_integrity()
    runtime.stats()
    for change in (
        lambda: runtime.resize("25%"),
        lambda: resize_host_memory(runtime, 1 << 30),
        lambda: sleep(runtime, 1),
    ):
        with pytest.raises(ConfigError, match=r"is impossible while the engine sleeps|experts are in"):
            change()
    wake(runtime)
    wake(runtime)  # of another part of vLLM's memory
    assert level.slots.nbytes == there
    assert all(map(torch.equal, ask(runtime, STEPS), want))
    assert not any(map(torch.any, elsewhere))
    runtime.close()


def test_what_cannot_be_had_again_is_a_sentence_and_may_be_tried_again(folder, monkeypatch):
    runtime = make_runtime(make_level(folder, 1), "50%", link_gbps=50.0)
    want = run(runtime, STEPS)
    sleep(runtime, 2)
    monkeypatch.setattr("vllm_dymoe.transfer.level_slots.available_host_memory", lambda: 5)
    with pytest.raises(StoreError, match="5 are free"):
        wake(runtime)
    monkeypatch.undo()
    monkeypatch.setattr(runtime.memory.pools, "_device_memory", type("Full", (), {"available": lambda self: 5})())
    with pytest.raises(ConfigError, match="5 bytes of host memory are available"):
        wake(runtime)
    monkeypatch.undo()
    wake(runtime)
    assert all(map(torch.equal, run(runtime, STEPS), want))
    runtime.close()
