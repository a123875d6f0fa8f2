"""Hotness over windows, and sets with hysteresis: what never swaps, what must, and how often at most."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from vllm_dymoe.residency.hotness import Hotness, Rule, even_shares, hottest, share_out, swaps

LAYERS, EXPERTS = 2, 8
counts = arrays(np.int64, (LAYERS, EXPERTS), elements=st.integers(0, 1000))
scores = arrays(np.float64, (LAYERS, EXPERTS), elements=st.floats(0, 8))
places = arrays(np.int64, LAYERS, elements=st.integers(0, EXPERTS))
rules = st.builds(Rule, st.floats(0.05, 1), st.floats(0.01, 1), st.integers(0, 3))


def steady(score):
    return Hotness(score, score, score)


def follow(hotness, high, places, rule, windows):
    """Serve windows one after the other; the moves of each."""
    moves = []
    for window in windows:
        hotness = hotness.after(window, rule)
        plan = swaps(hotness, high, places, rule)
        for _, layer, up, down in plan:
            high[layer, up] = True
            if down is not None:
                high[layer, down] = False
        assert (high.sum(1) <= places).all()
        moves.append(plan)
    return hotness, moves


@given(scores, places, rules, st.data())
def test_noise_below_the_margin_never_swaps(score, places, rule, data):
    noise = data.draw(arrays(np.float64, score.shape, elements=st.floats(-0.499, 0.499))) * rule.margin
    assert swaps(steady(np.maximum(score + noise, 0)), hottest(score, places), places, rule) == []


@given(scores, arrays(np.bool_, (LAYERS, EXPERTS)), places, rules)
def test_one_plan_says_all_and_every_move_is_worth_more_than_the_margin(score, high, places, rule):
    high &= hottest(high.astype(float), places)
    plan = swaps(steady(score), high, places, rule)
    assert all(gain > rule.margin for gain, _, _, down in plan if down is not None)
    assert [swap.gain for swap in plan] == sorted((swap.gain for swap in plan), reverse=True)
    for _, layer, up, down in plan:
        assert not high[layer, up]
        assert down is None or high[layer, down]
        high[layer, up] = True
        if down is not None:
            high[layer, down] = False
    assert swaps(steady(score), high, places, rule) == []
    best = np.where(hottest(score, places), score, 0).sum(1)
    lost = best - np.where(high, score, 0).sum(1)
    if rule.slack == 0:
        assert (lost <= places * rule.margin + 1e-9).all()


@given(counts, counts, places, st.floats(0.3, 1), st.floats(0.01, 1))
def test_sets_converge_in_bounded_windows_after_a_shift(old, new, places, alpha, margin):
    """After w windows (1 - alpha) ** w of the old traffic is left; what that hides is lost beside the margin."""
    old, new, rule = old + 1, new + 1, Rule(alpha, margin, 0)
    high = hottest(even_shares(old), places)
    windows = 10
    follow(Hotness.of(old), high, places, rule, [new] * windows)
    target = even_shares(new)
    lost = np.where(hottest(target, places), target, 0).sum(1) - np.where(high, target, 0).sum(1)
    hidden = 2 * EXPERTS * (1 - alpha) ** windows
    assert (lost <= places * (margin + hidden) + 1e-9).all()


def test_a_clear_shift_is_followed_after_two_windows():
    old, new = np.array([[9, 9, 1, 1]]), np.array([[1, 1, 9, 9]])
    high, place = hottest(even_shares(old), np.array([2])), np.array([2])
    _, moves = follow(Hotness.of(old), high, place, Rule(0.6, 0.1, 0), [new] * 4)
    assert [len(plan) for plan in moves] == [0, 2, 0, 0]
    assert high.tolist() == [[False, False, True, True]]


@given(counts, counts, places, rules, st.integers(1, 20))
def test_traffic_that_alternates_swaps_no_pair_back(one, other, places, rule, times):
    """Whatever two mixes an adversary takes in turn."""
    high = hottest(even_shares(one), places)
    _, moves = follow(Hotness.of(one), high, places, rule, [one + 1, other + 1] * times)
    pairs = [(layer, up, down) for plan in moves[1:] for _, layer, up, down in plan if down is not None]
    assert not {(layer, down, up) for layer, up, down in pairs} & set(pairs)
    assert len(set(pairs)) == len(pairs) <= LAYERS * EXPERTS * EXPERTS // 4


@given(counts, rules)
def test_a_layer_that_saw_nothing_forgets_nothing(some, rule):
    hotness = Hotness.of(some)
    idle = hotness.after(np.zeros_like(some), rule)
    for name in ("score", "last", "before"):
        assert np.array_equal(getattr(idle, name), getattr(hotness, name))


def test_the_first_window_counts_for_itself_and_windows_count_alike_whatever_their_size():
    rule = Rule(0.25, 0.1, 0)
    first = Hotness.of(np.zeros((1, 4), np.int64)).after(np.array([[4, 0, 0, 0]]), rule)
    assert first.score.tolist() == [[4, 0, 0, 0]]
    for size in (1, 1000):
        assert first.after(np.array([[0, 4, 0, 0]]) * size, rule).score.tolist() == [[3, 1, 0, 0]]


def test_high_experts_stay_within_the_slack():
    score = np.array([[5.0, 4, 3, 2, 1]])
    high = np.array([[True, False, True, False, False]])
    assert [swap[1:] for swap in swaps(steady(score), high, np.array([2]), Rule(1, 0.1, 0))] == [(0, 1, 2)]
    assert swaps(steady(score), high, np.array([2]), Rule(1, 0.1, 1)) == []


def test_free_places_go_to_the_hottest_and_to_no_unused_expert():
    score, none = np.array([[0.0, 3, 0, 1]]), np.zeros((1, 4), bool)
    assert [swap.up for swap in swaps(steady(score), none, np.array([3]), Rule(1, 9, 0))] == [1, 3]


@pytest.mark.parametrize(("places", "expected"), [(0, [0, 0]), (3, [2, 1]), (8, [4, 4])])
def test_layers_get_places_by_what_these_bring(places, expected):
    assert share_out(np.array([[3.0, 0.5, 0.4, 0.1], [1.1, 0.3, 0.2, 0.1]]), places).tolist() == expected
