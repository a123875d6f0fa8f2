"""The runtime with the kernel that it has on a GPU: it calls it as it calls the CPU's, and nothing else changes."""

from dataclasses import replace

import pytest
import torch

from tests.kernels.sections import DEVICE, TOLERANCE, relative_error
from tests.runtime.steps import ByNumber, run, with_budget
from tests.small_model import make_experts
from tests.support.memory_writer import MemoryWriter
from vllm_dymoe.experts.layout import ModelExperts
from vllm_dymoe.kernels.triton import TritonKernel
from vllm_dymoe.quantize.dummy import random_store
from vllm_dymoe.runtime import moe

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="the runtime's own device is the CPU here")

STEPS = [(0, 0, 1), (1, 1, 1), (2, 0, 3), (3, 1, 40)]
MIXED = ByNumber(low=frozenset({0, 3}), skipped=frozenset({5}))


@pytest.fixture
def on_triton(monkeypatch):
    monkeypatch.setattr(moe, "make_kernel", TritonKernel)


def test_it_computes_what_the_cpu_kernel_computes(memory_store, monkeypatch):
    """Few tokens are decoded and many grouped, four and two bits in one call, and some experts are skipped."""
    want = run(with_budget(memory_store, "100%", MIXED), STEPS)
    monkeypatch.setattr(moe, "make_kernel", TritonKernel)
    runtime = with_budget(memory_store, "100%", MIXED)
    assert isinstance(runtime.kernel, TritonKernel)
    for got, one in zip(run(runtime, STEPS), want, strict=True):
        assert relative_error(got, one.double()) < TOLERANCE[torch.bfloat16]


def test_no_budget_changes_a_bit(memory_store, on_triton):
    """With one slot of each tier experts are computed one at a time, projection by projection as they arrive."""
    want = run(with_budget(memory_store, "100%", MIXED), STEPS)
    runtime = with_budget(memory_store, "minimum", MIXED, threads=2)
    got = run(runtime, STEPS)
    assert runtime.stats().misses > len(want) * 2
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    runtime.engine.close()


def test_the_integers_of_a_checkpoint_beside_a_tier_derived_from_them(monkeypatch):
    """At 4 bits zeros count steps and columns have an order, at 2 not."""
    plain = make_experts()
    formats = {bits: replace(fmt, integer_zeros=bits == 4, act_order=bits == 4) for bits, fmt in plain.formats.items()}
    experts = ModelExperts(plain.layers, plain.num_experts, plain.top_k, formats)
    store = random_store(experts, MemoryWriter(experts), seed=3)
    want = run(with_budget(store, "100%", MIXED), STEPS)
    monkeypatch.setattr(moe, "make_kernel", TritonKernel)
    runtime = with_budget(store, "50%", MIXED)
    assert runtime.kernel._kinds == {(4, True, True), (2, False, False)}, "what is compiled once, for all calls"
    for got, one in zip(run(runtime, STEPS), want, strict=True):
        assert relative_error(got, one.double()) < TOLERANCE[torch.bfloat16]
