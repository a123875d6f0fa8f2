"""AutoRound's checkpoints: other tools' layouts under its own name."""

import pytest
import torch

from tests.quantize.readers import float_packing, packing
from vllm_dymoe.quantize.readers import make_reader
from vllm_dymoe.quantize.tensors import CheckpointError

ROWS, COLUMNS = 64, 128
INT4 = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "data_type": "int"}


@pytest.mark.parametrize(
    ("layout", "pack"),
    [(None, packing.gptq), ("auto_round:auto_gptq", packing.gptq), ("auto_round:auto_awq", packing.awq)],
)
def test_integers_lie_as_the_named_tool_packs_them(layout, pack):
    matrix = packing.random_prequantized(ROWS, COLUMNS, 32, dtype=torch.float16, symmetric=True)
    reader = make_reader(INT4 if layout is None else INT4 | {"packing_format": layout})
    read = reader.read({part: pack(matrix)[part] for part in reader.parts}, ROWS, COLUMNS)
    assert torch.equal(read.codes, matrix.codes)
    assert torch.equal(read.dequantize(), matrix.weights())


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("fp8-blocks", {"bits": 8, "group_size": [128, 128], "data_type": "fp"}),
        ("mxfp4-compressed-tensors", {"bits": 4, "group_size": 32, "data_type": "mx_fp"}),
        ("mxfp8-compressed-tensors", {"bits": 8, "group_size": 32, "data_type": "mx_fp"}),
    ],
)
def test_floats_lie_as_others_publish_them(kind, config):
    matrix = float_packing.random_floats(kind, ROWS, COLUMNS)
    reader = make_reader({"quant_method": "auto-round", **config})
    parts = float_packing.parts(kind, matrix)
    read = reader.read({part: parts[part] for part in reader.parts}, ROWS, COLUMNS)
    assert torch.equal(read.dequantize(), matrix.dequantize())


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"packing_format": "auto_round:new"}, 'int at 4 bits in "auto_round:new", which cannot be read'),
        ({"bits": 3}, "at 3 bits, and only 8, 4, 2 can be read"),
        ({"extra_config": {"layers.1.mlp.experts.0.up_proj": {"bits": 8}}}, "has another format for"),
    ],
)
def test_what_cannot_be_read_is_said(change, sentence):
    with pytest.raises(CheckpointError, match=sentence):
        make_reader(INT4 | change)


def test_other_layers_may_have_other_bits():
    make_reader(INT4 | {"extra_config": {"model.layers.0.mlp.gate": {"bits": 16}, "lm_head": {"bits": 16}}})
