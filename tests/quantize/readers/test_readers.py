"""Readers return exactly what each format's own tool packed.

golden/ holds tensors that autoawq 0.2.9, auto-gptq 0.7.1, compressed-tensors 0.17.0, nvidia-modelopt 0.47.0 and
transformers packed. Beside them are ``weights``, the tool's own dequantization, and for integers the ``codes`` and
``zero_points`` that were packed.
"""

from functools import partial
from pathlib import Path

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize as dequantize_by_tool
from safetensors.torch import load_file

from tests.quantize.readers.kinds import (
    FLOATS,
    awq,
    compressed_tensors,
    float_parts,
    gptq,
    int_quantized,
    random_floats,
    random_integers,
)
from tests.quantize.readers.test_configurations import AWQ, CHANNEL8, GPTQ, GROUP4, ROUND, pack_quantized
from vllm_dymoe.experts.encoding import FP8, STEPS
from vllm_dymoe.experts.matrix import MatrixFormat
from vllm_dymoe.kernels import dequantize, unpack
from vllm_dymoe.quantize.readers import make_reader
from vllm_dymoe.quantize.readers.base import describe

LAST = "compressed-tensors-4-asymmetric"
INTEGERS = {
    "awq": (AWQ, awq),
    "gptq": (GPTQ, gptq),
    "compressed-tensors-4-group": (pack_quantized(GROUP4), compressed_tensors),
    "compressed-tensors-8-channel": (pack_quantized(CHANNEL8), compressed_tensors),
    LAST: (
        pack_quantized(GROUP4 | {"symmetric": False, "actorder": "weight"}),
        partial(compressed_tensors, symmetric=False),
    ),
}
# Quark packs the same bytes as compressed-tensors.
TOOLS = INTEGERS | {kind: (FLOATS[kind], partial(float_parts, kind)) for kind in FLOATS if kind != "mxfp4-quark"}


def spelled(reader, tensors):
    return {reader.spellings.get(part, part): tensor for part, tensor in tensors.items()}


def golden(kind, **changes):
    """Return a kind's tensors and its reader."""
    reader = make_reader(TOOLS[kind][0] | changes)
    return spelled(reader, load_file(Path(__file__).parent / "golden" / f"{kind}.safetensors")), reader


def read(kind):
    tensors, reader = golden(kind)
    return tensors["weights"], reader, reader.read(tensors, *tensors["weights"].shape)


def packed(matrix, reader, group_size=32):
    encoding, dtype = matrix.encoding, torch.bfloat16 if matrix.zero_points is None else matrix.scales.dtype
    format = MatrixFormat(
        *matrix.shape, encoding, encoding.group_size or group_size, dtype, integer_zeros=reader.asymmetric,
        act_order=reader.act_order,
    )  # fmt: skip
    section = torch.full((format.nbytes,), 0xEE, dtype=torch.uint8)
    matrix.pack(format, section)
    return format.view(section)


def check_held(matrix, reader, weights, group_size=64):
    held = packed(matrix, reader, group_size)
    assert torch.equal(unpack(held), matrix.codes)
    assert torch.equal(dequantize(held).to(weights.dtype), weights)


@pytest.mark.parametrize("kind", TOOLS)
def test_every_weight_is_the_one_that_the_tool_dequantizes(kind):
    (tensors, _), (want, reader, matrix) = golden(kind), read(kind)
    assert want.count_nonzero() > want.numel() / 2
    assert (matrix.bits, matrix.encoding) == (reader.bits, reader.encoding)
    assert torch.equal(matrix.dequantize().to(want.dtype), want)
    check_held(matrix, reader, want, 32)
    if kind in INTEGERS:
        check_held(matrix, reader, want, 64)
        assert torch.equal(matrix.codes, tensors["codes"])
        assert torch.equal(matrix.zero_points, tensors["zero_points"])


@pytest.mark.parametrize("kind", TOOLS)
def test_the_packer_of_the_tests_packs_as_the_tool_does(kind):
    (tensors, reader), (_, _, matrix), pack = golden(kind), read(kind), TOOLS[kind][1]
    for part, tensor in spelled(reader, pack(matrix)).items():
        assert (tensor.dtype, tensor.shape) == (tensors[part].dtype, tensors[part].shape), part
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), tensors[part].view(-1).view(torch.uint8)), part
    if kind in FLOATS:
        made = random_floats(kind, 100, 192)
        again = reader.read(spelled(reader, pack(made)), 100, 192)
        assert torch.equal(again.dequantize(), made.dequantize())
        assert made.dequantize().std() == pytest.approx(192**-0.5, rel=0.8)


@pytest.mark.parametrize("kind", TOOLS)
def test_a_rank_has_its_part_of_every_weight(kind):
    """A rank's boundary may split a block of rows, or columns into whole groups."""
    want, reader, matrix = read(kind)
    half, column = matrix.shape[0] // 2, 32 if matrix.encoding is FP8 else 96
    rows, columns = slice(half, 2 * half), slice(None) if reader.act_order else slice(column, column + 96)
    part, want = matrix.part(0, rows).part(1, columns), want[rows, columns]
    check_held(part, reader, want, 32)
    if kind in FLOATS:
        weights = dequantize(packed(part.filled(half + 5, 128), reader)).to(want.dtype)
        assert torch.equal(weights[:half, :96], want)
        assert weights.count_nonzero() == want.count_nonzero()


def test_a_default_dtype_rounds_no_factor():
    """The default dtype is bfloat16 while vLLM loads a model."""
    want, reader, matrix = read("nvfp4-modelopt")
    torch.set_default_dtype(torch.bfloat16)
    try:
        held = packed(matrix, reader)
        weights = matrix.dequantize()
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(dequantize(held), want)
    assert torch.equal(weights, want)


def test_a_boundary_that_cuts_a_group_is_refused():
    _, reader, matrix = read("mxfp4")
    with pytest.raises(ValueError, match="groups of 32"):
        packed(matrix.part(1, slice(16, 112)), reader)


def test_scales_of_one_number_for_a_row_or_of_exponents_are_read():
    weight = torch.randn(6, 64).to(torch.float8_e4m3fn)
    in_blocks = {"quant_method": "fp8", "weight_block_size": [4, 32]}  # the last block has two rows
    for config, scales, block in (
        ({"quant_method": "fp8"}, torch.rand(6, 1), (1, 64)),
        (in_blocks, torch.rand(2, 2).to(torch.float8_e8m0fnu), (4, 32)),
    ):
        reader = make_reader(config)
        matrix = reader.read(dict(zip(reader.parts, (weight, scales), strict=True)), 6, 64)
        spread = scales.float().repeat_interleave(block[0], 0)[:6].repeat_interleave(block[1], 1)
        assert torch.equal(matrix.dequantize(), weight.float() * spread)


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("desc_act", [True, False])
@pytest.mark.parametrize("group_size", [64, 128, -1])
def test_every_variant_of_gptq_gives_its_codes_back(bits, version, symmetric, desc_act, group_size):
    shuffled = desc_act and group_size > 0
    source = None if group_size < 0 else group_size
    matrix = random_integers(32, 256, source, bits=bits, symmetric=symmetric, shuffled=shuffled, seed=bits)
    config = GPTQ | {"bits": bits, "sym": symmetric, "desc_act": desc_act, "group_size": group_size}
    reader = make_reader(config | {"checkpoint_format": version})
    found = reader.read(gptq(matrix, version=version), 32, 256)
    assert torch.equal(found.column_groups, matrix.column_groups)
    assert torch.equal(found.dequantize(), matrix.dequantize())
    check_held(found, reader, matrix.dequantize())


@pytest.mark.parametrize("said", [False, True])
def test_desc_act_with_static_groups_is_held_exactly(said):
    """With static groups, neighbouring columns share a group in spite of desc_act.

    Such a checkpoint needs no stored column order.
    """
    matrix, reader = random_integers(32, 256, 64), make_reader(GPTQ | {"static_groups": said})
    assert reader.act_order != said
    check_held(reader.read(gptq(matrix), 32, 256), reader, matrix.dequantize())


def decompressed(tensors, weights):
    """Dequantize tensors with compressed-tensors itself, which vLLM requires."""
    pack = pytest.importorskip("compressed_tensors.compressors.pack_quantized.base")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    described = quantization.QuantizationArgs(type="int", **weights)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=described)
    state = {name: tensor for name, tensor in tensors.items() if name.startswith("weight_")}
    return pack.PackedQuantizationCompressor.decompress(state, scheme)["weight"]


@pytest.mark.parametrize("order", ["group", "dynamic"])
def test_columns_in_another_order_are_read_and_not_mixed_up(order):
    matrix = random_integers(32, 128, 64, symmetric=True, shuffled=True, dtype=torch.bfloat16)
    weights = GROUP4 | {"actorder": order}
    tensors = compressed_tensors(matrix) | {"weight_g_idx": matrix.column_groups.int()}
    reader = make_reader(pack_quantized(weights))
    found = reader.read(tensors, 32, 128)
    assert torch.equal(found.dequantize(), matrix.dequantize())
    assert torch.equal(found.dequantize(), decompressed(tensors, weights))
    check_held(found, reader, matrix.dequantize(), 32)
    with pytest.raises(ValueError, match="weight_g_idx reorders columns"):
        make_reader(pack_quantized(GROUP4 | {"actorder": "weight"})).read(tensors, 32, 128)


@pytest.mark.parametrize("layout", [None, "auto_round:auto_gptq", "auto_round:auto_awq"])
def test_auto_rounds_integers_lie_as_the_named_tool_packs_them(layout):
    matrix = random_integers(64, 128, 32, dtype=torch.float16, symmetric=True)
    tensors = (awq if layout and layout.endswith("awq") else gptq)(matrix)
    reader = make_reader(ROUND | ({} if layout is None else {"packing_format": layout}))
    assert torch.equal(reader.read(tensors, 64, 128).dequantize(), matrix.dequantize())


def with_byte(byte):
    def change(tensor):
        tensor = tensor.clone()
        tensor.view(torch.uint8).view(-1)[7] = byte
        return tensor

    return change


@pytest.mark.parametrize(
    ("kind", "changes", "part", "change", "sentence"),
    [
        ("awq", {}, "qweight", lambda t: t[:-1], r"qweight has shape \[191, 8\], expected \[192, 8\]"),
        ("awq", {}, "qzeros", lambda t: t.float(), r"qzeros is torch\.float32, expected I32"),
        ("awq", {}, "scales", lambda t: t.int(), r"scales is torch\.int32"),
        ("gptq", {}, "qweight", lambda t: t[:-1], r"qweight has shape \[23, 64\], expected \[24, 64\]"),
        ("gptq", {}, "g_idx", lambda t: t + 1, "groups that do not exist"),
        ("gptq", {"desc_act": False}, "g_idx", lambda t: t, "g_idx reorders columns"),
        ("gptq", {"static_groups": True}, "g_idx", lambda t: t, "static_groups true"),
        ("gptq", {"sym": True}, "qzeros", lambda t: t, "zero points other than 8"),
        (LAST, {}, "weight_packed", lambda t: t[:-1], r"weight_packed has shape \[43, 24\], expected \[44, 24\]"),
        (LAST, {}, "weight_zero_point", lambda t: t.t(), r"weight_zero_point has shape \[3, 6\], expected \[6, 3\]"),
        (LAST, {}, "weight_shape", lambda t: t + 1, r"weight_shape is \[45, 193\], expected \[44, 192\]"),
        ("mxfp4", {}, "blocks", lambda t: t[:, :5], r"blocks has shape \[44, 5, 16\], expected \[44, 6, 16\]"),
        ("mxfp4", {}, "blocks", lambda t: t.float(), "blocks is torch.float32, expected U8 or I8"),
        ("mxfp4", {}, "scales", with_byte(255), "scales are NaN or infinite"),
        ("mxfp4", {}, "scales", with_byte(254), "too large for a weight"),
        ("nvfp4-modelopt", {}, "weight_scale", with_byte(0x7F), "scales are NaN or infinite"),
        (
            "nvfp4-modelopt",
            {},
            "weight_scale_2",
            lambda t: t.expand(2),
            r"weight_scale_2 has shape \[2\]",
        ),
        ("nvfp4-compressed-tensors", {}, "weight_global_scale", torch.zeros_like, "too large for a weight"),
        ("nvfp4-compressed-tensors", {}, "weight_packed", lambda t: t.t(), r"weight_packed has shape \[96, 44\]"),
        ("fp8-blocks", {}, "weight", with_byte(0xFF), "weights are NaN"),
        ("fp8-blocks", {}, "weight_scale_inv", lambda t: t[:, :1], r"weight_scale_inv has shape \[1, 1\], expected"),
        ("fp8-blocks", {}, "weight_scale_inv", lambda t: t * torch.inf, "scales are NaN or infinite"),
    ],
)
def test_tensors_that_are_damaged_or_disagree_are_named(kind, changes, part, change, sentence):
    tensors, reader = golden(kind, **changes)
    with pytest.raises(ValueError, match=sentence):
        reader.read(tensors | {part: change(tensors[part])}, *tensors["weights"].shape)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("strategy", "group_size"), [("channel", None), ("group", 64), ("tensor", None)])
def test_signed_bytes_are_what_compressed_tensors_makes_of_them(strategy, group_size, symmetric):
    """W8A8 weights against the tool's own dequantization.

    The plugin does not quantize activations, so only the weights are read.
    """
    weights = CHANNEL8 | {"strategy": strategy, "group_size": group_size, "symmetric": symmetric}
    matrix = random_integers(48, 128, group_size, bits=8, symmetric=symmetric, dtype=torch.bfloat16)
    config = pack_quantized(weights, format="int-quantized", input_activations={"num_bits": 8, "dynamic": True})
    tensors = int_quantized(matrix, symmetric=symmetric)
    if strategy == "tensor":
        tensors = {part: tensor if part == "weight" else tensor[:1, 0] for part, tensor in tensors.items()}
        if not symmetric:
            return  # vLLM and the tool support one zero point per tensor for activations only
    reader = make_reader(config)
    found = reader.read(tensors, 48, 128)
    args = QuantizationArgs(num_bits=8, type="int", strategy=strategy, group_size=group_size, symmetric=symmetric)
    scale = tensors["weight_scale"] if strategy != "tensor" else tensors["weight_scale"].view(1)
    want = dequantize_by_tool(tensors["weight"], scale, tensors.get("weight_zero_point"), args)
    assert torch.equal(found.dequantize(), want)
    form = MatrixFormat(48, 128, STEPS[8], 32, torch.bfloat16, integer_zeros=not symmetric)
    section = torch.empty(form.nbytes, dtype=torch.uint8)
    found.pack(form, section)
    assert torch.equal(dequantize(form.view(section), torch.bfloat16), want)
    assert "activations stay at 16 bits" in describe(reader, (8,), "rtn")
    with pytest.raises(ValueError, match="weight_scale has shape"):
        reader.read(tensors | {"weight_scale": torch.ones(48, 7)}, 48, 128)
