"""AutoAWQ's tensors: exactly the codes, zero points and weights that AutoAWQ's own code packed."""

import importlib.util
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.quantize.readers.make_golden import without_init
from tests.quantize.readers.packing import Prequantized, awq, random_prequantized
from vllm_dymoe.kernels import dequantize, unpack
from vllm_dymoe.quantize.readers import make_reader
from vllm_dymoe.quantize.tensors import CheckpointError
from vllm_dymoe.residency.code import code_of
from vllm_dymoe.residency.matrix import MatrixFormat

GOLDEN = load_file(Path(__file__).parent / "golden" / "awq.safetensors")
ROWS, COLUMNS = GOLDEN["codes"].shape
GROUP = 64
CONFIG = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
PARTS = ("qweight", "qzeros", "scales")


def read(tensors=GOLDEN, **changes):
    reader = make_reader(CONFIG | changes)
    return reader.read({part: tensors[part] for part in reader.parts}, ROWS, COLUMNS)


def test_codes_and_zero_points_are_those_that_autoawq_packed():
    matrix = read()
    assert torch.equal(matrix.codes, GOLDEN["codes"])
    assert torch.equal(matrix.zero_points, GOLDEN["zero_points"])
    assert torch.equal(matrix.scales, GOLDEN["scales"].t())
    assert torch.equal(matrix.dequantize(), GOLDEN["weights"])


@pytest.mark.parametrize("group_size", [64, 32])
def test_a_section_holds_the_same_integers_and_dequantizes_to_autoawqs_weights(group_size):
    format = MatrixFormat(ROWS, COLUMNS, code_of(4), group_size, torch.float16, integer_zeros=True)
    section = torch.full((format.nbytes,), 0xEE, dtype=torch.uint8)
    read().pack(format, section)
    packed = format.view(section)
    assert torch.equal(unpack(packed), GOLDEN["codes"])
    assert torch.equal(dequantize(packed, torch.float16), GOLDEN["weights"])


def test_the_packer_of_the_tests_packs_as_autoawq_does():
    groups = torch.arange(COLUMNS) // GROUP
    matrix = Prequantized(4, GROUP, GOLDEN["codes"], GOLDEN["zero_points"], GOLDEN["scales"].t(), groups)
    for part, tensor in awq(matrix).items():
        assert torch.equal(tensor, GOLDEN[part]), part


def test_autoawq_packs_so_today():
    """With the package itself, where it is installed (the extra "awq") or its sources are on the path."""
    if importlib.util.find_spec("awq") is None:
        pytest.skip("autoawq is not installed")
    without_init("awq", "awq.modules", "awq.modules.linear")
    from awq.modules.linear import gemm
    from awq.utils import packing_utils as unpacking

    matrix = random_prequantized(64, 256, 128, seed=3)
    linear = torch.nn.Linear(256, 64, bias=False, dtype=torch.float16)
    linear.weight.data = matrix.weights()
    packed = gemm.WQLinear_GEMM.from_linear(
        linear, 4, 128, scales=matrix.scales.t().contiguous(), zeros=matrix.zero_points.t().float()
    )
    parts = {part: getattr(packed, part) for part in PARTS}
    found = make_reader(CONFIG | {"group_size": 128}).read(parts, 64, 256)
    assert torch.equal(found.codes, matrix.codes)
    theirs = unpacking.dequantize_gemm(*parts.values(), 4, 128)
    assert torch.equal(found.dequantize(), theirs.t())


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"version": "gemv"}, 'version "gemv", and only "gemm" can be read'),
        ({"bits": 3}, "at 3 bits, and only 4 can be read"),
        ({"bits": None}, "at None bits"),
        ({"zero_point": False}, "without zero points"),
        ({"group_size": 48}, "in groups of 48"),
    ],
)
def test_variants_that_are_not_read_are_refused(changes, sentence):
    with pytest.raises(CheckpointError, match=sentence) as caught:
        make_reader(CONFIG | changes)
    assert str(caught.value).endswith(".")


def test_methods_that_are_not_read_are_refused_by_name():
    with pytest.raises(CheckpointError, match=r"with hqq already, and only awq, gptq, .* and 16-bit"):
        make_reader({"quant_method": "hqq"})


@pytest.mark.parametrize(
    ("part", "tensor", "sentence"),
    [
        ("qweight", GOLDEN["qweight"][:-1], r"qweight has shape \[191, 8\], expected \[192, 8\]"),
        ("qweight", GOLDEN["qweight"].t(), r"qweight has shape \[8, 192\], expected \[192, 8\]"),
        ("qzeros", GOLDEN["qzeros"][:1], r"qzeros has shape \[1, 8\], expected \[3, 8\]"),
        ("scales", GOLDEN["scales"].t(), r"scales has shape \[64, 3\], expected \[3, 64\]"),
        ("qzeros", GOLDEN["qzeros"].float(), r"qzeros is torch\.float32, expected torch\.int32"),
        ("scales", GOLDEN["scales"].int(), r"scales is torch\.int32, expected torch\.float16 or"),
    ],
)
def test_tensors_that_disagree_are_named(part, tensor, sentence):
    with pytest.raises(ValueError, match=sentence):
        read(GOLDEN | {part: tensor})
