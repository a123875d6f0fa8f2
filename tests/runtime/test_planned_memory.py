"""Versions that move between steps without the host: captured tables stay, their values change, and no bit is wrong."""

import itertools
import time
from unittest import mock

import numpy as np
import pytest
import torch

from tests.runtime.decided import decode, decode_wide
from tests.runtime.schedules import LAYERS
from tests.runtime.steps import CPU, random_step
from tests.runtime.test_migration import AT_ONCE, frozen_output
from tests.runtime.two_ranks import on_two_ranks
from tests.small_model import make_experts, make_store
from vllm_dymoe.config import Options
from vllm_dymoe.residency.hotness import GATE_UNIT, squared_gates
from vllm_dymoe.residency.routing import Phase
from vllm_dymoe.residency.rule import HIGH, LOW
from vllm_dymoe.runtime import MoERuntime
from vllm_dymoe.runtime.decode_path import DECODE_ROWS
from vllm_dymoe.runtime.device_side import DecodeCounts
from vllm_dymoe.runtime.memory import Writer
from vllm_dymoe.systems.dynaexq import DynaExq

STORES = {nested: make_store(make_experts(layers=LAYERS, num_experts=6, nested=nested)) for nested in (False, True)}
PROMPT = DECODE_ROWS + 3


def planned_runtime(nested, share="85%", agree=list, **options):
    chosen = Options(hi=4, lo=2, group_size=32, expert_budget=share, decisions="device")
    return MoERuntime(STORES[nested], chosen, CPU, system=DynaExq(**(AT_ONCE | options)), agree=agree)


def serve(runtime, count, tokens=lambda number: (2, 5, PROMPT)[number % 3]):
    """Whole steps, narrow and wide ones in turn; yields each layer's output beside that of a frozen map."""
    for number in range(count):
        rows = tokens(number)
        runtime.serving.begin_step(Phase.PREFILL if rows == PROMPT else Phase.DECODE)
        held = runtime.memory.table.tier.copy()
        for layer in range(LAYERS):
            x, weights, ids = random_step(number, rows, runtime.experts)
            ids = (ids % 3 + 3 * (number // 6 % 2)).int()  # now one half, now the other
            run = decode_wide if rows == PROMPT else decode
            yield run(runtime, layer, x, weights, ids), held, (layer, (x, weights, ids))
        runtime.serving.end_decode(rows, wide=rows == PROMPT)
        runtime.check_integrity()
        time.sleep(0.002)


@pytest.mark.parametrize("nested", STORES)
def test_steps_with_and_without_the_host_compute_the_rows_that_are_published(nested):
    runtime = planned_runtime(nested)
    runtime.memory.device_side.table.recording.fill_(1)
    assert runtime.memory.writer is Writer.PLANNER
    addresses = {name: tensor.data_ptr() for name, tensor in vars(runtime.memory.device_side.table).items()}
    maps = []
    for output, held, (layer, step) in serve(runtime, 24):
        assert torch.equal(output, frozen_output(STORES[nested], held, layer, step))
        maps.append(held)
    stats = runtime.stats()
    assert stats.moves["published"] > 0
    assert any((one != maps[0]).any() for one in maps)
    assert stats.misses == 0
    assert stats.bytes_moved["demand"] == 0
    assert set(np.unique(runtime.memory.table.tier)) == {LOW, HIGH}
    runtime.resize("95%")
    for output, held, (layer, step) in serve(runtime, 6):
        assert torch.equal(output, frozen_output(STORES[nested], held, layer, step))
    assert addresses == {name: tensor.data_ptr() for name, tensor in vars(runtime.memory.device_side.table).items()}
    runtime.engine.close()


@pytest.mark.parametrize("nested", STORES)
def test_rows_that_the_device_does_not_hear_of_are_found(nested):
    runtime = planned_runtime(nested)
    runtime.memory.device_side.table.recording.fill_(1)
    with mock.patch.object(runtime.memory, "rows_changed"), pytest.raises(AssertionError, match="reads other rows"):
        list(serve(runtime, 24))
    runtime.engine.close()


@pytest.mark.parametrize("rows", [4, PROMPT])
def test_choices_are_counted_where_they_are_made_and_read_once(rows):
    runtime = planned_runtime(True, window_s=1e9)
    runtime.memory.device_side.table.recording.fill_(1)
    counts, expected = DecodeCounts(runtime.memory.device_side.table), np.zeros((3, LAYERS, 6), np.int64)
    runtime.decode.wide.count = counts.add_layer
    for _, held, (layer, (_, weights, ids)) in serve(runtime, 5, lambda number: rows):
        np.add.at(expected, (held[layer][ids] - LOW, layer, ids), 1)
        np.add.at(expected[2, layer], ids, squared_gates(weights))
        if layer == LAYERS - 1 and rows != PROMPT:
            counts.add(rows)
    assert runtime.serving.migration._seen == 5 * rows * 2 * LAYERS
    counts.ask()
    assert counts.ready()
    assert np.array_equal(counts.take(), expected)
    assert expected[2].any()
    counts.ask()
    assert not np.any(counts.take())
    runtime.engine.close()


def test_ranks_whose_clocks_differ_close_a_window_with_the_same_counts():
    def run(rank, agree):
        runtime = planned_runtime(True, agree=agree, window_s=3, window_uses=0.1)
        runtime.memory.device_side.table.recording.fill_(1)
        migration, turns = runtime.serving.migration, itertools.count(-rank)
        migration._look, migration._began, migration._clock = 1, 0, lambda: next(turns)
        hotness = []
        for _ in serve(runtime, 40, lambda number: 1 + number % 5):
            hotness.append(migration.hotness.copy())
        runtime.engine.close()
        return hotness

    one, other, asked = on_two_ranks(run)
    assert asked > 10
    assert len({score.tobytes() for score in one}) > 3
    assert all(map(np.array_equal, one, other))


def test_experts_of_other_ranks_and_rows_of_padding_are_not_counted():
    runtime = planned_runtime(True)
    table, counts = runtime.memory.device_side.table, DecodeCounts(runtime.memory.device_side.table)
    table.ring_ids[0, :, :3] = torch.tensor([[0, -1], [5, 0], [4, 4]], dtype=torch.int32)
    table.ring_weights[0, :, :3] = torch.tensor([[0.25, 0.75], [0.5, 1.5], [9, 9]])
    counts.add(2)
    counts.ask()
    low, high, gates = counts.take()
    assert (low + high).tolist() == [[2, 0, 0, 0, 0, 1]] * LAYERS
    squares = [0.25**2 + 0.75**2, 0, 0, 0, 0, 0.25**2]  # weights count as shares of their token's
    assert gates.tolist() == [[square * GATE_UNIT for square in squares]] * LAYERS
    runtime.engine.close()
