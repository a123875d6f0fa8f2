"""Prefetching changes no value, takes no slot from demand, and stops if too slow."""

import random
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.executor.steps import ByNumber, with_budget
from tests.small_model import make_experts, make_store
from vllm_dymoe.cache.budget import SlotPlan
from vllm_dymoe.cache.device_cache import DeviceCache, SlotPools, check_cache
from vllm_dymoe.cache.device_memory import DeviceMemory
from vllm_dymoe.cache.expert_cache import Fetcher
from vllm_dymoe.cache.transfer import Reason, TransferStats
from vllm_dymoe.cache.transfer.ticket import State, Ticket
from vllm_dymoe.executor.prefetcher import Prefetcher, PrefetchStats
from vllm_dymoe.planner.precision import Precision
from vllm_dymoe.planner.routing import Phase
from vllm_dymoe.planner.table import layer_quotas
from vllm_dymoe.policies.dymoe import Dymoe
from vllm_dymoe.prefetch import Candidate, Predictor

CPU = torch.device("cpu")
STORE = make_store(make_experts(layers=4))
FORMAT = STORE.experts.formats[4]
STEPS = [(seed, seed % 4, (1, 1, 7, 40)[seed // 4 % 4]) for seed in range(48)]


class HostPredictions(Predictor):
    """Predict random experts of random layers.

    Some are named twice, some are resident already, and some belong to layers that have run.
    """

    def __init__(self, seed):
        self._random = random.Random(seed)

    def predict(self, layer):
        count = self._random.randrange(8)
        return [Candidate(self._random.randrange(4), self._random.randrange(6)) for _ in range(count)]


@dataclass
class Link:
    """An engine whose transfers progress as far as the test says."""

    occupies_cores: bool = False
    tickets: list[Ticket] = field(default_factory=list)
    demanded: list[Ticket] = field(default_factory=list)
    stats: TransferStats = field(default_factory=TransferStats)

    def submit(self, key, destination, reason, after=None, projections=3):
        self.tickets.append(Ticket(key, destination, reason, after, projections))
        return self.tickets[-1]

    def move(self, ticket, arrived, state):
        ticket.arrived, ticket.state = arrived, state

    def demand(self, ticket):
        ticket.reason = Reason.DEMAND
        self.demanded.append(ticket)

    def wait(self, ticket, projections=3):
        assert ticket.state is State.DONE, "only what has arrived is waited for here"

    def arrived(self, ticket):
        return ticket.state is State.DONE

    def cancel(self, ticket):
        if ticket.state in (State.PENDING, State.RESTING):
            ticket.state = State.CANCELLED
        return ticket.state is State.CANCELLED

    def settle(self, ticket):
        ticket.state = State.CANCELLED if ticket.state is State.RUNNING else ticket.state
        return True


@dataclass
class Ahead:
    """A prefetcher with its collaborators, and the slots that a step holds."""

    prefetcher: Prefetcher
    cache: DeviceCache
    fetcher: Fetcher
    engine: Link

    def demand(self, layer, expert):
        return self.fetcher.start(layer, expert, Precision.HIGH, Reason.DEMAND)

    def give_back(self, fetches):
        """Finish a layer like a step that has received all bytes."""
        for fetch in fetches:
            fetch.ticket.state = State.DONE
            if not fetch.complete:
                self.fetcher.complete(fetch)
            self.fetcher.release(fetch, None)

    def check(self, *held):
        waiting = [*self.prefetcher.ahead, *self.fetcher.orphaned, *held]
        check_cache(self.cache, ((fetch.precision, fetch.slot, fetch.kept) for fetch in waiting))


def make_ahead(slots=6, staging=2, projections=3):
    quotas = layer_quotas(slots, [1] * 4, staging, slots)
    plan = SlotPlan(slots * FORMAT.nbytes, 0, {Precision.HIGH: slots}, {Precision.HIGH: quotas})
    cache = DeviceCache(STORE, plan, SlotPools(plan, STORE.experts, {Precision.HIGH: FORMAT.bits}, CPU, DeviceMemory()))
    engine = Link()
    fetcher = Fetcher(cache, engine)
    for layer, quota in enumerate(quotas):
        for expert in range(quota):
            fetch = fetcher.start(layer, expert, Precision.HIGH, Reason.DEMAND, kept=True)
            fetch.ticket.state = State.DONE
            fetcher.complete(fetch)
    engine.tickets.clear()
    policy = ByNumber(projections=projections)
    return Ahead(Prefetcher(fetcher, 4, policy, PrefetchStats()), cache, fetcher, engine)


@pytest.mark.parametrize(
    ("low", "nested", "fetched"),
    [
        (2, True, {(0, Precision.LOW), (0, Precision.HIGH), (1, Precision.LOW)}),
        (2, False, {(0, Precision.HIGH), (1, Precision.LOW)}),
        (0, False, {(0, Precision.HIGH)}),
    ],
    ids=["one in the other", "two versions", "skipped"],
)
def test_experts_are_fetched_ahead_in_the_precision_that_their_layer_will_want(low, nested, fetched):
    """Two experts are predicted for the last of four layers, which wants one high.

    Without a stored low version, the other is not fetched.
    """
    store = make_store(make_experts(layers=4, nested=nested))
    server = with_budget(
        store,
        "50%",
        Dymoe(retention=0.75, high_by="depth"),
        low=low,
        predictor=HostPredictions(1),
        link_gbps=FORMAT.nbytes / 1e-3 / 1e9,
        planning="host",
    )
    server.host_planned.prefetcher.offer(2, candidates(0, 1, layer=3))
    server.host_planned.prefetcher.fill()
    assert {(fetch.expert, fetch.precision) for fetch in server.host_planned.prefetcher.ahead} == fetched
    server.host_planned.prefetcher.clear()
    server.engine.close()


def candidates(*experts, layer=1):
    return [Candidate(layer, expert) for expert in experts]


def fetched(ahead):
    return [(ticket.key.layer, ticket.key.expert) for ticket in ahead.engine.tickets]


def counts(ahead):
    stats = ahead.prefetcher.stats
    return stats.useful, stats.late, stats.wasted, stats.cancelled


def test_the_best_candidates_take_the_staging_slots_and_the_others_wait_for_one():
    ahead = make_ahead()
    kept = ahead.cache.table.residents(Precision.HIGH)
    ahead.prefetcher.offer(0, candidates(0, 3, 4, 5))  # 0 is resident
    ahead.prefetcher.fill()
    assert fetched(ahead) == [(1, 3), (1, 4)]
    assert {ticket.reason for ticket in ahead.engine.tickets} == {Reason.PREFETCH}
    assert ahead.cache.table.residents(Precision.HIGH) == kept, "nothing is evicted for a prediction"
    assert ahead.prefetcher.give_way(Precision.HIGH)
    ahead.prefetcher.fill()
    assert fetched(ahead) == [(1, 3), (1, 4), (1, 5)]
    ahead.check()


def test_a_new_offer_replaces_what_was_not_begun_and_layers_that_are_past_are_ignored():
    ahead = make_ahead()
    ahead.prefetcher.offer(0, candidates(3, 4, 5))
    ahead.prefetcher.offer(1, candidates(3, layer=1) + candidates(4, layer=2))
    ahead.prefetcher.fill()
    assert fetched(ahead) == [(2, 4)]


def test_what_is_needed_is_claimed_and_the_rest_given_up():
    ahead = make_ahead(slots=8, staging=4)
    ahead.prefetcher.offer(0, candidates(2, 3, 4, 5))
    ahead.prefetcher.fill()
    arrived, moving, wrong, untouched = ahead.engine.tickets
    ahead.engine.move(arrived, 3, State.DONE)
    ahead.engine.move(moving, 1, State.RUNNING)
    ahead.engine.move(wrong, 3, State.DONE)
    claimed = ahead.prefetcher.claim(1, {2: Precision.HIGH, 3: Precision.HIGH})
    assert [(expert, fetch.complete) for (expert, _), fetch in claimed.items()] == [(2, True), (3, False)]
    assert ahead.engine.demanded == [moving]
    assert untouched.state is State.CANCELLED
    assert counts(ahead) == (1, 1, 1, 1)
    ahead.check(*claimed.values())
    ahead.give_back(claimed.values())
    ahead.check()


def test_the_slot_of_a_wrong_prediction_stays_taken_while_a_projection_moves_into_it():
    ahead = make_ahead()
    ahead.prefetcher.offer(0, candidates(3, 4))
    ahead.prefetcher.fill()
    first, second = ahead.engine.tickets
    ahead.engine.move(first, 0, State.RUNNING)
    ahead.engine.move(second, 0, State.RUNNING)
    ahead.prefetcher.claim(1, {})
    assert ahead.demand(2, 5) is None
    assert not ahead.prefetcher.give_way(Precision.HIGH)
    ahead.engine.move(first, 1, State.CANCELLED)
    assert ahead.prefetcher.give_way(Precision.HIGH)
    assert ahead.demand(2, 5).slot.packed.data_ptr() == first.destination.data_ptr()
    assert ahead.fetcher.settle()
    assert ahead.demand(2, 4).slot.packed.data_ptr() == second.destination.data_ptr()
    assert counts(ahead) == (0, 0, 2, 0)


def test_demand_takes_the_slot_of_the_last_prediction():
    ahead = make_ahead(slots=8, staging=4)
    ahead.prefetcher.offer(0, candidates(3, layer=1) + candidates(4, 5, layer=3) + candidates(5, layer=2))
    ahead.prefetcher.fill()
    for expected in ([(1, 3), (2, 5), (3, 4)], [(1, 3), (2, 5)], [(1, 3)], []):
        assert ahead.prefetcher.give_way(Precision.HIGH)
        assert {(fetch.layer, fetch.expert) for fetch in ahead.prefetcher.ahead} == set(expected)
    assert not ahead.prefetcher.give_way(Precision.HIGH)
    assert not ahead.prefetcher.give_way(Precision.LOW), "slots of another size"


def test_a_part_of_an_expert_is_in_time_when_it_has_arrived():
    ahead = make_ahead(projections=1)
    ahead.prefetcher.offer(0, candidates(3, 4))
    ahead.prefetcher.fill()
    here, late = ahead.engine.tickets
    assert (here.wanted, late.wanted) == (1, 1)
    ahead.engine.move(here, 1, State.RESTING)
    claimed = ahead.prefetcher.claim(1, {3: Precision.HIGH, 4: Precision.HIGH})
    assert not any(fetch.complete for fetch in claimed.values())
    assert ahead.engine.demanded == [here, late]
    assert counts(ahead) == (1, 1, 0, 0)


def test_another_precision_than_the_one_that_was_fetched_is_not_used():
    """A high version that was predicted does not serve a low request.

    It could, but then a prediction would decide what is computed.
    """
    ahead = make_ahead()
    ahead.prefetcher.offer(0, candidates(3))
    ahead.prefetcher.fill()
    ahead.engine.move(ahead.engine.tickets[0], 3, State.DONE)
    assert ahead.prefetcher.claim(1, {3: Precision.LOW}) == {}
    ahead.check()


def test_cores_that_copy_have_no_idle_link():
    ahead = make_ahead()
    ahead.engine.occupies_cores = True
    assert ahead.prefetcher.look_ahead(0, Phase.DECODE, Slow(None)) is None, "nothing has to be predicted"


class Slow(Predictor):
    """A predictor that takes some seconds to name two experts, one of them rightly.

    On a side stream the time passes when it begins.
    """

    def __init__(self, wait, seconds=0.0, later=False):
        super().__init__(SimpleNamespace(answers_later=later))
        self.wait, self.seconds, self.begun = wait, seconds, 0

    def observe(self, routing):
        pass

    def begin(self, layer):
        self.begun += 1
        self.wait(self.seconds)

    def predict(self, layer):
        if not self.answers_later:
            self.wait(self.seconds)
        return candidates(3, 4)


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("later", [False, True])
def test_predictions_that_hide_less_than_they_take_become_rare_in_their_phase_alone(later, waits):
    """They stay frequent if the layer then has to wait for the link.

    In that case the link was busy while the host predicted.
    """
    now = 0.0

    def wait(seconds):
        nonlocal now
        now += seconds

    ahead = make_ahead()
    prefetcher = ahead.prefetcher
    prefetcher.clock = lambda: now
    for phase, seconds in ((Phase.DECODE, 0.6), (Phase.PREFILL, 0.1)):
        predictor = Slow(wait, seconds, later)
        for _ in range(40):
            prefetcher.look_ahead(0, phase, predictor)
            prefetcher.answer()
            prefetcher.fill()
            ahead.engine.stats.exposed_wait_seconds += 0.01 * waits
            for ticket in ahead.engine.tickets:
                ticket.state, ticket.arrived, ticket.moved_seconds = State.DONE, 3, 1.0
            ahead.give_back(prefetcher.claim(1, {3: Precision.HIGH}).values())
        if later:
            rare = phase is Phase.DECODE and not waits
            assert predictor.begun == (29 if rare else 40), "what is not read is not begun"
    assert prefetcher.intervals == {"prefill": 1, "decode": 1 if waits else 2}, "one second hidden for 0.6, and for 0.1"


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_any_sequence_gives_every_slot_back(data):
    ahead = make_ahead(slots=data.draw(st.integers(1, 10)), staging=data.draw(st.integers(0, 4)))
    prefetcher, layer, held = ahead.prefetcher, 0, []
    for _ in range(data.draw(st.integers(0, 40))):
        action = data.draw(st.sampled_from(["offer", "fill", "fill", "claim", "give way", "settle", "move", "compute"]))
        if action == "offer":
            chosen = data.draw(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=5))
            prefetcher.offer(layer, [Candidate(*names) for names in chosen])
        elif action == "fill":
            prefetcher.fill()
        elif action == "claim":
            layer = (layer + 1) % 4
            wanted = dict.fromkeys(data.draw(st.sets(st.integers(0, 5))), Precision.HIGH)
            for fetch in prefetcher.claim(layer, wanted).values():
                victims = sorted(expert for of, expert in ahead.cache.table.residents(Precision.HIGH) if of == layer)
                if victims and fetch.expert not in victims and data.draw(st.booleans()):
                    ahead.cache.evict(layer, victims[0])
                    ahead.fetcher.keep(fetch)
                held.append(fetch)
            ahead.give_back(held)  # a layer is finished before the next one is routed
            held.clear()
        elif action == "give way":
            free = ahead.cache.pools[Precision.HIGH].free
            assert prefetcher.give_way(Precision.HIGH) == (ahead.cache.pools[Precision.HIGH].free > free)
        elif action == "settle":
            ahead.fetcher.settle()
        elif action == "move":
            for ticket in ahead.engine.tickets:
                if not ticket.ended:
                    going = ticket.wanted and ticket.arrived < 3
                    state = data.draw(st.sampled_from([State.RUNNING, State.DONE, State.FAILED]))
                    ahead.engine.move(ticket, 3 if state is State.DONE and going else ticket.arrived, state)
        ahead.check()
    prefetcher.clear()
    assert ahead.fetcher.settle_all()
    ahead.check()
    ahead.cache.clear()
    assert ahead.cache.pools[Precision.HIGH].free == ahead.cache.pools[Precision.HIGH].count


def test_a_layer_fills_its_share_while_a_copy_that_was_given_up_still_moves():
    ahead = make_ahead(slots=6, staging=2)
    fetcher, (pool,) = ahead.fetcher, ahead.cache.pools.values()
    ahead.engine.settle = lambda ticket: ticket.state is not State.RUNNING
    ahead.cache.evict(0, 0)
    hangs = fetcher.start(0, 0, Precision.HIGH, Reason.DEMAND, kept=True)
    hangs.ticket.state = State.RUNNING
    fetcher.give_up([hangs], wait=True)
    assert list(fetcher.orphaned) == [hangs]
    ahead.check()

    again = fetcher.start(0, 0, Precision.HIGH, Reason.DEMAND, kept=True)
    streamed = fetcher.start(0, 2, Precision.HIGH, Reason.DEMAND)
    assert again is not None, "the table says that the layer has room"
    assert streamed is not None, "of two slots in no layer's share one is written by what hangs"
    assert fetcher.start(0, 3, Precision.HIGH, Reason.DEMAND) is None
    ahead.check(again, streamed)

    ahead.give_back([again, streamed])
    hangs.ticket.state = State.DONE
    assert fetcher.collect()
    ahead.check()
    assert (pool.free, pool.reserved) == (2, 0)
