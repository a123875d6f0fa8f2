import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_dymoe.prefetch.tuner import Heop, Setting

LAYERS = 16
GROUPS = (range(5), range(5, 12), range(12, 16))


def settings_of(heop):
    return [group.setting for group in heop._groups]


class Workload:
    """A model with known best K and P for each group, and with noisy costs."""

    def __init__(self, best, seed=0, noise=0.5):
        self.best, self.noise, self.chance = best, noise, random.Random(seed)

    def cost(self, group, setting):
        k, p = self.best[group]
        return 2.0 * abs(setting.k - k) + 1.5 * abs(setting.p - p)

    def run(self, heop, steps):
        for _ in range(steps):
            for group, layers in enumerate(GROUPS):
                amount = 10 + self.cost(group, heop.setting(layers[0])) + self.chance.gauss(0, self.noise)
                heop.record(layers[0], unused=amount, missed=0, hits=0)
            heop.end_step()


def make(**options):
    return Heop(LAYERS, Setting(4, 3), Setting(10, 6), alpha=1.0, beta=1.0, **options)


def test_the_groups_are_those_of_the_paper():
    heop = make()
    for group, layers in enumerate(GROUPS):
        heop._groups[group].setting = Setting(group + 1, 1)
        assert all(heop.setting(layer) == Setting(group + 1, 1) for layer in layers)


def test_the_cost_is_that_of_equation_11():
    heop = Heop(3, Setting(4, 3), Setting(8, 4), alpha=0.3, beta=0.7, update_every=1, rounds=1)
    heop.record(0, unused=5, missed=4, hits=1)
    heop.end_step()
    (average,) = heop._groups[0].costs.values()
    assert average.mean == pytest.approx(0.3 * 5 + 0.7 * (4 - 1))


@settings(max_examples=30)
@given(st.integers(0, 1000), st.tuples(*[st.tuples(st.integers(2, 7), st.integers(1, 5))] * 3))
def test_it_settles_near_the_best_of_each_group(seed, best):
    heop = make(seed=seed, rounds=60)
    workload = Workload(best, seed)
    workload.run(heop, 10 * 60)
    assert heop.settled
    for group, setting in enumerate(settings_of(heop)):
        assert workload.cost(group, setting) <= 2.0
        assert workload.cost(group, setting) <= workload.cost(group, Setting(4, 3))


def test_it_stays_within_bounds():
    heop = make(rounds=200)
    seen = set()
    for _ in range(2000):
        for group, layers in enumerate(GROUPS):
            heop.record(layers[0], unused=group, missed=0, hits=0)
            seen.add(heop.setting(layers[0]))
        heop.end_step()
    assert {k for k, _ in seen} <= set(range(1, 11))
    assert {p for _, p in seen} <= set(range(1, 7))


def test_another_cache_starts_the_search_again():
    heop = make(rounds=60)
    Workload(((3, 2), (5, 3), (6, 4))).run(heop, 600)
    assert heop.settled
    fixed, after = settings_of(heop), Workload(((7, 5), (5, 3), (2, 1)), seed=1)
    after.run(heop, 600)
    assert settings_of(heop) == fixed, "what is found stays"
    heop.restart()
    assert settings_of(heop) == fixed
    after.run(heop, 600)
    assert heop.settled
    for group in (0, 2):
        assert after.cost(group, settings_of(heop)[group]) < after.cost(group, fixed[group])


def test_a_model_of_one_layer_has_one_group():
    heop = Heop(1, Setting(4, 3), Setting(8, 4), rounds=2)
    for _ in range(30):
        heop.record(0, unused=1, missed=0, hits=0)
        heop.end_step()
    assert heop.settled
