"""The policy adaptive: dynaexq's minimum, rescued experts, and the waiting dial.

Experts with much weight are rescued; the dial bounds the time that steps wait for them.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cache.test_migration import STORES
from tests.errors import refused
from tests.executor.device_planned import decode, run_large_batch
from tests.executor.steps import CPU as HERE
from tests.executor.steps import random_step
from vllm_dymoe.cache.budget import minimum_budget, plan_slots, workspace_bytes
from vllm_dymoe.cache.device_table import DeviceWaits
from vllm_dymoe.cache.transfer import make_engine
from vllm_dymoe.options import Options
from vllm_dymoe.planner.constants import SMALL_BATCH_ROWS
from vllm_dymoe.planner.link_share import EVERY, LEAST, MOST, MOST_ERROR, RATE, HostWaits, LinkShare, StepTime
from vllm_dymoe.planner.precision import Precision
from vllm_dymoe.planner.routing import Phase, Routing
from vllm_dymoe.planner.rule import CPU, HIGH, HIT, LOW, STREAM, decide
from vllm_dymoe.planner.table import Counter, Table
from vllm_dymoe.policies.adaptive import Adaptive
from vllm_dymoe.policies.dynaexq import AsResident
from vllm_dymoe.server import ExpertServer

FROZEN = {"window_s": 1e9}


def adaptive(store, places=4, *, fetches=False, on_device=False, link_gbps=None, **parameters):
    """Return a server whose high experts stay the same.

    With ``fetches``, misses come over a link; otherwise the CPU computes them.
    """
    policy = Adaptive(**(FROZEN | parameters))
    options = Options(
        high=4, low=2, group_size=32, expert_budget="100%", policy="adaptive", misses="fetch" if fetches else "compute",
        planning="device" if on_device else "auto", link_gbps=link_gbps,
    )  # fmt: skip
    if on_device:
        server = ExpertServer(store, options, HERE, policy=policy)
        more = (places - 1) * store.experts.formats[4].nbytes
        server.resize(server.minimum_budget + more)
        return server
    least = minimum_budget(store.experts, options, policy, workspace_bytes(store.experts))
    more = (places - 1) * store.experts.formats[4].nbytes
    options = options.model_copy(update={"expert_budget": type(options.expert_budget).parse(least + more)})
    engine = make_engine(store, HERE, 0, io_threads=0) if fetches else None
    return ExpertServer(store, options, HERE, policy=policy, engine=engine)


def serve(server, seed, layer, tokens):
    server.host_planned.begin_step(Phase.DECODE)
    x, weights, ids = random_step(seed, tokens, server.experts)
    return server.host_planned.forward(Routing(layer, 3, x, ids, weights))


@pytest.mark.parametrize("fetches", [False, True])
def test_a_rescued_expert_is_computed_high_and_nothing_is_kept(fetches):
    """At threshold 0, answers are those of a server with every expert high.

    At a large threshold they are those of dynaexq.
    """
    store = STORES[True]
    rescued, never = (adaptive(store, fetches=fetches, threshold=at) for at in (0.0, 1e6))
    whole = adaptive(store, 18, threshold=1e6)
    floor = adaptive(store, wait_share=0)
    assert (whole.cache.table.precision == HIGH).all()
    before = rescued.cache.table.precision.copy()
    for seed in range(12):
        at = seed, seed % 3, (1, 2, 9)[seed % 3]
        assert torch.equal(serve(rescued, *at), serve(whole, *at))
        assert torch.equal(serve(never, *at), serve(floor, *at))
        for server in (rescued, never, floor):
            server.check_integrity()
    assert np.array_equal(rescued.cache.table.precision, before)
    assert rescued.stats().misses > 0
    assert never.stats().misses == floor.stats().misses == 0
    for server in (rescued, never, whole, floor):
        server.engine.close()


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("fetches", [False, True])
def test_a_device_rescues_as_the_host_does(fetches, nested):
    """In small and in large batches.

    An expert that is fetched for a rescue takes no slot through which versions migrate.
    """
    store = STORES[nested]
    places = 4 if nested else 1
    rescued = adaptive(store, places, fetches=fetches, on_device=True, threshold=0.0)
    some, host = (adaptive(store, places, fetches=True, on_device=there, threshold=1.2) for there in (True, False))
    whole = adaptive(store, 18, threshold=1e6)
    assert (whole.cache.table.precision == HIGH).all()
    table, before = rescued.cache.device_table.table, rescued.cache.table.precision.copy()
    same = np.array_equal(some.cache.table.precision, host.cache.table.precision)
    for seed in range(12):
        layer, tokens = seed % 3, (1, 2, 20)[seed // 3 % 3]
        x, weights, ids = random_step(seed, tokens, store.experts)
        run = decode if tokens <= SMALL_BATCH_ROWS else run_large_batch
        want = serve(whole, seed, layer, tokens)
        assert torch.equal(run(rescued, layer, x, weights, ids), want)
        got = run(some, layer, x, weights, ids)
        assert not same or torch.equal(got, serve(host, seed, layer, tokens))
        rescued.check_integrity()
    assert np.array_equal(rescued.cache.table.precision, before)
    assert np.array_equal(table.precision.numpy(), before)
    counts = table.counters.sum(0)
    assert counts[Counter.FETCHED_HIGH] + counts[Counter.CPU_EXECUTED] > 0
    assert counts[Counter.EVICTIONS] == 0
    for server in (rescued, some, host, whole):
        server.close(keep_store=True)


def test_the_dial_follows_what_device_planned_steps_have_fetched():
    """On a far too slow link, the threshold rises until less is fetched.

    The device uses the host's threshold.
    """
    server = adaptive(STORES[True], fetches=True, on_device=True, link_gbps=0.001, wait_share=0.05)
    table, (_, threshold) = server.cache.device_table.table, server.policy.precision.thresholds
    begun, largest = int(threshold[0]), 0
    for seed in range(4 * EVERY):
        server.host_planned.begin_step(Phase.DECODE)
        largest = max(largest, int(threshold[0]))
        for layer in range(3):
            x, _, ids = random_step(seed, 1, server.experts)
            decode(server, layer, x, torch.tensor([[0.95, 0.05]]), ids)
    assert largest > begun
    server.host_planned.begin_step(Phase.DECODE)
    assert table.threshold.tolist() == threshold.tolist()
    server.close(keep_store=True)


def test_only_experts_above_the_threshold_are_rescued():
    policy = Adaptive(threshold=1.6)
    at = Routing(0, 3, torch.zeros(1, 8), torch.tensor([[3, 1, 2, 0]]), torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    wanted = policy.precision.select(at)
    assert [expert for expert, precision in wanted.items() if precision is Precision.HIGH] == [3], "2.0 even shares"
    even = Routing(0, 3, torch.zeros(1, 8), torch.tensor([[0, 1, 2, 3]]), torch.full((1, 4), 0.25))
    assert set(policy.precision.select(even).values()) == {Precision.LOW}, "not even the largest"


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1 << 30), st.booleans(), st.booleans())
def test_where_others_write_the_rows_misses_are_streamed_or_executed(seed, nested, executes):
    chance = np.random.default_rng(seed)
    active = np.sort(chance.choice(12, 5, replace=False))
    wanted = chance.integers(LOW, HIGH + 1, 5).astype(np.int8)
    held = chance.integers(LOW, HIGH + 1, 12).astype(np.int8)
    score = chance.integers(0, 9, (1 + nested, 12))
    costs = np.zeros((3, 4), np.int64)
    if executes:
        costs[1:] = [10, 3, 1, 16]
    told = {"rows": np.ones(5, np.int64), "costs": costs, "admits": False}
    places = decide(active, wanted, held, score, score.copy(), (0, 12, 12), **told)
    assert np.isin(places, (HIT, STREAM, CPU)).all()
    missing = (held[active] == LOW) & (wanted == HIGH)
    assert np.array_equal((places != HIT).any(0), missing)


def test_the_dial_has_two_ends():
    assert isinstance(Adaptive(wait_share=0).precision, AsResident)
    assert Adaptive(wait_share=0).precision.thresholds == ()
    assert all(threshold.tolist() == [0, 0] for threshold in Adaptive(wait_share=1).precision.thresholds)
    assert Adaptive(wait_share=1).precision.link_share is None
    assert Adaptive(wait_share=0.2).precision.link_share == 0.2
    assert Adaptive(wait_share=0.2, threshold=1.5).precision.link_share is None


def controlled(share, waits, steps=4000, phases=(Phase.DECODE,)):
    """Run the controller on steps of 10 ms; return even shares and shares of waiting.

    ``waits`` gives a step's wait as a function of the threshold, and of the phase if there are several.
    """
    now, waited, found = [0.0], [0.0], []
    thresholds = Adaptive(wait_share=share).precision.thresholds
    controller = LinkShare(thresholds, share, HostWaits(lambda: waited[0], lambda: now[0]))
    for step in range(steps):
        phase = phases[step % len(phases)]
        controller.begin_step(phase)
        at = thresholds[1][0] / (1 << 32)
        new = waits(at) if len(phases) == 1 else waits(at, phase)
        waited[0], now[0] = waited[0] + new, now[0] + 0.01 + new
        found.append((at, new / (0.01 + new)))
    assert all(threshold[1] == 0 for threshold in thresholds), "they rest in the planner"
    return found


@pytest.mark.parametrize("share", [0.05, 0.1, 0.3])
def test_the_time_that_steps_wait_settles_at_the_share(share):
    found = controlled(share, lambda threshold: 0.02 * np.exp(-threshold))
    assert np.mean([waiting for _, waiting in found[-200:]]) == pytest.approx(share, rel=0.1)


def test_prompts_do_not_move_the_threshold_of_decoded_tokens():
    """Every ninth step reads a prompt.

    At the same threshold it fetches a hundred times as much.
    """

    def waits(threshold, phase):
        return (2.0 if phase is Phase.PREFILL else 0.02) * np.exp(-threshold)

    found = controlled(0.1, waits, steps=9000, phases=(Phase.PREFILL, *[Phase.DECODE] * 8))
    for number in (0, 4):
        settled = [waiting for _, waiting in found[number::9]][-50:]
        assert np.mean(settled) == pytest.approx(0.1, rel=0.15)


def test_it_never_winds_up():
    """It returns from either end within 300 steps, however long it was there."""
    calls = iter(range(10**6))
    turned = controlled(0.1, lambda threshold: 0.5 if next(calls) < 2000 else 0.02 * np.exp(-threshold))
    assert max(at for at, _ in turned) == MOST
    back = next(number for number, (_, waiting) in enumerate(turned[2000:]) if waiting > 0.08)
    assert back < 300
    calls = iter(range(10**6))
    turned = controlled(0.1, lambda threshold: 0.0 if next(calls) < 2000 else 0.02 * np.exp(-threshold))
    assert min(at for at, _ in turned) == LEAST
    assert next(number for number, (_, waiting) in enumerate(turned[2000:]) if waiting < 0.12) < 300


def test_ranks_move_their_thresholds_together_and_idleness_counts_for_nothing():
    now, waited, thresholds = [0.0], [0.0], Adaptive(wait_share=0.1).precision.thresholds
    agreed = []

    def least(said):
        agreed.append(said)
        return [min(value, 1 << 32) for value in said]

    controller = LinkShare(thresholds, 0.1, HostWaits(lambda: waited[0], lambda: now[0]), least)
    start = int(thresholds[0][0])
    for step in range(EVERY):
        controller.begin_step(Phase.DECODE)
        now[0] += 0.01 if step else 1e6
        waited[0] += 0.009
    assert all(threshold[0] == 1 << 32 for threshold in thresholds)
    ((prompt, decoded),) = agreed
    assert prompt == start, "nothing is known of prompts"
    assert decoded == pytest.approx(start * 2 ** (RATE * MOST_ERROR))


def test_a_device_says_later_what_steps_have_waited():
    """A reading that has not arrived is skipped.

    One that covers steps of two phases is left out, too.
    """
    table, now = Table.allocate(1, 4, device="cpu"), [0.0]
    waits = DeviceWaits(table, {HIGH: 0.5}, lambda: now[0])

    def step(phase, fetched, ready=True):
        waits._on_host = waits._on_host if ready else NotReady(waits._on_host)
        found = waits.begin_step(phase)
        if not ready:
            waits._on_host = waits._on_host.copy
        table.counters[0, Counter.FETCHED_HIGH] += fetched
        now[0] += 1.0
        return found

    step(Phase.DECODE, 1)
    step(Phase.DECODE, 2)
    assert step(Phase.DECODE, 4) == StepTime(Phase.DECODE, 1.0, 0.5)
    assert step(Phase.PREFILL, 8, ready=False) is None
    assert step(Phase.PREFILL, 16) == StepTime(Phase.DECODE, 1.0, 1.0)
    assert step(Phase.PREFILL, 32) is None, "the step of decode and the first prompt"
    assert step(Phase.PREFILL, 64) == StepTime(Phase.PREFILL, 1.0, 8.0)


class NotReady:
    """A copy of the counters that has not arrived yet."""

    ready = False

    def __init__(self, copy):
        self.copy = copy


def test_a_budget_that_cannot_hold_all_bases_is_refused_and_names_dymoe():
    experts, policy = STORES[True].experts, Adaptive()
    options = Options(high=4, low=2, group_size=32, policy="adaptive")
    least = minimum_budget(experts, options, policy, 1000)
    bases = len(experts.layers) * experts.num_experts * experts.formats[2].nbytes
    assert least > 1000 + bases
    with refused('policy "dymoe"', option="expert_budget", least=least):
        plan_slots(experts, options, policy, least - 1, 1000)
    plan = plan_slots(experts, options, policy, least, 1000)
    assert plan.quotas[Precision.LOW] == [experts.num_experts] * len(experts.layers)
    assert sum(plan.quotas[Precision.HIGH]) == 1
    assert plan.staging[Precision.HIGH] == 2, "for what steps fetch"
