"""Step plans made with NumPy against the host's table, expert by expert."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.decode_steps import (
    COSTS,
    EXPERTS,
    FORMATS,
    LAYERS,
    NESTED,
    POOL,
    RANKS,
    SOURCE,
    TOKENS,
    decide,
    host_table,
    make_table,
    own_ids,
    random_step,
)
from vllm_dymoe.planner.constants import Action
from vllm_dymoe.planner.precision import Precision
from vllm_dymoe.planner.routing import Phase, Routing, group_by_expert
from vllm_dymoe.planner.rule import ABSENT, CPU, HIGH, HIT, LOW, STREAM
from vllm_dymoe.planner.table import CODES, Counter, check_integrity, set_pools
from vllm_dymoe.policies.dymoe import Dymoe


class Host:
    """The host's side: ``Policy.select``, and a table of its own."""

    def __init__(self, quotas, policy, skip_low, nested, experts=EXPERTS, costs=None):
        reuse_high = policy.precision.reuses_high
        self.table = host_table(quotas, experts, reuse_high=reuse_high, nested=nested, costs=costs)
        self.table.evicts[:] = policy.residency.evicts
        self.policy, self.skip_low = policy, skip_low
        self.counts = np.zeros((LAYERS, len(Counter)), np.int64)

    def step(self, layer, ids, weights, global_ids=None):
        """Return the active experts, their computed versions, and the actions.

        The actions are one list per slice if versions are nested, otherwise one list.
        """
        plan = self.policy.precision.select(
            Routing(layer, LAYERS, torch.empty(len(ids), 1), ids, weights, Phase.DECODE, global_ids=global_ids)
        )
        wanted = {
            expert: precision
            for expert, precision in plan.items()
            if not (self.skip_low and precision is Precision.LOW)
        }
        counts, nested = self.counts[layer], self.table.nested
        counts[Counter.STEPS] += 1
        counts[Counter.NEEDED_HIGH] += sum(precision is Precision.HIGH for precision in plan.values())
        counts[Counter.NEEDED_LOW] += sum(precision is Precision.LOW for precision in plan.values())
        counts[Counter.SKIPPED] += len(plan) - len(wanted)
        active, precisions = np.array([*wanted], np.int64), np.array([CODES[t] for t in wanted.values()], np.int8)
        before = self.table.precision[layer].copy()
        rows = np.array([int((ids == expert).sum()) for expert in wanted], np.int64)
        places = self.table.begin_step(layer, active, precisions, rows)
        hit, on_cpu = (places == HIT).all(0), (places == CPU).any(0)
        counts[Counter.CPU_EXECUTED] += np.count_nonzero(on_cpu)
        reused = hit & (before[active] != precisions) & bool(self.table.reuse_high[0])
        counts[Counter.HITS] += np.count_nonzero(hit)
        counts[Counter.REUSES] += np.count_nonzero(reused)
        counts[Counter.PROMOTIONS] += np.count_nonzero(
            ~hit & ~on_cpu & (precisions == HIGH) & (before[active] != ABSENT)
        )
        parts = [np.full(len(active), LOW), np.full(len(active), HIGH)] if nested else [precisions]
        for part, kinds in zip(places, parts, strict=True):
            for code, counter in ((HIGH, Counter.FETCHED_HIGH), (LOW, Counter.FETCHED_LOW)):
                counts[counter] += np.count_nonzero((part != HIT) & ~on_cpu & (kinds == code))
            counts[Counter.STREAMED] += np.count_nonzero(part == STREAM)
            counts[Counter.EVICTIONS] += np.count_nonzero(part >= 0)
        self.table.keep(layer, active, precisions, places)
        check_integrity(self.table)
        computed = np.where(reused, before[active], precisions)
        actions = np.array([[_action(place) for place in part] for part in places]).reshape(places.shape)
        if nested:  # a slice that is not computed counts as a hit
            actions[1, computed != HIGH] = Action.HIT
        return active.tolist(), computed.tolist(), actions.tolist()


def _action(place):
    return {HIT: Action.HIT, STREAM: Action.STREAM, CPU: Action.CPU}.get(place, Action.ADMIT)


def check_items(plan, ids, active, computed, action):
    """Check that items are the host's experts, in its order and with its positions."""
    count = int(plan.count)
    assert plan.experts[:count].tolist() == active
    assert plan.precisions[:count].tolist() == computed
    assert plan.action[:, :count].tolist() == action
    assert (plan.experts[count:] == -1).all()
    assert not plan.work[count:-1].any()
    grouped = group_by_expert(ids.numpy())
    for item, expert in enumerate(active):
        number, first, last = plan.work[item].tolist()
        assert number == item
        at = grouped.experts.index(expert)
        part = slice(grouped.bounds[at], grouped.bounds[at + 1])
        on_cpu = action[0][item] == Action.CPU
        assert (plan.computed.flatten()[grouped.pairs[part]] == 1 + on_cpu).all()
        if on_cpu:
            assert last == first
            last += part.stop - part.start
        assert plan.pairs[first:last].tolist() == grouped.pairs[part].tolist()
        assert plan.rows[first:last].tolist() == grouped.rows[part].tolist()
    named = torch.isin(ids, torch.tensor(active))
    assert torch.equal(plan.computed.bool(), named)


share = st.integers(0, EXPERTS)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, LAYERS - 1), st.integers(1, TOKENS), st.integers(0, 1 << 30)), max_size=30),
    st.lists(share, min_size=LAYERS, max_size=LAYERS),
    st.lists(share, min_size=LAYERS, max_size=LAYERS),
    st.sampled_from([0.0, 0.3, 0.75, 1.0]),
    st.sampled_from(["threshold", "depth"]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from(sorted(COSTS)),
    st.sampled_from(["coldest", "least recent", "first in"]),
    st.sampled_from(sorted(RANKS)),
)
def test_any_steps_give_the_rows_that_the_host_keeps(
    steps, low, high, retention, high_by, reuse_high, skip_low, nested, costs, evicts, rank
):
    quotas = {LOW: low, HIGH: high}
    policy = Dymoe(retention=retention, high_by=high_by, reuse_high=reuse_high, evicts=evicts)
    numbers, global_ids = RANKS[rank], None
    everywhere = 0 if numbers is None else len(numbers)
    options = {"skip_low": skip_low, "nested": nested, "costs": COSTS[costs], "all_experts": everywhere}
    table = make_table(quotas, policy=policy, **options)
    host = Host(quotas, policy, skip_low, nested, costs=COSTS[costs])
    for layer, tokens, seed in steps:
        ids, weights = random_step(seed, tokens, experts=everywhere or EXPERTS)
        if numbers is not None:
            ids, global_ids = own_ids(numbers, ids), ids
        plan = decide(table, layer, ids, weights, global_ids=global_ids)
        check_items(plan, ids, *host.step(layer, ids, weights, global_ids))
        check_integrity(table.on_host(), ranges=True)
        for name in ("precision", "slot", "score", "used_at", "step"):
            assert np.array_equal(getattr(table, name).numpy(), getattr(host.table, name))
    assert table.counters.tolist() == host.counts.tolist()


@pytest.mark.parametrize("high_by", ["threshold", "depth"])
@pytest.mark.parametrize("marked", [False, True])
def test_ranks_together_choose_what_one_with_all_experts_chooses(high_by, marked):
    """Choosing alone, eight ranks would keep one expert each high: .67 of the active ones at a retention of .25."""
    ranks, experts, policy = 8, 64, Dymoe(retention=0.25, high_by=high_by, reuse_high=False)
    own = experts // ranks
    (one,), each = (
        [
            make_table({LOW: [0, 0], HIGH: [0, 0]}, policy=policy, experts=held, top_k=8, all_experts=everywhere)
            for _ in range(count)
        ]
        for count, held, everywhere in ((1, experts, 0), (ranks, own, experts))
    )
    for seed in range(120):
        layer, tokens = seed % LAYERS, (1, 4, 6)[seed % 3]
        ids, weights = random_step(seed, tokens, 8, experts)
        marks = (torch.arange(tokens) % 3).to(torch.int8) if marked else None
        plan, found = decide(one, layer, ids, weights, marks=marks), {}
        for rank, table in enumerate(each):
            here = torch.where(ids // own == rank, ids % own, -1)
            of_rank = decide(table, layer, here, weights, marks=marks, global_ids=ids)
            found |= {own * rank + expert: code for expert, code in computed_by(of_rank).items()}
        assert found == computed_by(plan)
    for name in ("threshold", "prompt_threshold"):
        assert all(torch.equal(getattr(table, name), getattr(one, name)) for table in each)
    wanted = sum(table.counters[:, [Counter.NEEDED_HIGH, Counter.NEEDED_LOW]].sum(0) for table in each)
    if not marked:  # otherwise an expert is high if prompts or decoded tokens want it
        assert wanted[0] / wanted.sum() == pytest.approx(0.25, abs=0.05)


def computed_by(plan):
    """Return the version of each expert that a plan computes."""
    count = int(plan.count)
    return dict(zip(plan.experts[:count].tolist(), plan.precisions[:count].tolist(), strict=True))


def check_addresses(table, layer, plan, held):
    """Check that residents are read in place, and that fetches go to their slots.

    Returns pool and slot of everything that is read in place, and of everything that is written.
    """
    precision, slots = held
    read, written = [], []
    formats = NESTED if table.nested else FORMATS
    for item in range(int(plan.count)):
        expert, computed = int(plan.experts[item]), int(plan.precisions[item])
        assert plan.bits[item].tolist() == [matrix.encoding.tag for matrix in formats[computed].matrices]
        assert not table.nested or computed == HIGH or not plan.addresses[1, item].any()
        of_slices = zip(plan.action, plan.slots, plan.addresses, plan.destinations, strict=True)
        codes = (LOW, HIGH)[:computed] if table.nested else (computed,)
        for number, (code, (actions, to, addresses, destinations)) in enumerate(zip(codes, of_slices, strict=False)):
            offsets, action = [section.start for section in formats[code].sections], int(actions[item])
            source, destination = SOURCE[code] + (layer * table.experts + expert << 12), None
            if action == Action.HIT:
                place = int(slots[code][layer, expert])
                source = POOL[code] + (place << 12)
                assert precision[layer, expert] >= code if table.nested else precision[layer, expert] == code
                read.append((code, place))
            elif to[item] >= 0:
                assert action != Action.CPU
                destination = int(to[item])
                written.append((code, destination))
            assert (addresses[item] - source).tolist() == offsets
            if action == Action.ADMIT:
                assert (int(table.slot[number, layer, expert]), int(table.precision[layer, expert])) == (
                    destination,
                    max(code, table.precision[layer, expert]),
                )
            target = [0] * 3 if destination is None else [POOL[code] + (destination << 12) + start for start in offsets]
            assert destinations[item].tolist() == target
    return read, written


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 1 << 30), min_size=1, max_size=12), st.integers(0, 4), st.integers(0, 3), st.booleans(),
       st.sampled_from(sorted(COSTS)))  # fmt: skip
def test_addresses_are_those_of_the_rows(seeds, share, staging, nested, costs):
    quotas = {LOW: [share] * LAYERS, HIGH: [share] * LAYERS}
    table = make_table(quotas, staging=staging, nested=nested, costs=COSTS[costs])
    for seed in seeds:
        layer = seed % LAYERS
        held = table.precision.clone(), {LOW: table.slot[0].clone(), HIGH: table.slot[-1].clone()}
        read, written = check_addresses(table, layer, decide(table, layer, *random_step(seed)), held)
        assert len(set(written)) == len(written)
        assert not set(read) & set(written)


def test_an_expert_with_more_positions_than_are_multiplied_at_once_is_streamed_through_a_staging_slot():
    table = make_table({LOW: [0] * LAYERS, HIGH: [0] * LAYERS}, policy=Dymoe(retention=1), staging=1)
    ids = torch.tensor([[0, 1, 2], [0, 1, 3], [0, 1, 4]])
    plan = decide(table, 0, ids, torch.ones(3, 3))
    assert plan.slots[0, :5].tolist() == [0, -1, -1, -1, -1]
    assert plan.action[0, :5].tolist() == [Action.STREAM] * 5
    assert not table.precision.any()


def test_shares_that_a_pool_does_not_have_are_refused():
    table = make_table({LOW: [0, 0], HIGH: [6, 6]})
    with pytest.raises(ValueError, match=r"13 slots.* 12"):
        set_pools(table, {HIGH: [(0, 1, 12)]}, {HIGH: [6, 7]})
    with pytest.raises(ValueError, match="13 of its 12 experts"):
        set_pools(table, {HIGH: [(0, 1, 13)]}, {HIGH: [13, 0]})


def test_no_more_rows_are_tokens_than_a_layer_has():
    """A draft's later passes replay with the step's token count, which may be larger."""
    tables = [make_table({LOW: [2, 2], HIGH: [2, 2]}) for _ in range(2)]
    ids, weights = random_step(1, 3)
    plans = [decide(table, 0, ids, weights, real=real) for table, real in zip(tables, (3, 7), strict=True)]
    for one, other in ((plans[0].tensors, plans[1].tensors), *[map(vars, tables)]):
        assert all(torch.equal(values, other[name]) for name, values in one.items())


def test_weights_of_skipped_experts_go_to_the_tokens_others_where_that_is_asked_for():
    policy = Dymoe(retention=0.5, high_by="equal", skipped_weights="renormalize")
    table = make_table({LOW: [0, 0], HIGH: [3, 3]}, policy=policy, skip_low=True)
    ids, weights = torch.tensor([[0, 1, 2], [3, -1, 0], [4, 5, 6]]), torch.tensor([[0.5, 0.25, 0.25]] * 3)
    weights[2] = torch.tensor([0.125, 0.125, 0.125])
    plan = decide(table, 0, ids, weights)
    computed = plan.computed > 0
    assert computed.tolist() == [[True, True, True], [True, False, True], [False, False, False]]
    assert plan.weights[:2].tolist() == weights[:2].tolist(), "another rank's expert keeps its weight"
    lighter = weights.index_put((torch.tensor(0), torch.tensor(2)), torch.tensor(0.0625))
    plan = decide(table, 1, torch.tensor([[0, 1, 2], [3, -1, 0], [4, 5, 7]]), lighter)
    assert plan.computed[0].tolist() == [1, 1, 0]
    assert plan.weights[0, :2].sum() == pytest.approx(float(lighter[0].sum()), rel=1e-6)
    table.renormalizes.fill_(0)
    plan = decide(table, 1, torch.tensor([[0, 1, 2], [3, -1, 0], [4, 5, 7]]), lighter)
    assert torch.equal(plan.weights, lighter)


def test_a_step_without_rows_changes_nothing():
    table = make_table({LOW: [2, 2], HIGH: [2, 2]})
    decide(table, 0, *random_step(1))
    before = {name: value.clone() for name, value in vars(table).items()}
    plan = decide(table, 0, *random_step(2), real=0)
    assert all(torch.equal(value, before[name]) for name, value in vars(table).items())
    assert not any(values.any() for values in (plan.count, plan.work[:-1], plan.computed))


def test_the_ring_holds_the_last_plans():
    table = make_table({LOW: [0, 0], HIGH: [1, 1]}, depth=2)
    decide(table, 1, *random_step(0))
    assert not table.ring_rows.any()
    table.recording.fill_(1)
    for step in (2, 3):
        ids, weights = random_step(step)
        decide(table, 1, ids, weights, real=step)
        at = step % 2
        assert table.ring_rows[at].tolist() == [0, step]
        assert torch.equal(table.ring_ids[at, 1, :step].long(), ids[:step])
        assert torch.equal(table.ring_weights[at, 1, :step], weights[:step])


def test_a_snapshot_for_the_host():
    policy = Dymoe(retention=1)
    table = make_table({LOW: [0, 0], HIGH: [3, 3]}, policy=policy)
    for seed in range(6):
        decide(table, seed % 2, *random_step(seed))
    host = host_table({LOW: [0, 0], HIGH: [3, 3]})
    host.copy_rows(table)
    check_integrity(host, ranges=True)
    assert (host.precision == HIGH).sum() == 6
    assert host.step.tolist() == [3, 3]
    before = host.score.copy()
    table.clear()
    assert not table.precision.any()
    table.copy_rows(host)
    for name in ("precision", "slot", "score", "used_at", "step"):
        assert np.array_equal(getattr(host, name), getattr(table, name))
    table.score.zero_()
    assert np.array_equal(host.score, before), "a copy is no view"
