"""The self-test on the GPU's kernels, in Triton's interpreter."""

import pytest
import torch

from tests.executor.steps import CPU, FAST
from tests.kernels.sections import DEVICE
from tests.small_model import make_experts
from tests.support.no_launches import CardParts
from vllm_dymoe.kernels import Activation, Decode, Grouped, native
from vllm_dymoe.kernels.triton import small_batch_step
from vllm_dymoe.options import Options
from vllm_dymoe.server.self_test import self_test

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="the server's own device is the CPU here")
OPTIONS = Options(high=4, low=0, group_size=32, link_gbps=FAST)


def run(**given):
    experts = make_experts(bits=(4,), num_experts=4, hidden=128, dtype=torch.float16)
    found = self_test(
        experts, OPTIONS, CPU, [Activation.SILU], parts=CardParts(CPU, Decode.PLAIN, Grouped.PLAIN), **given
    )
    assert found.skipped == ""
    return found


def test_right_kernels_pass():
    found = run()
    assert (found.failure, found.steps) == ("", 4 if native.load() is None else 6)


def test_a_wrong_strip_of_columns_is_found(monkeypatch):
    whole = small_batch_step.decode_down

    def wrong(hidden, out, *others, **named):
        whole(hidden, out, *others, **named)
        out[-1, -64:] = 0

    monkeypatch.setattr(small_batch_step, "decode_down", wrong)
    assert "a step of 1 tokens" in run().failure
