"""Codes of other tools in the store: the same integers, or a refusal."""

from dataclasses import replace

import pytest
import torch

from tests.quantize.readers.kinds import random_integers
from vllm_dymoe.experts.encoding import encoding_of
from vllm_dymoe.experts.matrix import MatrixFormat
from vllm_dymoe.kernels import dequantize, unpack


def packed(matrix, group_size, dtype=torch.float16, *, steps=True, act_order=False):
    format = MatrixFormat(
        *matrix.shape, encoding_of(matrix.bits), group_size, dtype, integer_zeros=steps, act_order=act_order
    )
    section = torch.full((format.nbytes,), 0xEE, dtype=torch.uint8)
    matrix.pack(format, section)
    return format.view(section)


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("source", "store"), [(128, 128), (128, 32), (64, 64), (None, 128), (None, 32), (96, 32)])
@pytest.mark.parametrize("act_order", [False, True])
def test_integers_and_weights_are_the_checkpoints(bits, dtype, source, store, act_order):
    matrix = random_integers(70, 200, source, bits=bits, dtype=dtype, shuffled=act_order)
    section = packed(matrix, store, dtype, act_order=act_order)
    assert torch.equal(unpack(section), matrix.codes)
    assert torch.equal(dequantize(section, dtype), matrix.dequantize())


def test_columns_of_a_group_stay_in_their_own_order():
    """Contiguous groups need no stored order, and others keep it within a group.

    So a checkpoint gives the same bytes everywhere.
    """
    assert packed(random_integers(8, 128, 32), 32, act_order=True).order.tolist() == list(range(128))
    matrix = random_integers(8, 128, 32, shuffled=True)
    stored = packed(matrix, 32, act_order=True).order.long()
    groups = matrix.column_groups[stored]
    assert groups.tolist() == sorted(groups.tolist())
    assert all((stored[groups == group].diff() > 0).all() for group in range(4))


LONG = random_integers(8, 128, 32, shuffled=True)
LONG.column_groups[LONG.column_groups == 1] = torch.tensor([0] + [1] * 31)
PLAIN, SHUFFLED = random_integers(8, 64, 32), random_integers(8, 64, 32, shuffled=True)


@pytest.mark.parametrize(
    ("matrix", "group_size", "options", "sentence"),
    [
        (PLAIN, 32, {"dtype": torch.bfloat16}, "rounded to bfloat16"),
        (PLAIN, 32, {"steps": False}, "has zero points"),
        (PLAIN, 64, {}, "groups of 64"),
        (SHUFFLED, 32, {}, "as they are"),
        (LONG, 32, {"act_order": True}, "even sorted"),
        (random_integers(8, 96, 64).part(1, slice(32, 96)), 64, {}, "groups of 64"),
    ],
)
def test_what_cannot_be_held_is_refused(matrix, group_size, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        packed(matrix, group_size, **options)
    matrix = replace(matrix, scales=torch.full_like(matrix.scales, torch.inf))
    with pytest.raises(ValueError, match="scales are NaN or infinite"):
        packed(matrix, group_size, **options)
