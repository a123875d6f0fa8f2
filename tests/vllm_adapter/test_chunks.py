"""A prompt that vLLM reads in chunks is judged as one that it reads at once."""

from types import SimpleNamespace

import pytest
import torch

from tests.vllm_adapter.steps import prompt, scheduled
from vllm_dymoe.residency.routing import Routing
from vllm_dymoe.residency.tier import Tier
from vllm_dymoe.systems.dymoe import Dymoe
from vllm_dymoe.systems.importance import step_importance
from vllm_dymoe.vllm_adapter import step as step_module
from vllm_dymoe.vllm_adapter.step import PromptTap, RunningStep

LAYERS, EXPERTS, TOP_K, LENGTH = 3, 16, 4, 33


class Rank:
    """Steps of requests, each of which says where its tokens lie in its prompt; no attention is listened to."""

    def __init__(self, monkeypatch, **options):
        system = Dymoe(retention=0.75)
        self.step = RunningStep()
        self.tap, self.system = PromptTap(lambda: system, self.step, **options), system
        self._monkeypatch = monkeypatch
        generator = torch.Generator().manual_seed(0)
        scores = torch.rand(LAYERS, LENGTH, EXPERTS, generator=generator)
        self.weights, self.ids = (part.contiguous() for part in scores.softmax(-1).topk(TOP_K))

    def run(self, spans, **step):
        """One step of requests "a", "b", ... that compute these (first, last) tokens; the routings of its layers."""
        what = scheduled(*(last - first for first, last in spans), **step)
        self.step.end()
        self.tap.chunks.begin_step(what)
        self.step.begin(what)
        counts = torch.tensor([0, *what.num_scheduled_tokens.values()])
        ends = torch.tensor([last for _, last in spans])
        attention = SimpleNamespace(query_start_loc=counts.cumsum(0), seq_lens=ends)
        context = SimpleNamespace(attn_metadata={"attn.0": attention}, additional_kwargs={})
        self._monkeypatch.setattr(step_module, "get_forward_context", lambda: context)
        routings = []
        for layer in range(LAYERS):
            ids, weights = (torch.cat([part[layer, a:b] for a, b in spans]) for part in (self.ids, self.weights))
            found = self.tap.tokens(len(ids), ids.device, layer)
            routing = Routing(layer, LAYERS, torch.empty(len(ids), 0), ids, weights, self.step.phase, found)
            self.tap.remember(routing, EXPERTS)
            routings.append(routing)
        return routings

    def loads(self, routings):
        """By layer what each expert of the step's prompts counts, rounded: chunks are added in another order."""
        found = [step_importance(r.ids, r.weights, EXPERTS, r.prompt).load for r in routings]
        return [{expert: (hits, round(total, 4)) for expert, (hits, total) in load.items()} for load in found]


@pytest.fixture
def rank(monkeypatch):
    return Rank(monkeypatch)


def read_in_chunks(rank, name, *ends):
    """The routings of the last one."""
    first, new = 0, [prompt(name, range(LENGTH))]
    for end in ends:
        computed = {name: first}
        found = rank.run([(first, end)], new=new, reading=[name], computed=computed)
        first, new = end, []
    return found


@pytest.mark.parametrize("ends", [(LENGTH,), (16, 32, LENGTH), (20, LENGTH)])
def test_the_last_chunk_knows_what_the_whole_prompt_said(rank, monkeypatch, ends):
    whole = rank.loads(Rank(monkeypatch).run([(0, LENGTH)], new=[prompt("a", range(LENGTH))]))
    got = rank.loads(read_in_chunks(rank, "a", *ends))
    for load, want in zip(got, whole, strict=True):
        assert load == {expert: want[expert] for expert in load}


def test_a_last_chunk_of_one_token_is_a_prompt(rank):
    """Which experts it needs high does not follow from its own weights."""
    routings = read_in_chunks(rank, "a", LENGTH - 1, LENGTH)
    assert all(routing.prompt.rows.tolist() == [True] for routing in routings)
    alone = [Routing(r.layer, LAYERS, r.x, r.ids, r.weights, r.phase) for r in routings]
    chosen, by_weight = ([rank.system.precision.select(r) for r in found] for found in (routings, alone))
    assert chosen != by_weight
    for routing, tiers in zip(routings, chosen, strict=True):
        load = step_importance(routing.ids, routing.weights, EXPERTS, routing.prompt).load
        worst_high = min(load[expert] for expert, tier in tiers.items() if tier is Tier.HI)
        assert all(load[expert] <= worst_high for expert, tier in tiers.items() if tier is Tier.LO)


def test_a_cached_prefix_and_a_prompt_that_begins_anew_say_nothing(rank):
    read_in_chunks(rank, "a", 16)
    (first, *_) = rank.run([(0, 16)], reading=["a"], computed={"a": 0})  # after a preemption, say
    assert first.prompt.before is None
    rank.tap.chunks.begin_step(scheduled(0, 13, new=[prompt("b", range(30), computed=16)], finished=["a"]))
    assert rank.tap.chunks.take(29, 13).load is None


def test_requests_are_told_apart_by_where_they_are(rank):
    """The runner has them in another order than the scheduler, and one of them answers already."""
    rank.run([(0, 8), (0, 16)], new=[prompt("a", range(LENGTH)), prompt("b", range(LENGTH))])
    chunks = rank.tap.chunks
    chunks.begin_step(scheduled(8, 8, 1, reading=["a", "b"], computed={"a": 8, "b": 16, "c": 40}))
    second, first = chunks.take(24, 8), chunks.take(16, 8)
    assert torch.equal(second.load[:, 0].sum(1), torch.full((LAYERS,), 16.0 * TOP_K, dtype=torch.float64))
    assert torch.equal(first.load[:, 0].sum(1), torch.full((LAYERS,), 8.0 * TOP_K, dtype=torch.float64))
    assert chunks.take(41, 1) is None


def test_what_will_not_be_asked_for_is_not_counted(rank):
    rank.run([(0, LENGTH)], new=[prompt("a", range(LENGTH))])
    assert rank.tap.chunks._reading["a"].load is None
