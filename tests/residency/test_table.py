"""The table's rows and the slots that they name."""

import numpy as np
import pytest
import torch

from tests.support.decode_steps import host_table
from vllm_dymoe.residency.code import code_of
from vllm_dymoe.residency.format import Format
from vllm_dymoe.residency.rule import HIGH, LOW
from vllm_dymoe.residency.slots import SlotPool
from vllm_dymoe.residency.table import check_integrity, coldest_of, layer_shares
from vllm_dymoe.residency.tier import Tier

CPU = torch.device("cpu")
FORMAT = Format(64, 64, code_of(4), 32, torch.bfloat16)


def test_shares_are_what_staging_leaves_and_follow_the_weights_up_to_what_a_layer_can_use():
    assert layer_shares(10, [1, 1, 1], 2, 8) == [3, 3, 2]
    assert layer_shares(2, [1, 1, 1], 2, 8) == [0, 0, 0]
    assert layer_shares(1, [1, 1, 1], 2, 8) == [0, 0, 0]
    assert layer_shares(11, [1, 0.75, 0.5, 0], 2, 8) == [4, 3, 2, 0]
    assert layer_shares(12, [1, 0.5, 0.5], 0, 4) == [4, 4, 4]
    assert layer_shares(40, [1, 0.5, 0], 2, 8) == [8, 8, 0]
    assert layer_shares(6, [0, 0], 0, 8) == [0, 0]


def used(hi, *experts, **options):
    table = host_table({HIGH: [hi], LOW: [hi]}, 6, **options)
    for expert in experts:
        table.begin_step(0, np.array([expert]), np.array([HIGH], np.int8))
    return table


def test_the_coldest_of_those_that_are_not_spared():
    table = used(3, 0, 1, 1, 2, 2, 2)
    for expert in range(3):
        table.publish(0, expert, Tier.HI, expert)
    assert coldest_of(table, 0, Tier.HI, set()) == 0
    assert coldest_of(table, 0, Tier.HI, {0}) == 1
    assert coldest_of(table, 0, Tier.HI, {0, 1, 2}) is None
    assert coldest_of(table, 0, Tier.LO, set()) is None
    table.clear()
    assert not table.tier.any()
    assert not table.heat.any()


def test_a_row_too_many_is_found():
    table = used(1)
    table.publish(0, 0, Tier.HI, 0)
    with pytest.raises(AssertionError, match="would be there twice"):
        table.publish(0, 0, Tier.HI, 5)
    check_integrity(table, ranges=True)
    table.publish(0, 1, Tier.HI, 6)
    with pytest.raises(AssertionError, match="layers keep"):
        check_integrity(table)
    table = used(2)
    table.publish(0, 0, Tier.HI, 4)
    with pytest.raises(AssertionError, match="another layer"):
        check_integrity(table, ranges=True)
    table.publish(0, 1, Tier.HI, 4)
    with pytest.raises(AssertionError, match="name one slot"):
        check_integrity(table)


def test_a_fine_slice_needs_its_base():
    table = used(2, nested=True)
    with pytest.raises(AssertionError, match="base of expert 3"):
        table.publish(0, 3, Tier.HI, 0)
    table.publish(0, 3, Tier.LO, 1)
    table.publish(0, 3, Tier.HI, 0)
    assert (table.slots(Tier.LO), table.slots(Tier.HI)) == ([1], [0])
    assert table.remove(0, 3, fine=True) == [(Tier.HI, 0)]
    assert table.remove(0, 3) == [(Tier.LO, 1)]
    assert table.remove(0, 3) == []


def test_what_layers_were_promised_is_not_lent():
    pool = SlotPool(FORMAT, 5, CPU, promised=3)
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
    pool = SlotPool(FORMAT, 2, CPU, promised=1)
    assert pool.take(kept=False)
    assert pool.take(kept=False) is None
    pool.keep()
    assert pool.take(kept=False)


def test_integrity_finds_a_lost_slot():
    pool = SlotPool(FORMAT, 3, CPU, promised=0)
    slot = pool.take(kept=False)
    pool.check_integrity([slot.index])
    with pytest.raises(AssertionError, match="lost or doubled"):
        pool.check_integrity([])
    pool._free.append(slot)
    with pytest.raises(AssertionError, match="lost or doubled"):
        pool.check_integrity([slot.index])
