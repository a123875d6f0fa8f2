"""The programs around a large-batch step give the lists of their plain twin.

They are compared bit for bit.
"""

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.kernels.twins import STEPS, Twins
from tests.support.decode_steps import EXPERTS, LAYERS, RANKS, numbers_of, random_step
from vllm_dymoe.kernels.triton.tiles import EVERY
from vllm_dymoe.planner.large_batch import LargeBatchShape
from vllm_dymoe.planner.rule import HIGH, LOW
from vllm_dymoe.planner.table import ID_BITS
from vllm_dymoe.policies.dymoe import Dymoe
from vllm_dymoe.policies.exact import Exact


@settings(
    max_examples=25, deadline=None, phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck)
)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 1 << 30)), min_size=2, max_size=5),
    st.integers(0, 8),
    st.integers(0, 8),
    st.sampled_from([0.3, 1.0]),
    st.booleans(),
    st.integers(0, 5),
    st.integers(0, 4),
    st.sampled_from(["threshold", "depth"]),
    st.sampled_from(["coldest", "least recent", "first in"]),
    st.booleans(),
    st.sampled_from([STEPS, (EVERY, EVERY), (0, 8)]),
    st.sampled_from(sorted(RANKS)),
)
def test_any_steps(steps, low, high, retention, nested, staging, passes, high_by, evicts, skips, classes, rank):
    """If experts are skipped, their weights go to others.

    Experts have several classes, or all of them the first one or the second.
    """
    skips &= not nested
    chosen = {"retention": retention, "high_by": high_by, "skipped_weights": "renormalize" if skips else "keep"}
    policy = Dymoe(**chosen, evicts=evicts) if nested or retention < 1 else Exact(evicts=evicts)
    quotas = {LOW: [low] * LAYERS, HIGH: [min(low, high) if nested else high] * LAYERS}
    numbers = RANKS[rank]
    twins = Twins(quotas, policy=policy, staging=staging, nested=nested, skip_low=skips, numbers=numbers)
    half = staging // 2
    for number, (tokens, seed) in enumerate(steps):
        ids, weights = random_step(seed, tokens, experts=EXPERTS if numbers is None else len(numbers))
        marks = (torch.arange(tokens) * seed % 7 % 3).to(torch.int8) if seed % 3 else None
        shape = LargeBatchShape(
            tokens, 3, 12, 1 + nested, half if passes else 0, passes if half else 0, marks is not None,
            decoded=(2, 4)[seed % 2], weights_on_input=seed % 5 == 1,
        )  # fmt: skip
        layer, real = number % LAYERS, seed % (tokens + 3)
        ahead = HIGH if seed % 2 and not nested and shape.half and layer + 1 < LAYERS else 0
        twins.large_batch_step(layer, ids, weights, shape, (number + 1) % 2, real, marks, ahead, classes)


@pytest.mark.parametrize(
    ("experts", "top_k", "tokens", "nested"), [(1024, 10, 40, True), (512, 10, 40, False), (33, 4, 700, True)]
)
def test_sizes_of_models(experts, top_k, tokens, nested):
    """Two precisions, the second of which is counted in several chunks."""
    quotas = {LOW: [experts // 2] * LAYERS, HIGH: [experts // 4] * LAYERS}
    options = {"experts": experts, "top_k": top_k, "nested": nested}
    twins = Twins(quotas, policy=Dymoe(retention=0.5), staging=8, **options)
    shape = LargeBatchShape(tokens, top_k, experts, 1 + nested, 4, 3)
    assert shape.chunks > 1 or tokens < 100
    for seed in range(2):
        twins.large_batch_step(0, *random_step(seed, tokens, top_k, experts), shape, seed, tokens)


@pytest.mark.parametrize(("experts", "own", "top_k", "tokens"), [(1024, 128, 10, 40), (33, 11, 4, 700)])
def test_sizes_of_ranks(experts, own, top_k, tokens):
    """Precision is chosen among all ranks' experts, with and without marks."""
    quotas, numbers = {LOW: [own // 2] * LAYERS, HIGH: [own // 4] * LAYERS}, numbers_of(experts, own)
    for high_by in ("threshold", "depth"):
        policy = Dymoe(retention=0.5, high_by=high_by)
        twins = Twins(quotas, policy=policy, staging=8, experts=own, top_k=top_k, numbers=numbers)
        for marks in (None, (torch.arange(tokens) % 3).to(torch.int8)):
            shape = LargeBatchShape(tokens, top_k, own, 1, 4, 3, marks is not None)
            twins.large_batch_step(0, *random_step(3, tokens, top_k, experts), shape, 0, tokens, marks)


@pytest.mark.parametrize("nested", [False, True])
def test_rows_that_are_not_finite_count_in_no_statistic(nested):
    """This also holds if prompt tokens have a measure of their own."""
    quotas, policy = {LOW: [4, 4], HIGH: [3, 3]}, Dymoe(retention=0.5)
    twins, alone = (Twins(quotas, policy=policy, staging=4, nested=nested) for _ in range(2))
    for seed in range(8):
        ids, weights = random_step(seed, 20, absent=0)
        marks = (torch.arange(20) % 3).to(torch.int8)
        poisoned = torch.tensor([2, 4, 9])
        shape = LargeBatchShape(20, 3, 12, 1 + nested, 2, 2, True)
        alone.large_batch_step(seed % LAYERS, ids.index_fill(0, poisoned, -1), weights, shape, 0, 20, marks)
        poison = (float("nan"), float("inf"), -float("inf"), 1e30)[seed % 4]
        twins.large_batch_step(seed % LAYERS, ids, weights.index_fill(0, poisoned, poison), shape, 0, 20, marks)
        for name in ("score", "used_at", "threshold", "prompt_threshold", "step"):
            assert torch.equal(getattr(twins.plain, name), getattr(alone.plain, name)), name


@pytest.mark.parametrize("wrong", [33, 65537, (1 << 32) + 1, -2])
def test_an_expert_outside_the_model_is_told_from_any_chunk(wrong):
    quotas = {LOW: [20, 20], HIGH: [10, 10]}
    twins = Twins(quotas, policy=Dymoe(retention=0.5), staging=8, experts=33, top_k=4)
    shape = LargeBatchShape(700, 4, 33, 1, 4, 3)
    assert shape.chunks > 1
    for row in (3, 699):
        ids, weights = random_step(row, 700, 4, 33)
        ids = ids.long()
        ids[row, 2] = wrong
        twins.large_batch_step(1, ids, weights, shape, 0, 699)  # the last row is padding
        assert twins.plain.outside.tolist() == [-1, wrong & ID_BITS if row < 699 else -1]
        for table in (twins.plain, twins.table):
            table.outside.fill_(-1)
