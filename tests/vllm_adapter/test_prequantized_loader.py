"""Quantized experts from vLLM's loaders: every tensor order, every rank, and what is missing or wrong."""

import random
from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.layers.fused_moe.activation import MoEActivation

from tests.quantize.readers.packing import awq, random_prequantized
from vllm_dymoe.config import ConfigError
from vllm_dymoe.quantize.readers import make_reader
from vllm_dymoe.residency.format import Projection
from vllm_dymoe.vllm_adapter.expert_loader import PrequantizedExpertLoader

EXPERTS, HIDDEN, INTERMEDIATE, GROUP = 4, 64, 96, 32
SHARDS = {Projection.GATE: ("w1", "w13"), Projection.UP: ("w3", "w13"), Projection.DOWN: ("w2", "w2")}
CONFIG = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}


class Layer(torch.nn.Module):
    """What the loader sees of a RoutedExperts."""

    layer_name = "model.layers.3.mlp.experts"

    def __init__(self, *, rank=0, ranks=1, expert_rank=0, expert_ranks=1, wanted=True):
        super().__init__()
        parallel = SimpleNamespace(tp_rank=rank, tp_size=ranks)
        self.moe_config = SimpleNamespace(moe_parallel_config=parallel, activation=MoEActivation.SILU)
        self.local = EXPERTS // expert_ranks
        self.first = expert_rank * self.local
        self.got = {}
        self.loader = PrequantizedExpertLoader(
            self, self.put, None, make_reader(CONFIG), lambda: wanted, HIDDEN, INTERMEDIATE
        )
        self.loader.register(self, torch.float16, bias=False)

    def put(self, expert, projection, matrix):
        assert (expert, projection) not in self.got
        self.got[expert, projection] = matrix()

    def _map_global_expert_id_to_local_expert_id(self, expert):
        return expert - self.first if self.first <= expert < self.first + self.local else -1

    def load(self, tensors):
        for expert, projection, part, tensor in tensors:
            shard, stem = SHARDS[projection]
            param = getattr(self, f"{stem}_{part}")
            done = param.weight_loader(
                param, tensor, f"{self.layer_name}.{stem}_{part}", shard, expert, return_success=True
            )
            assert done is (self._map_global_expert_id_to_local_expert_id(expert) != -1)


MODEL = {
    (expert, projection): random_prequantized(
        *((HIDDEN, INTERMEDIATE) if projection is Projection.DOWN else (INTERMEDIATE, HIDDEN)),
        GROUP,
        seed=10 * expert + projection,
    )
    for expert in range(EXPERTS)
    for projection in Projection
}


def tensors(seed=0):
    """All tensors of the model, in any order."""
    everything = [(*place, part, tensor) for place, matrix in MODEL.items() for part, tensor in awq(matrix).items()]
    random.Random(seed).shuffle(everything)
    return everything


@pytest.mark.parametrize("parallel", [(0, 1, 0, 1), (0, 3, 0, 1), (1, 3, 0, 1), (2, 3, 0, 1), (0, 1, 1, 2)])
def test_every_expert_arrives_once_and_cut_as_codes(parallel):
    rank, ranks, expert_rank, expert_ranks = parallel
    layer = Layer(rank=rank, ranks=ranks, expert_rank=expert_rank, expert_ranks=expert_ranks)
    layer.load(tensors())
    layer.loader.check_complete()
    share = INTERMEDIATE // ranks
    mine = slice(rank * share, (rank + 1) * share)
    assert len(layer.got) == layer.local * len(Projection)
    for (expert, projection), matrix in layer.got.items():
        source = MODEL[layer.first + expert, projection]
        cut = (slice(None), mine) if projection is Projection.DOWN else (mine, slice(None))
        assert torch.equal(matrix.codes, source.codes[cut])
        assert torch.equal(matrix.dequantize(), source.weights()[cut])


def test_nothing_is_read_where_nobody_needs_it():
    layer = Layer(wanted=False)
    layer.load([(*place[:2], part, torch.empty(0)) for *place, part, _ in tensors()])
    layer.loader.check_complete()
    assert not layer.got


def refusal(layer, spoiled):
    def load():
        layer.load(spoiled)
        layer.loader.check_complete()

    with pytest.raises(ConfigError) as caught:
        load()
    sentence = str(caught.value)
    assert sentence.startswith("vllm-dymoe: the down projection of expert 2 in model.layers.3.mlp.experts ")
    assert sentence.endswith(".")
    return sentence


@pytest.mark.parametrize("part", ["qweight", "qzeros", "scales"])
def test_a_missing_tensor_is_named(part):
    left = [entry for entry in tensors() if entry[:3] != (2, Projection.DOWN, part)]
    assert f"lacks {part} in the checkpoint; download it again." in refusal(Layer(), left)


@pytest.mark.parametrize(
    ("part", "tensor", "sentence"),
    [
        ("qweight", torch.zeros(64, 8, dtype=torch.int32), "qweight has shape [64, 8], expected [96, 8]"),
        ("qzeros", torch.zeros(2, 8, dtype=torch.int32), "qzeros has shape [2, 8], expected [3, 8]"),
        ("scales", torch.zeros(3, 64), None),
        ("weight", torch.zeros(64, 96), "it has 16 bits, although the checkpoint is quantized"),
    ],
)
def test_a_tensor_that_disagrees_is_named(part, tensor, sentence):
    spoiled = [entry for entry in tensors() if entry[:3] != (2, Projection.DOWN, part)]
    spoiled.append((2, Projection.DOWN, part, tensor))
    if sentence is None:  # scales of another dtype are the packer's to judge
        Layer().load(spoiled)
    else:
        assert sentence in refusal(Layer(), spoiled)


def test_quantized_experts_of_a_whole_layer_in_one_tensor_are_refused():
    layer = Layer()
    with pytest.raises(
        ConfigError, match=r"w13_qweight of model\.layers\.3\.mlp\.experts holds quantized experts of a whole"
    ):
        layer.w13_qweight.weight_loader(layer.w13_qweight, torch.zeros(4, 8, 8), "w13_qweight", "w1", 0)
