"""Every way in which vLLM's models pass experts gives the same weights and biases."""

import random
from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.layers.fused_moe.activation import MoEActivation

from tests.quantize.readers.kinds import awq, float_parts, random_floats, random_integers
from vllm_dymoe.experts.format import Projection
from vllm_dymoe.options import ConfigError
from vllm_dymoe.quantize.readers import make_reader
from vllm_dymoe.vllm_plugin.expert_loader import ExpertLoader

EXPERTS, HIDDEN, INTERMEDIATE = 4, 6, 8
SHARDS = {Projection.GATE: "w1", Projection.UP: "w3", Projection.DOWN: "w2"}
SHAPES = {
    Projection.GATE: (INTERMEDIATE, HIDDEN),
    Projection.UP: (INTERMEDIATE, HIDDEN),
    Projection.DOWN: (HIDDEN, INTERMEDIATE),
}


class Layer(torch.nn.Module):
    """The part of RoutedExperts that the loader uses; keeps the weights passed on."""

    layer_name = "model.layers.3.mlp.experts"

    def __init__(
        self, *, rank=0, ranks=1, expert_rank=0, expert_ranks=1, activation=MoEActivation.SILU, bias=True,
        config=None, sizes=(HIDDEN, INTERMEDIATE), wanted=True,
    ):  # fmt: skip
        super().__init__()
        parallel = SimpleNamespace(tp_rank=rank, tp_size=ranks)
        self.moe_config = SimpleNamespace(moe_parallel_config=parallel, activation=activation, num_experts=EXPERTS)
        self.local = EXPERTS // expert_ranks
        self.first = expert_rank * self.local
        self.got, self.wanted = {}, wanted
        sink = SimpleNamespace(put=self.put)
        reader = make_reader(config)
        self.loader = ExpertLoader(self, (sink, 3), sizes[0], sizes[1] // ranks, reader)
        self.loader.register(self, torch.bfloat16, bias=bias)

    def put(self, layer, expert, projection, tensor, *, bias=False, parts=None):
        place = ("bias" if bias else "weight", expert, projection)
        assert layer == 3
        if self.wanted:  # as long as no store is complete
            assert place not in self.got, f"{place} came twice"
            self.got[place] = tensor() if callable(tensor) else tensor

    def _map_global_expert_id_to_local_expert_id(self, expert):
        return expert - self.first if self.first <= expert < self.first + self.local else -1


def random_model():
    generator = torch.Generator().manual_seed(0)
    places = [(expert, projection) for expert in range(EXPERTS) for projection in Projection]
    weights = {place: torch.randn(*SHAPES[place[1]], generator=generator) for place in places}
    biases = {place: torch.randn(SHAPES[place[1]][0], generator=generator) for place in places}
    return weights, biases


def expected(layer, weights, biases, rank, ranks):
    """Return a rank's slices: rows of gate and up, columns of down.

    The bias of down belongs to the first rank.
    """
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
    """As RoutedExperts.load_weights."""
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
    """As GptOssModel._load_weights_other, after it has sliced the stacks."""
    rank, ranks = layer.moe_config.moe_parallel_config.tp_rank, layer.moe_config.moe_parallel_config.tp_size
    mine = slice(layer.first, layer.first + layer.local)
    rows = slice(2 * rank * INTERMEDIATE // ranks, 2 * (rank + 1) * INTERMEDIATE // ranks)
    columns = slice(rank * INTERMEDIATE // ranks, (rank + 1) * INTERMEDIATE // ranks)
    layer.w13_weight.copy_(in_turns(weights)[mine, rows])
    layer.w2_weight.copy_(stacked(weights, Projection.DOWN)[mine, :, columns])
    layer.w13_bias.copy_(in_turns(biases)[mine, rows])
    layer.w2_bias.copy_(stacked(biases, Projection.DOWN)[mine] * (rank == 0))


def gpt_oss_one_by_one(layer, weights, biases):
    """As GptOssModel._try_load_streamed_expert: transposed and not sliced.

    Rows of gate and up alternate.
    """
    for expert in range(EXPERTS):
        for name, matrix in (
            ("w13_weight", in_turns(weights)[expert].t()),
            ("w2_weight", weights[expert, Projection.DOWN].t()),
            ("w13_bias", in_turns(biases)[expert]),
            ("w2_bias", biases[expert, Projection.DOWN]),
        ):
            param = getattr(layer, name)
            param.weight_loader(param, matrix, f"model.{name}", f"gpt_oss_{name.partition('_')[0]}", expert)


def dbrx_stacks(layer, weights, biases):
    """As DbrxForCausalLM.load_weights: all experts in one matrix, down transposed.

    There is no expert number.
    """
    for projection, name in ((Projection.GATE, "w1"), (Projection.UP, "v1"), (Projection.DOWN, "w2")):
        stack = stacked(weights, projection)
        matrix = (stack.transpose(1, 2) if projection is Projection.DOWN else stack).flatten(0, 1)
        param = getattr(layer, "w2_weight" if name == "w2" else "w13_weight")
        param.weight_loader(param, matrix, f"transformer.blocks.0.ffn.experts.mlp.{name}", "ffn.experts.w13_weight")


def llama_stacks(layer, weights, biases):
    """As for Llama 4: sliced by expert before the call, and by rows in it."""
    for projection, shard in SHARDS.items():
        stack = stacked(weights, projection)[layer.first :][: layer.local]
        layer.w13_weight.weight_loader(layer.w13_weight, stack, "model.w13_weight", shard, layer.first)


def without_a_gate(layer, weights, biases):
    """As for models with ReLU^2: the first matrix is up."""
    weights = {place: weight for place, weight in weights.items() if place[1] is not Projection.GATE}
    for (expert, projection), weight in weights.items():
        name, shard = ("w2_weight", "w2") if projection is Projection.DOWN else ("w13_weight", "w1")
        getattr(layer, name).weight_loader(getattr(layer, name), weight, f"model.{name}", shard, expert)


WAYS = {
    one_by_one: MoEActivation.SILU,
    gpt_oss_stacks: MoEActivation.SWIGLUOAI,
    gpt_oss_one_by_one: MoEActivation.SWIGLUOAI,
    dbrx_stacks: MoEActivation.SILU,
    llama_stacks: MoEActivation.SILU,
    without_a_gate: MoEActivation.RELU2_NO_MUL,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("parallel", [(0, 1, 0, 1), (0, 2, 0, 1), (1, 2, 0, 1), (0, 1, 1, 2)])
def test_every_expert_arrives_once_and_sliced(way, parallel):
    rank, ranks, expert_rank, expert_ranks = parallel
    layer = Layer(rank=rank, ranks=ranks, expert_rank=expert_rank, expert_ranks=expert_ranks, activation=WAYS[way])
    weights, biases = random_model()
    way(layer, weights, biases)
    want = expected(layer, weights, biases, rank, ranks)
    if way in (dbrx_stacks, llama_stacks, without_a_gate):
        want = {place: tensor for place, tensor in want.items() if place[0] == "weight"}
    if way is without_a_gate:
        want = {place: tensor for place, tensor in want.items() if place[2] is not Projection.GATE}
    assert layer.got.keys() == want.keys()
    for place, tensor in want.items():
        assert torch.equal(layer.got[place], tensor), place


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
    with pytest.raises(ConfigError, match=f"tensor model.{name} "):
        layer.w13_weight.weight_loader(layer.w13_weight, torch.zeros(shape), f"model.{name}", "w1", 0)


WIDE, NARROW, GROUP = 64, 96, 32
STEMS = {Projection.GATE: ("w1", "w13"), Projection.UP: ("w3", "w13"), Projection.DOWN: ("w2", "w2")}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}


def awq_layer(**parallel):
    return Layer(config=AWQ, sizes=(WIDE, NARROW), bias=False, **parallel)


def load(layer, tensors):
    for expert, projection, part, tensor in tensors:
        shard, stem = STEMS[projection]
        param = getattr(layer, f"{stem}_{part}")
        name = f"{layer.layer_name}.{stem}_{part}"
        done = param.weight_loader(param, tensor, name, shard, expert, return_success=True)
        assert done is (layer._map_global_expert_id_to_local_expert_id(expert) != -1)


MODEL = {
    (expert, projection): random_integers(
        *((WIDE, NARROW) if projection is Projection.DOWN else (NARROW, WIDE)), GROUP, seed=10 * expert + projection
    )
    for expert in range(EXPERTS)
    for projection in Projection
}


def tensors(seed=0):
    everything = [(*place, part, tensor) for place, matrix in MODEL.items() for part, tensor in awq(matrix).items()]
    random.Random(seed).shuffle(everything)
    return everything


@pytest.mark.parametrize("parallel", [(0, 1, 0, 1), (0, 3, 0, 1), (1, 3, 0, 1), (2, 3, 0, 1), (0, 1, 1, 2)])
def test_every_quantized_expert_arrives_once_and_cut_as_codes(parallel):
    rank, ranks, expert_rank, expert_ranks = parallel
    layer = awq_layer(rank=rank, ranks=ranks, expert_rank=expert_rank, expert_ranks=expert_ranks)
    load(layer, tensors())
    layer.loader.check_complete()
    share = NARROW // ranks
    mine = slice(rank * share, (rank + 1) * share)
    assert len(layer.got) == layer.local * len(Projection)
    for (_, expert, projection), matrix in layer.got.items():
        source = MODEL[layer.first + expert, projection]
        cut = (slice(None), mine) if projection is Projection.DOWN else (mine, slice(None))
        assert torch.equal(matrix.codes, source.codes[cut])
        assert torch.equal(matrix.dequantize(), source.dequantize()[cut])


def test_nothing_is_read_where_the_store_is_complete():
    layer = awq_layer(wanted=False)
    load(layer, [(*place[:2], part, torch.empty(0)) for *place, part, _ in tensors()])
    layer.loader.check_complete()
    assert not layer.got


def refusal(layer, spoiled):
    def load_all():
        load(layer, spoiled)
        layer.loader.check_complete()

    with pytest.raises(ConfigError) as caught:
        load_all()
    sentence = str(caught.value)
    assert sentence.startswith("vllm-dymoe: the down projection of expert 2 in model.layers.3.mlp.experts ")
    assert sentence.endswith(".")
    return sentence


@pytest.mark.parametrize(
    ("part", "tensor", "sentence"),
    [
        ("qweight", torch.zeros(64, 8, dtype=torch.int32), "qweight has shape [64, 8], expected [96, 8]"),
        ("qzeros", torch.zeros(2, 8, dtype=torch.int32), "qzeros has shape [2, 8], expected [3, 8]"),
        ("weight", torch.zeros(64, 96), "it has 16 bits, although the checkpoint is quantized"),
        *((part, None, f"lacks {part} in the checkpoint; download it again.") for part in ("qweight", "scales")),
    ],
)
def test_a_tensor_that_disagrees_or_is_missing_is_named(part, tensor, sentence):
    spoiled = [entry for entry in tensors() if entry[:3] != (2, Projection.DOWN, part)]
    spoiled += [] if tensor is None else [(2, Projection.DOWN, part, tensor)]
    assert sentence in refusal(awq_layer(), spoiled)


def test_quantized_experts_of_a_whole_layer_in_one_tensor_are_refused():
    layer = awq_layer()
    with pytest.raises(ConfigError, match=r"w13_qweight of model\.layers\.3\.mlp\.experts holds"):
        layer.w13_qweight.weight_loader(layer.w13_qweight, torch.zeros(4, 8, 8), "w13_qweight", "w1", 0)


GATE, UP, DOWN = Projection
MX_WIDTH = 160  # five groups of 32: ranks have different numbers of them


def mx_layer(width):
    return Layer(config={"quant_method": "mxfp4"}, sizes=(WIDE, width), activation=MoEActivation.SWIGLUOAI)


def load_stack(layer, name, tensor, expert=None):
    """Call the loader as GptOssModel does."""
    param = getattr(layer, name)
    param.weight_loader(param, tensor, weight_name=f"x.{name}", shard_id=None, expert_id=expert)


def stacked_model():
    wide = [random_floats("mxfp4", 2 * MX_WIDTH, WIDE, seed=e) for e in range(2)]
    down = [random_floats("mxfp4", WIDE, MX_WIDTH, seed=9 + e) for e in range(2)]
    return wide, down


def mx_stacks(matrices):
    packed = [float_parts("mxfp4", matrix) for matrix in matrices]
    blocks, scales = (torch.stack([each[part] for each in packed]) for part in ("blocks", "scales"))
    return blocks.flatten(2), scales


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_rank_has_its_groups_and_zeros_behind_them(ranks):
    wide, down = stacked_model()
    (codes, scales), (down_codes, down_scales) = mx_stacks(wide), mx_stacks(down)
    bias = torch.randn(2, 2 * MX_WIDTH)
    width = -(-5 // ranks) * 32
    for rank in range(ranks):
        begin, end = min(rank * width, MX_WIDTH), min((rank + 1) * width, MX_WIDTH)
        if begin == end:
            continue  # the last of four ranks has no group
        layer = mx_layer(width)
        load_stack(layer, "w13_weight_scale", scales[:, 2 * begin : 2 * end])
        load_stack(layer, "w13_bias", bias[:, 2 * begin : 2 * end])
        load_stack(layer, "w13_weight", codes[:, 2 * begin : 2 * end])
        load_stack(layer, "w2_weight", down_codes[..., begin // 2 : end // 2])
        load_stack(layer, "w2_weight_scale", down_scales[..., begin // 32 : end // 32])
        load_stack(layer, "w2_bias", torch.ones(2, WIDE))
        layer.loader.check_complete()
        for expert in range(2):
            gate, up = (wide[expert].dequantize()[first::2][begin:end] for first in (0, 1))
            zeros = width - (end - begin)
            pad = torch.nn.functional.pad
            assert torch.equal(layer.got["weight", expert, GATE].dequantize(), pad(gate, (0, 0, 0, zeros)))
            assert torch.equal(layer.got["weight", expert, UP].dequantize(), pad(up, (0, 0, 0, zeros)))
            assert torch.equal(
                layer.got["weight", expert, DOWN].dequantize(), pad(down[expert].dequantize()[:, begin:end], (0, zeros))
            )
            assert torch.equal(layer.got["bias", expert, UP], pad(bias[expert, 1::2][begin:end], (0, zeros)))
            assert torch.equal(layer.got["bias", expert, DOWN], torch.ones(WIDE))


def test_half_a_layer_and_damage_are_sentences():
    wide, _ = stacked_model()
    codes, scales = mx_stacks(wide)
    layer = mx_layer(MX_WIDTH)
    load_stack(layer, "w13_weight", codes)
    with pytest.raises(ConfigError, match="lacks scales"):
        layer.loader.check_complete()
    with pytest.raises(ConfigError, match=r"expert 0 .* scales"):
        load_stack(layer, "w13_weight_scale", scales[:, :, :1])
    with pytest.raises(ConfigError, match="one expert's"):
        load_stack(layer, "w13_weight", codes[0], expert=0)


@pytest.mark.parametrize("rank", [0, 1])
def test_where_experts_may_move_every_rank_takes_all_and_no_copy_of_them(rank):
    """vLLM numbers redundant experts after the last one, and passes them again."""
    layer = Layer(expert_rank=rank, expert_ranks=2, bias=False)
    layer.loader = ExpertLoader(layer, (layer.loader._store, 3), HIDDEN, INTERMEDIATE, all_experts=EXPERTS)
    layer.loader.register(layer, torch.bfloat16, bias=False)
    weight = torch.randn(SHAPES[Projection.GATE])
    given = [layer.loader(layer.w13_weight, weight, "weight", "w1", number, True) for number in range(EXPERTS + 2)]
    assert given == [True] * EXPERTS + [False] * 2
    assert {expert for _, expert, _ in layer.got} == set(range(EXPERTS))
    with pytest.raises(ConfigError, match="--enable-eplb"):
        layer.loader(layer.w13_weight, torch.stack([weight] * 2), "weight", "w1", 0)
