"""Random stores: finite, repeatable, in the usual format, with distinct experts."""

import pytest
import torch

from tests.small_model import make_experts
from tests.support.memory_writer import MemoryWriter
from vllm_dymoe.experts.encoding import CODEBOOKS
from vllm_dymoe.experts.format import Projection, SliceKey, all_keys
from vllm_dymoe.experts.matrix import MatrixFormat
from vllm_dymoe.kernels import dequantize
from vllm_dymoe.quantize.dummy import fill_randomly, random_store

PROJECTIONS = len(Projection)


def make(seed=0, **changes):
    experts = make_experts(**changes)
    return random_store(experts, MemoryWriter(experts), seed)


def slices(store):
    return {key: store.packed(key) for key in all_keys(store.experts)}


@pytest.mark.parametrize("bits", [16, 8, 4, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("hidden", "intermediate"), [(64, 64), (100, 70)])
def test_weights_are_finite_and_centred_and_of_the_usual_size(bits, dtype, hidden, intermediate):
    store = make(bits=(bits,), dtype=dtype, hidden=hidden, intermediate=intermediate)
    fmt = store.experts.formats[bits]
    weights = [dequantize(matrix) for key in all_keys(store.experts) for matrix in fmt.view(store.packed(key))]
    everything = torch.cat([weight.flatten() for weight in weights])
    assert torch.isfinite(everything).all()
    assert 0.015 < everything.std() < 0.03
    assert everything.mean().abs() < 0.002
    assert everything.unique().numel() >= min(2**bits, 64)


def test_a_seed_is_repeated_and_another_one_differs():
    first, again, other = slices(make(1)), slices(make(1)), slices(make(2))
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not any(torch.equal(first[key], other[key]) for key in first)
    assert len({bytes(packed.numpy()) for packed in first.values()}) == len(first), "no two experts are the same"


def test_biases_are_filled_and_padding_stands_for_zeros():
    store = make(bits=(4,), hidden=100, intermediate=70, bias=True)
    bias = store.experts.formats[4].view(store.packed(SliceKey(1, 3, 4))).down.bias
    assert torch.isfinite(bias).all()
    assert bias.std() > 0
    gate = store.experts.formats[4].view(store.packed(SliceKey(0, 0, 4))).gate
    assert gate.format.padded_rows > 70
    assert (gate.scales_zeros[:, 70:] == 0).all()
    assert (gate.scales_zeros[:, :70] != 0).all()


@pytest.mark.parametrize("book", CODEBOOKS.values(), ids=CODEBOOKS)
def test_published_floats_are_finite_and_of_the_usual_size(book):
    format = MatrixFormat(200, 512, book, book.group_size or 64, torch.bfloat16)
    section = torch.empty(format.nbytes, dtype=torch.uint8)
    fill_randomly(format, section, torch.Generator().manual_seed(0))
    weights = dequantize(format.view(section))
    assert torch.isfinite(weights).all()
    assert 0.01 < weights.std() < 0.04  # some scales are powers of two, so the size may be off by a factor of 2
    assert weights.unique().numel() >= 15
