"""gpt-oss's quantized stacks, cut as vLLM cuts them, end in the checkpoint's weights on every rank."""

from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.layers.fused_moe.activation import MoEActivation

from tests.quantize.readers.float_packing import parts, random_floats
from vllm_dymoe.config import ConfigError
from vllm_dymoe.quantize.readers import make_reader
from vllm_dymoe.residency.format import Projection
from vllm_dymoe.vllm_adapter.stack_loader import QuantizedStackLoader

EXPERTS, HIDDEN, INTERMEDIATE = 2, 64, 160  # five groups of 32: no two ranks have equally many
GATE, UP, DOWN = Projection


class Layer(torch.nn.Module):
    """What the loader sees of a RoutedExperts, and what it was given."""

    def __init__(self, width, *, wanted=True):
        super().__init__()
        parallel = SimpleNamespace(tp_rank=0, tp_size=1)
        self.moe_config = SimpleNamespace(moe_parallel_config=parallel, activation=MoEActivation.SWIGLUOAI)
        self.layer_name, self.got, self.biases = "model.layers.0.mlp.experts", {}, {}
        reader = make_reader({"quant_method": "mxfp4"})
        self.loader = QuantizedStackLoader(
            self,
            lambda *given: self.got.__setitem__(given[:2], given[2]().dequantize()),
            lambda *given: self.biases.__setitem__(given[:2], given[2]),
            reader,
            lambda: wanted,
            HIDDEN,
            width,
        )
        self.loader.register(self, torch.bfloat16, bias=True)

    def _map_global_expert_id_to_local_expert_id(self, expert):
        return expert

    def load(self, name, tensor, expert=None):
        """As GptOssModel's loader calls it."""
        param = getattr(self, name)
        param.weight_loader(param, tensor, weight_name=f"x.{name}", shard_id=None, expert_id=expert)


def model():
    wide = [random_floats("mxfp4", 2 * INTERMEDIATE, HIDDEN, seed=e) for e in range(EXPERTS)]
    down = [random_floats("mxfp4", HIDDEN, INTERMEDIATE, seed=9 + e) for e in range(EXPERTS)]
    return wide, down


def stacks(matrices):
    packed = [parts("mxfp4", matrix) for matrix in matrices]
    blocks, scales = (torch.stack([each[part] for each in packed]) for part in ("blocks", "scales"))
    return blocks.flatten(2), scales


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_rank_has_its_groups_and_zeros_behind_them(ranks):
    wide, down = model()
    (codes, scales), (down_codes, down_scales) = stacks(wide), stacks(down)
    bias = torch.randn(EXPERTS, 2 * INTERMEDIATE)
    width = -(-5 // ranks) * 32
    for rank in range(ranks):
        begin, end = min(rank * width, INTERMEDIATE), min((rank + 1) * width, INTERMEDIATE)
        if begin == end:
            continue  # the fourth of four ranks has nothing
        layer = Layer(width)
        layer.load("w13_weight_scale", scales[:, 2 * begin : 2 * end])
        layer.load("w13_bias", bias[:, 2 * begin : 2 * end])
        layer.load("w13_weight", codes[:, 2 * begin : 2 * end])
        layer.load("w2_weight", down_codes[..., begin // 2 : end // 2])
        layer.load("w2_weight_scale", down_scales[..., begin // 32 : end // 32])
        layer.load("w2_bias", torch.ones(EXPERTS, HIDDEN))
        layer.loader.check_complete()
        for expert in range(EXPERTS):
            gate, up = (wide[expert].dequantize()[first::2][begin:end] for first in (0, 1))
            zeros = width - (end - begin)
            pad = torch.nn.functional.pad
            assert torch.equal(layer.got[expert, GATE], pad(gate, (0, 0, 0, zeros)))
            assert torch.equal(layer.got[expert, UP], pad(up, (0, 0, 0, zeros)))
            assert torch.equal(layer.got[expert, DOWN], pad(down[expert].dequantize()[:, begin:end], (0, zeros)))
            assert torch.equal(layer.biases[expert, UP], pad(bias[expert, 1::2][begin:end], (0, zeros)))
            assert torch.equal(layer.biases[expert, DOWN], torch.ones(HIDDEN))


def test_half_a_layer_and_damage_are_sentences():
    wide, _ = model()
    codes, scales = stacks(wide)
    layer = Layer(INTERMEDIATE)
    layer.load("w13_weight", codes)
    with pytest.raises(ConfigError, match="lacks w13_weight_scale; download"):
        layer.loader.check_complete()
    with pytest.raises(ConfigError, match=r"w13 of expert 0 .* scales has shape"):
        layer.load("w13_weight_scale", scales[:, :, :1])
    with pytest.raises(ConfigError, match="is one expert's, and a mxfp4 checkpoint holds all"):
        layer.load("w13_weight", codes[0], expert=0)


def test_nothing_is_read_where_a_store_is_complete():
    layer = Layer(INTERMEDIATE, wanted=False)
    for name, tensor in zip(("w13_weight", "w13_weight_scale"), stacks(model()[0]), strict=True):
        layer.load(name, tensor)
    assert not layer.got
