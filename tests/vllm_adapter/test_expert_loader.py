"""Every way in which vLLM's models hand experts over ends in the same weights and biases."""

from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.layers.fused_moe.activation import MoEActivation

from vllm_dymoe.config import ConfigError
from vllm_dymoe.residency.format import Projection
from vllm_dymoe.vllm_adapter.expert_loader import ExpertLoader

EXPERTS, HIDDEN, INTERMEDIATE = 4, 6, 8
SHARDS = {Projection.GATE: "w1", Projection.UP: "w3", Projection.DOWN: "w2"}
SHAPES = {
    Projection.GATE: (INTERMEDIATE, HIDDEN),
    Projection.UP: (INTERMEDIATE, HIDDEN),
    Projection.DOWN: (HIDDEN, INTERMEDIATE),
}


class Layer(torch.nn.Module):
    """What the loader sees of a RoutedExperts."""

    def __init__(self, *, rank=0, ranks=1, expert_rank=0, expert_ranks=1, activation=MoEActivation.SILU, bias=True):
        super().__init__()
        parallel = SimpleNamespace(tp_rank=rank, tp_size=ranks)
        self.moe_config = SimpleNamespace(moe_parallel_config=parallel, activation=activation)
        self.local = EXPERTS // expert_ranks
        self.first = expert_rank * self.local
        self.got = {}
        loader = ExpertLoader(self, self.put("weight"), self.put("bias"))
        loader.register(self, torch.bfloat16, bias=bias)

    def put(self, kind):
        def put(expert, projection, tensor):
            place = (kind, expert, projection)
            assert place not in self.got, f"{place} came twice"
            self.got[place] = tensor

        return put

    def _map_global_expert_id_to_local_expert_id(self, expert):
        return expert - self.first if self.first <= expert < self.first + self.local else -1


def random_model():
    generator = torch.Generator().manual_seed(0)
    places = [(expert, projection) for expert in range(EXPERTS) for projection in Projection]
    weights = {place: torch.randn(*SHAPES[place[1]], generator=generator) for place in places}
    biases = {place: torch.randn(SHAPES[place[1]][0], generator=generator) for place in places}
    return weights, biases


def expected(layer, weights, biases, rank, ranks):
    """The rank's slices: rows of gate and up, columns of down; the bias of down on the first rank only."""
    part = slice(rank * INTERMEDIATE // ranks, (rank + 1) * INTERMEDIATE // ranks)
    want = {}
    for (expert, projection), weight in weights.items():
        local = layer._map_global_expert_id_to_local_expert_id(expert)
        if local == -1:
            continue
        down, bias = projection is Projection.DOWN, biases[expert, projection]
        want["weight", local, projection] = weight[:, part] if down else weight[part]
        want["bias", local, projection] = bias * (rank == 0) if down else bias[part]
    return want


def one_by_one(layer, weights, biases):
    """As RoutedExperts.load_weights does."""
    for (expert, projection), weight in weights.items():
        for kind, tensor in (("weight", weight), ("bias", biases[expert, projection])):
            name = f"{'w2' if projection is Projection.DOWN else 'w13'}_{kind}"
            param = getattr(layer, name)
            done = param.weight_loader(param, tensor, f"model.{name}", SHARDS[projection], expert, return_success=True)
            assert done is (layer._map_global_expert_id_to_local_expert_id(expert) != -1)


def stacked(tensors, projection):
    return torch.stack([tensors[expert, projection] for expert in range(EXPERTS)])


def in_turns(tensors):
    return torch.stack((stacked(tensors, Projection.GATE), stacked(tensors, Projection.UP)), 2).flatten(1, 2)


def gpt_oss_stacks(layer, weights, biases):
    """As GptOssModel._load_weights_other does, after it has sliced the stacks."""
    rank, ranks = layer.moe_config.moe_parallel_config.tp_rank, layer.moe_config.moe_parallel_config.tp_size
    mine = slice(layer.first, layer.first + layer.local)
    rows = slice(2 * rank * INTERMEDIATE // ranks, 2 * (rank + 1) * INTERMEDIATE // ranks)
    columns = slice(rank * INTERMEDIATE // ranks, (rank + 1) * INTERMEDIATE // ranks)
    layer.w13_weight.copy_(in_turns(weights)[mine, rows])
    layer.w2_weight.copy_(stacked(weights, Projection.DOWN)[mine, :, columns])
    layer.w13_bias.copy_(in_turns(biases)[mine, rows])
    layer.w2_bias.copy_(stacked(biases, Projection.DOWN)[mine] * (rank == 0))


def gpt_oss_one_by_one(layer, weights, biases):
    """As GptOssModel._try_load_streamed_expert does: transposed, gate and up in turns, not sliced."""
    for expert in range(EXPERTS):
        for name, matrix in (
            ("w13_weight", in_turns(weights)[expert].t()),
            ("w2_weight", weights[expert, Projection.DOWN].t()),
            ("w13_bias", in_turns(biases)[expert]),
            ("w2_bias", biases[expert, Projection.DOWN]),
        ):
            param = getattr(layer, name)
            param.weight_loader(param, matrix, f"model.{name}", f"gpt_oss_{name.partition('_')[0]}", expert)


@pytest.mark.parametrize("way", [one_by_one, gpt_oss_stacks, gpt_oss_one_by_one])
@pytest.mark.parametrize("parallel", [(0, 1, 0, 1), (0, 2, 0, 1), (1, 2, 0, 1), (0, 1, 1, 2)])
def test_every_expert_arrives_once_and_sliced(way, parallel):
    rank, ranks, expert_rank, expert_ranks = parallel
    activation = MoEActivation.SILU if way is one_by_one else MoEActivation.SWIGLUOAI
    layer = Layer(rank=rank, ranks=ranks, expert_rank=expert_rank, expert_ranks=expert_ranks, activation=activation)
    weights, biases = random_model()
    way(layer, weights, biases)
    want = expected(layer, weights, biases, rank, ranks)
    assert layer.got.keys() == want.keys()
    for place, tensor in want.items():
        assert torch.equal(layer.got[place], tensor), place


def test_a_stack_through_the_weight_loader_holds_the_local_experts():
    """As Llama 4 does: sliced by expert before, by rows here."""
    layer = Layer(rank=1, ranks=2, expert_rank=1, expert_ranks=2, bias=False)
    weights, biases = random_model()
    for projection, shard in SHARDS.items():
        stack = stacked(weights, projection)[layer.first :]
        layer.w13_weight.weight_loader(
            layer.w13_weight, stack, "model.w13_weight", shard_id=shard, expert_id=layer.first
        )
    want = expected(layer, weights, biases, 1, 2)
    assert layer.got.keys() == {place for place in want if place[0] == "weight"}
    for place, tensor in layer.got.items():
        assert torch.equal(tensor, want[place]), place


def test_placeholders_are_empty_and_there_for_biases_only_if_the_layer_has_them():
    assert {name: p.numel() for name, p in Layer().named_parameters()} == dict.fromkeys(
        ("w13_weight", "w2_weight", "w13_bias", "w2_bias"), 0
    )
    assert [name for name, _ in Layer(bias=False).named_parameters()] == ["w13_weight", "w2_weight"]


@pytest.mark.parametrize(
    ("name", "shape"), [("w13_weight_scale", (4, 4)), ("w13_weight", (4,)), ("w13_bias", (4, 4)), ("w2_weight", ())]
)
def test_what_is_no_weight_or_bias_is_refused_by_name(name, shape):
    layer = Layer()
    with pytest.raises(ConfigError, match=f"cannot take the checkpoint's tensor model.{name} with shape"):
        layer.w13_weight.weight_loader(layer.w13_weight, torch.zeros(shape), f"model.{name}", "w1", 0)


def dbrx_stacks(layer, weights):
    """As DbrxForCausalLM.load_weights does: all experts one below the other, down as its transpose, and no number."""
    for projection, name in ((Projection.GATE, "w1"), (Projection.UP, "v1"), (Projection.DOWN, "w2")):
        stack = stacked(weights, projection)
        matrix = (stack.transpose(1, 2) if projection is Projection.DOWN else stack).flatten(0, 1)
        param = getattr(layer, "w2_weight" if name == "w2" else "w13_weight")
        param.weight_loader(param, matrix, f"transformer.blocks.0.ffn.experts.mlp.{name}", "ffn.experts.w13_weight")


@pytest.mark.parametrize("parallel", [(0, 1, 0, 1), (1, 2, 0, 1), (0, 1, 1, 2)])
def test_dbrx_stacks_arrive_sliced(parallel):
    rank, ranks, expert_rank, expert_ranks = parallel
    layer = Layer(rank=rank, ranks=ranks, expert_rank=expert_rank, expert_ranks=expert_ranks, bias=False)
    layer.moe_config.num_experts = EXPERTS
    weights, biases = random_model()
    dbrx_stacks(layer, weights)
    want = {p: t for p, t in expected(layer, weights, biases, rank, ranks).items() if p[0] == "weight"}
    assert layer.got.keys() == want.keys()
    assert all(torch.equal(layer.got[place], tensor) for place, tensor in want.items())


def test_the_first_matrix_of_experts_without_a_gate_is_up():
    layer = Layer(activation=MoEActivation.RELU2_NO_MUL, bias=False)
    weights, _ = random_model()
    for expert in range(EXPERTS):
        for shard, projection in (("w1", Projection.UP), ("w2", Projection.DOWN)):
            param = getattr(layer, "w2_weight" if shard == "w2" else "w13_weight")
            assert param.weight_loader(
                param, weights[expert, projection], "model.weight", shard, expert, return_success=True
            )
    assert {place[2] for place in layer.got} == {Projection.UP, Projection.DOWN}
    assert len(layer.got) == 2 * EXPERTS
