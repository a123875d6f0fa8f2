"""AWQ, GPTQ and compressed-tensors: exactly the codes, zero points and weights that each tool's own code packed.

golden/ holds tensors as autoawq 0.2.9, auto-gptq 0.7.1 and compressed-tensors 0.17.0 packed them, ``codes`` and
``zero_points`` that they were given, and ``weights``: what the tool makes of the packed tensors again.
"""

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.quantize.readers.packing import Prequantized, awq, compressed_tensors, gptq, random_prequantized
from vllm_dymoe.kernels import dequantize, unpack
from vllm_dymoe.quantize.readers import make_reader
from vllm_dymoe.quantize.tensors import CheckpointError
from vllm_dymoe.residency.code import code_of
from vllm_dymoe.residency.matrix import MatrixFormat


def compressed(weights, **changes):
    group = {"targets": ["Linear"], "weights": {"type": "int"} | weights, "input_activations": None} | changes
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}


GROUP4 = {"num_bits": 4, "group_size": 64, "strategy": "group", "symmetric": True}
CHANNEL8 = {"num_bits": 8, "strategy": "channel", "symmetric": True}
ASYMMETRIC = GROUP4 | {"symmetric": False, "actorder": "weight"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": False, "desc_act": True}
ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "data_type": "int"}
TOOLS = {
    "awq": (AWQ, awq, "scales"),
    "gptq": (GPTQ, gptq, "scales"),
    "compressed-tensors-4-group": (compressed(GROUP4), compressed_tensors, "weight_scale"),
    "compressed-tensors-8-channel": (compressed(CHANNEL8), compressed_tensors, "weight_scale"),
    "compressed-tensors-4-asymmetric": (
        compressed(ASYMMETRIC),
        partial(compressed_tensors, symmetric=False),
        "weight_scale",
    ),
}
GOLDEN = {kind: load_file(Path(__file__).parent / "golden" / f"{kind}.safetensors") for kind in TOOLS}


def read(config, tensors, rows, columns):
    return make_reader(config).read(tensors, rows, columns)


def check_held(found, config, weights, group_size=64):
    reader = make_reader(config)
    format = MatrixFormat(
        *found.shape, code_of(found.bits), group_size, weights.dtype, integer_zeros=reader.asymmetric,
        act_order=reader.act_order,
    )  # fmt: skip
    section = torch.full((format.nbytes,), 0xEE, dtype=torch.uint8)
    found.pack(format, section)
    assert torch.equal(unpack(format.view(section)), found.codes)
    assert torch.equal(dequantize(format.view(section), weights.dtype), weights)


@pytest.mark.parametrize("kind", TOOLS)
def test_numbers_are_those_that_the_tool_packed(kind):
    (config, pack, scales), golden = TOOLS[kind], GOLDEN[kind]
    found = read(config, golden, *golden["codes"].shape)
    assert torch.equal(found.codes, golden["codes"])
    assert torch.equal(found.zero_points, golden["zero_points"])
    assert torch.equal(found.dequantize(), golden["weights"])
    for group_size in (64, 32):
        check_held(found, config, golden["weights"], group_size)
    # And the packer of the tests packs as the tool does.
    given = golden[scales].t() if scales == "scales" else golden[scales]
    columns = golden["codes"].shape[1]
    matrix = Prequantized(found.bits, columns, golden["codes"], golden["zero_points"], given, found.column_groups)
    for part, tensor in pack(matrix).items():
        assert torch.equal(tensor, golden[part]), part


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("desc_act", [True, False])
@pytest.mark.parametrize("group_size", [64, 128, -1])
def test_every_variant_of_gptq_gives_its_codes_back(bits, version, symmetric, desc_act, group_size):
    shuffled = desc_act and group_size > 0
    source = None if group_size < 0 else group_size
    matrix = random_prequantized(32, 256, source, bits=bits, symmetric=symmetric, shuffled=shuffled, seed=bits)
    config = GPTQ | {"bits": bits, "sym": symmetric, "desc_act": desc_act, "group_size": group_size}
    found = read(config | {"checkpoint_format": version}, gptq(matrix, version=version), 32, 256)
    assert torch.equal(found.column_groups, matrix.column_groups)
    assert torch.equal(found.dequantize(), matrix.dequantize())
    check_held(found, config, matrix.dequantize())


@pytest.mark.parametrize("said", [False, True])
def test_desc_act_with_static_groups_is_held_exactly(said):
    """g_idx then has neighbours in one group, although desc_act is true; a checkpoint that says so needs no order."""
    matrix, config = random_prequantized(32, 256, 64), GPTQ | {"static_groups": said}
    assert make_reader(config).act_order != said
    check_held(read(config, gptq(matrix), 32, 256), config, matrix.dequantize())


def decompressed(tensors, weights):
    """The weights that the package itself makes of tensors; vLLM requires it."""
    pack_quantized = pytest.importorskip("compressed_tensors.compressors.pack_quantized.base")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    described = quantization.QuantizationArgs(type="int", **weights)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=described)
    state = {name: tensor for name, tensor in tensors.items() if name.startswith("weight_")}
    return pack_quantized.PackedQuantizationCompressor.decompress(state, scheme)["weight"]


@pytest.mark.parametrize("order", ["group", "dynamic"])
def test_columns_in_another_order_are_read_and_not_mixed_up(order):
    matrix = random_prequantized(32, 128, 64, symmetric=True, shuffled=True, dtype=torch.bfloat16)
    weights = GROUP4 | {"actorder": order}
    tensors = compressed_tensors(matrix) | {"weight_g_idx": matrix.column_groups.int()}
    found = read(compressed(weights), tensors, 32, 128)
    assert torch.equal(found.dequantize(), matrix.dequantize())
    assert torch.equal(found.dequantize(), decompressed(tensors, weights))
    check_held(found, compressed(weights), matrix.dequantize(), 32)
    with pytest.raises(ValueError, match="weight_g_idx says that its columns were reordered"):
        read(compressed(GROUP4 | {"actorder": "weight"}), tensors, 32, 128)


@pytest.mark.parametrize("layout", [None, "auto_round:auto_gptq", "auto_round:auto_awq"])
def test_auto_rounds_integers_lie_as_the_named_tool_packs_them(layout):
    matrix = random_prequantized(64, 128, 32, dtype=torch.float16, symmetric=True)
    tensors = (awq if layout and layout.endswith("awq") else gptq)(matrix)
    found = read(ROUND | ({} if layout is None else {"packing_format": layout}), tensors, 64, 128)
    assert torch.equal(found.dequantize(), matrix.dequantize())


def test_layers_that_are_left_out_or_no_experts_are_no_other_format():
    assert make_reader(GPTQ | {"dynamic": {r"-:.*attn.*": {}}}).bits == 4
    assert make_reader(ROUND | {"extra_config": {"model.layers.0.mlp.gate": {"bits": 16}}}).bits == 4


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"quant_method": "hqq"}, "with hqq already, and only awq, gptq, .* and 16-bit"),
        (AWQ | {"version": "gemv"}, 'version "gemv", and only "gemm" can be read'),
        (AWQ | {"bits": 3}, "at 3 bits, and only 4 can be read"),
        (AWQ | {"zero_point": False}, "without zero points"),
        (AWQ | {"group_size": 48}, "in groups of 48"),
        (GPTQ | {"bits": 3}, "at 3 bits, and only 8, 4, 2 can be read"),
        (GPTQ | {"checkpoint_format": "marlin"}, 'checkpoint_format "marlin", and only gptq and gptq_v2'),
        (GPTQ | {"dynamic": {r".*\.3\..*": {"bits": 8}}}, "has another format for the modules"),
        (ROUND | {"packing_format": "auto_round:new"}, 'int at 4 bits in "auto_round:new", which cannot be read'),
        (ROUND | {"extra_config": {"layers.1.mlp.experts.0.up_proj": {"bits": 8}}}, "has another format for"),
        (compressed(GROUP4 | {"num_bits": 6}), "at 6 bits, and only 8, 4, 2"),
        (compressed(GROUP4 | {"type": "float"}), 'float weights by "group"'),
        (compressed(GROUP4 | {"strategy": "tensor"}), 'int weights by "tensor"'),
        (compressed(GROUP4, input_activations={"num_bits": 8}), "quantized activations"),
        (compressed(GROUP4, format="int-quantized"), "the format int-quantized"),
        (compressed(GROUP4) | {"config_groups": {}}, "the format that it does not name"),
        (
            compressed(GROUP4) | {"config_groups": {"a": {"weights": GROUP4}, "b": {"weights": CHANNEL8}}},
            "several kinds of weights",
        ),
    ],
)
def test_variants_that_are_not_read_are_refused(config, sentence):
    with pytest.raises(CheckpointError, match=sentence) as caught:
        make_reader(config)
    assert str(caught.value).endswith(".")


LAST = "compressed-tensors-4-asymmetric"


@pytest.mark.parametrize(
    ("kind", "changes", "part", "change", "sentence"),
    [
        ("awq", {}, "qweight", lambda t: t[:-1], r"qweight has shape \[191, 8\], expected \[192, 8\]"),
        ("awq", {}, "qzeros", lambda t: t.float(), r"qzeros is torch\.float32, expected I32"),
        ("awq", {}, "scales", lambda t: t.int(), r"scales is torch\.int32, expected F16 or BF16 or"),
        ("gptq", {}, "qweight", lambda t: t[:-1], r"qweight has shape \[23, 64\], expected \[24, 64\]"),
        ("gptq", {}, "g_idx", lambda t: t + 1, "g_idx names groups that do not exist: there are 3"),
        ("gptq", {"desc_act": False}, "g_idx", lambda t: t, "g_idx says that its columns were reordered"),
        ("gptq", {"static_groups": True}, "g_idx", lambda t: t, "says desc_act false or static_groups true"),
        ("gptq", {"sym": True}, "qzeros", lambda t: t, "qzeros has zero points other than 8"),
        (LAST, {}, "weight_packed", lambda t: t[:-1], r"weight_packed has shape \[43, 24\], expected \[44, 24\]"),
        (LAST, {}, "weight_zero_point", lambda t: t.t(), r"weight_zero_point has shape \[3, 6\], expected \[6, 3\]"),
        (LAST, {}, "weight_shape", lambda t: t + 1, r"weight_shape is \[45, 193\], expected \[44, 192\]"),
    ],
)
def test_tensors_that_disagree_are_named(kind, changes, part, change, sentence):
    golden = GOLDEN[kind]
    with pytest.raises(ValueError, match=sentence):
        read(TOOLS[kind][0] | changes, golden | {part: change(golden[part])}, *golden["codes"].shape)
