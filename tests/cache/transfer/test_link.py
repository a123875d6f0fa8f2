"""The emulated link: no byte is early, transfers queue up, the core stays free."""

import threading
import time

import pytest
import torch

from tests.small_model import make_experts, make_store
from tests.support.patience import becomes
from vllm_dymoe.cache.transfer import Reason, make_engine
from vllm_dymoe.cache.transfer.delivery import CpuDelivery, EmulatedLink
from vllm_dymoe.cache.transfer.ticket import State, Ticket
from vllm_dymoe.experts.format import SliceKey

STORE = make_store(make_experts())
NBYTES = STORE.experts.formats[4].nbytes
SECONDS = 0.03  # for one packed expert
LATE = 0.02
PATIENCE = 30  # seconds; a busy machine may wake a thread late, but never early


def punctual(attempt):
    late, begin = [], time.monotonic()
    while not late or late[-1] >= LATE:
        assert time.monotonic() - begin < PATIENCE, late
        late.append(attempt())


def link(seconds=SECONDS):
    return make_engine(STORE, torch.device("cpu"), NBYTES, timeout=10, link_gbps=NBYTES / seconds / 1e9)


def submit(engine, expert, reason=Reason.DEMAND):
    return engine.submit(SliceKey(0, expert, 4), torch.zeros(NBYTES, dtype=torch.uint8), reason)


def test_projections_arrive_one_after_the_other():
    sections = STORE.experts.formats[4].sections

    def attempt():
        engine, late = link(), []
        begin = time.perf_counter()
        ticket = submit(engine, 1)
        for number, section in enumerate(sections, 1):
            engine.wait(ticket, number)
            late.append(time.perf_counter() - begin - section.stop / NBYTES * SECONDS)
            assert torch.equal(ticket.destination[: section.stop], STORE.packed(ticket.key)[: section.stop])
        engine.close()
        assert min(late) >= 0
        return max(late)

    punctual(attempt)


def test_the_link_goes_on_without_a_waiting_thread_and_takes_no_core():
    engine = link()
    assert not engine.occupies_cores
    before, begin = time.process_time(), time.perf_counter()
    tickets = [submit(engine, expert) for expert in range(3)]
    assert becomes(lambda: all(ticket.state is State.DONE for ticket in tickets))
    assert time.perf_counter() - begin >= 3 * SECONDS
    # The bound leaves time for three copies of a few KiB, nine sleeps and this test's own polling. A thread that spins
    # while it waits would use all the time.
    assert time.process_time() - before < 0.5 * (time.perf_counter() - begin)
    engine.close()


def test_demand_overtakes_a_prefetch_at_the_next_projection():
    longest = max(section.stop - section.start for section in STORE.experts.formats[4].sections)

    def attempt():
        engine = link()
        ahead = submit(engine, 0, Reason.PREFETCH)
        assert becomes(lambda: ahead.state is State.RUNNING)
        begin = time.perf_counter()
        engine.wait(submit(engine, 1))
        passed = time.perf_counter() - begin
        assert ahead.arrived < 3
        engine.wait(ahead)
        engine.close()
        return passed - (1 + longest / NBYTES) * SECONDS

    punctual(attempt)


def test_the_link_begins_when_it_is_free_whenever_its_thread_comes():
    """Bytes arrive when they would have arrived if the thread had come in time."""
    link = EmulatedLink(CpuDelivery(STORE), bytes_per_second=NBYTES)
    ready = time.perf_counter() - 100
    for _ in range(3):
        ticket = Ticket(SliceKey(0, 1, 4), torch.zeros(NBYTES, dtype=torch.uint8), Reason.DEMAND, ready=ready)
        for projection, section in enumerate(STORE.experts.formats[4].sections):
            link.deliver(ticket, range(projection, projection + 1), ticket.destination[section])
    assert link._pacer._free == pytest.approx(ready + 3), "a second for each packed expert, all of them past"


def test_a_waiting_thread_leaves_the_link_to_the_links_thread():
    """If two threads moved bytes, they would change the order of demanded fetches."""
    engine, threads = link(seconds=0.001), set()
    deliver = engine._delivery.deliver
    engine._delivery.deliver = lambda *args, **named: (
        threads.add(threading.current_thread()),
        deliver(*args, **named),
    )[1]
    for _ in range(20):
        for ticket in [submit(engine, expert) for expert in range(6)]:
            engine.wait(ticket)
    assert len(threads) == 1
    assert threading.current_thread() not in threads
    engine.close()


def test_a_device_with_a_link_of_its_own_is_not_emulated():
    with pytest.raises(ValueError, match="link_gbps"):
        make_engine(STORE, torch.device("cuda"), NBYTES, link_gbps=1.0)
