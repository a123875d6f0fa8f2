"""The table's rows, and the slots that they point to."""

import numpy as np
import pytest
import torch

from tests.support.decode_steps import host_table
from vllm_dymoe.cache.slots import Arena, SlotPool
from vllm_dymoe.experts.encoding import encoding_of
from vllm_dymoe.experts.format import ExpertFormat
from vllm_dymoe.planner.precision import Precision
from vllm_dymoe.planner.rule import HIGH, LOW
from vllm_dymoe.planner.table import check_integrity, coldest_of, layer_quotas

FORMAT = ExpertFormat(64, 64, encoding_of(4), 32, torch.bfloat16)


def test_shares_are_what_staging_leaves_and_follow_the_weights_up_to_what_a_layer_can_use():
    assert layer_quotas(10, [1, 1, 1], 2, 8) == [3, 3, 2]
    assert layer_quotas(2, [1, 1, 1], 2, 8) == [0, 0, 0]
    assert layer_quotas(1, [1, 1, 1], 2, 8) == [0, 0, 0]
    assert layer_quotas(11, [1, 0.75, 0.5, 0], 2, 8) == [4, 3, 2, 0]
    assert layer_quotas(12, [1, 0.5, 0.5], 0, 4) == [4, 4, 4]
    assert layer_quotas(40, [1, 0.5, 0], 2, 8) == [8, 8, 0]
    assert layer_quotas(6, [0, 0], 0, 8) == [0, 0]


def used(high, *experts, **options):
    table = host_table({HIGH: [high], LOW: [high]}, 6, **options)
    for expert in experts:
        table.begin_step(0, np.array([expert]), np.array([HIGH], np.int8))
    return table


def test_the_coldest_of_those_that_are_not_spared():
    table = used(3, 0, 1, 1, 2, 2, 2)
    for expert in range(3):
        table.publish(0, expert, Precision.HIGH, expert)
    assert coldest_of(table, 0, Precision.HIGH, set()) == 0
    assert coldest_of(table, 0, Precision.HIGH, {0}) == 1
    assert coldest_of(table, 0, Precision.HIGH, {0, 1, 2}) is None
    assert coldest_of(table, 0, Precision.LOW, set()) is None
    table.clear()
    assert not table.precision.any()
    assert not table.score.any()


def test_a_row_too_many_is_found():
    table = used(1)
    table.publish(0, 0, Precision.HIGH, 0)
    with pytest.raises(AssertionError, match="would be held twice"):
        table.publish(0, 0, Precision.HIGH, 5)
    check_integrity(table, ranges=True)
    table.publish(0, 1, Precision.HIGH, 6)
    with pytest.raises(AssertionError, match="layers keep"):
        check_integrity(table)
    table = used(2)
    table.publish(0, 0, Precision.HIGH, 4)
    with pytest.raises(AssertionError, match="another layer"):
        check_integrity(table, ranges=True)
    table.publish(0, 1, Precision.HIGH, 4)
    with pytest.raises(AssertionError, match="name one slot"):
        check_integrity(table)


def test_a_fine_slice_needs_its_base():
    table = used(2, nested=True)
    with pytest.raises(AssertionError, match="base of expert 3"):
        table.publish(0, 3, Precision.HIGH, 0)
    table.publish(0, 3, Precision.LOW, 1)
    table.publish(0, 3, Precision.HIGH, 0)
    assert (table.slots(Precision.LOW), table.slots(Precision.HIGH)) == ([1], [0])
    assert table.remove(0, 3, residual=True) == [(Precision.HIGH, 0)]
    assert table.remove(0, 3) == [(Precision.LOW, 1)]
    assert table.remove(0, 3) == []


def pool_of(count, reserved, **options):
    return SlotPool(FORMAT, [Arena(count * FORMAT.nbytes)], reserved, **options)


def test_what_layers_were_reserved_is_not_lent():
    pool = pool_of(5, reserved=3)
    first, second = pool.take(kept=False), pool.take(kept=False)
    assert pool.take(kept=False) is None, "the layers' own slots are not to be taken"
    kept = [pool.take(kept=True) for _ in range(3)]
    assert None not in kept
    assert pool.take(kept=True) is None
    pool.give_back(first, kept=False)
    assert pool.take(kept=False) is first
    pool.give_back(kept[0], kept=True)
    assert pool.take(kept=False) is None, "it is promised again"
    assert pool.take(kept=True) is kept[0]
    pool.give_back(second, kept=False)


def test_a_borrowed_slot_that_is_kept_makes_another_one_free():
    pool = pool_of(2, reserved=1)
    slot = pool.take(kept=False)
    assert slot
    assert pool.take(kept=False) is None
    pool.keep(slot)
    assert pool.take(kept=False)


def test_a_pool_that_lends_gives_reserved_slots_to_what_is_streamed():
    pool = pool_of(3, reserved=2, lends=True)
    slots = [pool.take(kept=False) for _ in range(3)]
    assert None not in slots
    pool.keep(slots[0])
    assert pool.reserved == 1
    assert pool.take(kept=True) is None
    pool.give_back(slots[0], kept=True)
    assert (pool.reserved, pool.free) == (2, 1)


def test_merged_pools_number_their_slots_on():
    one, other = pool_of(2, reserved=1), pool_of(3, reserved=2)
    slots = one.slots + other.slots
    one.merge(other, [0])
    assert one.slots == slots
    assert (one.count, one.reserved, one.free, one.nbytes) == (5, 3, 5, 5 * FORMAT.nbytes)
    one.check_integrity([])


def test_integrity_finds_a_lost_slot():
    pool = pool_of(3, reserved=0)
    slot = pool.take(kept=False)
    pool.check_integrity([slot.index])
    with pytest.raises(AssertionError, match="lost or doubled"):
        pool.check_integrity([])
    pool._free[0].append(slot)
    with pytest.raises(AssertionError, match="lost or doubled"):
        pool.check_integrity([slot.index])
