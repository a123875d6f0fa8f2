"""Predictions that do not pay become rare, and are tried again later."""

import random

import pytest

from vllm_dymoe.prefetch.pace import Pace, StepPace


def use(pace, rounds, needed, hidden=1.0, cost=0.0):
    """Predict two experts a round, ``needed`` of them correctly; return the rounds.

    Rounds in which the pace makes no prediction are not counted.
    """
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


def paced_steps(costs, changes=(0,), spread=0.2, steps=1500):
    """Return of which steps a pace prefetches.

    Times are random: around 1 without prefetching, and around ``costs`` with it. A cost holds from its change on.
    """
    now, generator, acted = [0.0], random.Random(3), []
    pace = StepPace(lambda: now[0])
    for number in range(steps):
        acted.append(pace.begin_step(1))
        cost = costs[sum(number >= change for change in changes) - 1]
        now[0] += generator.lognormvariate(0, spread) * (cost if acted[-1] else 1)
    return acted


@pytest.mark.parametrize(("cost", "least", "most"), [(0.92, 0.85, 1), (1.15, 0, 0.3), (1, 0.5, 1)])
def test_steps_that_differ_more_than_prefetch_gains_are_compared_by_many(cost, least, most):
    shares = [
        sum(acted) / len(acted) for acted in [paced_steps((cost,), spread=spread) for spread in (0.15, 0.2, 0.25)]
    ]
    assert all(least <= share <= most for share in shares), shares


def test_a_pace_follows_a_change():
    acted = paced_steps((0.8, 1.3, 0.8), (0, 3000, 9000), steps=18000)
    shares = [sum(acted[end - 1500 : end]) / 1500 for end in (3000, 9000, 18000)]
    assert shares[0] > 0.9
    assert shares[1] < 0.2
    assert shares[2] > 0.9
