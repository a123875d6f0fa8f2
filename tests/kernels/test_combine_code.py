"""What the compiler makes of the weighted sum: products that are rounded by themselves, on every architecture."""

from dataclasses import replace

import pytest

from tests.support.benchmarks import modules_of

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def sums():
    """The planned variants, and what finds fused multiply-adds in them."""
    with modules_of("gpu"):
        import machine_code
        import variants

        yield [v for v in variants.all_variants() if v.kernel == "combine"], machine_code.fused_instructions


@pytest.mark.parametrize("architecture", [80, 86, 89, 90, 100, 120])
def test_no_product_is_added_before_it_is_rounded(sums, architecture):
    variants, fused = sums
    variants = [variant for variant in variants if variant.architecture == architecture]
    assert len(variants) >= 2
    for variant in variants:
        assert fused(variant) == [], variant.key


def test_a_compiler_that_may_fuse_would_be_found(sums):
    (variant, *_), fused = sums
    assert any("fma.rn.f32" in line for line in fused(replace(variant, options={"num_warps": 4})))
    assert any("FFMA" in line for line in fused(replace(variant, options={"num_warps": 4})))
