"""The weighted sum of experts in Triton equals the plain loop bit for bit.

This holds whatever absent rows contain.
"""

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.kernels.sections import DEVICE
from tests.operations import Operations
from vllm_dymoe.kernels.combine import Pairs, combine, combine_with_torch
from vllm_dymoe.kernels.triton import combine as on_gpu

NAN = float("nan")


def plain_loop(out, weights, absent):
    """Add one token's experts one at a time: the result that all devices must give."""
    tokens, top_k = weights.shape
    total = torch.zeros(tokens, out.shape[1])
    for token in range(tokens):
        for k in range(top_k):
            if not absent[token, k]:
                product = weights[token, k] * out[token * top_k + k].float()
                total[token] = total[token] + product
    return total.to(out.dtype)


def plain_weights(weights, ids, skipped):
    """Move the weights of skipped experts to the token's other experts."""
    weights = weights.clone()
    for token, row in enumerate(ids.tolist()):
        here = stays = torch.tensor(0.0)
        for k, expert in enumerate(row):
            here = here + (weights[token, k] if expert >= 0 else 0.0)
            stays = stays + (weights[token, k] if expert >= 0 and expert not in skipped else 0.0)
        weights[token] *= here / stays if stays > 0 else 1.0
    return weights


def same_bits(a, b):
    return torch.equal(a.cpu().view(torch.int16), b.cpu().view(torch.int16))


def on_the_card(pairs, into):
    moved = [part.to(DEVICE) if isinstance(part, torch.Tensor) else part for part in pairs]
    result = into.to(DEVICE)
    on_gpu.combine_on_gpu(Pairs(*moved), result)
    return result


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    tokens=st.integers(0, 5),
    top_k=st.integers(1, 22),
    hidden=st.sampled_from([1, 3, 64, 77, 130, 1030]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    ids=st.sampled_from([None, torch.int32, torch.int64]),
    some=st.frozensets(st.integers(0, 29), max_size=12),
    renormalize=st.booleans(),
    strided=st.booleans(),
    scale=st.sampled_from([1e-30, 1e-3, 1.0, 1e4]),
    seed=st.integers(0, 1000),
)
@example(3, 22, 77, torch.bfloat16, torch.int32, frozenset(range(30)), True, True, 1.0, 0)
@example(3, 22, 77, torch.bfloat16, torch.int32, frozenset({3, 7, 20}), True, True, 1.0, 0)
def test_it_is_the_plain_loop_to_the_last_bit(
    tokens, top_k, hidden, dtype, ids, some, renormalize, strided, scale, seed
):
    generator = torch.Generator().manual_seed(seed)
    out = (torch.randn(tokens * top_k, hidden, generator=generator) * scale).to(dtype)
    weights = torch.rand(tokens, 2 * top_k, generator=generator)[:, ::2]
    weights = weights if strided else weights.contiguous()
    expert_ids = torch.randint(-1, 30, (tokens, top_k), generator=generator)
    skipped = sorted(some) if ids else []
    absent = torch.zeros(tokens, top_k, dtype=torch.bool)
    if ids:
        expert_ids[: tokens // 3] = -1  # padding rows of a batch
        absent = (expert_ids < 0) | torch.isin(expert_ids, torch.tensor(skipped, dtype=torch.int64))
        out[absent.flatten()] = NAN
        expert_ids = expert_ids.to(ids)
    want = plain_loop(out, plain_weights(weights, expert_ids, skipped) if renormalize and skipped else weights, absent)
    marks = torch.zeros(max(skipped) + 1, dtype=torch.int32) if skipped else None
    if skipped:
        marks[skipped] = 1
    pairs = Pairs(out, weights, expert_ids if ids else None, marks, renormalize and bool(skipped))
    poison = torch.full((tokens, hidden), NAN, dtype=dtype)
    got = on_the_card(pairs, poison)
    assert same_bits(got, want)
    assert same_bits(combine_with_torch(pairs), want)
    handed_on = {"expert_ids": expert_ids if ids else None, "renormalize": pairs.renormalize}
    assert same_bits(combine(out, weights, skipped=set(skipped), **handed_on), want), "the processor's"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_are_rounded_before_they_are_added(dtype):
    """A fused multiply-add would keep what the first product's rounding discards.

    Here that is the whole result.
    """
    weights = torch.tensor([[1.0 + 2.0**-23, 1.0]])
    first = torch.tensor([[1.0 + 2.0**-7]]).to(dtype)
    out = torch.cat((-first, (weights[0, 0] * first.float()).to(dtype)))
    exact = -(1.0 + 2.0**-23) * (1.0 + 2.0**-7) + out[1].double().item()
    got = on_the_card(Pairs(out, weights, None, None, False), torch.zeros(1, 1, dtype=dtype))
    assert same_bits(got, plain_loop(out, weights, torch.zeros(1, 2, dtype=torch.bool)))
    assert exact != got.double().item(), "the case shows nothing"


def test_infinities_negative_zeros_and_subnormals():
    out = torch.tensor([[-0.0, float("inf"), 1e-40, -1e-40], [-0.0, 1.0, 1e-40, -1e-40]]).bfloat16()
    weights = torch.tensor([[0.5, 0.25]])
    pairs = Pairs(out, weights, None, None, False)
    want = plain_loop(out, weights, torch.zeros(1, 2, dtype=torch.bool))
    assert same_bits(on_the_card(pairs, torch.zeros(1, 4).bfloat16()), want)
    assert same_bits(combine_with_torch(pairs), want)


@pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, 7), (torch.float16, 10)])
def test_ties_are_rounded_to_even(dtype, bits):
    step = 2.0**-bits
    out = torch.tensor([[1.0, 1.0 + step, -1.0, -1.0 - step], [step / 2, step / 2, -step / 2, -step / 2]]).to(dtype)
    got = on_the_card(Pairs(out, torch.ones(1, 2), None, None, False), torch.zeros(1, 4).to(dtype))
    assert got[0].tolist() == [1.0, 1.0 + 2 * step, -1.0, -1.0 - 2 * step]


def test_one_launch_for_a_layer_and_no_other_operation():
    """A step of 2048 tokens once took 55 thousand torch operations."""
    started = []
    pairs = Pairs(
        torch.ones(2048 * 8, 64, device=DEVICE).bfloat16(), torch.ones(2048, 8, device=DEVICE), None, None, False
    )
    into = torch.empty(2048, 64, device=DEVICE).bfloat16()
    with Operations() as operations:
        on_gpu.combine_on_gpu(pairs, into, start=lambda kernel, grid, *rest: started.append(grid))
    assert started == [(2048, 1)]
    assert operations.names == []
