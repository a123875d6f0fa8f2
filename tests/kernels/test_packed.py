"""The format of one packed matrix."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_dymoe.experts.encoding import NESTED, PLAIN, STEPS, encoding_of
from vllm_dymoe.experts.matrix import MatrixFormat
from vllm_dymoe.kernels import dequantize, pack, pack_nested, unpack

formats = st.builds(
    MatrixFormat,
    rows=st.integers(1, 150),
    columns=st.integers(1, 200),
    encoding=st.sampled_from(list(STEPS.values())),
    group_size=st.sampled_from([32, 64, 128, 256]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    bias=st.booleans(),
    act_order=st.booleans(),
)


@settings(max_examples=80, deadline=None)
@given(formats, st.integers(0, 2**31))
def test_codes_scales_and_zeros_survive(format, seed):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << format.bits, (format.rows, format.columns), generator=generator, dtype=torch.uint8)
    scales, zeros = (torch.randn(2, format.rows, format.groups, generator=generator)).to(format.dtype)
    order = torch.randperm(format.columns, generator=generator) if format.act_order else None
    section = torch.full((format.nbytes,), 0xEE, dtype=torch.uint8)
    pack(format, codes, scales, zeros, section, order)
    packed = format.view(section)
    assert torch.equal(unpack(packed), codes)
    groups = torch.arange(format.columns) // format.group_size
    if order is not None:
        assert torch.equal(packed.order.long(), order)
        groups[order] = groups.clone()  # the group of each input column
    want = (codes.float() - (1 << format.bits) // 2) * scales.float()[:, groups] + zeros.float()[:, groups]
    assert torch.equal(dequantize(packed), want)
    if packed.bias is not None:
        packed.bias.fill_(1.0)
        assert torch.equal(dequantize(packed), want), "the bias lies on the weights"
        tail = section[format.bias_offset : format.order_offset].view(format.dtype)
        assert tail.nonzero().flatten().tolist() == list(range(format.rows))


@settings(max_examples=80, deadline=None)
@given(formats.filter(lambda format: format.bits > 2), st.booleans(), st.integers(0, 2**31))
def test_the_low_version_is_inside_the_high_one(format, steps, seed):
    format = replace(format, encoding=NESTED[format.bits], integer_zeros=steps)
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << format.bits, (format.rows, format.columns), generator=generator, dtype=torch.uint8)
    scales, zeros = (torch.randn(2, format.rows, format.groups, generator=generator)).to(format.dtype)
    zeros = zeros.mul(4).round() if steps else zeros
    order = torch.randperm(format.columns, generator=generator) if format.act_order else None
    base, residual = (torch.full((nbytes,), 0xEE, dtype=torch.uint8) for nbytes in (format.base.nbytes, format.nbytes))
    pack_nested(format, codes, scales, zeros, base, residual, order)
    low = format.base.view(base)
    high = format.view(residual, low)
    assert torch.equal(unpack(high), codes)
    assert torch.equal(unpack(low), codes >> format.bits // 2)
    assert base.numel() + residual.numel() == replace(format, encoding=encoding_of(format.bits)).nbytes
    assert residual.numel() % 256 == 0

    def weights(codes):
        groups = torch.arange(format.columns) // format.group_size
        if order is not None:
            groups[order] = groups.clone()
        scale, zero = scales.double()[:, groups], zeros.double()[:, groups]
        return (codes.double() - (1 << format.bits) // 2) * scale + (zero * scale if steps else zero)

    assert torch.equal(dequantize(high, torch.float64), weights(codes))
    step = 1 << format.bits // 2
    middle = codes.double() // step * step + (1.5 if step == 4 else 7.5)
    assert torch.equal(dequantize(low, torch.float64), weights(middle))


def test_codes_that_there_are_not_are_refused():
    with pytest.raises(ValueError, match="bits is 3"):
        encoding_of(3)


def test_a_fine_section_is_read_with_its_own_base_only():
    format = MatrixFormat(64, 64, NESTED[4], 64, torch.bfloat16)
    residual = torch.zeros(format.nbytes, dtype=torch.uint8)
    with pytest.raises(ValueError, match="base is None"):
        format.view(residual)
    plain = replace(format.base, encoding=encoding_of(2))
    with pytest.raises(ValueError, match="upper_of=0"):
        format.view(residual, plain.view(torch.zeros(plain.nbytes, dtype=torch.uint8)))


@settings(max_examples=40, deadline=None)
@given(formats)
def test_sections_are_aligned_a_bias_and_an_order_lie_at_the_end_and_padding_is_zero(format):
    assert not any(
        place % 256 for place in (format.nbytes, format.scales_offset, format.bias_offset, format.order_offset)
    )
    for encoding in (format.encoding, PLAIN):
        bare = replace(format, encoding=encoding, bias=False, act_order=False)
        biased = replace(bare, bias=True)
        packed = bare.view(torch.zeros(bare.nbytes, dtype=torch.uint8))
        assert packed.bias is packed.order is None
        assert biased.bias_offset == bare.bias_offset == bare.nbytes
        assert 0 <= biased.nbytes - bare.nbytes - 2 * biased.padded_rows < 256
    ordered = replace(format, act_order=True)
    assert ordered.order_offset == replace(format, act_order=False).nbytes
    assert 0 <= ordered.nbytes - ordered.order_offset - 2 * ordered.padded_columns < 256
    section = torch.full((format.nbytes,), 0xEE, dtype=torch.uint8)
    zeros = torch.zeros(format.rows, format.groups)
    order = torch.arange(format.columns) if format.act_order else None
    pack(format, torch.zeros(format.rows, format.columns, dtype=torch.uint8), zeros, zeros, section, order)
    stored = section[format.order_offset :].view(torch.int16)
    assert stored.nonzero().flatten().tolist() == (list(range(1, format.columns)) if format.act_order else [])
    assert not section[: format.order_offset].any()


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        ({"group_size": 48}, ValueError, "group_size is 48"),
        ({"rows": -1}, ValueError, "at least 0 rows"),
        ({"dtype": torch.float32}, TypeError, r"dtype is torch\.float32"),
        ({"act_order": True, "encoding": PLAIN}, ValueError, "act_order is set for the code 16"),
        (
            {"act_order": True, "columns": 32769},
            ValueError,
            "act_order is set for 32769 columns",
        ),
    ],
)
def test_impossible_formats_are_refused(change, error, sentence):
    values = {"rows": 64, "columns": 64, "encoding": encoding_of(4), "group_size": 32, "dtype": torch.bfloat16}
    with pytest.raises(error, match=sentence):
        MatrixFormat(**(values | change))


@pytest.mark.parametrize(
    ("section", "error", "sentence"),
    [
        (lambda n: torch.zeros(n - 1, dtype=torch.uint8), ValueError, "section has shape"),
        (lambda n: torch.zeros(n), TypeError, "section is torch.float32"),
        (lambda n: torch.zeros(2 * n, dtype=torch.uint8)[::2], ValueError, "expected a contiguous tensor"),
        (lambda n: torch.zeros(n + 1, dtype=torch.uint8)[1:], ValueError, "multiples of 16"),
    ],
)
def test_wrong_sections_are_refused(section, error, sentence):
    format = MatrixFormat(64, 64, encoding_of(4), 32, torch.bfloat16)
    with pytest.raises(error, match=sentence):
        format.view(section(format.nbytes))


def test_codes_that_do_not_fit_are_refused():
    format = MatrixFormat(2, 32, encoding_of(2), 32, torch.bfloat16)
    codes, ones = torch.full((2, 32), 4, dtype=torch.uint8), torch.ones(2, 1)
    with pytest.raises(ValueError, match="codes contains 4"):
        pack(format, codes, ones, ones, torch.empty(format.nbytes, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("act_order", "order", "sentence"),
    [
        (True, None, "order is missing"),
        (False, torch.arange(32), "order is given"),
        (True, torch.zeros(32, dtype=torch.int64), "each of the 32 columns once"),
        (True, torch.arange(31), "each of the 32 columns once"),
    ],
)
def test_wrong_orders_are_refused(act_order, order, sentence):
    format = MatrixFormat(2, 32, encoding_of(2), 32, torch.bfloat16, act_order=act_order)
    codes, ones = torch.zeros(2, 32, dtype=torch.uint8), torch.ones(2, 1)
    with pytest.raises(ValueError, match=sentence):
        pack(format, codes, ones, ones, torch.empty(format.nbytes, dtype=torch.uint8), order)
