"""The residency rule against a naive twin, and what it is for."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vllm_dymoe.residency.rule import AGING, HIGH, STREAM, USE, coldest, decide, record_uses

EXPERTS = 8
steps = st.lists(st.sets(st.integers(0, EXPERTS - 1), min_size=1, max_size=EXPERTS), min_size=1, max_size=60)


def after(uses):
    heat, used_at = np.zeros(EXPERTS, np.int64), np.zeros(EXPERTS, np.int64)
    for step, active in enumerate(uses, start=1):
        record_uses(heat, used_at, sorted(active), step)
    return heat, used_at


@given(steps)
def test_heat_is_an_aged_count_of_uses(uses):
    heat, used_at = after(uses)
    for expert in range(EXPERTS):
        naive, last = 0, 0
        for step, active in enumerate(uses, start=1):
            naive -= naive >> AGING
            if expert in active:
                naive, last = naive + USE, step
        assert (heat[expert], used_at[expert]) == (naive, last)


@given(steps, st.sets(st.integers(0, EXPERTS - 1), min_size=1))
def test_the_victim_is_the_coldest_and_among_equals_the_one_used_longest_ago(uses, among):
    heat, used_at = after(uses)
    assert coldest(heat, used_at, np.array(sorted(among))) == min(among, key=lambda e: (heat[e], used_at[e], e))


def test_heat_never_leaves_the_integers_that_order_by_heat_and_step():
    heat, _used_at = after([{0}] * 2000)
    assert heat[0] <= USE << AGING
    assert int(heat[0]) * (1 << 40) + (1 << 40) < 1 << 63


def test_a_step_is_forgotten_after_some_dozens():
    """One use against none: after so many steps of others both are nearly equally cold."""
    heat, _ = after([{0}] + [{1}] * 100)
    assert heat[0] < USE // 256


def test_equal_heat_is_admitted():
    """Else the first experts of a model would be kept for ever once every one was used as often."""

    def place_of_1(uses):
        """With one slot, which expert 0 has."""
        heat, used_at = after(uses)
        held = np.zeros(EXPERTS, np.int8)
        held[0] = HIGH
        return decide(np.array([1]), np.array([HIGH]), held, heat, used_at, (0, 0, 1)).tolist()

    assert place_of_1([{0, 1}]) == [0]
    assert place_of_1([{0}, {0}, {1}]) == [STREAM]
