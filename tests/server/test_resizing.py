"""The memory of a budget change.

A smaller budget frees memory for others; a larger one is checked first.
"""

import re
from types import SimpleNamespace

import msgspec
import psutil
import pytest
import torch

from tests.errors import refused
from tests.executor.steps import CPU, forward, kept_by, make_server, random_step
from tests.small_model import make_experts
from tests.support.memory_writer import MemoryStore
from vllm_dymoe.cache import device_memory
from vllm_dymoe.cache.device_memory import CudaMemory
from vllm_dymoe.cache.slots import Arena, SlotPool
from vllm_dymoe.cache.store import Manifest
from vllm_dymoe.cache.store.writer import StoreWriter
from vllm_dymoe.options import ConfigError
from vllm_dymoe.quantize.dummy import random_store

MIB = 2**20


def rss():
    return psutil.Process().memory_info().rss


def test_what_a_smaller_budget_leaves_is_the_policies_again():
    """A smaller budget frees the slots' memory in this process.

    A view that a cancelled transfer still holds must not keep it alive.
    """
    store = MemoryStore(make_experts(layers=2, num_experts=32, hidden=1024, intermediate=512, bits=(4, 2)))
    server = make_server(store, "100%")
    view = next(iter(server.cache.pools.values())).slots[0].packed
    held, before = server.budget.reserved, rss()
    server.resize("25%")
    left = held - server.budget.reserved
    assert left > 20 * MIB
    assert before - rss() > 0.9 * left
    before = rss()
    server.resize("100%")
    assert rss() - before > 0.9 * left, "and it is there again when it is wanted"
    assert not view.any()


def test_an_automatic_budget_is_that_of_the_start():
    server = make_server(MemoryStore(make_experts()), "50%")
    before = server.slot_plan
    with pytest.raises(ConfigError, match="sized its KV cache"):
        server.resize("auto for 4 requests")
    assert server.slot_plan == before


def test_the_largest_budget_can_be_reported(server):
    """The engine sends its counts to the front end in 64 bits."""
    server.resize(2**63 - 1)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(server.stats().to_dict()))["budget_bytes"] == 2**63 - 1
    with refused():
        server.resize(2**63)


def test_slots_that_numpy_has_seen_are_given_back_too(tmp_path):
    """As after reads of files: torch does not resize a storage shared with NumPy."""
    experts = make_experts()
    files = random_store(experts, StoreWriter(tmp_path / "store", Manifest(experts, "dummy", "a model")), seed=1)
    server = make_server(files, "50%", low=0)
    outputs = [forward(server, layer, *random_step(1, 7, experts)) for layer in (0, 1)]
    for budget in ("25%", "100%"):
        server.resize(budget)
        again = [forward(server, layer, *random_step(1, 7, experts)) for layer in (0, 1)]
        assert all(torch.equal(a, b) for a, b in zip(again, outputs, strict=True))
    server.check_integrity()
    server.engine.close()


def test_a_devices_slots_are_freed_even_where_a_view_is_held():
    fmt = make_experts().formats[4]
    pool = SlotPool(fmt, [Arena(3 * fmt.nbytes, device=CPU)])
    view = pool.slots[1].packed
    pool.close()
    assert view.untyped_storage().nbytes() == 0


class Device:
    """Memory of a device that others use, too.

    It knows how much is free and how much computation needs.
    """

    def __init__(self, server, free, computing=0):
        self.total = free + sum(pool.nbytes for pool in server.cache.pools.values())
        self.computing, self._server = computing, server
        self.peak = 0

    def available(self):
        held = sum(len(pool.slots) * pool.format.nbytes for pool in self._server.cache.pools.values())
        self.peak = max(self.peak, held)
        return self.total - held

    def computation(self):
        return self.computing


def use(server, device):
    """Treat the current and future slots as memory of the given device."""
    server._parts.device_memory = server.cache.pools._device_memory = device


@pytest.fixture
def server(memory_store):
    server = make_server(memory_store, "50%", low=0)
    forward(server, 0, *random_step(1, 7, memory_store.experts))
    return server


@pytest.mark.parametrize("computing", [0, 7000])
def test_more_than_the_device_has_is_refused_with_the_number_that_fits_and_changes_nothing(server, computing):
    slot = server.experts.formats[4].nbytes
    use(server, Device(server, 4 * slot + computing - 1, computing))
    versions, pools, plan = kept_by(server), server.cache.pools, server.slot_plan
    with pytest.raises(ConfigError) as caught:
        server.resize("100%")
    assert (server.cache.pools, server.slot_plan) == (pools, plan)
    assert kept_by(server) == versions, "the cache is as it was"
    sentence = str(caught.value)
    assert f"12 slots would take {12 * slot} bytes of host memory; the present ones take {6 * slot}" in sentence
    assert f"{4 * slot + computing - 1} bytes are free, and computation needs {computing} of these" in sentence
    server.resize(int(re.search(r"expert_budget to at most (\d+) bytes", sentence)[1]))
    assert sum(server.slot_plan.slots.values()) == 9
    forward(server, 0, *random_step(1, 7, server.experts))
    server.check_integrity()


def test_the_old_slots_count_for_the_new_ones(server):
    slot = server.experts.formats[4].nbytes
    use(server, Device(server, 6 * slot))
    server.resize("100%")
    assert sum(server.slot_plan.slots.values()) == 12


def test_a_smaller_budget_is_always_possible(server):
    use(server, Device(server, 0, computing=10**9))
    server.resize("25%")
    assert sum(server.slot_plan.slots.values()) == 3
    assert server.cache.pools.available == 3 * server.experts.formats[4].nbytes


def test_old_memory_is_gone_before_new_memory_is_made(server, monkeypatch):
    there, init = [], Arena.__init__
    old = list(server.cache.pools.values())

    def made(self, *arguments, **more):
        there.append(sum(pool.nbytes for pool in old))
        init(self, *arguments, **more)

    monkeypatch.setattr(Arena, "__init__", made)
    server.resize("75%")
    assert there == [0]


class Torch:
    """Replaces ``torch.cuda``'s memory calls; its allocator keeps what is freed."""

    def __init__(self, monkeypatch):
        self.free, self.cached, self.calls = 1000, 300, []
        cuda = SimpleNamespace(
            device=torch.device,
            empty_cache=self.empty_cache,
            mem_get_info=lambda device: (self.free, 8000),
            max_memory_allocated=lambda device: 900,
            memory_allocated=lambda device: 700,
        )
        monkeypatch.setattr(device_memory, "torch", SimpleNamespace(cuda=cuda))

    def empty_cache(self):
        self.free, self.cached = self.free + self.cached, 0


def test_what_torch_keeps_unused_is_given_back_and_counts_as_free(monkeypatch):
    Torch(monkeypatch)
    cache = CudaMemory(torch.device("cpu"))
    assert cache.available() == 1300
    assert cache.computation() == 200


@pytest.mark.parametrize(("code", "value", "shared"), [(0, 1, True), (0, 0, False), (100, 1, False), (None, 1, False)])
@pytest.mark.parametrize(("question", "number"), [("shares_addresses", 91), ("ends_long_kernels", 17)])
def test_the_driver_says_what_a_device_does(monkeypatch, question, number, code, value, shared):
    def attribute(answer, asked, device):
        assert (asked, device) == (number, 3)
        if code is None:
            raise OSError
        answer._obj.value = value
        return code

    monkeypatch.setattr(device_memory.ctypes, "CDLL", lambda name: SimpleNamespace(cuDeviceGetAttribute=attribute))
    assert getattr(CudaMemory(torch.device("cuda:3")), question)() is shared
