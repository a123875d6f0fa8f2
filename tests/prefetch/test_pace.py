"""Predictions that do not pay become rare, and are tried again."""

import pytest

from vllm_dymoe.prefetch.pace import Pace


def use(pace, rounds, needed, hidden=1.0, cost=0.0):
    """Make predictions of two experts each, of which some are needed; returns the number of predictions made."""
    asked = 0
    for _ in range(rounds):
        if pace.acts():
            asked += 1
            pace.spend(cost)
            for prediction in range(2):
                pace.judge(prediction < needed, hidden)
    return asked


def test_what_is_wrong_is_done_less_and_less_but_never_not_at_all():
    pace = Pace()
    assert use(pace, 17, needed=0) == 17
    assert pace.interval == 2
    use(pace, 17 * (2 + 4 + 8 + 16 + 32), needed=0)
    assert pace.interval == 64
    assert 15 <= use(pace, 16 * 64, needed=0) <= 17
    assert pace.interval == 64
    use(pace, 18 * (64 + 32 + 16 + 8 + 4 + 2), needed=2)
    assert pace.interval == 1


@pytest.mark.parametrize(("before", "cost", "after"), [(1, 0.9, 1), (1, 1.1, 2), (2, 0.6, 2), (2, 0.4, 1)])
def test_a_second_of_the_host_has_to_hide_two_and_to_win_four(before, cost, after):
    pace = Pace(interval=before)
    use(pace, 17 * before, needed=2, hidden=1.0, cost=cost)
    assert pace.interval == after


def test_a_cache_that_leaves_few_predictions_is_judged_by_its_predictions():
    pace = Pace()
    for _ in range(33):
        assert pace.acts()
        pace.spend(0.1)
    assert pace.interval == 2, "nothing was hidden"


def test_a_few_wrong_predictions_have_no_share():
    pace = Pace()
    for place in range(33):
        pace.acts()
        pace.spend(0.0)
        if place < 7:
            pace.judge(False, 1.0)
    assert pace.interval == 1


@pytest.mark.parametrize("layers", [2, 4, 8, 48])
@pytest.mark.parametrize("interval", [1, 2, 4, 64])
def test_every_layer_has_its_turn(layers, interval):
    pace = Pace(interval=interval)
    asked = [place % layers for place in range(40 * interval * layers) if pace.acts()]
    assert len(asked) == 40 * layers
    assert all(10 < asked.count(layer) < 90 for layer in range(layers)) or interval == 1
