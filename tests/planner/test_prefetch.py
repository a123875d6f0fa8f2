"""Where predicted experts are copied, and how the next layer's plan uses them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.decode_steps import EXPERTS, LAYERS, POOL, SOURCE, decide, make_table, random_step, rows
from vllm_dymoe.planner.constants import Action
from vllm_dymoe.planner.prefetch import PrefetchList, list_predicted, prefetch_slots, publish, set_prefetch
from vllm_dymoe.planner.rule import ABSENT, HIGH, LOW
from vllm_dymoe.planner.small_batch import PROJECTIONS
from vllm_dymoe.planner.table import Counter
from vllm_dymoe.policies.dymoe import Dymoe


def predict(table, layer, experts, code=HIGH):
    table.predicted[:, layer] = -1
    table.predicted[0, layer, : len(experts)] = torch.tensor(experts, dtype=torch.int32)
    table.predicted[1, layer] = code


def listed(table, layer, projections=PROJECTIONS, real=1):
    out = PrefetchList.allocate(table.experts, "cpu")
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
    assert copies[:, 3].tolist() == lacking[: prefetch_slots(staging)]
    first, nbytes = (
        int(table.staging[HIGH, 0]),
        1 << 12 if projections == PROJECTIONS else int(table.offsets[HIGH, projections]),
    )
    for number, (source, destination, size, expert) in enumerate(copies.tolist()):
        assert source == SOURCE[HIGH] + (table.experts + expert << 12)
        assert destination == POOL[HIGH] + (first + number << 12)
        assert size == nbytes
    assert not table.staged[1, 2].any(), "nothing has arrived"


def test_what_has_arrived_is_read_from_its_slot_and_what_has_not_from_the_store():
    table = made()
    ids, weights = torch.tensor([[3, 5, 7]]), torch.ones(1, 3)
    predict(table, 1, [7, 3, 9])
    listed(table, 1)
    publish(table, 1, 3, PROJECTIONS)
    publish(table, 1, 9, PROJECTIONS)
    plan = decide(table, 1, ids, weights)
    offsets = table.offsets[HIGH]
    assert (plan.addresses[0, 0] - offsets).tolist() == [POOL[HIGH] + (1 << 12)] * 3
    for item, expert in ((1, 5), (2, 7)):
        assert (plan.addresses[0, item] - offsets).tolist() == [SOURCE[HIGH] + (table.experts + expert << 12)] * 3
    assert plan.action[0, :3].tolist() == [Action.STREAM] * 3
    counts = table.counters[1]
    assert counts[[Counter.AHEAD, Counter.AHEAD_USED]].tolist() == [2, 1]
    assert counts[[Counter.AHEAD_BYTES, Counter.AHEAD_USED_BYTES]].tolist() == [2 << 12, 1 << 12]


@pytest.mark.parametrize("real", [0, 1])
def test_what_has_arrived_counts_for_one_plan(real):
    """After that its slots belong to the next layer, with or without tokens."""
    table = made()
    predict(table, 1, [3])
    listed(table, 1)
    publish(table, 1, 3, PROJECTIONS)
    ids, weights = torch.tensor([[3, 5, 7]]), torch.ones(1, 3)
    decide(table, 1, ids, weights, real=real)
    plan = decide(table, 1, ids, weights)
    assert int(plan.addresses[0, 0, 0] - table.offsets[HIGH, 0]) == SOURCE[HIGH] + (table.experts + 3 << 12)


def test_nothing_is_listed_without_tokens_or_without_slots():
    table = made()
    predict(table, 1, [3, 4])
    assert len(listed(table, 1)[1]) == 2
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
