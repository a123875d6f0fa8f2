"""One blob: three matrices with what the expert has."""

import pytest
import torch

from vllm_dymoe.experts.layout import ExpertFormat


@pytest.mark.parametrize("flag", ["bias", "integer_zeros", "act_order"])
def test_all_projections_are_as_the_expert_is(flag):
    without, with_it = (ExpertFormat(96, 64, 4, 32, torch.float16, **{flag: there}) for there in (False, True))
    assert [getattr(matrix, flag) for matrix in with_it.matrices] == [True] * 3
    assert [getattr(matrix, flag) for matrix in without.matrices] == [False] * 3
    assert [(matrix.rows, matrix.columns) for matrix in with_it.matrices] == [(64, 96), (64, 96), (96, 64)]
    assert with_it.nbytes == sum(matrix.nbytes for matrix in with_it.matrices)
