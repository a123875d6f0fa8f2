"""Published floats: exactly the weights that each format's own tools make of their tensors.

golden/ holds tensors as nvidia-modelopt 0.47.0, compressed-tensors 0.17.0 and transformers packed them, and
``weights``: what the same tool makes of them again.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.quantize.readers.float_packing import CONFIGS, FP8_WEIGHTS, compressed, parts, random_floats
from vllm_dymoe.kernels import dequantize, unpack
from vllm_dymoe.quantize.readers import make_reader
from vllm_dymoe.quantize.tensors import CheckpointError
from vllm_dymoe.residency.code import FP8
from vllm_dymoe.residency.matrix import MatrixFormat

FOLDER = Path(__file__).parent / "golden"
KINDS = [kind for kind in CONFIGS if kind != "mxfp4-quark"]  # which are compressed-tensors' bytes


QUARK4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
QUARK8 = {"dtype": "fp8_e4m3", "qscheme": "per_channel"}
ROUND = {"quant_method": "auto-round"}


def quark(weight, **layers):
    rules = {pattern: {"weight": rule} for pattern, rule in layers.items()}
    return {"quant_method": "quark", "global_quant_config": {"weight": weight}, "layer_quant_config": rules}


def golden(kind):
    """Tensors of a kind, its reader, and the matrix that it reads."""
    tensors, reader = load_file(FOLDER / f"{kind}.safetensors"), make_reader(CONFIGS[kind])
    tensors = {reader.spellings.get(part, part): tensor for part, tensor in tensors.items()}
    rows, columns = tensors["weights"].shape
    return tensors, reader, reader.read({part: tensors[part] for part in reader.parts}, rows, columns)


def packed(matrix, group_size=32):
    book = matrix.code
    format = MatrixFormat(*matrix.shape, book, book.group_size or group_size, torch.bfloat16)
    section = torch.full((format.nbytes,), 0xEE, dtype=torch.uint8)
    matrix.pack(format, section)
    return format.view(section)


@pytest.mark.parametrize("kind", KINDS)
def test_every_weight_is_the_one_that_the_tool_dequantizes(kind):
    tensors, reader, matrix = golden(kind)
    want = tensors["weights"]
    assert want.count_nonzero() > want.numel() / 2
    assert (matrix.bits, matrix.code) == (reader.bits, reader.code)
    assert torch.equal(matrix.dequantize().to(want.dtype), want)
    held = packed(matrix)
    assert torch.equal(dequantize(held).to(want.dtype), want)
    assert torch.equal(unpack(held), matrix.codes)


def test_a_default_dtype_rounds_no_factor():
    """vLLM loads models under the default dtype bfloat16."""
    tensors, _, matrix = golden("nvfp4-modelopt")
    torch.set_default_dtype(torch.bfloat16)
    try:
        held = packed(matrix)
        weights = matrix.dequantize()
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(dequantize(held), tensors["weights"])
    assert torch.equal(weights, tensors["weights"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_has_its_part_of_every_weight(kind):
    """Also where the boundary cuts a block of rows, or of columns into whole groups of the store."""
    tensors, _, matrix = golden(kind)
    half, column = matrix.shape[0] // 2, 96 if matrix.code is not FP8 else 32
    part = matrix.part(0, slice(half, 2 * half)).part(1, slice(column, column + 96))
    want = tensors["weights"][half:, column : column + 96]
    assert torch.equal(dequantize(packed(part)).to(want.dtype), want)
    filled = part.filled(half + 5, 128)
    weights = dequantize(packed(filled)).to(want.dtype)
    assert torch.equal(weights[:half, :96], want)
    assert weights.count_nonzero() == want.count_nonzero()


@pytest.mark.parametrize("kind", KINDS)
def test_the_packer_of_the_tests_packs_as_the_tool_does(kind):
    tensors, reader, matrix = golden(kind)
    made = {reader.spellings.get(part, part): tensor for part, tensor in parts(kind, matrix).items()}
    for part, tensor in made.items():
        assert (tensor.dtype, tensor.shape) == (tensors[part].dtype, tensors[part].shape), part
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), tensors[part].view(-1).view(torch.uint8)), part
    made = random_floats(kind, 100, 192)
    again = {reader.spellings.get(part, part): tensor for part, tensor in parts(kind, made).items()}
    again = reader.read(again, 100, 192)
    assert torch.equal(again.dequantize(), made.dequantize())
    assert made.dequantize().std() == pytest.approx(192**-0.5, rel=0.8)


def test_a_boundary_that_cuts_a_group_is_refused():
    _, _, matrix = golden("mxfp4")
    with pytest.raises(ValueError, match="do not lie in groups of 32 with one scale"):
        packed(matrix.part(1, slice(16, 112)))


def test_scales_of_one_number_for_a_row_or_of_exponents_are_read():
    weight = torch.randn(6, 64).to(torch.float8_e4m3fn)
    in_blocks = {"quant_method": "fp8", "weight_block_size": [4, 32]}  # of which the last has two rows
    for config, scales, block in (
        ({"quant_method": "fp8"}, torch.rand(6, 1), (1, 64)),
        (in_blocks, torch.rand(2, 2).to(torch.float8_e8m0fnu), (4, 32)),
    ):
        reader = make_reader(config)
        matrix = reader.read(dict(zip(reader.parts, (weight, scales), strict=True)), 6, 64)
        spread = scales.float().repeat_interleave(block[0], 0)[:6].repeat_interleave(block[1], 1)
        assert torch.equal(matrix.dequantize(), weight.float() * spread)


def damaged(kind, part, change):
    tensors, reader, _ = golden(kind)
    parts = {name: tensors[name] for name in reader.parts}
    parts[part] = change(parts[part].clone())
    return reader.read(parts, *tensors["weights"].shape)


def with_byte(*some):
    def change(tensor):
        for place, byte in enumerate(some, 7):
            tensor.view(torch.uint8).view(-1)[place] = byte
        return tensor

    return change


@pytest.mark.parametrize(
    ("kind", "part", "change", "sentence"),
    [
        ("mxfp4", "blocks", lambda t: t[:, :5], r"blocks has shape \[44, 5, 16\], expected \[44, 6, 16\]"),
        ("mxfp4", "blocks", lambda t: t.float(), "blocks is torch.float32, expected U8 or I8"),
        ("mxfp4", "scales", with_byte(255), "some of its scales are NaN or infinite"),
        ("mxfp4", "scales", with_byte(254), "too large for a weight"),
        ("nvfp4-modelopt", "weight_scale", with_byte(0x7F), "some of its scales are NaN or infinite"),
        ("nvfp4-modelopt", "weight_scale_2", lambda t: t.expand(2), r"weight_scale_2 has shape \[2\], expected one"),
        ("nvfp4-compressed-tensors", "weight_global_scale", torch.zeros_like, "too large for a weight"),
        ("nvfp4-compressed-tensors", "weight_packed", lambda t: t.t(), r"weight_packed has shape \[96, 44\]"),
        ("fp8-blocks", "weight", with_byte(0xFF), "some of its weights are NaN"),
        (
            "fp8-blocks",
            "weight_scale_inv",
            lambda t: t[:, :1],
            r"weight_scale_inv has shape \[1, 1\], expected \[1, 2\]",
        ),
        ("fp8-blocks", "weight_scale_inv", lambda t: t * torch.inf, "some of its scales are NaN or infinite"),
    ],
)
def test_damaged_tensors_are_a_sentence(kind, part, change, sentence):
    with pytest.raises(ValueError, match=sentence):
        damaged(kind, part, change)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fp8, e5m2, and only e4m3"),
        ({"quant_method": "fp8", "weight_block_size": [128, 100]}, "in groups of 100"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "algorithm W4A8_AWQ, and only NVFP4"),
        ({"quant_method": "modelopt"}, "algorithm ONE IT DOES NOT NAME"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "NVFP4 has groups of 16"),
        (compressed("nvfp4-pack-quantized", FP8_WEIGHTS), '8-bit float weights by "channel" in nvfp4-pack-quantized'),
        (compressed("float-quantized", FP8_WEIGHTS | {"symmetric": False}), "only symmetric 8-bit floats"),
        (compressed("float-quantized", FP8_WEIGHTS, format="mixed"), "the format mixed"),
        ({"quant_method": "mxfp8", "moe_quant_algo": "NVFP4"}, "its experts with NVFP4"),
        (quark({"dtype": "int4", "qscheme": "per_group"}), "quark, experts in int4 per_group, and only"),
        (quark(QUARK4 | {"group_size": 16}), "quark, experts in fp4 per_group, and only"),
        (quark(QUARK4, **{"*.down_proj": QUARK8}), "quark, its experts in several formats"),
        (quark([QUARK4, QUARK8]), "quark, its experts in several formats"),
    ],
)
def test_variants_that_are_not_read(config, sentence):
    with pytest.raises(CheckpointError, match=sentence):
        make_reader(config)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("mxfp4-compressed-tensors", quark(QUARK4)),
        ("fp8-compressed-tensors", quark(QUARK8)),
        ("fp8-compressed-tensors", quark(QUARK4, **{"*.experts.*": QUARK8})),
        ("mxfp4-compressed-tensors", quark([QUARK4], **{"*self_attn*": QUARK8})),
        ("fp8-blocks", ROUND | {"bits": 8, "group_size": [128, 128], "data_type": "fp"}),
        ("mxfp4-compressed-tensors", ROUND | {"bits": 4, "group_size": 32, "data_type": "mx_fp"}),
        ("mxfp8-compressed-tensors", ROUND | {"bits": 8, "group_size": 32, "data_type": "mx_fp"}),
    ],
)
def test_quark_and_auto_round_have_other_words_for_the_same(kind, config):
    matrix, reader = random_floats(kind, 64, 128), make_reader(config)
    given = dict(zip(reader.parts, parts(kind, matrix).values(), strict=True))
    assert torch.equal(reader.read(given, 64, 128).dequantize(), matrix.dequantize())
