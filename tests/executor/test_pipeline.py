"""The order in which a layer's experts are fetched and computed.

The test decides when transfers arrive.
"""

from dataclasses import replace

import pytest
import torch

from tests.executor.steps import ByNumber, forward, make_server, random_step
from tests.small_model import make_experts, make_store
from vllm_dymoe.cache.expert_cache import Fetcher
from vllm_dymoe.cache.transfer import Reason, TransferStats
from vllm_dymoe.cache.transfer.ticket import State, Ticket
from vllm_dymoe.kernels import Activation
from vllm_dymoe.planner.routing import Phase
from vllm_dymoe.policies.base import ResidencyPolicy
from vllm_dymoe.policies.on_demand import OnDemand
from vllm_dymoe.prefetch import Candidate, Predictor

STORE = make_store(make_experts(num_experts=6))
FORMAT = STORE.experts.formats[4]
NEVER = 1000


class Script:
    """An engine that logs its calls.

    Attributes:
        log: calls to the engine, and computations.
        arrives: number of computations after which each expert of layer 0 arrives; others never arrive by themselves.
    """

    occupies_cores = False

    def __init__(self, arrives):
        self.log, self.arrives, self.stats = [], arrives, TransferStats()
        self._computed = 0
        self._at, self.fences = {}, []

    def submit(self, key, destination, reason, after=None, projections=3):
        self.log.append(f"{'ask' if reason is Reason.DEMAND else 'ahead'} {key.expert}")
        self._at[destination.data_ptr()] = key.expert
        self.fences.append(after)
        STORE.read_into(key, destination)
        return Ticket(key, destination, reason, after, projections)

    def demand(self, ticket):
        ticket.reason = Reason.DEMAND

    def wait(self, ticket, projections=3):
        if ticket.state is not State.DONE:
            self.log.append(f"wait {ticket.key.expert}.{projections}")
            ticket.arrived = projections
            ticket.state = State.DONE if projections == 3 else State.RUNNING

    def arrived(self, ticket):
        if self.arrives.get(ticket.key.expert, NEVER) <= self._computed:
            ticket.state = State.DONE
        return ticket.state is State.DONE

    def cancel(self, ticket):
        ticket.state = State.CANCELLED
        return True

    def settle(self, ticket):
        return True

    def fence(self):
        return self._computed

    def close(self):
        pass

    def listen(self, kernel):
        begin, compute, current = kernel.begin, kernel.compute, []

        def begun(x, plan, *rest):
            current[:] = [plan]
            begin(x, plan, *rest)

        def listening(items, receive=None):
            experts = [str(self._at[current[0].views[item].gate.weight.data_ptr()]) for item in items]
            self.log.append(f"compute {' '.join(experts)}")
            compute(items, receive)
            self._computed += 1

        kernel.begin, kernel.compute = begun, listening


def make(arrives, resident, staging=2, predictor=None, asynchronous=False):
    """Return a server of two layers that keep two experts each, and its engine.

    Some experts are resident.
    """
    engine = Script({})
    server = make_server(
        STORE, (4 + staging) / 12, ByNumber(staging=staging), low=0, engine=engine, predictor=predictor
    )
    engine.listen(server.kernel)
    server.kernel.asynchronous = asynchronous
    if resident:
        step(server, resident)
    engine.log.clear()
    engine.arrives, engine._computed = arrives, 0
    return server, engine


def step(server, experts):
    count = 2 * len(experts)
    x, _, _ = random_step(1, count, STORE.experts)
    ids = torch.tensor([[e, f] for e, f in zip(experts, experts[1:] + experts[:1], strict=True)] * 2, dtype=torch.int32)
    if len(experts) == 1:
        ids[:, 1] = -1
    weights = torch.full((count, 2), 0.5)
    return forward(server, 0, x, weights, ids, Activation.SILU)


def test_the_link_starts_first_and_each_expert_is_computed_as_its_projections_arrive():
    server, engine = make({}, resident=[0, 1])
    step(server, [0, 1, 2, 3, 4, 5])
    as_it_arrives = lambda e: [f"compute {e}", f"wait {e}.1", f"wait {e}.2", f"wait {e}.3"]  # noqa: E731
    assert engine.log == [
        *("ask 2", "ask 3", "compute 1", "compute 0"),
        *as_it_arrives(2),
        *("ask 4", *as_it_arrives(3)),  # the expert in one slot is computed while the other slot fills
        *("ask 5", *as_it_arrives(4), *as_it_arrives(5)),
    ]


def test_what_frees_a_slot_goes_before_the_residents_as_long_as_slots_are_short():
    server, engine = make({2: 1, 3: 2, 4: 2, 5: 4}, resident=[0, 1])
    step(server, [0, 1, 2, 3, 4, 5])
    assert engine.log == [
        *("ask 2", "ask 3", "compute 1"),
        *("compute 2", "ask 4"),
        *("compute 4", "ask 5"),  # 3 has arrived, too; either one frees a slot
        "compute 0 3",  # every expert has a slot, so the rest is computed together
        "compute 5",
    ]


def test_without_shortage_all_that_is_there_is_computed_together():
    server, engine = make({}, resident=[0, 1], staging=4)
    step(server, [0, 1, 2, 3])
    assert engine.log[:3] == ["ask 2", "ask 3", "compute 0 1"]


def test_cores_that_copy_take_turns_with_computation():
    server, engine = make({}, resident=[0, 1], staging=4)
    engine.occupies_cores = True
    step(server, [0, 1, 2, 3])
    assert engine.log == ["ask 2", "ask 3", "wait 2.3", "wait 3.3", "compute 0 1 2 3"]


def without_overlap(server):
    """Let a server alternate transfers and computation, like Accelerate."""
    server.host_planned.policy = OnDemand(overlap=False)
    server.host_planned.fetcher = Fetcher(server.cache, server.engine, overlaps=server.policy.residency.overlaps)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_without_overlap_nothing_moves_while_anything_computes(asynchronous):
    server, engine = make({}, resident=[], asynchronous=asynchronous)
    without_overlap(server)
    engine.fences.clear()
    step(server, [0, 1, 2, 3, 4, 5])  # in at least two rounds: two cache slots and two staging slots
    log, asked = engine.log, [entry for entry in engine.log if entry.startswith("ask")]
    assert len(asked) == 6
    for entry, fence in zip(asked, engine.fences, strict=True):
        begin, end = log.index(entry), log.index(f"wait {entry.split()[1]}.3")
        assert not any(other.startswith("compute") for other in log[begin:end])
        assert fence == sum(other.startswith("compute") for other in log[:begin]), "behind all that computes"
    assert engine.fences[-1] > 0


def test_without_overlap_a_slot_that_was_never_read_waits_as_well():
    server, engine = make({}, resident=[0, 1])
    without_overlap(server)
    step(server, [0, 1])
    computed = engine._computed
    engine.fences.clear()
    step(server, [2, 3])  # these are colder, and pass through fresh staging slots
    assert computed > 0
    assert engine.fences == [computed, computed]


def waits(*experts):
    return [f"wait {expert}.{count}" for count in (1, 2, 3) for expert in experts]


def test_where_computing_only_enqueues_half_of_what_is_on_its_way_is_one_launch():
    server, engine = make({}, resident=[0, 1], staging=4, asynchronous=True)
    step(server, [0, 1, 2, 3, 4, 5])
    assert engine.log == [
        *("ask 2", "ask 3", "ask 4", "ask 5", "compute 0 1"),  # every expert has a slot
        *("compute 2 3", *waits(2, 3)),  # while 4 and 5 move
        *("compute 4", *waits(4)),
        *("compute 5", *waits(5)),
    ]


def test_where_computing_only_enqueues_residents_are_spread_over_the_misses():
    """Enqueued at once, all residents would precede the work that frees a slot.

    The link would wait meanwhile.
    """
    server, engine = make({}, resident=[0, 1], asynchronous=True)
    step(server, [0, 1, 2, 3, 4, 5])
    assert [entry for entry in engine.log if not entry.startswith("wait")] == [
        *("ask 2", "ask 3", "compute 1", "compute 2"),
        *("ask 4", "compute 0", "compute 3"),
        *("ask 5", "compute 4", "compute 5"),
    ]


def test_where_computing_only_enqueues_what_has_arrived_together_is_one_launch():
    server, engine = make({2: 2, 3: 2, 4: 2, 5: 3}, resident=[0], staging=4, asynchronous=True)
    step(server, [0, 2, 3, 4, 5])
    assert engine.log == [
        *("ask 2", "ask 3", "ask 4", "ask 5", "compute 0"),
        *("compute 2 3", *waits(2, 3)),
        *("compute 4", "compute 5"),
    ]
    server, engine = make({2: 1, 3: 1, 4: 1, 5: 1}, resident=[0], staging=4, asynchronous=True)
    step(server, [0, 2, 3, 4, 5])
    assert engine.log[4:] == ["compute 0", "compute 2 3 4 5"]


class Next(Predictor):
    def predict(self, layer):
        return [Candidate(layer + 1, 4), Candidate(layer + 1, 5)] if layer == 0 else []


def test_the_next_layer_takes_the_slots_that_this_one_leaves():
    server, engine = make({}, resident=[], predictor=Next())
    step(server, [0, 1, 2, 3])  # four experts, two cache slots, two staging slots
    assert [entry for entry in engine.log if not entry.startswith("wait")] == [
        *("ask 0", "ask 1", "ask 2", "ask 3"),
        *("compute 0", "compute 1", "compute 2"),
        *("ahead 4", "compute 3", "ahead 5"),  # once every expert of this layer has had its slot
    ]


class KeepsNothing(ByNumber):
    """A policy that keeps nothing, so that predictions may use every slot."""

    @property
    def residency(self):
        return ResidencyPolicy(keeps=False)

    @property
    def prefetch(self):
        return replace(super().prefetch, first_layer=True)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_layer_that_keeps_nothing_hands_its_first_slot_to_the_next_layer_at_once(asynchronous):
    """DuoServe-MoE 5.3: prefetching starts after the first expert.

    This holds even if all experts have arrived.
    """
    engine = Script({0: 0, 1: 0, 2: 0})
    server = make_server(STORE, 4 / 12, KeepsNothing(), low=0, engine=engine, predictor=Next())
    engine.listen(server.kernel)
    server.kernel.asynchronous = asynchronous
    step(server, [0, 1, 2])
    assert engine.log == ["ask 0", "ask 1", "ask 2", "ahead 4", "compute 2", "ahead 5", "compute 0 1"]


class First(Predictor):
    def predict(self, layer):
        return [Candidate(0, 3), Candidate(0, 4)] if layer == -1 else []


@pytest.mark.parametrize(
    ("policy", "phase", "log"),
    [
        (KeepsNothing(), Phase.PREFILL, ["ahead 3", "ahead 4"]),
        (KeepsNothing(), Phase.DECODE, []),
        (ByNumber(), Phase.PREFILL, []),
    ],
)
def test_a_prompts_first_layer_is_fetched_ahead_of_it(policy, phase, log):
    """DuoServe-MoE 5.2: experts travel while the work before the layer is computed."""
    engine = Script({3: 0, 4: 0, 5: 0})
    server = make_server(STORE, 4 / 12, policy, low=0, engine=engine, predictor=First())
    server.host_planned.begin_step(phase)
    assert engine.log == log
    step(server, [3, 5])
    assert engine.log.count("ask 3") == (not log)
    predictions = server.stats().prefetches
    assert predictions["useful"] + predictions["late"] == bool(log)
    server.check_integrity()
