"""AMD Quark's checkpoints: its words for formats that others have, too."""

import pytest
import torch

from tests.quantize.readers import float_packing
from vllm_dymoe.quantize.readers import make_reader
from vllm_dymoe.quantize.tensors import CheckpointError

ROWS, COLUMNS = 64, 128
MXFP4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
FP8 = {"dtype": "fp8_e4m3", "qscheme": "per_channel"}


def quark(weight, **layers):
    rules = {pattern: {"weight": rule} for pattern, rule in layers.items()}
    return {"quant_method": "quark", "global_quant_config": {"weight": weight}, "layer_quant_config": rules}


@pytest.mark.parametrize(
    ("kind", "config", "name"),
    [
        ("mxfp4-compressed-tensors", quark(MXFP4), "weight_packed"),
        ("fp8-compressed-tensors", quark(FP8), "weight"),
        ("fp8-compressed-tensors", quark(MXFP4, **{"*.experts.*": FP8}), "weight"),
        ("mxfp4-compressed-tensors", quark([MXFP4], **{"*self_attn*": FP8}), "weight_packed"),
    ],
)
def test_experts_lie_as_others_publish_them(kind, config, name):
    matrix = float_packing.random_floats(kind, ROWS, COLUMNS)
    parts = float_packing.parts(kind, matrix)
    given = {"weight": parts[name], "weight_scale": parts["weight_scale"]}
    assert torch.equal(make_reader(config).read(given, ROWS, COLUMNS).dequantize(), matrix.dequantize())


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (quark({"dtype": "int4", "qscheme": "per_group"}), "experts in int4 per_group, and only"),
        (quark(MXFP4 | {"group_size": 16}), "experts in fp4 per_group, and only"),
        (quark(MXFP4, **{"*.down_proj": FP8}), "its experts in several formats"),
        (quark([MXFP4, FP8]), "its experts in several formats"),
    ],
)
def test_what_cannot_be_read_is_said(config, sentence):
    with pytest.raises(CheckpointError, match=f"quantized with quark, {sentence}"):
        make_reader(config)
