"""The server: residency never changes values, and failures leave nothing behind."""

import contextlib
import itertools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.errors import refused
from tests.executor.steps import BUDGETS, STEPS, ByNumber, forward, make_server, random_step, run, with_budget
from tests.small_model import make_experts, make_store
from tests.support.faulty_store import FaultyStore
from tests.support.memory_writer import staged
from vllm_dymoe.cache.pages import map_bytes, whole_pages
from vllm_dymoe.cache.transfer import TransferError
from vllm_dymoe.options import ConfigError
from vllm_dymoe.planner.routing import RoutingError
from vllm_dymoe.resolve import resolve_options
from vllm_dymoe.server import expert_server


@pytest.mark.parametrize(("threads", "misses"), [(0, "fetch"), (2, "fetch"), (0, "compute")])
@pytest.mark.parametrize("policy", [None, ByNumber(low=frozenset({0, 3}), skipped=frozenset({5}))])
def test_no_budget_changes_a_bit(memory_store, policy, threads, misses):
    want = run(with_budget(memory_store, "100%", policy, threads=threads), STEPS)
    for budget in BUDGETS[1:]:
        server = with_budget(memory_store, budget, policy, threads=threads, misses=misses)
        got = run(server, STEPS)
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True)), budget
        assert server.budget.reserved <= server.budget.limit
        server.engine.close()


@pytest.mark.parametrize("budget", ["25%", "minimum"])
@pytest.mark.parametrize("nested", [True, False])
def test_what_is_computed_in_memory_moves_nothing_once_slots_are_full(nested, budget):
    store = make_store(make_experts(layers=2, nested=nested))
    policy = ByNumber(low=frozenset({0, 3}))
    server = with_budget(store, budget, policy, misses="compute")
    run(server, STEPS)
    server.reset_stats()
    before = server.cache.table.precision.copy()
    got, stats = run(server, STEPS), server.stats()
    assert stats.cpu_executed == stats.misses > 0
    assert sum(stats.transfers.values()) == stats.evictions == 0
    assert (server.cache.table.precision == before).all()
    want = run(with_budget(store, budget, policy), STEPS * 2)[len(STEPS) :]
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    server.check_integrity()


def test_misses_are_not_computed_from_files(memory_store):
    with pytest.raises(ConfigError, match="experts in memory"):
        resolve_options({"misses": "compute", "host_store": "file"}, environment={})
    assert resolve_options({"misses": "compute"}, environment={}).host_store == "pinned"
    with refused(option="misses"):
        make_server(staged(memory_store), misses="compute")


def test_full_residency_fetches_every_expert_once(memory_store):
    server = make_server(memory_store, low=0)
    run(server, STEPS * 3)
    stats = server.stats()
    assert stats.misses == stats.transfers["demand"] <= 12
    assert stats.bytes_moved["demand"] == stats.misses * memory_store.experts.formats[4].nbytes


def test_the_smallest_budget_serves_and_one_byte_less_is_refused(memory_store):
    server = with_budget(memory_store, "minimum")
    assert {precision.value: n for precision, n in server.slot_plan.slots.items()} == {"high": 1}
    least = server.minimum_budget
    with refused(option="expert_budget", least=least):
        make_server(memory_store, least - 1)
    with refused(option="expert_budget", least=least):
        server.resize(least - 1)
    run(server, STEPS[:5])


def test_another_ranks_experts_add_nothing(memory_store):
    x, weights, ids = random_step(3, 8, memory_store.experts)
    server = make_server(memory_store)
    mine = torch.where(ids < 3, ids, -1)
    theirs = torch.where(ids >= 3, ids, -1)
    both = forward(server, 0, x, weights, mine).float() + forward(server, 0, x, weights, theirs).float()
    whole = forward(server, 0, x, weights, ids).float()
    # Rounded to bf16 (8 bits) three times instead of once.
    torch.testing.assert_close(both, whole, rtol=2e-2, atol=2e-2 * whole.abs().max().item())
    none = forward(server, 0, x, weights, torch.full_like(ids, -1))
    assert bool((none == 0).all())


def test_no_tokens_are_no_work(memory_store):
    server = make_server(memory_store)
    x, weights, ids = random_step(0, 0, memory_store.experts)
    assert forward(server, 0, x, weights, ids).shape == (0, 64)


@pytest.mark.parametrize("blocks", [0, 1 << 20])
def test_a_transfer_by_the_cores_that_compute_takes_turns_with_computation(memory_store, blocks, monkeypatch):
    """Copying and computing share the cores.

    If a core copies, all arrivals and hits are computed in one call. If reads wait for a disk, the first expert is
    computed on arrival.
    """
    from_disk = itertools.count(step=blocks)
    usage = lambda who: SimpleNamespace(ru_inblock=next(from_disk))  # noqa: E731
    monkeypatch.setattr("vllm_dymoe.cache.transfer.delivery.resource.getrusage", usage)
    server = make_server(memory_store, low=0)
    x, weights, ids = random_step(0, 40, memory_store.experts)
    for layer in (0, 1):  # the server learns from these reads whether a core copies
        forward(server, layer, x, weights, ids)
    assert server.engine.occupies_cores == (blocks == 0)
    calls, compute = [], server.kernel.compute
    server.kernel.compute = lambda items, *rest: (calls.append(len(items)), compute(items, *rest))
    server.cache.clear()
    forward(server, 0, x, weights, ids % 3)
    forward(server, 0, x, weights, ids)
    assert sum(calls) == 9
    assert calls == [3, 6] if blocks == 0 else calls[0] == 1
    server.engine.close()


def test_memory_that_another_process_has_taken_is_refused_at_start(memory_store, monkeypatch):
    monkeypatch.setattr("vllm_dymoe.cache.device_memory.available_host_memory", lambda: 5000)
    with refused(" 5000 bytes", option="expert_budget"):
        make_server(memory_store, "100%")


def test_a_device_without_room_is_refused_with_the_options_that_matter(memory_store, monkeypatch):
    def arena(*arguments, **more):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore lines")

    monkeypatch.setattr("vllm_dymoe.cache.device_cache.Arena", arena)
    with refused("Tried to allocate 2 GiB.*gpu_memory_utilization", option="expert_budget"):
        make_server(memory_store, "100%")


@settings(max_examples=30, deadline=None)
@given(
    st.sets(st.integers(0, 60), max_size=12),
    st.sampled_from(BUDGETS),
    st.integers(0, 2),
    st.sampled_from([None, ByNumber(low=frozenset({0, 3}))]),
)
def test_a_failed_read_fails_its_step_and_no_other(failing, budget, threads, policy):
    want = run(make_server(STORE, policy=policy), STEPS)
    store = FaultyStore(STORE, lambda number, key: "fail" if number in failing else None)
    server = with_budget(store, budget, policy, threads=threads)
    failures = 0
    for step, wanted in zip(STEPS, want, strict=True):
        due = {number for number in failing if number >= len(store.reads)}
        got = None
        with contextlib.suppress(TransferError):
            got = run(server, [step])
        server.check_integrity()
        if got is None:
            failures += 1
            assert min(due, default=1000) < len(store.reads), "a step failed although no read of it did"
        else:
            assert torch.equal(got[0], wanted)
    assert (failures > 0) == (min(failing, default=1000) < len(store.reads))
    server.engine.close()
    server.cache.clear()
    server.check_integrity()


STORE = make_store(make_experts())


@pytest.mark.parametrize("tokens", [1, 2, 40])
@pytest.mark.parametrize("wrong", [6, 32768, 65536, 65537, 1 << 40, -2])
def test_an_expert_outside_the_model_is_an_error_and_the_next_step_runs(memory_store, tokens, wrong):
    """The ids include some that wrap in 16 bits.

    Once, two tokens of expert 65537 were computed with expert 1.
    """
    server = with_budget(memory_store, "50%")
    x, weights, ids = random_step(1, tokens, memory_store.experts)
    want = forward(server, 0, x, weights, ids)
    bad = ids.long().clone()
    bad[-1, -1] = wrong
    with pytest.raises(RoutingError) as raised:
        forward(server, 0, x, weights, bad)
    assert (raised.value.layer, raised.value.expert) == (0, wrong)
    assert torch.equal(forward(server, 0, x, weights, ids), want)
    server.check_integrity()
    server.close(keep_store=True)


@pytest.mark.parametrize("reason", [None, "out of memory"])
@pytest.mark.parametrize("closed", [True, False])
def test_memory_for_a_device_is_pinned_until_the_server_is_closed_or_the_memory_gone(closed, reason, monkeypatch):
    """Otherwise a later server could not pin what is mapped there next."""
    calls = []
    pinner = SimpleNamespace(
        pin=lambda address, nbytes: calls.append((address, nbytes)) or reason,
        unpin=lambda address: calls.append(address),
    )
    monkeypatch.setattr(expert_server, "CudaPinner", lambda device: pinner)
    parts = expert_server.Parts(torch.device("cpu"))
    parts.device = torch.device("cuda")
    memory = map_bytes(100)
    address = memory.data_ptr()
    assert parts.pin(memory) == reason
    assert calls == [(address, whole_pages(100))]
    if closed:
        parts.unpin()
        assert calls[1:] == ([address] if reason is None else [])
    del memory
    assert calls[1:] == ([address] if reason is None else [])
