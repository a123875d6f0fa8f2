"""Versions migrate between steps without the host, and outputs stay exact.

Captured tables stay in place; only their values change.
"""

import itertools
import time
from unittest import mock

import numpy as np
import pytest
import torch

from tests.cache.test_migration import AT_ONCE, frozen_output
from tests.executor.device_planned import decode, run_large_batch
from tests.executor.schedules import LAYERS
from tests.executor.steps import CPU, FAST, random_step
from tests.executor.two_ranks import on_two_ranks
from tests.small_model import make_experts, make_store
from vllm_dymoe.cache.device_cache import Writer
from vllm_dymoe.cache.device_table import DeviceCounts
from vllm_dymoe.options import Options
from vllm_dymoe.planner.constants import SMALL_BATCH_ROWS
from vllm_dymoe.planner.hotness import GATE_UNIT, squared_gates
from vllm_dymoe.planner.routing import Phase
from vllm_dymoe.planner.rule import HIGH, LOW
from vllm_dymoe.policies.dynaexq import DynaExq
from vllm_dymoe.server import ExpertServer

STORES = {nested: make_store(make_experts(layers=LAYERS, num_experts=6, nested=nested)) for nested in (False, True)}
PROMPT = SMALL_BATCH_ROWS + 3


def planned_server(nested, share="85%", agree=list, **options):
    chosen = Options(high=4, low=2, group_size=32, expert_budget=share, link_gbps=FAST)
    return ExpertServer(STORES[nested], chosen, CPU, policy=DynaExq(**(AT_ONCE | options)), agree=agree)


def serve(server, count, tokens=lambda number: (2, 5, PROMPT)[number % 3]):
    """Run whole steps, small and large batches in turn.

    Yields each layer's output, the precisions in effect, and (layer, inputs).
    """
    for number in range(count):
        rows = tokens(number)
        server.host_planned.begin_step(Phase.PREFILL if rows == PROMPT else Phase.DECODE)
        held = server.cache.table.precision.copy()
        for layer in range(LAYERS):
            x, weights, ids = random_step(number, rows, server.experts)
            ids = (ids % 3 + 3 * (number // 6 % 2)).int()  # alternate between the two halves
            run = run_large_batch if rows == PROMPT else decode
            yield run(server, layer, x, weights, ids), held, (layer, (x, weights, ids))
        server.host_planned.end_decode(rows)
        server.check_integrity()
        time.sleep(0.002)


@pytest.mark.parametrize("nested", STORES)
def test_steps_with_and_without_the_host_compute_the_rows_that_are_published(nested):
    server = planned_server(nested)
    server.cache.device_table.table.recording.fill_(1)
    assert server.cache.writer is Writer.PLANNER
    addresses = {name: tensor.data_ptr() for name, tensor in vars(server.cache.device_table.table).items()}
    maps = []
    for _ in range(40):  # a busy machine copies late
        for output, held, (layer, step) in serve(server, 24):
            assert torch.equal(output, frozen_output(STORES[nested], held, layer, step))
            maps.append(held)
        if any((one != maps[0]).any() for one in maps):
            break
    stats = server.stats()
    assert stats.moves["published"] > 0
    assert any((one != maps[0]).any() for one in maps)
    assert stats.misses == 0
    assert stats.bytes_moved["demand"] == 0
    assert set(np.unique(server.cache.table.precision)) == {LOW, HIGH}
    server.resize("95%")
    for output, held, (layer, step) in serve(server, 6):
        assert torch.equal(output, frozen_output(STORES[nested], held, layer, step))
    assert addresses == {name: tensor.data_ptr() for name, tensor in vars(server.cache.device_table.table).items()}
    server.engine.close()


@pytest.mark.parametrize("nested", STORES)
def test_rows_that_the_device_does_not_hear_of_are_found(nested):
    server = planned_server(nested)
    server.cache.device_table.table.recording.fill_(1)
    with (
        mock.patch.object(server.cache, "rows_changed"),
        pytest.raises(AssertionError, match="rows on the device differ"),
    ):
        list(serve(server, 960))  # a busy machine copies late
    server.engine.close()


@pytest.mark.parametrize("rows", [4, PROMPT])
def test_choices_are_counted_where_they_are_made_and_read_once(rows):
    server = planned_server(True, window_s=1e9)
    server.cache.device_table.table.recording.fill_(1)
    counts, expected = server.host_planned.migration._decoded, np.zeros((3, LAYERS, 6), np.int64)
    for _, held, (layer, (_, weights, ids)) in serve(server, 5, lambda number: rows):
        np.add.at(expected, (held[layer][ids] - LOW, layer, ids), 1)
        np.add.at(expected[2, layer], ids, squared_gates(weights))
    assert server.host_planned.migration._seen == 5 * rows * 2 * LAYERS
    counts.ask()
    assert counts.ready()
    assert np.array_equal(counts.take(), expected)
    assert expected[2].any()
    counts.ask()
    assert not np.any(counts.take())
    server.engine.close()


def test_ranks_whose_clocks_differ_close_a_window_with_the_same_counts():
    def run(rank, agree):
        server = planned_server(True, agree=agree, window_s=3, window_uses=0.1)
        server.cache.device_table.table.recording.fill_(1)
        migration, turns = server.host_planned.migration, itertools.count(-rank)
        migration._look, migration._began, migration._clock = 1, 0, lambda: next(turns)
        hotness = []
        for _ in serve(server, 40, lambda number: 1 + number % 5):
            hotness.append(migration.hotness.copy())
        server.engine.close()
        return hotness

    one, other, asked = on_two_ranks(run)
    assert asked > 10
    assert len({score.tobytes() for score in one}) > 3
    assert all(map(np.array_equal, one, other))


def test_experts_of_other_ranks_and_rows_of_padding_are_not_counted():
    server = planned_server(True)
    table, counts = server.cache.device_table.table, DeviceCounts(server.cache.device_table.table)
    table.ring_ids[0, :, :3] = torch.tensor([[0, -1], [5, 0], [4, 4]], dtype=torch.int32)
    table.ring_weights[0, :, :3] = torch.tensor([[0.25, 0.75], [0.5, 1.5], [9, 9]])
    table.ring_rows.fill_(2)
    for _ in range(2):  # the second call finds no new step
        counts.add()
    counts.ask()
    low, high, gates = counts.take()
    assert (low + high).tolist() == [[2, 0, 0, 0, 0, 1]] * LAYERS
    squares = [0.25**2 + 0.75**2, 0, 0, 0, 0, 0.25**2]  # weights count as fractions of their token's sum
    assert gates.tolist() == [[square * GATE_UNIT for square in squares]] * LAYERS
    server.engine.close()
