"""The programs that list and copy predicted experts against their plain twins."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kernels.sections import DEVICE, at_the_edge
from tests.kernels.twins import Twins, moved
from tests.support.decode_steps import EXPERTS, LAYERS, random_step, rows
from vllm_dymoe.kernels.triton.popularity import count_and_name_on_gpu
from vllm_dymoe.kernels.triton.prefetch import (
    copy_predicted_on_gpu,
    judge_predicted_on_gpu,
    list_predicted_on_gpu,
    name_experts_on_gpu,
)
from vllm_dymoe.planner.constants import PROJECTIONS, experts_width
from vllm_dymoe.planner.prefetch import PrefetchList, judge_predicted, list_predicted, name_experts, set_prefetch
from vllm_dymoe.planner.rule import ABSENT, HIGH, LOW
from vllm_dymoe.planner.table import Table
from vllm_dymoe.policies.dymoe import Dymoe
from vllm_dymoe.prefetch.on_device import count_and_name


def predict(twins, layer, seed):
    """List some experts in some version, each once, and end at a random place."""
    generator = torch.Generator().manual_seed(seed)
    experts = torch.randperm(twins.plain.experts, generator=generator).int()
    experts[int(torch.randint(twins.plain.experts + 1, (1,), generator=generator)) :] = -1
    codes = torch.randint(LOW, HIGH + 1, experts.shape, generator=generator).int()
    for table in (twins.plain, twins.table):
        table.predicted[:, layer] = torch.stack((experts, codes)).to(table.predicted.device)


def list_both(twins, layer, real, projections, look_ahead=1):
    plain = PrefetchList.allocate(twins.plain.experts, "cpu", layers=LAYERS, slices=1 + twins.plain.nested)
    found = moved(plain, lambda values: twins.place(values.clone()).fill_(77))
    list_predicted(twins.plain, layer, rows(real), projections, plain, look_ahead)
    given = layer, twins.place(rows(real)), projections, vars(found), look_ahead
    list_predicted_on_gpu(twins.table.at(layer), *given)
    count = int(plain.count)
    assert int(found.count) == count
    assert torch.equal(plain.copies[:count], found.copies[:count].cpu())
    assert torch.equal(plain.held[layer % 2], found.held[layer % 2].cpu())
    assert not found.arrivals.any()
    twins.compare()
    found.held.copy_(plain.held)
    found.counts.zero_()
    return plain, found


def arrive(twins, layer, seed):
    """Mark some of the listed copies as complete."""
    some = torch.rand(twins.plain.experts, generator=torch.Generator().manual_seed(seed)) < 0.5
    for table in (twins.plain, twins.table):
        for staged in table.staged.flatten(0, 1):
            staged[2] = torch.where(some.to(staged.device) & (staged[1] > 0), PROJECTIONS, 0)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 1 << 30)), min_size=1, max_size=6),
    st.sampled_from([0, 2, 5]),
    st.sampled_from([0, 1, 2, 7]),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.integers(1, PROJECTIONS),
    st.booleans(),
    st.integers(1, 2),
)
def test_any_predictions_and_steps(steps, share, staging, retention, projections, nested, look_ahead):
    quotas = {LOW: [share] * LAYERS, HIGH: [share] * LAYERS}
    twins = Twins(quotas, policy=Dymoe(retention=retention), staging=staging, nested=nested)
    for table in (twins.plain, twins.table):
        set_prefetch(table, {LOW: staging, HIGH: staging})
    for number, (tokens, seed) in enumerate(steps):
        layer = number % LAYERS
        predict(twins, layer, seed)
        plain, found = list_both(twins, layer, seed % (tokens + 1), projections, look_ahead)
        arrive(twins, layer, seed)
        ids, weights = random_step(seed, tokens)
        real = rows(seed % (tokens + 1))
        judge_predicted(twins.plain, layer, ids, real, plain)
        judge_predicted_on_gpu(vars(twins.table), layer, twins.place(ids), twins.place(real), vars(found))
        assert torch.equal(plain.counts, found.counts.cpu())
        twins.step(layer, ids, weights, real=int(real))


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.integers(0, 1 << 30),
    st.integers(1, 5),
    st.integers(1, 3),
    st.tuples(st.integers(0, EXPERTS + 1), st.integers(1, 4)),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.booleans(),
)
def test_names_are_those_of_the_plain_twin(seed, tokens, voters, asked, retention, others):
    """Scores include ties and NaN, and some experts belong to other ranks."""
    twins = Twins({LOW: [2] * LAYERS, HIGH: [2] * LAYERS}, policy=Dymoe(retention=retention), staging=2)
    generator, everyone = torch.Generator().manual_seed(seed), EXPERTS * (1 + others)
    ahead = torch.from_numpy(Dymoe(retention=retention, ahead="high").precision.counts_ahead(LAYERS, EXPERTS))
    numbers = torch.full((LAYERS, everyone), -1, dtype=torch.int32)
    for of_layer in numbers:
        of_layer[torch.randperm(everyone, generator=generator)[:EXPERTS]] = torch.arange(EXPERTS, dtype=torch.int32)
    scores = (torch.randn(voters, tokens, everyone, generator=generator) * 4).round() / 4
    scores[torch.rand(scores.shape, generator=generator) < 0.1] = torch.nan
    scores[torch.rand(scores.shape, generator=generator) < 0.1] = -torch.inf
    settings = torch.tensor([asked] * LAYERS, dtype=torch.int32)
    real, layer = rows(seed % (tokens + 1)), seed % (LAYERS - 1)
    for table in (twins.plain, twins.table):
        table.fetched_ahead.copy_(ahead)
    name_experts(twins.plain, layer + 1, layer, scores, real, settings, numbers)
    placed = [twins.place(values) for values in (scores, real, settings, numbers)]
    scratch = torch.zeros(experts_width(everyone), dtype=torch.int64, device=DEVICE)
    name_experts_on_gpu(vars(twins.table), layer + 1, layer, *placed, scratch)
    twins.compare()


def test_nothing_beside_the_tensors_is_touched():
    twins = Twins({LOW: [0, 3], HIGH: [0, 2]}, place=at_the_edge, staging=4)
    for table in (twins.plain, twins.table):
        set_prefetch(table, {LOW: 4, HIGH: 4})
    for layer in range(LAYERS):
        predict(twins, layer, layer)
        list_both(twins, layer, 1, PROJECTIONS)


@pytest.mark.parametrize("planned", [0, 1])
def test_copies_are_complete_and_published_or_stop(planned):
    """The copies are for layer 1.

    Once it is planned nothing is copied, and nothing is reported as arrived.
    """
    lengths = [0, 16, 4096, 32 * 8192 * 2 + 8192 + 48]
    sources = [torch.randint(0, 255, (max(count, 16),), dtype=torch.uint8, device=DEVICE) for count in lengths]
    slots = [torch.full((len(source) + 16,), 0xEE, dtype=torch.uint8, device=DEVICE) for source in sources]
    listed = PrefetchList.allocate(EXPERTS, DEVICE)
    for number, (source, slot, count) in enumerate(zip(sources, slots, lengths, strict=True)):
        place = 5 * EXPERTS + 2 * number
        listed.copies[number] = torch.tensor((source.data_ptr(), slot.data_ptr(), count, place, 2))
    listed.count.fill_(len(lengths))
    table = Table.allocate(LAYERS, EXPERTS, device=DEVICE)
    assert (table.precision == ABSENT).all()
    table.planned.fill_(planned)
    copy_predicted_on_gpu(table.at(1), 1, vars(listed))
    made = planned != 1
    for source, slot, count in zip(sources, slots, lengths, strict=True):
        assert torch.equal(slot[:count], source[:count]) == (made or not count)
        assert (slot[count:] == 0xEE).all()
    arrived = table.staged[1, 0, 2].tolist()
    assert arrived == [2 * (made and expert % 2 == 0 and expert < 2 * len(lengths)) for expert in range(EXPERTS)]
    assert not table.staged[0].any()


@pytest.mark.parametrize(("experts", "top_k"), [(12, 3), (33, 4)])
def test_popularity_is_its_plain_twin(experts, top_k):
    plain, counts = (torch.zeros(LAYERS, experts, dtype=torch.int64, device=device) for device in ("cpu", DEVICE))
    expected = torch.full((LAYERS, experts), -1, dtype=torch.int32)
    found = expected.to(DEVICE, copy=True)
    for seed in range(12):
        large = seed % 5 == 4  # only counted, in several chunks
        ids, _ = random_step(seed, 700 if large else 1 + seed % 3, top_k, experts)
        ids, real = ids if seed % 2 else ids.int(), 701 - seed if large else seed % (len(ids) + 1)
        others = 2, 1 << 20, 0 if large else top_k
        count_and_name(plain, expected, seed % LAYERS, ids, rows(real), *others)
        given = counts, found, seed % LAYERS, ids.to(DEVICE), rows(real).to(DEVICE), *others
        count_and_name_on_gpu(*given)
        assert torch.equal(counts.cpu(), plain)
        assert torch.equal(found.cpu(), expected)
    assert (expected >= 0).any()
