"""Sleep frees the slots (level 2: host memory, too); waking restores all bits."""

import psutil
import pytest
import torch

from tests.errors import refused
from tests.executor.device_planned import run_on_card
from tests.executor.steps import make_server
from tests.small_model import make_experts
from vllm_dymoe.cache.host_cache import HostCache
from vllm_dymoe.cache.pages import map_bytes
from vllm_dymoe.cache.store import FileStore, Manifest, StoreError, whole_host_cache
from vllm_dymoe.cache.store.writer import StoreWriter
from vllm_dymoe.options import ConfigError
from vllm_dymoe.quantize.dummy import random_store

EXPERTS = make_experts(layers=2, num_experts=32, hidden=1024, intermediate=512, bits=(4, 2))
STEPS = [(seed, seed % 2, (1, 7, 40)[seed % 3]) for seed in range(8)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sleep") / "store"
    random_store(EXPERTS, StoreWriter(folder, Manifest(EXPERTS, "dummy", "a model")), seed=1).close()
    return folder


def make_host_cache(folder, part):
    host_cache = HostCache(FileStore(folder), int(whole_host_cache(EXPERTS) * part))
    if part == 1:
        host_cache.fill()
    return host_cache


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("part", [1, 0.4])
def test_memory_goes_at_its_level_and_the_bits_are_the_same_behind_it(folder, part, depth):
    host_cache = make_host_cache(folder, part)
    server = make_server(host_cache, "50%", link_gbps=50.0)
    want, process = run_on_card(server, STEPS), psutil.Process()
    slots, there, before = server.cache.pools.values(), host_cache.slots.nbytes, process.memory_info().rss
    gone = sum(pool.nbytes for pool in slots) + there * (depth == 2)
    server.sleep(depth)
    assert before - process.memory_info().rss > 0.9 * gone > 10 << 20
    assert host_cache.slots.nbytes == there * (depth == 1)
    elsewhere = [map_bytes(arena) for arena in (there, there // 2, there // 2)]  # other memory takes the addresses
    server.check_integrity()
    server.stats()
    for change in (
        lambda: server.resize("25%"),
        lambda: server.resize_host_memory(1 << 30),
        lambda: server.sleep(1),
    ):
        with pytest.raises(ConfigError, match=r"sleeps|experts are in"):
            change()
    server.wake()
    server.wake()  # vLLM wakes each part of its memory separately
    assert host_cache.slots.nbytes == there
    assert all(map(torch.equal, run_on_card(server, STEPS), want))
    assert not any(map(torch.any, elsewhere))
    server.close()


def test_what_cannot_be_had_again_is_a_sentence_and_may_be_tried_again(folder, monkeypatch):
    server = make_server(make_host_cache(folder, 1), "50%", link_gbps=50.0)
    want = run_on_card(server, STEPS)
    server.sleep(2)
    monkeypatch.setattr("vllm_dymoe.cache.host_slots.available_host_memory", lambda: 5)
    with pytest.raises(StoreError, match="5 bytes are free"):
        server.wake()
    monkeypatch.undo()
    monkeypatch.setattr(server._parts, "device_memory", type("Full", (), {"available": lambda self: 5})())
    with refused(" 5 bytes", option="expert_budget"):
        server.wake()
    monkeypatch.undo()
    server.wake()
    assert all(map(torch.equal, run_on_card(server, STEPS), want))
    server.close()


def test_experts_that_cannot_be_read_at_waking_are_read_at_the_next_try(folder, monkeypatch):
    server = make_server(make_host_cache(folder, 1), "50%", link_gbps=50.0)
    want, read_into, reads = run_on_card(server, STEPS), FileStore.read_into, []

    def fail_once(*given, **how):
        reads.append(given)
        if len(reads) == 20:
            raise StoreError("the disk is on fire")
        read_into(*given, **how)

    server.sleep(2)
    monkeypatch.setattr(FileStore, "read_into", fail_once)
    with pytest.raises(StoreError, match="on fire"):
        server.wake()
    assert server.store.slots.nbytes == 0
    server.wake()
    assert all(map(torch.equal, run_on_card(server, STEPS), want))
    server.close()
