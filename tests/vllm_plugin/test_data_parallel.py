"""Layers that compute rows of several engines together.

Device planning has to serve the same tokens as host planning.
"""

import pytest
import torch
from vllm.v1.outputs import ModelRunnerOutput

from tests.executor.device_planned import decode, device_planned_server, run_large_batch
from tests.executor.steps import make_server, random_step
from tests.small_model import make_experts, make_store
from tests.support.no_host import NoHost
from tests.vllm_plugin.steps import rank_of, scheduled
from vllm_dymoe.kernels import Activation
from vllm_dymoe.planner.constants import SMALL_BATCH_ROWS
from vllm_dymoe.planner.table import Counter
from vllm_dymoe.vllm_plugin import data_parallel
from vllm_dymoe.vllm_plugin.data_parallel import GatheredOnDevice
from vllm_dymoe.vllm_plugin.expert_ids import bounded_map
from vllm_dymoe.vllm_plugin.failures import FailedStep
from vllm_dymoe.vllm_plugin.step import RankLayer

EVERY = 12  # experts of both engines; each has every second one


class Group:
    """Stands for the other engine; its rows come before this one's.

    The first ``tokens`` of its rows are tokens, the others padding.
    """

    def __init__(self):
        self.x = self.weights = self.ids = None
        self.tokens = 0

    def dispatch(self, x, weights, ids, sequence_parallel, extra=None):
        others = self.ids
        if extra is None:  # the other engine's device has marked its padding already
            others = torch.where(torch.arange(len(self.ids))[:, None] < self.tokens, self.ids, -1)
        met = torch.cat((self.x, x)), torch.cat((self.weights, weights)), torch.cat((others, ids.to(others.dtype)))
        if extra is None:
            return met
        marks = (torch.arange(len(self.ids)) < self.tokens).to(extra[0].dtype)
        return *met, [torch.cat((marks, extra[0]))]

    def combine(self, out, sequence_parallel):
        return out[len(self.ids) :]


@pytest.fixture
def group(monkeypatch):
    group = Group()
    monkeypatch.setattr(data_parallel, "get_ep_group", lambda: group)
    return group


def step_of(seed, rows, experts):
    x, weights, _ = random_step(seed, rows, experts)
    ids = torch.rand(rows, EVERY, generator=torch.Generator().manual_seed(seed)).topk(2).indices.int()
    return x, weights, ids


def run(rank, group, seed, tokens, rows, others, spoil=None, *, second=False):
    """Run a step of two engines; return this one's outputs and the step's.

    Args:
        rank: this engine's rank.
        group: the other engine.
        seed: of the routing and the inputs.
        tokens: number of this engine's tokens.
        rows: number of this engine's rows; those after its tokens are padding.
        others: the other engine's tokens and rows.
        spoil: a wrong expert in the other engine's first row.
        second: this engine is the other one of the same step.
    """
    experts = rank.server.experts
    numbers = torch.full((EVERY,), -1, dtype=torch.int32)
    numbers[second::2] = torch.arange(EVERY // 2, dtype=torch.int32)
    layers = [RankLayer(n, Activation.SILU, bounded_map(numbers), meets=True) for n in range(2)]
    given, theirs = step_of(seed, rows, experts), step_of(seed + 50, others[1], experts)
    if second:
        (tokens, rows), others, given, theirs = others, (tokens, rows), theirs, given
    group.tokens, (group.x, group.weights, group.ids) = others[0], theirs
    if spoil is not None:
        group.ids[0, 0] = spoil
    answer = ModelRunnerOutput(req_ids=[], req_id_to_index={})
    if not tokens:
        with rank.idle_step():
            return [rank.forward(layer, *given) for layer in layers], None
    output = scheduled(*[1] * tokens)
    rank.begin_step(output)
    outputs = [rank.forward(layer, *given)[:tokens] for layer in layers]
    return outputs, rank.end_model(None, output, answer)


STEPS = [(3, 4, (2, 2)), (0, 2, (5, 6)), (2, 2, (0, 1)), (10, 12, (30, 32)), (0, 1, (0, 1)), (8, 8, (8, 8))]


@pytest.mark.parametrize("policy", ["exact", "on-demand", "layer-prefetch"])
def test_rows_of_both_engines_are_computed_as_by_the_host_and_padding_counts_nowhere(memory_store, group, policy):
    device = rank_of(device_planned_server(memory_store, "50%", policy, low=0))
    host = rank_of(make_server(memory_store, "100%", policy, low=0))
    assert device.server.small_batches is not None
    for seed, step in enumerate(STEPS * 2):
        got, want = run(device, group, seed, *step)[0], run(host, group, seed, *step)[0]
        if step[0]:
            assert all(map(torch.equal, got, want)), step
    table, planned = device.server.cache.device_table.table, host.server.stats().planned
    with_tokens = sum(bool(tokens + others[0]) for tokens, _, others in STEPS)
    assert table.step.tolist() == [2 * with_tokens] * 2, "a step without a token of anyone ages no score"
    wanted = table.counters[:, [Counter.NEEDED_HIGH, Counter.NEEDED_LOW]].sum(0).tolist()
    assert wanted == [planned.get(name, 0) for name in ("high", "low")]
    device.server.check_integrity()


@pytest.mark.parametrize("high_by", ["threshold", "equal"])
def test_both_engines_choose_precision_as_one_with_all_experts(memory_store, group, high_by):
    """Each alone would serve more of its few active experts high."""
    options = {"policy_options": {"retention": 0.25, "high_by": high_by, "reuse_high": False}}
    one = device_planned_server(make_store(make_experts(num_experts=EVERY)), "50%", "dymoe", **options)
    both = [
        rank_of(device_planned_server(memory_store, "50%", "dymoe", all_experts=EVERY, **options)) for _ in range(2)
    ]
    for seed, (tokens, rows, others) in enumerate(STEPS * 5):
        for second, rank in enumerate(both):
            run(rank, group, seed, tokens, rows, others, second=bool(second))
        parts = []
        for number, (real, count) in enumerate(((tokens, rows), others)):
            x, weights, ids = step_of(seed + 50 * number, count, both[0].server.experts)
            parts.append((x, weights, torch.where(torch.arange(count)[:, None] < real, ids, -1)))
        x, weights, ids = map(torch.cat, zip(*parts, strict=True))
        for layer in range(2):
            alone = decode if len(x) <= SMALL_BATCH_ROWS else run_large_batch
            alone(one, layer, x, weights, ids, rows=len(x) if (ids >= 0).any() else 0)
    of_one, *of_both = (server.cache.device_table.table for server in (one, *(rank.server for rank in both)))
    assert all(torch.equal(table.threshold, of_one.threshold) for table in of_both)
    want, *found = (table.counters[:, [Counter.NEEDED_HIGH, Counter.NEEDED_LOW]].sum(0) for table in (of_one, *of_both))
    assert torch.equal(sum(found), want)
    if high_by == "equal":  # the threshold starts for other weights, and moves slowly
        assert want[0] / want.sum() == pytest.approx(0.25, abs=0.05)
    for rank in both:
        rank.server.check_integrity()


@pytest.mark.parametrize("rows", [2, SMALL_BATCH_ROWS])
def test_nothing_that_meets_waits_for_the_device(memory_store, group, rows):
    server = device_planned_server(memory_store, "50%")
    group.tokens, (group.x, group.weights, group.ids) = 1, step_of(1, rows, server.experts)
    server.small_batches.tell(rows)
    given = step_of(2, rows, server.experts)
    with NoHost():
        met = GatheredOnDevice(*given, server.small_batches, None)
    assert server.small_batches.memory.rows.tolist() == [2 * rows]
    assert met.combine(met.x).shape == given[0].shape


def test_both_engines_find_an_expert_outside_the_model_in_a_token_of_one(memory_store, group):
    rank = rank_of(device_planned_server(memory_store, "50%"))
    assert not isinstance(run(rank, group, 1, 3, 4, (2, 2))[1], FailedStep)
    failed = run(rank, group, 2, 3, 4, (2, 2), spoil=EVERY)[1]
    assert isinstance(failed, FailedStep)
    assert f"there are {EVERY}" in failed.failure
    assert not isinstance(run(rank, group, 3, 3, 4, (2, 2))[1], FailedStep)


def test_ranks_of_tensor_parallelism_have_their_part_of_the_tokens(memory_store):
    path = device_planned_server(memory_store, "50%").small_batches
    path.tell(5)
    ids = torch.zeros(4, 2, dtype=torch.int32)
    assert [(path.own_tokens(ids, first)[:, 0] == 0).sum().item() for first in (0, 4, 8)] == [4, 1, 0]
