"""Matrices of published floats: MXFP4, NVFP4, FP8."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_dymoe.experts.encoding import CODEBOOKS, FP8, MXFP4, NVFP4
from vllm_dymoe.experts.matrix import MatrixFormat
from vllm_dymoe.kernels import dequantize, pack_floats, unpack

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # OCP Microscaling Formats 1.0, table 5
BOOKS = list(CODEBOOKS.values())


def format_of(book, rows, columns, group_size=64, dtype=torch.bfloat16, **rest):
    return MatrixFormat(rows, columns, book, book.group_size or group_size, dtype, **rest)


def test_levels_are_the_standards():
    codes = torch.arange(16, dtype=torch.uint8)
    want = torch.tensor(E2M1 + [-level for level in E2M1])
    for book in (MXFP4, NVFP4):
        assert torch.equal(book.levels(codes), want)
        assert torch.equal(book.levels(codes).signbit(), want.signbit())
    every = torch.arange(256, dtype=torch.uint8)
    sign, exponent, mantissa = 1 - 2 * (every >> 7).double(), every >> 3 & 15, (every & 7).double() / 8
    normal = sign * (1 + mantissa) * 2.0 ** (exponent.double() - 7)
    want = torch.where(exponent == 0, sign * mantissa * 2.0**-6, normal)
    want[(every & 127) == 127] = torch.nan
    assert torch.equal(FP8.levels(every).double().nan_to_num(1e9), want.nan_to_num(1e9))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(BOOKS),
    st.integers(1, 150),
    st.integers(1, 200),
    st.sampled_from([32, 64, 128, 256]),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_codes_and_scales_survive(book, rows, columns, group_size, bias, seed):
    format = format_of(book, rows, columns, group_size, bias=bias)
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << book.bits, (rows, columns), generator=generator, dtype=torch.uint8)
    codes[~book.levels(codes).isfinite()] = 1
    scales = torch.rand(rows, format.groups, generator=generator).add(0.1).to(book.scale_dtype)
    factor = (0.3, 7.0) if book.has_factor else (1.0, 1.0)
    section = torch.full((format.nbytes,), 0xEE, dtype=torch.uint8)
    pack_floats(format, codes, scales, section, factor)
    packed = format.view(section)
    assert torch.equal(unpack(packed), codes)
    steps = scales.float() * torch.tensor(factor[0]) / factor[1]
    want = book.levels(codes) * steps[:, torch.arange(columns) // format.group_size]
    assert torch.equal(dequantize(packed), want)
    assert format.nbytes % 256 == format.scales_offset % 256 == format.bias_offset % 256 == 0
    if bias:
        assert not packed.bias.any()
        packed.bias.fill_(1.0)
        assert torch.equal(dequantize(packed), want), "the bias lies on something else"


@pytest.mark.parametrize(("book", "bits"), [(MXFP4, 4.25), (NVFP4, 4.5), (FP8, 8.25)])
def test_an_expert_takes_the_bits_that_are_published(book, bits):
    format = format_of(book, 768, 2048, 128)
    assert 8 * format.nbytes / (768 * 2048) == pytest.approx(bits, abs=0.01)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"group_size": 64}, "group_size is 64"),
        ({"integer_zeros": True}, "neither zeros nor an order"),
        ({"act_order": True}, "neither zeros nor an order"),
    ],
)
def test_formats_that_do_not_exist(arguments, sentence):
    sizes = {"rows": 64, "columns": 64, "encoding": MXFP4, "group_size": 32, "dtype": torch.bfloat16}
    with pytest.raises(ValueError, match=sentence):
        MatrixFormat(**sizes | arguments)
