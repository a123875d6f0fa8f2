"""Versions migrate while steps run: no step waits, and no table row is wrong.

Only the moves themselves cost time.
"""

import contextlib
import itertools
import random
import time
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field

from tests.errors import refused
from tests.executor.device_planned import decode
from tests.executor.schedules import (
    COMPUTATION,
    DEVICES,
    EXPERTS,
    KINDS,
    LAYERS,
    STORES,
    DevicePlannedParts,
    Program,
    RecordedFaults,
    RecordedParts,
    make_engine,
)
from tests.executor.steps import CPU, FAST, ByNumber, NumberPrecision, forward, make_server, random_step
from tests.executor.two_ranks import on_two_ranks
from tests.small_model import make_experts, make_store
from tests.support.deterministic_threads import DeterministicThreads
from tests.support.faulty_store import FaultyStore
from tests.support.happens_before import History
from tests.support.instead import Instead
from tests.support.patience import becomes
from tests.support.recorded_device import RecordedStreams, record_reads
from vllm_dymoe.cache.budget import expert_worth, minimum_budget, plan_slots, workspace_bytes
from vllm_dymoe.cache.device_table import DeviceCounts
from vllm_dymoe.cache.expert_cache import Fetcher
from vllm_dymoe.cache.migration import ARRIVED, FAILED, UNDER_WAY, Migration
from vllm_dymoe.cache.transfer import Reason, TransferError
from vllm_dymoe.cache.transfer import make_engine as plain_engine
from vllm_dymoe.cache.transfer.delivery import CpuDelivery
from vllm_dymoe.cache.transfer.engine import TransferEngine
from vllm_dymoe.cache.transfer.ticket import State
from vllm_dymoe.experts.format import SliceKey
from vllm_dymoe.options import ConfigError, Options
from vllm_dymoe.planner.hotness import Swap
from vllm_dymoe.planner.precision import Precision
from vllm_dymoe.planner.routing import Phase
from vllm_dymoe.planner.rule import HIGH, LOW
from vllm_dymoe.planner.table import Table
from vllm_dymoe.policies.dynaexq import DynaExq
from vllm_dymoe.server import ExpertServer

AT_ONCE = {"window_s": 0, "window_uses": 1, "margin": 0, "alpha": 1.0, "link_share": 1.0}


class ByMap(ByNumber):
    """A frozen map from (layer, expert) to a code of the table."""

    frozen: list = Field(default_factory=list)

    @property
    def precision(self):
        def select(routing):
            row = self.frozen[routing.layer]
            return {expert: Precision.HIGH if row[expert] == HIGH else Precision.LOW for expert in routing.active}

        return Instead(NumberPrecision(frozenset((Precision.HIGH, Precision.LOW)), reuses_high=False), select=select)


def frozen_output(store, bits_map, layer, step):
    """Run a layer's step with the versions that a map assigns to the experts."""
    server = make_server(store, "100%", ByMap(frozen=bits_map.tolist()), threads=0, transfer_timeout_s=0)
    server.cache.table.reuse_high[:] = False
    return forward(server, layer, *step)


def dynaexq(store, places=4, engine=None, parts=None, agree=list, high=4, low=2, link_gbps=None, **options):
    policy, formats = DynaExq(**(AT_ONCE | options)), store.experts.formats
    step = formats[high].nbytes - (0 if formats[high].nested else formats[low].nbytes)
    chosen = {"high": high, "low": low, "group_size": 32, "link_gbps": link_gbps}
    more = {"policy": policy, "engine": engine, "agree": agree, "parts": parts}
    if link_gbps:
        server = ExpertServer(store, Options(expert_budget="100%", **chosen), CPU, **more)
        server.resize(server.minimum_budget + (places - 1) * step)
        server.cache.device_table.table.recording.fill_(1)
        return server
    least = minimum_budget(store.experts, Options(**chosen), policy, workspace_bytes(store.experts))
    return ExpertServer(store, Options(expert_budget=least + (places - 1) * step, **chosen), CPU, **more)


def serve(server, steps):
    """Run steps (seed, layer, tokens) with shifting traffic.

    Yields each output, the precisions that were in effect, and the inputs.
    """
    for number, (seed, layer, tokens) in enumerate(steps):
        server.host_planned.begin_step(Phase.DECODE)
        held = server.cache.table.precision.copy()
        x, weights, ids = random_step(seed, tokens, server.experts)
        ids = (ids % 3 + 3 * (number // 4 % 2)).int() if number % 3 else ids  # alternate between the two halves
        run = forward if server.small_batches is None else decode
        yield run(server, layer, x, weights, ids), held, (x, weights, ids)
        if server.small_batches is not None:
            server.host_planned.end_decode(tokens)
        server.check_integrity()


def execute(nested, kind, steps, turns, history, faults=(), high=4, idle=16, captures=False):
    """Serve on a recorded CPU or device.

    Returns each step's output, a frozen map's, and the outcomes of the moves.

    Each step of a device may be followed by a graph capture, with transfers paused throughout.
    """
    store = RecordedFaults(STORES[nested], history, turns, {})
    engine = make_engine(kind, store, history, turns, 1.0, Program(()))
    compute = COMPUTATION if kind in DEVICES else None
    parts, link_gbps = RecordedParts(history, None), None
    if kind in DEVICES:  # recorded devices, whose answers are forgotten between two polls
        chance = random.Random(len(steps))
        engine.streams._ended = lambda: chance.random() < 0.9
        parts, link_gbps = DevicePlannedParts(history), FAST
    server = dynaexq(store, high, engine, parts, link_gbps=link_gbps)
    store._faults = {store._reads + number: how for number, how in dict(faults).items()}
    record_reads(server.kernel, history, compute, turns.pause)
    served = []
    try:
        for output, held, step in serve(server, steps):
            served.append((output, frozen_output(STORES[nested], held, steps[len(served)][1], step)))
            if captures and kind in DEVICES and not faults:
                with engine.paused():
                    engine.streams.capturing = True
                    for _ in range(20):
                        turns.pause()
                    engine.streams.capturing = False
                assert engine.streams.intruders == []
            for _ in range(idle):  # a device needs several looks until its copies have finished
                turns.pause()
                server.host_planned.begin_step(Phase.DECODE)
        assert server.stats().misses == 0
        moves = dict(server.host_planned.migration.stats.moves)
    finally:
        store.hanging = False
        engine.close()
    return served, moves


steps = st.lists(
    st.tuples(st.integers(0, 50), st.integers(0, LAYERS - 1), st.sampled_from((1, 2, 9))), min_size=1, max_size=12
)
faults = st.dictionaries(st.integers(0, 20), st.sampled_from(("fail", "hang")), max_size=4)


@settings(max_examples=40, deadline=None)
@given(st.booleans(), st.sampled_from(KINDS), steps, faults, st.integers(1, 12), st.booleans(), st.integers(0, 2**32))
def test_no_schedule_corrupts_a_slot_and_the_map_alone_decides(nested, kind, steps, faults, high, captures, seed):
    """No schedule disturbs a capture either."""
    history, given = History(), {"faults": faults, "high": high, "captures": captures}
    served, _ = execute(nested, kind, steps, DeterministicThreads(history, seed), history, **given)
    assert history.races == []
    assert all(torch.equal(got, want) for got, want in served)


def random_steps(seed):
    chosen = random.Random(seed)
    return [(chosen.randrange(50), number % LAYERS, chosen.choice((2, 9))) for number in range(14)]


def found(nested, kind, seeds=range(12)):
    """Return the first fault that a seed shows, or None if there is none.

    Fails if nothing moved at all.
    """
    moved = 0
    for seed in seeds:
        history, served = History(), []
        try:
            served, moves = execute(nested, kind, random_steps(seed), DeterministicThreads(history, seed), history)
            moved += moves.get("published", 0)
        # An IndexError means that a pool promised a slot that it does not have.
        except (AssertionError, IndexError) as error:
            return str(error) or "asserted"
        if history.races:
            return history.races[0]
        if not all(torch.equal(got, want) for got, want in served):
            return "wrong"
    assert moved > 0
    return None


def unordered(self, move):
    def complete(self, fetch):
        fetch.complete = True
        if fetch.kept:
            self._publish(fetch)

    with mock.patch.object(Fetcher, "complete", complete):
        REAL["_publish"](self, move)


def published_early():
    state = mock.patch.object(Migration, "_state", lambda self, move: ARRIVED if move.fetches else FAILED)
    return state, mock.patch.object(Migration, "_publish", unordered)


def without_a_fence():
    """Let the copying thread itself report completion, without ordering computation."""

    def state(self, move):
        done = move.fetches and all(fetch.ticket.state is State.DONE for fetch in move.fetches)
        return ARRIVED if done else UNDER_WAY if move.fetches else FAILED

    return mock.patch.object(Migration, "_state", state), mock.patch.object(Migration, "_publish", unordered)


def half_a_pair():
    def publish(self, move):
        up, down = move.fetches
        self._fetcher.complete(up)
        self._memory.evict(up.layer, up.expert)
        self._fetcher.keep(up)
        move.fetches.remove(up)
        self._flying.remove(move)
        self._fetcher.give_up([down])

    return (mock.patch.object(Migration, "_publish", publish),)


def into_a_slot_that_is_still_read():
    submit = TransferEngine.submit

    def at_once(self, key, destination, reason, after=None, projections=3):
        return submit(self, key, destination, reason, None if reason is Reason.MIGRATION else after, projections)

    return (mock.patch.object(TransferEngine, "submit", at_once),)


def computation_does_not_wait():
    return (mock.patch.object(RecordedStreams, "computation_waits", return_value=None),)


def a_staging_buffer_is_reused_too_early():
    return (mock.patch.object(RecordedStreams, "synchronize", return_value=None),)


REAL = {"_publish": Migration._publish}
PLANTED = [
    *((published_early, nested, kind) for nested in (True, False) for kind in ("disk", "link", *DEVICES)),
    *((without_a_fence, nested, kind) for nested in (True, False) for kind in DEVICES),
    *((into_a_slot_that_is_still_read, True, kind) for kind in DEVICES),
    *((computation_does_not_wait, nested, "pinned") for nested in (True, False)),
    (a_staging_buffer_is_reused_too_early, True, "staged"),
    (half_a_pair, False, "disk"),
]


@pytest.mark.parametrize(("fault", "nested", "kind"), PLANTED)
def test_a_planted_fault_is_found(fault, nested, kind):
    with contextlib.ExitStack() as stack:
        for patch in fault():
            stack.enter_context(patch)
        assert found(nested, kind) is not None


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_without_a_fault_nothing_is_found(nested, kind):
    assert found(nested, kind, range(4)) is None


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize(("how", "outcome"), [("fail", "failed"), ("hang", "late")])
def test_copies_that_fail_or_hang_for_ever_cost_their_moves_and_no_step_waits(nested, how, outcome):
    store = FaultyStore(STORES[nested])
    server = dynaexq(store, places=6)
    store.action = lambda number, key: how
    begin = time.perf_counter()
    for number, (output, held, step) in enumerate(serve(server, random_steps(1) * 4)):
        layer = random_steps(1)[number % 14][1]
        assert torch.equal(output, frozen_output(STORES[nested], held, layer, step))
        time.sleep(0.001)
    assert time.perf_counter() - begin < 60, "something waited"
    stats = server.stats()
    assert stats.misses == 0
    assert stats.moves[outcome] > 0
    assert stats.moves["published"] == 0
    store.action = lambda number, key: None
    store.gate.set()
    served = lambda: list(serve(server, random_steps(2))) and server.stats().moves["published"]  # noqa: E731
    assert becomes(served, 20), "slots did not come back"
    server.engine.close()


@pytest.mark.parametrize(("hotness", "high", "low"), [("squared_gates", (4, 5), 0), ("uses", (0, 4), 5)])
def test_the_hottest_are_those_that_weigh_most_or_that_are_used_most(hotness, high, low):
    """Expert 0 is used most, and experts 4 and 5 weigh most.

    Expert 0 gets a tenth of every token's weight. Experts 4 and 5 each get the rest for half of the tokens, and
    expert 4 for one more.
    """
    store = make_store(make_experts(layers=1, num_experts=EXPERTS, nested=True))
    server = dynaexq(store, 2, plain_engine(store, CPU, 0, io_threads=0), hotness=hotness)
    ids = torch.tensor([[0, 4], [5, 0], [0, 4], [5, 0], [0, 4]])
    weights = torch.where(ids == 0, 0.1, 0.9)
    x, _, _ = random_step(0, 5, store.experts)
    for _ in range(8):
        server.host_planned.begin_step(Phase.DECODE)
        forward(server, 0, x, weights, ids.int())
        for fetch in list(server.host_planned.migration.flying):
            server.engine.wait(fetch.ticket)
    precisions = server.cache.table.precision[0]
    assert all(precisions[expert] == HIGH for expert in high)
    assert precisions[low] == LOW
    server.engine.close()


def test_no_more_moves_than_in_flight_and_the_link_rests_between_them():
    store = make_store(make_experts(layers=3, num_experts=EXPERTS, nested=True))
    now = [0.0]
    server = dynaexq(store, 9, plain_engine(store, CPU, 0, io_threads=0), in_flight=2, link_share=0.25)
    migration = server.host_planned.migration
    migration._clock = lambda: now[0]
    migration._began = 0.0
    list(serve(server, random_steps(3)))
    assert len(list(migration.flying)) == 2
    for fetch in list(migration.flying):
        server.engine.wait(fetch.ticket)
        fetch.ticket.moved_seconds = 1.0
    migration._migrating = DynaExq(**(AT_ONCE | {"window_s": 1e9, "link_share": 0.25})).residency.migrating
    migration._began = now[0]
    cold = zip(*(server.cache.table.precision != HIGH).nonzero(), strict=True)
    migration._planned.extend([Swap(1.0, place, None) for place in cold][-3:])
    migration.turn()
    assert not list(migration.flying), "two seconds of the link have to be paid for"
    now[0] = 7.9
    migration.turn()
    assert not list(migration.flying)
    now[0] = 8.1
    migration.turn()
    assert len(migration._flying) == 2


@pytest.mark.parametrize(("nested", "begun"), [(True, 6), (False, 2)])
def test_nested_versions_move_as_fast_as_the_link_has_time(nested, begun):
    """Moves of nested versions need no slots of their own, so many may run at once.

    With one move per step, a large model would take hundreds of steps.
    """
    store, now = make_store(make_experts(layers=3, num_experts=16, nested=nested)), [0.0]
    server = dynaexq(store, 24, plain_engine(store, CPU, 0, io_threads=0), in_flight=2, link_share=0.25)
    migration = server.host_planned.migration
    migration._clock, migration._began = lambda: now[0], 0.0
    migration._migrating = DynaExq(**(AT_ONCE | {"window_s": 1e9, "link_share": 0.25})).residency.migrating
    migration._busy, migration._moved = 1.0, (10, 5.0)  # half a second of the link for each
    high = list(zip(*(server.cache.table.precision == HIGH).nonzero(), strict=True))
    cold = [place for place in np.ndindex(3, 16) if place not in high]
    swaps = [Swap(1.0, up, down) for up, down in zip(cold, high, strict=False)]
    migration._planned.extend(swaps)
    assert len(swaps) > 6
    now[0] = 16.0  # of these seconds the link may use 4, and has used 1; the other 3 suffice for 6 moves
    migration.turn()
    assert len(migration._flying) == begun
    server.engine.close()


def test_warm_up_counts_nothing_and_idleness_ends_no_window():
    server = dynaexq(STORES[True])
    with server.host_planned.unobserved():
        list(serve(server, random_steps(1)))
    assert sum(server.stats().choices.values()) == 0
    server.host_planned.begin_step(Phase.DECODE)
    assert server.stats().windows == 0
    list(serve(server, random_steps(1)))
    server.host_planned.begin_step(Phase.DECODE)
    assert server.stats().windows > 0
    assert sum(server.stats().choices.values()) == sum(2 * tokens for _, _, tokens in random_steps(1))


def map_of_every_step(rank, agree):
    """Return the precisions before each step.

    The second rank's disk is slow, and sometimes fails.
    """
    store = FaultyStore(STORES[True])
    server = dynaexq(store, agree=agree)
    if rank:
        store.action = lambda number, key: time.sleep(0.003) or (None if number % 7 else "fail")
    maps = []
    for _, held, _ in serve(server, random_steps(5) * 6):
        maps.append(held)
        time.sleep(0.001)
    server.engine.close()
    return maps


def test_ranks_that_share_experts_publish_in_the_same_step():
    one, other, _ = on_two_ranks(map_of_every_step)
    assert len(one) == len(other) == 84
    assert all(map(np.array_equal, one, other))
    assert any((a != b).any() for a, b in itertools.pairwise(one)), "nothing moved"


def test_ranks_that_do_not_agree_are_found_apart():
    one, other, _ = on_two_ranks(lambda rank, agree: map_of_every_step(rank, list))
    assert not all(map(np.array_equal, one, other))


def test_ranks_with_nothing_to_move_seldom_ask():
    """Only their clocks can make ranks differ, so they seldom have to agree."""

    def run(rank, agree):
        server = dynaexq(STORES[True], agree=agree, window_s=1e9)
        return len(list(serve(server, random_steps(5) * 6)))

    *_, asked = on_two_ranks(run)
    assert 0 < asked <= 84 // 16


SIZES = [((4, 2), True), ((8, 4), True), ((16, 4), False)]


@given(st.sampled_from(SIZES), st.integers(0, 400_000))
def test_every_plan_holds_everybody_and_as_many_high_as_it_can(kind, nbytes):
    bits, nested = kind
    experts = make_experts(layers=3, num_experts=8, bits=bits, nested=nested)
    options, policy = Options(high=bits[0], low=bits[1], group_size=32), DynaExq()
    least = minimum_budget(experts, options, policy, 1000)
    if nbytes < least:
        with refused("or serve", option="expert_budget", least=least):
            plan_slots(experts, options, policy, nbytes, 1000)
        return
    plan = plan_slots(experts, options, policy, nbytes, 1000)
    sizes = {Precision.HIGH: experts.formats[bits[0]].nbytes, Precision.LOW: experts.formats[bits[1]].nbytes}
    spent = 1000 + sum(count * sizes[precision] for precision, count in plan.slots.items())
    assert spent <= nbytes
    high = sum(plan.quotas[Precision.HIGH])
    assert 1 <= high <= 24
    low = sum(plan.quotas.get(Precision.LOW, [0]))
    assert low == (24 if nested else 24 - high)
    staging = 0 if nested or high == 24 else 2
    assert plan.staging == dict.fromkeys(plan.slots, staging)
    one_more = sizes[Precision.HIGH] - (0 if nested else sizes[Precision.LOW])
    assert high >= 23 or nbytes - spent < one_more


def test_places_are_for_experts_whose_low_versions_lose_most():
    """This is the ranking before any traffic; the paper's counts only uses."""
    experts = make_experts(layers=2, num_experts=8, nested=True)
    lost = {layer: tuple(1.0 if expert < 6 else 16.0 * layer for expert in range(8)) for layer in experts.layers}
    store = make_store(replace(experts, lost=lost))
    server = dynaexq(store, places=4)
    assert np.argwhere(server.cache.table.precision == HIGH).tolist() == [[0, 6], [0, 7], [1, 6], [1, 7]]
    server = dynaexq(store, places=4, hotness="uses")
    assert np.argwhere(server.cache.table.precision == HIGH).tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    worth = expert_worth(store.experts, DynaExq().residency.migrating, (1.0, 3.0))
    assert worth[1, 7] / worth[1, 0] == pytest.approx(32**0.5)
    assert worth[1, 7] == pytest.approx(3 * (32 / 8.75) ** 0.5), "beside its own layer's"


@pytest.mark.parametrize("nested", [True, False])
def test_the_least_budget_serves(nested):
    server = dynaexq(STORES[nested], places=1)
    assert server.slot_plan.limit == server.minimum_budget
    list(serve(server, random_steps(0)))
    with refused('policy "dymoe"', option="expert_budget", least=server.minimum_budget):
        server.resize(server.minimum_budget - 1)
    server.resize(server.minimum_budget + 100_000)
    assert (server.cache.table.precision == HIGH).all()
    list(serve(server, random_steps(0)))
    assert server.stats().misses == 0


def test_an_expert_that_cannot_be_read_at_start_is_named():
    store = FaultyStore(STORES[True], lambda number, key: "fail")
    with pytest.raises(ConfigError, match="on fire"):
        dynaexq(store)


def test_a_transfer_that_is_not_wanted_holds_no_other_up():
    store, key = FaultyStore(STORES[True], lambda number, key: "hang"), SliceKey(0, 0, 4)
    engine = TransferEngine(CpuDelivery(store), 1)
    stuck = engine.submit(key, torch.zeros_like(STORES[True].packed(key)), Reason.MIGRATION)
    assert becomes(lambda: stuck.state is State.RUNNING)
    engine.abandon(stuck)
    store.action = lambda number, key: None
    other = engine.submit(key, torch.zeros_like(STORES[True].packed(key)), Reason.MIGRATION)
    assert becomes(lambda: engine.arrived(other))
    store.gate.set()
    engine.close()


def planned_and_moved(reset):
    """Return the moves in progress after every step.

    No copy ever arrives, and each is late after a window.
    """
    store = make_store(make_experts(layers=LAYERS, num_experts=EXPERTS, nested=True))
    server, moves = dynaexq(store, 3, plain_engine(store, CPU, 0, io_threads=0)), []
    for _ in serve(server, random_steps(7) * 3):
        moves.append([move.swap for move in server.host_planned.migration._flying])
        if reset:
            server.reset_stats()
    server.engine.close()
    return moves


def test_a_reset_of_statistics_changes_no_move():
    moves = planned_and_moved(reset=False)
    assert len({tuple(some) for some in moves}) > 3, "moves come and go"
    assert planned_and_moved(reset=True) == moves


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["weights", "x"])
def test_a_row_that_is_not_finite_leaves_no_trace_in_hotness_and_layer_worth(where, poison):
    """One such request would affect every later one through the state it leaves."""

    def hotness_and_worth(poisoned):
        server = dynaexq(STORES[True], alpha=0.5)
        for seed in range(80):
            server.host_planned.begin_step(Phase.DECODE)
            for layer in range(LAYERS):
                x, weights, ids = random_step(seed + layer, 9, server.experts)
                if layer == 2:  # this layer hardly changes its tokens, so the layer before it is worth little
                    x = random_step(seed + 1, 9, server.experts)[0] * 1.01
                if poisoned and seed % 8 == 3:
                    (weights if where == "weights" else x)[4] = poison
                elif where == "weights" and seed % 8 == 3:
                    x, weights, ids = (torch.cat((part[:4], part[5:])) for part in (x, weights, ids))
                forward(server, layer, x, weights, ids)
        migration = server.host_planned.migration
        server.engine.close()
        return migration.hotness, migration._worth

    hotness, worth = hotness_and_worth(True)
    clean_hotness, clean_worth = hotness_and_worth(False)
    assert np.array_equal(hotness, clean_hotness)
    assert np.isfinite(worth).all()
    assert worth == pytest.approx(clean_worth, rel=0.1)


def test_counts_of_steps_without_the_host_leave_out_what_is_not_finite():
    table = Table.allocate(2, 6, rows=4, top_k=2, depth=1, device="cpu")
    found, clean = DeviceCounts(table), DeviceCounts(table)
    ids, weights = torch.tensor([[0, 1], [2, 3], [4, 5]]), torch.rand(3, 2)
    for layer in range(2):
        clean.add_layer(layer, torch.tensor([[0, 1], [-1, -1], [4, 5]]), weights)
    for layer, poison in enumerate((float("nan"), float("inf"))):
        found.add_layer(layer, ids, weights.index_fill(0, torch.tensor([1]), poison))
    for counts in (found, clean):
        counts.ask()
    assert np.array_equal(found.take(), clean.take())
    table.ring_ids[0, :, :3], table.ring_weights[0, :, :3] = ids.int(), weights.index_fill(0, torch.tensor([1]), poison)
    table.ring_rows.fill_(3)
    found.add(), found.ask()
    assert np.array_equal(found.take(), clean.take())


def test_a_nested_move_that_fails_gives_the_displaced_expert_its_high_version_back():
    store = FaultyStore(STORES[True])
    server = dynaexq(store, 4, plain_engine(store, CPU, 0, io_threads=0), window_s=1e9)
    migration, precision = server.host_planned.migration, server.cache.table.precision
    before = precision.copy()
    up, down = (tuple(np.argwhere(of)[0].tolist()) for of in (before != HIGH, before == HIGH))
    migration._planned.append(Swap(1.0, up, down))
    store.action = lambda number, key: "fail" if (key.layer, key.expert) == up else None
    for _ in range(4):
        server.host_planned.begin_step(Phase.DECODE)
        for fetch in list(migration.flying):
            with contextlib.suppress(TransferError):
                server.engine.wait(fetch.ticket)
    assert np.array_equal(precision, before)
    assert migration.stats.moves["failed"] == 1
    server.check_integrity()
    server.engine.close()


@pytest.mark.parametrize("nested", [True, False])
def test_slots_can_be_freed_while_a_copy_moves(nested):
    """A change of the budget waits for the copy; it is not refused by chance."""
    store = FaultyStore(STORES[nested])
    server = dynaexq(store, 4, plain_engine(store, CPU, 0, timeout=60, io_threads=1), window_s=1e9)
    migration, precision = server.host_planned.migration, server.cache.table.precision
    up, down = (tuple(np.argwhere(of)[0].tolist()) for of in (precision != HIGH, precision == HIGH))
    migration._planned.append(Swap(1.0, up, down))
    store.action = lambda number, key: time.sleep(0.05)
    server.host_planned.begin_step(Phase.DECODE)
    assert becomes(lambda: any(fetch.ticket.state is State.RUNNING for fetch in migration.flying))
    server.sleep(1)
    assert list(server.host_planned.on_their_way()) == []
    assert migration.stats.moves == {"outdated": 1}
    server.wake()
    server.check_integrity()
    server.engine.close()
