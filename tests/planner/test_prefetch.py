"""Where predicted experts are copied, and how the next layer's plan uses them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.decode_steps import EXPERTS, LAYERS, POOL, SOURCE, decide, make_table, random_step, rows
from vllm_dymoe.planner.constants import PROJECTIONS, Action
from vllm_dymoe.planner.prefetch import (
    PredictionCount,
    PrefetchList,
    judge_predicted,
    list_predicted,
    prefetch_slots,
    publish,
    set_prefetch,
)
from vllm_dymoe.planner.rule import ABSENT, HIGH, LOW
from vllm_dymoe.planner.table import Counter
from vllm_dymoe.policies.dymoe import Dymoe


def predict(table, layer, experts, code=HIGH):
    table.predicted[:, layer] = -1
    table.predicted[0, layer, : len(experts)] = torch.tensor(experts, dtype=torch.int32)
    table.predicted[1, layer] = code


def listed(table, layer, projections=PROJECTIONS, real=1):
    out = PrefetchList.allocate(table.experts, "cpu", layers=LAYERS, slices=1 + table.nested)
    list_predicted(table, layer, rows(real), projections, out)
    return out, out.copies[: int(out.count)]


def made(staging=4, quota=0):
    table = make_table({LOW: [quota] * LAYERS, HIGH: [quota] * LAYERS}, policy=Dymoe(retention=1), staging=staging)
    set_prefetch(table, {HIGH: staging})
    return table


@settings(max_examples=60, deadline=None)
@given(st.permutations(range(EXPERTS)), st.integers(0, EXPERTS), st.integers(0, 9), st.integers(0, 4),
       st.integers(1, PROJECTIONS))  # fmt: skip
def test_copies_are_of_experts_that_the_layer_lacks_into_slots_that_no_layer_keeps(
    order, named, staging, quota, projections
):
    table = made(staging, quota)
    for seed in range(4):
        decide(table, 1, *random_step(seed))
    predict(table, 1, order[:named])
    _, copies = listed(table, 1, projections)
    lacking = [expert for expert in order[:named] if table.precision[1, expert] == ABSENT]
    assert (copies[::projections, 3] - 5 * EXPERTS).tolist() == lacking[: prefetch_slots(staging)]
    first, ends = int(table.staging[0, HIGH, 0]), [*table.offsets[0, HIGH].tolist(), 1 << 12]
    for number, (source, destination, size, place, arrived) in enumerate(copies.tolist()):
        expert, begin = place - 5 * EXPERTS, ends[number % projections]
        assert source == SOURCE[HIGH] + (table.experts + expert << 12) + begin
        assert destination == POOL[HIGH] + (first + number // projections << 12) + begin
        assert size == ends[number % projections + 1] - begin
        assert arrived == number % projections + 1
    assert not table.staged[1, 0, 2].any(), "nothing has arrived"


def test_what_has_arrived_is_read_from_its_slot_and_what_has_not_from_the_store():
    table = made()
    ids, weights = torch.tensor([[3, 5, 7]]), torch.ones(1, 3)
    predict(table, 1, [7, 3, 9])
    listed(table, 1)
    publish(table, 5 * EXPERTS + 3, PROJECTIONS)
    publish(table, 5 * EXPERTS + 9, PROJECTIONS)
    plan = decide(table, 1, ids, weights)
    offsets = table.offsets[1, HIGH]
    assert (plan.addresses[0, 0] - offsets).tolist() == [POOL[HIGH] + (1 << 12)] * 3
    for item, expert in ((1, 5), (2, 7)):
        assert (plan.addresses[0, item] - offsets).tolist() == [SOURCE[HIGH] + (table.experts + expert << 12)] * 3
    assert plan.action[0, :3].tolist() == [Action.STREAM] * 3
    counts = table.counters[1]
    assert counts[[Counter.AHEAD, Counter.AHEAD_USED]].tolist() == [2, 1]
    assert counts[[Counter.AHEAD_BYTES, Counter.AHEAD_USED_BYTES]].tolist() == [2 << 12, 1 << 12]
    assert counts[[Counter.LATE, Counter.CANCELLED]].tolist() == [1, 0]
    predict(table, 1, [4, 5])
    listed(table, 1)
    decide(table, 1, ids, weights)
    assert counts[[Counter.LATE, Counter.CANCELLED]].tolist() == [2, 1], "5 was needed, 4 was not"


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("arrived", range(PROJECTIONS + 1))
def test_the_cpu_is_left_what_still_has_to_cross_the_link(nested, arrived):
    """The CPU executes one of two misses, unless the link would finish both sooner.

    What has arrived of the other miss no longer counts as link time.
    """
    costs = [[0] * 4, [0, 0, 0, 64], [60, 90, 0, 64]]
    options = {"policy": Dymoe(retention=1), "staging": 4, "nested": nested, "costs": costs}
    table = make_table({LOW: [0] * LAYERS, HIGH: [0] * LAYERS}, **options)
    set_prefetch(table, {LOW: 4, HIGH: 4})
    predict(table, 1, [3])
    _, copies = listed(table, 1)
    for place in {*copies[:, 3].tolist()}:
        publish(table, place, arrived)
    plan = decide(table, 1, torch.tensor([[3, 5, -1]]), torch.ones(1, 3))
    left = 60 * (PROJECTIONS - arrived) // PROJECTIONS
    on_cpu = plan.action[0, :2] == Action.CPU
    assert bool(on_cpu.any()) == (left + 60 > 90), "it is faster than the link"
    assert not on_cpu[0] or arrived < PROJECTIONS, "what is there is never computed elsewhere"


@pytest.mark.parametrize("real", [0, 1])
def test_what_has_arrived_counts_for_one_plan(real):
    """Afterwards the slots belong to the next layer, with or without tokens."""
    table = made()
    predict(table, 1, [3])
    listed(table, 1)
    publish(table, 5 * EXPERTS + 3, PROJECTIONS)
    ids, weights = torch.tensor([[3, 5, 7]]), torch.ones(1, 3)
    decide(table, 1, ids, weights, real=real)
    plan = decide(table, 1, ids, weights)
    assert int(plan.addresses[0, 0, 0] - table.offsets[0, HIGH, 0]) == SOURCE[HIGH] + (table.experts + 3 << 12)


def test_nothing_is_listed_without_tokens_or_without_slots():
    table = made()
    predict(table, 1, [3, 4])
    assert len(listed(table, 1)[1]) == 2 * PROJECTIONS
    assert not len(listed(table, 1, real=0)[1])
    set_prefetch(table, {})
    assert not len(listed(table, 1)[1])


def test_experts_of_several_tokens_stream_through_the_other_slots():
    table = made(staging=4)
    ids = torch.tensor([[0, 1, 2], [0, 1, 3], [0, 1, 4]])
    plan = decide(table, 0, ids, torch.ones(3, 3))
    assert plan.slots[0, :2].tolist() == [3, -1], "three of the four are for predictions"
    set_prefetch(table, {})
    assert decide(table, 0, ids, torch.ones(3, 3)).slots[0, :2].tolist() == [0, 1]


def test_a_nested_version_is_fetched_as_the_slices_that_it_lacks():
    table = make_table({LOW: [2] * LAYERS, HIGH: [1] * LAYERS}, policy=Dymoe(retention=1), staging=4, nested=True)
    set_prefetch(table, {LOW: 4, HIGH: 4})
    table.precision[1, 5], table.slot[0, 1, 5] = LOW, int(table.first_slot[1, LOW])
    predict(table, 1, [5, 7])
    _, copies = listed(table, 1)
    base, residual = 8 * EXPERTS, 11 * EXPERTS
    assert copies[::PROJECTIONS, 3].tolist() == [residual + 5, base + 7, residual + 7]
    for place in (residual + 5, base + 7):
        publish(table, place, PROJECTIONS)
    plan = decide(table, 1, torch.tensor([[5, 7, 9]]), torch.ones(1, 3))
    first = {code: int(table.staging[1, code, 0]) for code in (LOW, HIGH)}
    found = plan.addresses[:, :2, 0] - table.offsets[1, 1:, :1]
    assert found[0, 1] == POOL[LOW] + (first[LOW] << 12), "the base of 7"
    assert found[1, 0] == POOL[HIGH] + (first[HIGH] << 12), "the residual slice of 5"
    assert found[1, 1] == SOURCE[HIGH] + (table.experts + 7 << 12), "that of 7 has not arrived"
    assert table.counters[1, [Counter.AHEAD, Counter.AHEAD_USED]].tolist() == [2, 2]


def test_predictions_are_judged_by_what_the_router_chose():
    table = made(quota=2)
    table.precision[1, 4], table.slot[0, 1, 4] = HIGH, int(table.first_slot[1, HIGH])
    predict(table, 1, [4, 3, 9])
    out, _ = listed(table, 1)
    ids = torch.tensor([[3, 4, -1], [3, 5, 6], [9, 9, 9]])
    judge_predicted(table, 1, ids, rows(2), out)
    judge_predicted(table, 1, ids, rows(0), out)
    named = {count.name: int(out.counts[1, count]) for count in PredictionCount}
    assert named == {"ASKED": 1, "PREDICTED": 3, "NEEDED": 4, "CORRECT": 2, "HELD": 1, "UNUSED": 1}
    assert not out.counts[0].any()


def test_what_came_for_the_second_next_layer_stays_when_it_is_the_next():
    table = made(staging=4)  # three slots are for predictions
    first, out = int(table.staging[0, HIGH, 0]), PrefetchList.allocate(table.experts, "cpu", layers=LAYERS)
    predict(table, 0, [1, 2])
    predict(table, 1, [5, 6, 7])
    list_predicted(table, 0, rows(1), PROJECTIONS, out, 2)
    odd = 5 * EXPERTS
    each = slice(0, int(out.count), PROJECTIONS)
    assert out.copies[each, 3].tolist() == [2 * EXPERTS + 1, 2 * EXPERTS + 2, odd + 5], "the next one first"
    assert table.staged_for.tolist() == [0, 1]
    publish(table, odd + 5, PROJECTIONS)
    predict(table, 1, [6, 5, 8])
    list_predicted(table, 1, rows(1), PROJECTIONS, out, 2)
    each = slice(0, int(out.count), PROJECTIONS)
    assert out.copies[each, 3].tolist() == [odd + 6, odd + 8], "5 is there"
    slots = [int(copy[1] - POOL[HIGH]) >> 12 for copy in out.copies[each]]
    assert slots == [first, first + 1], "it keeps its slot, the third one"
    plan = decide(table, 1, torch.tensor([[5, 6, 9]]), torch.ones(1, 3))
    assert int(plan.addresses[0, 0, 0] - table.offsets[1, HIGH, 0]) == POOL[HIGH] + (first + 2 << 12)
