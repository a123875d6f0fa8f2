"""compressed-tensors' tensors: exactly the codes and weights that its own code packed."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.quantize.readers.packing import Prequantized, compressed_tensors, random_prequantized
from vllm_dymoe.kernels import dequantize, unpack
from vllm_dymoe.quantize.readers import make_reader
from vllm_dymoe.quantize.tensors import CheckpointError
from vllm_dymoe.residency.code import code_of
from vllm_dymoe.residency.matrix import MatrixFormat

FOLDER = Path(__file__).parent / "golden"
KINDS = ("compressed-tensors-4-group", "compressed-tensors-8-channel", "compressed-tensors-4-asymmetric")
GOLDEN = {kind: load_file(FOLDER / f"{kind}.safetensors") for kind in KINDS}
WEIGHTS = {
    KINDS[0]: {"num_bits": 4, "group_size": 64, "strategy": "group", "symmetric": True},
    KINDS[1]: {"num_bits": 8, "strategy": "channel", "symmetric": True},
    KINDS[2]: {"num_bits": 4, "group_size": 64, "strategy": "group", "symmetric": False, "actorder": "weight"},
}


def config(weights, **changes):
    group = {"targets": ["Linear"], "weights": {"type": "int"} | weights, "input_activations": None} | changes
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}


def read(tensors, rows, columns, weights):
    return make_reader(config(weights)).read(tensors, rows, columns)


@pytest.mark.parametrize("kind", KINDS)
def test_codes_and_weights_are_those_that_compressed_tensors_packed(kind):
    golden = GOLDEN[kind]
    found = read(golden, *golden["codes"].shape, WEIGHTS[kind])
    assert torch.equal(found.codes, golden["codes"])
    assert torch.equal(found.dequantize(), golden["weights"])
    bits = WEIGHTS[kind]["num_bits"]
    steps = not WEIGHTS[kind]["symmetric"]
    format = MatrixFormat(*golden["codes"].shape, code_of(bits), 64, torch.bfloat16, integer_zeros=steps)
    section = torch.empty(format.nbytes, dtype=torch.uint8)
    found.pack(format, section)
    assert torch.equal(unpack(format.view(section)), golden["codes"])
    assert torch.equal(dequantize(format.view(section), torch.bfloat16), golden["weights"])


@pytest.mark.parametrize("kind", KINDS)
def test_the_packer_of_the_tests_packs_as_compressed_tensors_does(kind):
    golden, weights = GOLDEN[kind], WEIGHTS[kind]
    group = weights.get("group_size", golden["codes"].shape[1])
    groups = torch.arange(golden["codes"].shape[1]) // group
    matrix = Prequantized(
        weights["num_bits"], group, golden["codes"], golden["zero_points"], golden["weight_scale"], groups
    )
    for part, tensor in compressed_tensors(matrix, symmetric=weights["symmetric"]).items():
        assert torch.equal(tensor, golden[part]), part


def decompressed(tensors, weights):
    """The weights that the package itself makes of tensors; vLLM requires it."""
    pack_quantized = pytest.importorskip("compressed_tensors.compressors.pack_quantized.base")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    scheme = quantization.QuantizationScheme(
        targets=["Linear"], weights=quantization.QuantizationArgs(type="int", **weights)
    )
    state = {name: tensor for name, tensor in tensors.items() if name.startswith("weight_")}
    return pack_quantized.PackedQuantizationCompressor.decompress(state, scheme)["weight"]


@pytest.mark.parametrize("kind", KINDS)
def test_compressed_tensors_packs_so_today(kind):
    assert torch.equal(decompressed(GOLDEN[kind], WEIGHTS[kind]), GOLDEN[kind]["weights"])


@pytest.mark.parametrize("order", ["group", "dynamic"])
def test_columns_in_another_order_are_read_and_not_mixed_up(order):
    matrix = random_prequantized(32, 128, 64, symmetric=True, shuffled=True, dtype=torch.bfloat16)
    weights = {"num_bits": 4, "group_size": 64, "strategy": "group", "symmetric": True, "actorder": order}
    tensors = compressed_tensors(matrix) | {"weight_g_idx": matrix.column_groups.int()}
    found = read(tensors, 32, 128, weights)
    assert torch.equal(found.dequantize(), matrix.weights())
    format = MatrixFormat(32, 128, code_of(4), 32, torch.bfloat16, act_order=True)
    section = torch.empty(format.nbytes, dtype=torch.uint8)
    found.pack(format, section)
    assert torch.equal(unpack(format.view(section)), matrix.codes)
    assert torch.equal(dequantize(format.view(section), torch.bfloat16), matrix.weights())
    assert torch.equal(found.dequantize(), decompressed(tensors, weights))
    with pytest.raises(ValueError, match="weight_g_idx says that its columns were reordered"):
        read(tensors, 32, 128, weights | {"actorder": "weight"})


GROUP4 = WEIGHTS[KINDS[0]]


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (config(GROUP4 | {"num_bits": 6}), "at 6 bits, and only 8, 4, 2"),
        (config(GROUP4 | {"type": "float"}), 'float weights by "group"'),
        (config(GROUP4 | {"strategy": "tensor"}), 'int weights by "tensor"'),
        (config(GROUP4, input_activations={"num_bits": 8}), "quantized activations"),
        (config(GROUP4) | {"format": "marlin-24"}, "the format marlin-24"),
        (config(GROUP4, format="int-quantized"), "the format int-quantized"),
        (config(GROUP4) | {"config_groups": {}}, "the format that it does not name"),
        (
            config(GROUP4) | {"config_groups": {"a": {"weights": GROUP4}, "b": {"weights": WEIGHTS[KINDS[1]]}}},
            "several kinds of weights",
        ),
        (config(GROUP4 | {"group_size": 24}), "in groups of 24"),
    ],
)
def test_variants_that_are_not_read_are_refused(found, sentence):
    with pytest.raises(CheckpointError, match=sentence) as caught:
        make_reader(found)
    assert str(caught.value).endswith(".")


@pytest.mark.parametrize(
    ("part", "change", "sentence"),
    [
        ("weight_packed", lambda t: t[:-1], r"weight_packed has shape \[43, 24\], expected \[44, 24\]"),
        ("weight_scale", lambda t: t.t(), r"weight_scale has shape \[3, 44\], expected \[44, 3\]"),
        ("weight_zero_point", lambda t: t.t(), r"weight_zero_point has shape \[3, 6\], expected \[6, 3\]"),
        ("weight_shape", lambda t: t + 1, r"weight_shape is \[45, 193\], expected \[44, 192\]"),
    ],
)
def test_tensors_that_disagree_are_named(part, change, sentence):
    golden = GOLDEN[KINDS[2]]
    with pytest.raises(ValueError, match=sentence):
        read(golden | {part: change(golden[part])}, 44, 192, WEIGHTS[KINDS[2]])
