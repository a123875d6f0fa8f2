"""Compiled code of the weighted sum rounds every product, on every architecture."""

# ruff: noqa: N803
import re
from dataclasses import replace

import pytest

from tests.support.benchmarks import modules_of

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

from vllm_dymoe.kernels.triton.decode import add_experts  # noqa: E402


@triton.jit
def last_sum_kernel(
    out, weights, computed, partials, semaphores, ROWS: tl.constexpr, TOP_K: tl.constexpr, SPLIT: tl.constexpr
):
    """End a decode step: sum a token's experts, with no other multiplication."""
    add_experts(out, weights, computed, partials, semaphores, tl.program_id(1), tl.program_id(0), ROWS, TOP_K, SPLIT)


@triton.jit
def fused_sum_kernel(
    out, weights, computed, partials, semaphores, ROWS: tl.constexpr, TOP_K: tl.constexpr, SPLIT: tl.constexpr
):
    """Compute a product that is added immediately."""
    tl.store(out, tl.load(partials) * tl.load(weights) + tl.load(partials + 1))


@pytest.fixture(scope="module")
def sums():
    with modules_of("gpu"):
        import machine_code
        import variants

        yield variants.variants, machine_code.fused_instructions


@pytest.mark.parametrize("architecture", [80, 86, 89, 90, 100, 120])
def test_no_product_is_added_before_it_is_rounded(sums, architecture):
    of_architecture, fused = sums
    variants = [variant for variant in of_architecture(architecture) if variant.kernel == "combine"]
    assert len(variants) >= 2
    for variant in variants:
        assert fused(variant) == [], variant.key


def test_a_compiler_that_may_fuse_would_be_found(sums):
    of_architecture, fused = sums
    variant = next(variant for variant in of_architecture(80) if variant.kernel == "combine")
    assert any("fma.rn.f32" in line for line in fused(replace(variant, options={"num_warps": 4})))
    assert any("FFMA" in line for line in fused(replace(variant, options={"num_warps": 4})))


@pytest.fixture(scope="module")
def alone():
    with modules_of("gpu"):
        import machine_code
        import variants

        class Alone(variants.Variant):
            @property
            def code(self):
                return {"last_sum": last_sum_kernel, "fused_sum": fused_sum_kernel}[self.kernel]

        def variant(kernel, architecture):
            types = {"out": "*fp16", "weights": "*fp32", "computed": "*i32", "partials": "*fp32", "semaphores": "*i32"}
            constants = {"ROWS": 150, "TOP_K": 8, "SPLIT": 4}
            return Alone(architecture, kernel, "", "", "", types, constants, {"num_warps": 4, "enable_fp_fusion": True})

        yield variant, machine_code.fused_instructions


@pytest.mark.parametrize("architecture", [80, 90])
def test_nor_where_a_decode_step_ends_although_its_compiler_may_fuse(alone, architecture):
    """In the sum of experts a select separates each product from its addition.

    Fusing is allowed for products with weights. From sm_100 on products are packed in pairs, where single lines do not
    show what is added to what.
    """
    variant, fused = alone
    assert [line for line in fused(variant("last_sum", architecture)) if not _rounds_once_anyway(line)] == []
    assert fused(variant("fused_sum", architecture)) != []


def _rounds_once_anyway(line):
    """Return whether a fused line adds zero to a product, or loads a constant.

    A product plus zero starts a sum; a constant is zero times zero plus itself.
    """
    return re.search(r"(0f00000000;|\bRZ ;)$|-?RZ, RZ, ", line) is not None
