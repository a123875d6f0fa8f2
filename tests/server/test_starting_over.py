"""Ranks that share experts decide alike, even after one could not compute a step."""

import contextlib

import pytest

from tests.cache.test_migration import STORES
from tests.executor.steps import CPU, STEPS, forward, random_step
from tests.support.faulty_store import FaultyStore
from vllm_dymoe.cache.transfer import TransferError, make_engine
from vllm_dymoe.options import Options
from vllm_dymoe.server import ExpertServer


def rank_of(store, policy="dymoe", **parameters):
    options = Options(
        low=2, group_size=32, policy=policy, policy_options=parameters, expert_budget="60%", misses="fetch"
    )
    engine = make_engine(store, CPU, 0, io_threads=0)
    return ExpertServer(store, options, CPU, engine=engine, agree=lambda said: list(said))


def state(rank):
    table = rank.cache.table
    columns = (table.precision, table.score, table.used_at, table.step, *rank.policy.precision.thresholds)
    return [column.tolist() for column in columns]


@pytest.mark.parametrize("nested", [False, True])
def test_they_start_over_together(nested):
    """Ranks forget together what one of them has not learnt.

    The rank that failed would otherwise give experts another precision for a long time.
    """
    failing = FaultyStore(STORES[nested])
    ranks = [rank_of(store, retention=0.5) for store in (STORES[nested], failing)]
    assert all(rank.ranks_add_up for rank in ranks)
    assert not rank_of(STORES[nested], "exact").ranks_add_up, "residency changes no value"

    def serve():
        for seed, layer, tokens in STEPS:
            for rank in ranks:
                with contextlib.suppress(TransferError):
                    forward(rank, layer, *random_step(seed, tokens, rank.experts))

    serve()
    failing.action = lambda number, key: "fail" if number % 3 == 0 else None
    serve()
    failing.action = lambda number, key: None
    assert state(ranks[0]) != state(ranks[1])
    for rank in ranks:
        rank.start_over()
    assert state(ranks[0]) == state(ranks[1])
    serve()
    assert state(ranks[0]) == state(ranks[1])
    for rank in ranks:
        rank.check_integrity()
        rank.engine.close()
