"""Finding the gate of a layer in blocks of many shapes, and rejecting wrong ones."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from vllm_dymoe.options import Options
from vllm_dymoe.planner.routing import Routing
from vllm_dymoe.prefetch import Gate, RoutedModel
from vllm_dymoe.vllm_plugin.gates import GateError, PredictorObserver, checked, find_gate
from vllm_dymoe.vllm_plugin.observers import Observation

HIDDEN, EXPERTS, TOP_K = 12, 8, 2


class Experts(nn.Module):
    """The part of vLLM's RoutedExperts that the plugin reads."""

    def __init__(self):
        super().__init__()
        self.layer_name = "model.layers.0.mlp.experts"
        self.hidden_size = HIDDEN
        self.moe_config = SimpleNamespace(num_experts=EXPERTS)
        self.expert_map = None
        self.scoring_func, self.e_score_correction_bias = "softmax", None
        self.use_grouped_topk, self.num_expert_group, self.topk_group = False, None, None
        self.inside = nn.Linear(HIDDEN, EXPERTS)  # as a part of the experts it cannot be their gate


class Replicated(nn.Module):
    """Replaces vLLM's linear layers: their attributes, and calls that return a pair.

    Like theirs, it may have no weight after loading.
    """

    def __init__(self):
        super().__init__()
        self.input_size, self.output_size, self.params_dtype = HIDDEN, EXPERTS, torch.float32
        self.linear = [nn.Linear(HIDDEN, EXPERTS)]  # layers in a list are no submodules

    def forward(self, x):
        assert x.dtype == self.params_dtype
        return self.linear[0](x), None


class Block(nn.Module):
    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.experts = nn.Module()
        self.experts.routed_experts = Experts()

    @property
    def routed(self):
        return self.experts.routed_experts


def linear():
    return nn.Linear(HIDDEN, EXPERTS)


def assert_found(model, block, gate, dtype=torch.float32):
    x = torch.randn(3, HIDDEN, dtype=dtype)
    assert torch.equal(find_gate(block.routed, model).logits(x), gate(x.float()))


def above():
    layer = nn.Module()
    layer.router, layer.mlp = linear(), Block()
    return layer, layer.mlp, layer.router


def beside():
    block = Block(gate=linear(), shared_expert_gate=nn.Linear(HIDDEN, 1))
    return block, block, block.gate


def below():
    """Return a block with the gate a level below, under another name, as in DBRX."""
    block = Block(router=nn.Sequential(nn.Identity(), Replicated()))
    return block, block, block.router[1].linear[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("place", [above, beside, below])
def test_a_gate_is_found_wherever_it_lies(place, dtype):
    """The dtype of the input may differ from the gate's."""
    assert_found(*place(), dtype)


def test_the_gate_is_the_block_s_own_whatever_else_has_the_experts():
    """vLLM's models also keep lists of their MoE layers, which contain the experts."""
    model = nn.Module()
    model.layers = nn.ModuleList(Block(gate=linear()) for _ in range(3))
    model.moe_layers = nn.ModuleList(block.experts for block in model.layers)
    for block in model.layers:
        assert_found(model, block, block.gate)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Block(gate=linear(), other=linear()), "2 linear layers"),
        (lambda: nn.ModuleList([Block(), Block(gate=linear()), Block(gate=linear())]), "4 linear layers"),
        (lambda: Block(gate=nn.Linear(HIDDEN, EXPERTS + 1)), "no linear layer"),
    ],
)
def test_what_cannot_be_told_is_no_gate(make, message):
    model = make()
    with pytest.raises(GateError, match=message):
        find_gate(getattr(model, "routed", None) or model[0].routed, model)


@pytest.mark.parametrize("grouped", [False, True])
def test_how_scores_become_a_choice(grouped):
    block = Block(gate=linear())
    block.routed.scoring_func, block.routed.e_score_correction_bias = "sigmoid", torch.randn(EXPERTS)
    block.routed.use_grouped_topk, block.routed.num_expert_group, block.routed.topk_group = grouped, 4, 2
    block.routed.expert_map = torch.tensor([0, -1] * 4)
    gate = find_gate(block.routed, block)
    assert gate.scoring == "sigmoid"
    assert gate.correction is block.routed.e_score_correction_bias
    assert (gate.groups, gate.top_groups) == ((4, 2) if grouped else (0, 0))
    assert gate.local == (0, -1) * 4
    block.routed.scoring_func = "sqrtsoftplus"
    with pytest.raises(GateError, match="sqrtsoftplus"):
        find_gate(block.routed, block)


def choice(gate, x):
    return gate.scores(x).topk(TOP_K).indices.int()


def test_a_gate_that_chooses_otherwise_is_found_out():
    x, gate, other = torch.randn(50, HIDDEN), Gate(linear()), Gate(linear())
    assert checked(gate, "a", x, choice(gate, x)) is gate
    with pytest.raises(GateError, match=r"model.layers.1 .*[0-9]%"):
        checked(gate, "model.layers.1", x, choice(other, x))


@pytest.mark.parametrize(
    ("scoring", "logits", "near", "wrong"),
    [
        ("softmax", [-1.2036, -1.204, -1.609, -1.6099, -9.2], ([0, 1], [1]), [2]),
        # Llama-4 on a CPU: vLLM chose the first of two experts with logits of 2.2. The plugin's logits differ, because
        # they are computed from 0.87 times the input.
        ("softmax", [1.90625, 1.921875, 0.625], ([0],), [2]),
        ("sigmoid", [1.90625, 1.921875, 0.625], ([0],), [2]),
    ],
)
def test_near_ties_are_no_disagreement(scoring, logits, near, wrong):
    gate, x = Gate(lambda x: x, scoring), torch.tensor([logits])
    for ids in near:
        checked(gate, "a", x, torch.tensor([ids]))
    with pytest.raises(GateError):
        checked(gate, "a", x, torch.tensor([wrong]))


def test_a_correction_that_vllm_does_not_apply_is_dropped():
    x = torch.randn(50, EXPERTS)
    corrected = Gate(lambda x: x, correction=torch.randn(EXPERTS))
    assert checked(corrected, "a", x, choice(corrected, x)) is corrected
    assert checked(corrected, "a", x, x.topk(TOP_K).indices).correction is None
    with pytest.raises(GateError):
        checked(corrected, "a", x, (-x).topk(TOP_K).indices)


class Rank:
    """A rank that prepares prefetching with the given blocks, and the outcome."""

    def __init__(self, blocks, **options):
        self.predictor_observer, self.observation = PredictorObserver(Options(**options)), Observation()
        self.blocks, self.turned_off = [make() for make in blocks], 0
        self.predictor_observer.model_made(nn.ModuleList(self.blocks))
        for position, block in enumerate(self.blocks):
            self.predictor_observer.layer_loaded(position, block.routed)
        self.predictor_observer.model_loaded(len(blocks))
        self.predictor = self.predictor_observer.predictor(RoutedModel(len(blocks), EXPERTS, TOP_K))
        self.predictor_observer.listen(self.observation, self._turn_off)

    def _turn_off(self):
        self.turned_off += 1

    def see(self, layer, x, chosen_by):
        ids = self.blocks[chosen_by].gate(x).topk(TOP_K).indices
        routing = Routing(layer, len(self.blocks), x, ids, torch.ones(ids.shape))
        for observer in self.observation.observers:
            observer.see(routing)
        return routing


def good():
    return Block(gate=linear())


def test_each_gate_is_looked_at_once_and_then_none_is(monkeypatch):
    rank, looked_at = Rank([good, good], policy="exact"), []
    agreement = Gate.agreement
    monkeypatch.setattr(Gate, "agreement", lambda gate, *what: (looked_at.append(gate), agreement(gate, *what))[1])
    for layer in (0, 0, 1, 0, 1):
        assert bool(rank.observation.observers) == (len(looked_at) < 2)
        rank.see(layer, torch.randn(5, HIDDEN), layer)
    assert looked_at == rank.predictor_observer.gates
    assert rank.observation.observers == ()


@pytest.mark.parametrize("there", [False, True])
def test_a_gate_that_is_not_there_or_chooses_otherwise_gets_a_sentence_and_no_prefetch(there, warnings):
    rank = Rank([good, good if there else Block], policy="exact")
    if there:
        x = torch.randn(50, HIDDEN)
        rank.see(0, x, 0)
        assert not rank.turned_off
        rank.see(1, x, 0)
    assert rank.turned_off == there
    assert (rank.predictor is None) == (not there)
    assert rank.observation.observers == ()
    (sentence,) = warnings()
    reason = "that was found for model" if there else "of model.layers.0.mlp.experts cannot be used: 2 linear"
    assert f'policy "exact" prefetches nothing, because the gate {reason}' in sentence


@pytest.mark.parametrize(
    ("options", "foresees"),
    [
        ({"policy": "on-demand"}, False),
        ({"policy": "layer-prefetch"}, True),
        ({"policy": "duoserve"}, True),
        ({"policy_options": {"look_ahead": 0}}, False),
    ],
)
def test_policies_without_gates_look_for_none(options, foresees, warnings):
    rank = Rank([Block, Block], **options)
    assert (rank.predictor is not None) == foresees
    assert rank.observation.observers == (), "listening would cost time"
    assert not warnings()


def test_rows_that_are_not_finite_say_nothing_about_a_gate():
    """Otherwise one request of NaN at the start would end prefetching for good."""
    rank, x = Rank([good], policy="exact"), torch.randn(8, HIDDEN)
    ids = rank.blocks[0].gate(x).topk(TOP_K).indices
    x[1:], ids[1:], weights = float("nan"), (ids[1:] + 1) % EXPERTS, torch.ones(ids.shape)
    for observer in rank.observation.observers:
        observer.see(Routing(0, 1, x[1:], ids[1:], weights[1:]))
    assert rank.observation.observers, "nothing was said: it is asked again"
    for observer in rank.observation.observers:
        observer.see(Routing(0, 1, x, ids, weights))
    assert not rank.observation.observers
    assert not rank.turned_off
