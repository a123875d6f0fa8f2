"""Baselines of the papers' tables: a perfect predictor and FIFO eviction."""

import numpy as np
import pytest

from tests.executor.steps import random_step
from tests.small_model import make_experts, make_store
from tests.support.benchmarks import modules_of
from vllm_dymoe.planner.constants import Eviction
from vllm_dymoe.planner.routing import Routing
from vllm_dymoe.planner.rule import HIGH
from vllm_dymoe.planner.table import Table, set_pools

LAYERS = 2
STORE = make_store(make_experts(layers=LAYERS, num_experts=8, bits=(4,)))


@pytest.fixture
def compared():
    with modules_of("papers"):
        import compared

        yield compared


def test_the_oracle_knows_steps_that_it_has_seen(compared):
    oracle = compared.Oracle()
    for again in (False, True):
        for seed in (1, 2):
            routings = [Routing(layer, LAYERS, *_step(seed + 10 * layer)) for layer in range(LAYERS)]
            oracle.observe(routings[0])
            assert oracle.settled is again
            named = [candidate.expert for candidate in oracle.predict(0)]
            assert named == (routings[1].active if again else [])
            oracle.observe(routings[1])
            assert oracle.predict(1) == []


def _step(seed):
    x, weights, ids = random_step(seed, 3, STORE.experts)
    return x, ids, weights


def test_without_ageing_what_came_first_goes_first():
    table = Table.allocate(1, 6)
    table.evicts[:] = Eviction.FIRST_IN
    set_pools(table, {HIGH: [(0, 1, 2)]}, {HIGH: [2]})
    wanted = np.full(1, HIGH, np.int8)
    gone = []
    for expert in (0, 1, 0, 0, 2, 0, 3):  # expert 0 is used most often, and was the first to arrive
        active = np.array([expert])
        places = table.begin_step(0, active, wanted)
        gone.append(int(places[0, 0]))
        if gone[-1] >= -1:
            table.keep(0, active, wanted, places)
    assert gone == [-1, -1, -3, -3, 0, 1, 2]
