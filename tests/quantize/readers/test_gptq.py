"""AutoGPTQ's tensors: exactly the codes, zero points and weights that its own code packed."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.quantize.readers.packing import Prequantized, gptq, random_prequantized
from vllm_dymoe.kernels import dequantize, unpack
from vllm_dymoe.quantize.readers import make_reader
from vllm_dymoe.quantize.tensors import CheckpointError
from vllm_dymoe.residency.code import code_of
from vllm_dymoe.residency.matrix import MatrixFormat

GOLDEN = load_file(Path(__file__).parent / "golden" / "gptq.safetensors")
ROWS, COLUMNS = GOLDEN["codes"].shape
GROUP = 64
CONFIG = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": True}


def read(tensors, rows, columns, **changes):
    return make_reader(CONFIG | changes).read(tensors, rows, columns)


def test_codes_zero_points_and_order_are_those_that_autogptq_packed():
    matrix = read(GOLDEN, ROWS, COLUMNS)
    assert torch.equal(matrix.codes, GOLDEN["codes"])
    assert torch.equal(matrix.zero_points, GOLDEN["zero_points"])
    assert torch.equal(matrix.column_groups, GOLDEN["g_idx"].long())
    assert torch.equal(matrix.dequantize(), GOLDEN["weights"])


def test_the_packer_of_the_tests_packs_as_autogptq_does():
    matrix = Prequantized(
        4, GROUP, GOLDEN["codes"], GOLDEN["zero_points"], GOLDEN["scales"].t(), GOLDEN["g_idx"].long()
    )
    for part, tensor in gptq(matrix).items():
        assert torch.equal(tensor, GOLDEN[part]), part


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("desc_act", [True, False])
@pytest.mark.parametrize("group_size", [64, 128, -1])
def test_every_variant_gives_its_codes_back(bits, version, symmetric, desc_act, group_size):
    shuffled = desc_act and group_size > 0
    source = None if group_size < 0 else group_size
    matrix = random_prequantized(32, 256, source, bits=bits, symmetric=symmetric, shuffled=shuffled, seed=bits)
    config = {"bits": bits, "sym": symmetric, "desc_act": desc_act, "group_size": group_size}
    found = read(gptq(matrix, version=version), 32, 256, checkpoint_format=version, **config)
    assert torch.equal(found.codes, matrix.codes)
    assert torch.equal(found.zero_points, matrix.zero_points)
    assert torch.equal(found.column_groups, matrix.column_groups)
    assert torch.equal(found.dequantize(), matrix.weights())
    assert make_reader(CONFIG | config).act_order == shuffled
    format = MatrixFormat(32, 256, code_of(bits), 64, torch.float16, integer_zeros=not symmetric, act_order=shuffled)
    section = torch.empty(format.nbytes, dtype=torch.uint8)
    found.pack(format, section)
    assert torch.equal(unpack(format.view(section)), matrix.codes)
    assert torch.equal(dequantize(format.view(section), torch.float16), matrix.weights())


@pytest.mark.parametrize("said", [False, True])
def test_desc_act_with_static_groups_is_held_exactly(said):
    """g_idx then has neighbours in one group, although desc_act is true; a checkpoint that says so needs no order."""
    matrix = random_prequantized(32, 256, 64)
    found = read(gptq(matrix), 32, 256, desc_act=True, static_groups=said)
    assert make_reader(CONFIG | {"static_groups": said}).act_order != said
    format = MatrixFormat(32, 256, code_of(4), 64, torch.float16, integer_zeros=True, act_order=not said)
    section = torch.empty(format.nbytes, dtype=torch.uint8)
    found.pack(format, section)
    assert torch.equal(dequantize(format.view(section), torch.float16), matrix.weights())


@pytest.mark.parametrize("group_size", [64, 32])
def test_what_autogptq_packed_in_the_order_of_activations_is_held_bit_for_bit(group_size):
    assert not torch.equal(GOLDEN["g_idx"], torch.arange(COLUMNS, dtype=torch.int32) // GROUP)
    format = MatrixFormat(ROWS, COLUMNS, code_of(4), group_size, torch.float16, integer_zeros=True, act_order=True)
    section = torch.empty(format.nbytes, dtype=torch.uint8)
    read(GOLDEN, ROWS, COLUMNS).pack(format, section)
    assert torch.equal(unpack(format.view(section)), GOLDEN["codes"])
    assert torch.equal(dequantize(format.view(section), torch.float16), GOLDEN["weights"])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"bits": 3}, "at 3 bits, and only 8, 4, 2 can be read"),
        ({"checkpoint_format": "marlin"}, 'checkpoint_format "marlin", and only gptq and gptq_v2'),
        ({"is_marlin_format": True}, 'checkpoint_format "marlin"'),
        ({"group_size": 16}, "in groups of 16"),
        ({"dynamic": {r".*\.3\..*": {"bits": 8}}}, "has another format for the modules"),
    ],
)
def test_variants_that_are_not_read_are_refused(changes, sentence):
    with pytest.raises(CheckpointError, match=sentence):
        make_reader(CONFIG | changes)


def test_modules_that_are_left_out_are_no_other_format():
    assert make_reader(CONFIG | {"dynamic": {r"-:.*attn.*": {}}}).bits == 4


@pytest.mark.parametrize(
    ("changes", "part", "tensor", "sentence"),
    [
        ({}, "qweight", GOLDEN["qweight"][:-1], r"qweight has shape \[23, 64\], expected \[24, 64\]"),
        ({}, "qzeros", GOLDEN["qzeros"].t(), r"qzeros has shape \[8, 3\], expected \[3, 8\]"),
        ({}, "g_idx", GOLDEN["g_idx"] + 1, "g_idx names groups that do not exist: there are 3"),
        ({}, "g_idx", GOLDEN["g_idx"][:5], r"g_idx has shape \[5\], expected \[192\]"),
        ({"desc_act": False}, "g_idx", GOLDEN["g_idx"], "g_idx says that its columns were reordered"),
        ({"static_groups": True}, "g_idx", GOLDEN["g_idx"], "says desc_act false or static_groups true"),
        ({"sym": True}, "qzeros", GOLDEN["qzeros"], "qzeros has zero points other than 8"),
    ],
)
def test_tensors_that_disagree_are_named(changes, part, tensor, sentence):
    with pytest.raises(ValueError, match=sentence):
        read(GOLDEN | {part: tensor}, ROWS, COLUMNS, **changes)
