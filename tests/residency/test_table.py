"""The table and its slots: who is where, against a naive model of a layer's steps."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_dymoe.residency.code import code_of
from vllm_dymoe.residency.format import Format
from vllm_dymoe.residency.rule import FREE, HIGH, HIT, LOW, STREAM
from vllm_dymoe.residency.slots import SlotPool
from vllm_dymoe.residency.table import CODES, ResidencyTable, layer_shares
from vllm_dymoe.residency.tier import Tier

CPU = torch.device("cpu")
FORMAT = Format(64, 64, code_of(4), 32, torch.bfloat16)


def test_shares_are_what_staging_leaves():
    assert layer_shares(10, [1, 1, 1], 2, 8) == [3, 3, 2]
    assert layer_shares(2, [1, 1, 1], 2, 8) == [0, 0, 0]
    assert layer_shares(1, [1, 1, 1], 2, 8) == [0, 0, 0]


def test_shares_follow_the_weights_up_to_what_a_layer_can_use():
    assert layer_shares(11, [1, 0.75, 0.5, 0], 2, 8) == [4, 3, 2, 0]
    assert layer_shares(12, [1, 0.5, 0.5], 0, 4) == [4, 4, 4]
    assert layer_shares(40, [1, 0.5, 0], 2, 8) == [8, 8, 0]
    assert layer_shares(6, [0, 0], 0, 8) == [0, 0]


def step(table, layer, wanted):
    """What the rule says of each expert; rows follow it, and every copy arrives."""
    active = np.array(sorted(wanted), dtype=np.int64)
    codes = np.array([HIGH if wanted[expert] is Tier.HI else LOW for expert in sorted(wanted)], dtype=np.int8)
    places = table.begin_step(layer, active, codes).tolist()
    for expert, place in zip(active.tolist(), places, strict=True):
        if place >= 0:
            assert table.remove(layer, place)
        if place not in (HIT, STREAM):
            table.remove(layer, expert)
            table.publish(layer, expert, wanted[expert], 1000 * layer + 10 * expert + (wanted[expert] is Tier.HI))
    return dict(zip(active.tolist(), places, strict=True))


def high(*experts):
    return dict.fromkeys(experts, Tier.HI)


def low(*experts):
    return dict.fromkeys(experts, Tier.LO)


def make(hi=(3,), lo=(0,), experts=16, **options):
    return ResidencyTable(experts, {Tier.HI: hi, Tier.LO: lo}, **options)


def test_the_coldest_expert_of_the_layer_goes_and_not_the_one_that_was_used_longest_ago():
    table = make(hi=(3,))
    for expert in (0, 0, 0, 1, 2, 2):
        step(table, 0, high(expert))
    assert step(table, 0, high(3)) == {3: 1}
    assert table.residents(Tier.HI) == {(0, 0), (0, 2), (0, 3)}


def test_an_expert_colder_than_all_that_are_kept_is_streamed():
    table = make(hi=(2,))
    for expert in (0, 0, 0, 1, 1, 1):
        step(table, 0, high(expert))
    assert step(table, 0, high(2)) == {2: STREAM}
    step(table, 0, high(2))  # a second use makes it hotter than expert 0, which was not used for four steps
    step(table, 0, high(2))
    assert table.residents(Tier.HI) == {(0, 1), (0, 2)}


def test_a_step_that_needs_more_than_the_layer_may_keep_leaves_what_is_kept_alone():
    table = make(hi=(3,))
    step(table, 0, high(0, 1))
    assert step(table, 0, high(*range(2, 10))) == {2: FREE, **dict.fromkeys(range(3, 10), STREAM)}
    assert table.residents(Tier.HI) == {(0, 0), (0, 1), (0, 2)}


def test_what_a_step_uses_is_not_evicted_by_the_same_step():
    table = make(hi=(2,))
    step(table, 0, high(0, 1))
    for _ in range(3):
        step(table, 0, high(1))
    assert step(table, 0, high(0, 2)) == {0: HIT, 2: STREAM}, "0 is coldest, but it is read"


def test_a_layer_never_loses_an_expert_to_another_layer():
    table = make(hi=(2, 2), lo=(0, 0))
    step(table, 0, high(0, 1))
    for expert in range(16):
        step(table, 1, high(expert))
    assert {(0, 0), (0, 1)} <= table.residents(Tier.HI)


def test_promotion_replaces_the_low_version_and_conservative_reuse_keeps_the_high_one():
    table = make(hi=(2,), lo=(2,))
    assert step(table, 0, low(0)) == {0: FREE}
    assert step(table, 0, high(0)) == {0: FREE}
    assert (table.residents(Tier.HI), table.residents(Tier.LO)) == ({(0, 0)}, set())
    assert step(table, 0, low(0)) == {0: HIT}
    table = make(hi=(2,), lo=(2,), reuse_high=False)
    step(table, 0, high(0))
    assert step(table, 0, low(0)) == {0: FREE}
    assert (table.residents(Tier.HI), table.residents(Tier.LO)) == (set(), {(0, 0)})


def test_a_promotion_that_is_streamed_keeps_the_low_version():
    table = make(hi=(1,), lo=(2,))
    for _ in range(3):
        step(table, 0, high(1))
    step(table, 0, low(0))
    assert step(table, 0, high(0)) == {0: STREAM}
    assert table.residents(Tier.LO) == {(0, 0)}


def test_a_slot_that_a_promotion_frees_is_used_in_the_same_step():
    table = make(hi=(1,), lo=(1,))
    step(table, 0, low(0))
    assert step(table, 0, {0: Tier.HI, 1: Tier.LO}) == {0: FREE, 1: FREE}


def test_whoever_is_forgotten_was_never_used():
    table = make(hi=(2,))
    for expert in (0, 0, 0, 1):
        step(table, 0, high(expert))
    with pytest.raises(AssertionError, match="still names slots"):
        table.forget()
    for expert in (0, 1):
        table.remove(0, expert)
    table.forget()
    for expert in (0, 1, 2):  # all of them cold: the one that was used longest ago makes room
        step(table, 0, high(expert))
    assert table.residents(Tier.HI) == {(0, 1), (0, 2)}


def test_the_coldest_of_those_that_are_not_spared():
    table = make(hi=(3,))
    for expert in (0, 1, 1, 2, 2, 2):
        step(table, 0, high(expert))
    assert table.coldest(0, Tier.HI, set()) == 0
    assert table.coldest(0, Tier.HI, {0}) == 1
    assert table.coldest(0, Tier.HI, {0, 1, 2}) is None
    assert table.coldest(0, Tier.LO, set()) is None


STEPS = st.lists(
    st.tuples(st.integers(0, 1), st.dictionaries(st.integers(0, 5), st.sampled_from([Tier.HI, Tier.LO]), min_size=1)),
    max_size=30,
)


@settings(max_examples=300, deadline=None)
@given(
    STEPS,
    st.tuples(st.integers(0, 3), st.integers(0, 3)),
    st.tuples(st.integers(0, 3), st.integers(0, 3)),
    st.booleans(),
)
def test_any_steps_keep_every_invariant(steps, hi, lo, reuse_high):
    """Against the rule read expert by expert, as a person would."""
    table = ResidencyTable(6, {Tier.HI: hi, Tier.LO: lo}, reuse_high=reuse_high)
    held = [{}, {}]
    for layer, wanted in steps:
        places = step(table, layer, wanted)
        table.check_integrity()
        heat, used_at, mine = table.heat[layer], table.used_at[layer], held[layer]
        serves = lambda has, tier: has is tier or (reuse_high and has is Tier.HI)  # noqa: E731
        hits = {expert for expert, tier in wanted.items() if expert in mine and serves(mine[expert], tier)}
        assert {expert for expert, place in places.items() if place == HIT} == hits
        for tier, share in ((Tier.HI, hi[layer]), (Tier.LO, lo[layer])):
            missing = sorted(e for e, t in wanted.items() if t is tier and e not in hits)
            streamed = sum(t is tier for t in wanted.values()) > share
            for expert in missing:
                kept = [e for e, t in mine.items() if t is tier]
                if len(kept) < share:
                    want = FREE
                else:
                    victims = sorted((heat[e], used_at[e], e) for e in kept if e not in wanted)
                    want = victims[0][2] if victims and not streamed and heat[expert] >= victims[0][0] else STREAM
                assert places[expert] == want
                if want != STREAM:
                    mine.pop(want, None)
                    mine[expert] = tier
        assert mine == {e: t for t in (Tier.HI, Tier.LO) for at, e in table.residents(t) if at == layer}


# -- slots ----------------------------------------------------------------------------------------


def test_what_layers_were_promised_is_lent_to_nobody():
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


def test_integrity_finds_a_row_too_many():
    table = make(hi=(1,))
    table.publish(0, 0, Tier.HI, 4)
    with pytest.raises(AssertionError, match="would be there twice"):
        table.publish(0, 0, Tier.HI, 5)
    table.check_integrity()
    table.publish(0, 1, Tier.HI, 6)
    with pytest.raises(AssertionError, match="layers keep"):
        table.check_integrity()
    table = make(hi=(2,))
    table.publish(0, 0, Tier.HI, 4)
    table.publish(0, 1, Tier.HI, 4)
    with pytest.raises(AssertionError, match="name one slot"):
        table.check_integrity()


def as_a_person_would(wanted, held, heats, uses, shares):
    """The rule for slices, expert by expert."""
    base_share, fine_share = shares
    bases, fines = dict.fromkeys((e for e in held), FREE), {e for e, code in held.items() if code == HIGH}

    def find(expert, kept, share, wanting, kind):
        if len(kept) < share:
            return FREE
        heat, used_at = heats[kind], uses[kind]
        victims = sorted((heat[e], used_at[e], e) for e in kept if e not in wanted)
        hot = victims and wanting <= share and heat[expert] >= victims[0][0]
        return victims[0][2] if hot else STREAM

    places = {}
    for expert in sorted(wanted):
        place = HIT if expert in bases else find(expert, bases, base_share, len(wanted), 0)
        places[expert] = [place, HIT]
        if place >= 0:
            bases.pop(place)
            fines.discard(place)
        if place not in (HIT, STREAM):
            bases[expert] = FREE
    high = [expert for expert in sorted(wanted) if wanted[expert] is Tier.HI]
    for expert in high:
        if expert in fines:
            continue
        places[expert][1] = STREAM
        if expert in bases:
            places[expert][1] = place = find(expert, fines, fine_share, len(high), 1)
            if place >= 0:
                fines.discard(place)
            if place != STREAM:
                fines.add(expert)
    return {expert: tuple(place) for expert, place in places.items()}, bases.keys(), fines


@settings(max_examples=300, deadline=None)
@given(STEPS, st.tuples(st.integers(0, 3), st.integers(0, 3)), st.tuples(st.integers(0, 4), st.integers(0, 4)))
def test_any_steps_of_slices_keep_every_invariant(steps, hi, lo):
    table = ResidencyTable(6, {Tier.HI: hi, Tier.LO: lo}, nested=True)
    for layer, wanted in steps:
        held = {e: int(code) for e, code in enumerate(table.tier[layer]) if code}
        active = np.array(sorted(wanted))
        codes = np.array([CODES[wanted[expert]] for expert in sorted(wanted)], np.int8)
        got = table.begin_step(layer, active, codes)
        heats, uses = (table.heat[layer], table.fine_heat[layer]), (table.used_at[layer], table.fine_used_at[layer])
        want, bases, fines = as_a_person_would(wanted, held, heats, uses, (lo[layer], hi[layer]))
        assert dict(zip(active.tolist(), map(tuple, got.T.tolist()), strict=True)) == want
        for expert in [e for e, code in held.items() if code == HIGH and e in bases and e not in fines]:
            table.remove_fine(layer, expert)
        for expert in held.keys() - bases:
            table.remove(layer, expert)
        for part, kept in ((Tier.LO, bases), (Tier.HI, fines)):
            for expert in sorted(kept):
                if table.tier[layer, expert] < CODES[part]:
                    free = set(range(12)) - set(table.slots(part))
                    table.publish(layer, expert, part, min(free))
        table.check_integrity()


def test_a_fine_slice_needs_its_base():
    table = ResidencyTable(6, {Tier.HI: [1], Tier.LO: [2]}, nested=True)
    with pytest.raises(AssertionError, match="base of expert 3"):
        table.publish(0, 3, Tier.HI, 0)
    table.publish(0, 3, Tier.LO, 1)
    table.publish(0, 3, Tier.HI, 0)
    assert (table.slots(Tier.LO), table.slots(Tier.HI)) == ([1], [0])
    assert table.remove(0, 3) == [(Tier.HI, 0), (Tier.LO, 1)]
    table.check_integrity()
