"""Hotness over windows, and swaps with hysteresis."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from vllm_dymoe.planner.hotness import averaged, even_shares, hottest, swaps

LAYERS, EXPERTS = 2, 8
counts = arrays(np.int64, (LAYERS, EXPERTS), elements=st.integers(0, 1000))
scores = arrays(np.float64, (LAYERS, EXPERTS), elements=st.floats(0, 8))
places = st.integers(0, LAYERS * EXPERTS)
margins = st.floats(0.01, 1)


def top(score, places):
    """Return the hottest experts of all layers: bool, shaped like scores."""
    return hottest(score.reshape(1, -1), np.array([places])).reshape(score.shape)


def move(high, plan):
    for _, up, down in plan:
        assert not high[up]
        assert down is None or high[down]
        high[up] = True
        if down is not None:
            high[down] = False


@given(scores, places, margins, st.data())
def test_noise_below_the_margin_never_swaps(score, places, margin, data):
    noise = data.draw(arrays(np.float64, score.shape, elements=st.floats(-0.499, 0.499))) * margin
    assert swaps(np.maximum(score + noise, 0), top(score, places), places, margin) == []


@given(scores, arrays(np.bool_, (LAYERS, EXPERTS)), places, margins)
def test_one_plan_says_all_and_every_move_is_worth_more_than_the_margin(score, high, places, margin):
    high &= top(high.astype(float), places)
    plan = swaps(score, high, places, margin)
    assert all(gain > margin for gain, _, down in plan if down is not None)
    assert [swap.gain for swap in plan] == sorted((swap.gain for swap in plan), reverse=True)
    move(high, plan)
    assert high.sum() <= places
    assert swaps(score, high, places, margin) == []
    lost = score[top(score, places)].sum() - score[high].sum()
    assert lost <= places * margin + 1e-9


@given(counts, counts, places, st.floats(0.3, 1), margins)
def test_sets_converge_in_bounded_windows_after_a_shift(old, new, places, alpha, margin):
    """The loss is bounded by the margins and by what the old traffic still hides.

    After w windows the score still contains (1 - alpha) ** w of the old traffic.
    """
    score, target, windows = even_shares(old + 1), even_shares(new + 1), 10
    high = top(score, places)
    for _ in range(windows):
        score = averaged(score, new + 1, alpha)
        move(high, swaps(score, high, places, margin))
    lost = target[top(target, places)].sum() - target[high].sum()
    assert lost <= places * (margin + 2 * EXPERTS * (1 - alpha) ** windows) + 1e-9


def test_places_go_from_one_layer_to_another():
    score = np.array([[3.0, 2.5, 2.0, 0.5], [1.2, 1.1, 1.0, 0.7]])
    high = np.array([[True, True, False, False], [True, True, False, False]])
    plan = swaps(score, high, 4, 0.1)
    assert plan == [(pytest.approx(0.9), (0, 2), (1, 1))]
    assert swaps(score, high, 4, 1.0) == []


@given(counts, st.floats(0.05, 1))
def test_a_layer_that_saw_nothing_forgets_nothing(some, alpha):
    score = even_shares(some)
    assert np.array_equal(averaged(score, np.zeros_like(some), alpha), score)


def test_the_first_window_counts_for_itself_and_windows_count_alike_whatever_their_size():
    first = averaged(np.zeros((1, 4)), np.array([[4, 0, 0, 0]]), 0.25)
    assert first.tolist() == [[4, 0, 0, 0]]
    for size in (1, 1000):
        assert averaged(first, np.array([[0, 4, 0, 0]]) * size, 0.25).tolist() == [[3, 1, 0, 0]]


def test_free_places_go_to_the_hottest_and_to_no_unused_expert():
    score, none = np.array([[0.0, 3, 0, 1]]), np.zeros((1, 4), bool)
    assert [swap.up for swap in swaps(score, none, 3, 9)] == [(0, 1), (0, 3)]
