"""Device-planned steps whose experts are on disk: a thread reads what they miss.

A failed read fails its step.
"""

import threading

import pytest
import torch

from tests.cache.store.stores import write
from tests.executor.device_planned import (
    check_device_planned,
    decode,
    device_planned_server,
    run_large_batch,
    run_on_card,
)
from tests.executor.steps import equal, make_server, random_step, run
from tests.small_model import make_experts, make_store
from tests.support.faulty_store import FaultyStore
from vllm_dymoe.cache.device_table import DeviceFailures
from vllm_dymoe.cache.host_cache import HostCache
from vllm_dymoe.cache.pages import whole_pages
from vllm_dymoe.executor.disk_queue import DiskQueue
from vllm_dymoe.kernels import native
from vllm_dymoe.planner.rule import HIGH
from vllm_dymoe.policies.dymoe import Dymoe

pytestmark = pytest.mark.skipif(native.load() is None, reason="the native library was not built here")

LAYERS, EXPERTS = 3, 12
STORES = {nested: make_store(make_experts(layers=LAYERS, num_experts=EXPERTS, nested=nested)) for nested in (0, 1)}
STEPS = [(seed, layer, tokens) for seed, tokens in enumerate((1, 3, 20, 1, 40, 2)) for layer in range(LAYERS)]
MIXED = Dymoe(retention=0.5, high_by="depth", reuse_high=False)
POLICIES = {"exact": ("exact", 0), "on-demand": ("on-demand", 0), "precisions": (MIXED, 2), "skips": (MIXED, 0)}


@pytest.mark.parametrize("budget", ["100%", "50%", "minimum"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("nested", STORES)
def test_no_budget_changes_a_bit_of_what_comes_from_disk(nested, policy, budget):
    policy, low = POLICIES[policy]
    want = run(make_server(STORES[nested], "100%", policy, low=low), STEPS)
    store = FaultyStore(STORES[nested])
    server = device_planned_server(store, budget, policy, low=low, link_gbps=50.0)
    assert server.disk_queue is not None
    assert equal(run_on_card(server, STEPS), want)
    assert store.reads
    assert all(thread is not threading.main_thread() for thread, _ in store.reads)
    if budget == "100%" and policy == "exact":
        before = len(store.reads)
        again = [
            decode(server, layer, *random_step(seed, 1, store.experts)) for seed, layer, tokens in STEPS if tokens == 1
        ]
        assert equal(again, [one for one, (_, _, tokens) in zip(want, STEPS, strict=True) if tokens == 1])
        assert len(store.reads) == before, "what is there is not read again"
    server.close()


@pytest.mark.parametrize("rows", [2, 30])
@pytest.mark.parametrize("nested", STORES)
def test_an_expert_that_cannot_be_read_fails_its_step_and_leaves_no_row(nested, rows):
    """The kernels continue with other bytes, and their output is discarded."""
    store = FaultyStore(STORES[nested])
    server = device_planned_server(store, "50%", "exact", low=0, link_gbps=50.0)
    table, failures = (
        server.cache.device_table.table,
        DeviceFailures(server.cache.device_table.table, server.disk_queue.why),
    )
    want = run(make_server(STORES[nested], "100%", "exact", low=0), STEPS)
    step = decode if rows <= 16 else run_large_batch
    broken = random_step(3, rows, store.experts)[2]
    store.action = lambda number, key: "fail" if key.expert == int(broken[0, 0]) else None
    step(server, 1, *random_step(3, rows, store.experts))
    failures.send(1)
    assert "on fire" in failures.take(1)
    assert table.precision[1, int(broken[0, 0])] == 0
    assert (table.precision[1] == HIGH).any(), "others are kept"
    check_device_planned_rows(server)
    store.action = lambda number, key: None
    assert equal(run_on_card(server, STEPS), want)
    failures.send(2)
    assert failures.take(2) == ""
    server.close()


def check_device_planned_rows(server):
    server.store.packed = STORES[int(server.cache.nested)].packed
    check_device_planned(server)


def test_a_read_that_does_not_end_is_given_up_and_its_memory_is_left_alone():
    store = FaultyStore(STORES[0])
    server = device_planned_server(store, "50%", "exact", low=0, transfer_timeout_s=0.5)
    store.action = lambda number, key: "hang" if number == 0 else None
    table, queue = server.cache.device_table.table, server.disk_queue
    places = len(queue._landing)
    decode(server, 0, *random_step(1, 1, store.experts))
    assert "transfer_timeout_s" in queue.why(0)
    assert int(table.unread[0]) >= 0
    queue.release()
    assert len(queue._landing) < places, "something still writes there"
    store.gate.set()
    want = run(make_server(STORES[0], "100%", "exact", low=0), STEPS)
    assert equal(run_on_card(server, STEPS), want)
    queue.release()
    assert len(queue._landing) == places
    server.close()


class Poisoned(list):
    """A list of free memory, which overwrites what it is given."""

    def append(self, place):
        place.fill_(0x55)
        super().append(place)


@pytest.mark.parametrize("planted", [False, True])
def test_memory_is_given_back_when_the_device_has_read_it_and_not_before(planted, monkeypatch):
    """The test notices a thread that gives memory back together with its answer."""
    if planted:
        bring = DiskQueue._bring

        def early(self, layer, calls):
            bring(self, layer, calls)
            self._lent.close()

        monkeypatch.setattr(DiskQueue, "_bring", early)
    server = device_planned_server(FaultyStore(STORES[0]), "minimum", "exact", low=0)
    server.disk_queue._landing = Poisoned(server.disk_queue._landing)
    outputs = [decode(server, layer, *random_step(seed, 3, server.experts)) for seed, layer, _ in STEPS[:6]]
    want = run(make_server(STORES[0], "100%", "exact", low=0), [(seed, layer, 3) for seed, layer, _ in STEPS[:6]])
    assert equal(outputs, want) != planted
    server.close()


def test_nothing_is_asked_for_without_a_miss():
    store = FaultyStore(STORES[0])
    server = device_planned_server(store, "100%", "exact", low=0)
    step = random_step(1, 1, store.experts)
    first = decode(server, 0, *step)
    posted = int(server.disk_queue.queue.control.posted)
    assert posted == 1
    assert torch.equal(decode(server, 0, *step), first)
    assert int(server.disk_queue.queue.control.posted) == posted
    server.close()


def test_memory_that_the_device_can_read_needs_no_thread(memory_store):
    assert device_planned_server(memory_store).disk_queue is None


@pytest.mark.parametrize("room", [2, 5, EXPERTS + 4])
def test_host_memory_that_holds_a_part_lends_what_it_keeps_until_the_device_asks_again(tmp_path, room):
    """It may hold less than a layer's experts, and what it keeps is not read again."""
    experts = make_experts(layers=LAYERS, num_experts=EXPERTS)
    each = sum(whole_pages(fmt.nbytes) for fmt in experts.formats.values())
    store = HostCache(write(tmp_path, experts), room * each)
    want = run(make_server(STORES[0], "100%", "exact", low=0), STEPS)
    server = device_planned_server(store, "25%", "exact", low=0)
    assert server.disk_queue is not None
    assert equal(run_on_card(server, STEPS), want)
    assert store.slots.counts.misses > 0
    assert store.slots.counts.hits > 0 or room < EXPERTS
    server.resize_host_memory((room + 4) * each)
    server.sleep(2)
    server.wake()
    assert equal(run_on_card(server, STEPS), want)
    server.close()
