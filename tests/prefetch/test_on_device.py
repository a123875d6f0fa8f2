"""Predictors with device planning: what they write into the table."""

import pytest
import torch

from tests.support.on_device import OnDevice
from vllm_dymoe.planner.rule import HIGH
from vllm_dymoe.planner.table import Table
from vllm_dymoe.prefetch.on_device import AllExpertsOnDevice, PopularityOnDevice

LAYERS, EXPERTS, TOP_K = 3, 6, 2


def named(table, layer):
    experts = table.predicted[0, layer].tolist()
    return experts[: experts.index(-1)] if -1 in experts else experts


def step(predictor, layer, chosen, rows=None):
    ids = torch.tensor(chosen, dtype=torch.int32)
    count = torch.tensor([len(ids) if rows is None else rows], dtype=torch.int32)
    predictor.predict(layer, torch.empty(len(ids), 4), ids, count)


def test_popularity_names_what_the_next_layer_wanted_most_often():
    table = Table.allocate(LAYERS, EXPERTS, device="cpu")
    predictor = PopularityOnDevice(table, TOP_K)
    step(predictor, 0, [[0, 1]])
    assert named(table, 1) == [], "it was never seen"
    for chosen in ([[3, 4]], [[4, 5]], [[-1, 4]]):
        step(predictor, 1, chosen)
    step(predictor, 0, [[0, 1]])
    assert named(table, 1) == [4, 5], "of those wanted once the one that was wanted last"
    assert (table.predicted[1] == HIGH).all()


def test_padding_and_empty_steps_teach_nothing():
    table, other = (Table.allocate(LAYERS, EXPERTS, device="cpu") for _ in range(2))
    predictor, plain = PopularityOnDevice(table, TOP_K), PopularityOnDevice(other, TOP_K)
    step(predictor, 1, [[3, 4], [5, 5]], rows=1)
    step(predictor, 1, [[2, 2]], rows=0)
    step(plain, 1, [[3, 4]])
    assert torch.equal(predictor._counts, plain._counts)


def test_steps_fade():
    table = Table.allocate(LAYERS, EXPERTS, device="cpu")
    predictor = PopularityOnDevice(table, TOP_K)
    for _ in range(40):
        step(predictor, 1, [[0, 1]])
    for _ in range(3000):
        step(predictor, 1, [[2, 3]])
    step(predictor, 0, [[0, 0]])
    assert named(table, 1) == [2, 3]
    assert predictor._counts[1, 0] < 40 * PopularityOnDevice.UNIT / 8


def test_prompts_teach_what_single_tokens_would():
    table, other = (Table.allocate(LAYERS, EXPERTS, device="cpu") for _ in range(2))
    predictor, plain = PopularityOnDevice(table, TOP_K), PopularityOnDevice(other, TOP_K)
    ids, rows = torch.tensor([[0, 1], [1, -1], [4, 5]], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    predictor.observe(2, torch.empty(3, 4), ids, rows)
    step(plain, 2, ids.tolist(), rows=2)
    assert torch.equal(predictor._counts, plain._counts)


def test_all_experts_are_named_once():
    table = Table.allocate(LAYERS, EXPERTS, device="cpu")
    predictor = AllExpertsOnDevice(table, TOP_K)
    step(predictor, 0, [[0, 1]])
    assert named(table, 1) == list(range(EXPERTS))


@pytest.mark.parametrize("kind", [AllExpertsOnDevice, PopularityOnDevice])
def test_no_predictor_waits_for_the_device(kind):
    predictor = kind(Table.allocate(LAYERS, EXPERTS, device="cpu"), TOP_K)
    ids = torch.zeros(3, TOP_K, dtype=torch.int32).as_subclass(OnDevice)
    rows = torch.ones(1, dtype=torch.int32).as_subclass(OnDevice)
    OnDevice.log = []
    for layer in range(LAYERS):
        predictor.observe(layer, torch.empty(3, 4), ids, rows)
        predictor.predict(layer, torch.empty(3, 4), ids, rows)
    assert OnDevice.log == []
