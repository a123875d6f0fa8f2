"""Packing experts for any order of weights and biases in the checkpoint."""

import itertools
import random
from dataclasses import replace

import pytest
import torch

from tests.quantize.readers.kinds import random_integers
from tests.small_model import make_experts, random_weight
from tests.support.memory_writer import MemoryWriter
from vllm_dymoe.cache.store import FileStore, Manifest, StoreError
from vllm_dymoe.cache.store.writer import StoreWriter
from vllm_dymoe.experts.format import Projection, all_keys
from vllm_dymoe.kernels import dequantize
from vllm_dymoe.quantize import QUANTIZERS
from vllm_dymoe.quantize.packer import ExpertPacker


def random_bias(experts, place):
    layer, expert, projection = place
    rows = next(iter(experts.formats.values())).matrices[projection].rows
    generator = torch.Generator().manual_seed(layer * 1000 + expert * 10 + projection)
    return torch.randn(rows, generator=generator).bfloat16()


def places(experts):
    return list(itertools.product(range(len(experts.layers)), range(experts.num_experts), Projection))


def pack(experts, sink, order, weight_of=random_weight):
    packer = ExpertPacker(experts, QUANTIZERS["rtn"], sink)
    kinds = ("weight", "bias") if experts.formats[min(experts.formats)].bias else ("weight",)
    steps = [(place, kind) for place in places(experts) for kind in kinds]
    if order == "biases first":
        steps.sort(key=lambda step: step[1])
    elif order == "weights first":
        steps.sort(key=lambda step: step[1], reverse=True)
    elif order == "any":
        random.Random(0).shuffle(steps)
    for place, kind in steps:
        if kind == "weight":
            packer.put(*place, weight_of(experts, *place))
        else:
            packer.put_bias(*place, random_bias(experts, place))
    return packer.finish()


ORDERS = ("together", "biases first", "weights first", "any")


def random_codes(experts, layer, expert, projection):
    """Return a checkpoint's matrix whose groups are scattered."""
    matrix = experts.formats[4].matrices[projection]
    seed = layer * 1000 + expert * 10 + projection
    return random_integers(matrix.rows, matrix.columns, 32, dtype=torch.bfloat16, seed=seed, shuffled=True)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("bits", "bias", "ordered"),
    [((16,), True, False), ((4, 2), True, False), ((4, 2), True, True), ((4, 2), False, True)],
)
def test_weights_and_biases_come_in_any_order(tmp_path, order, bits, bias, ordered):
    """Files and memory get the same bytes in any order, and checksums match."""
    experts = make_experts(bits=bits, hidden=70, intermediate=33, bias=bias)
    if ordered:  # the order of columns is stored after the bias
        high = replace(experts.formats[4], integer_zeros=True, act_order=True)
        experts = replace(experts, formats={4: high, 2: experts.formats[2]})
    weight_of = random_codes if ordered else random_weight
    files = pack(experts, StoreWriter(tmp_path / "store", Manifest(experts, "rtn", "0" * 16)), order, weight_of)
    memory = pack(experts, MemoryWriter(experts), ORDERS[0], weight_of)
    assert isinstance(files, FileStore)
    assert files.experts == experts
    for key in all_keys(experts):
        fmt = experts.formats[key.bits]
        packed = torch.full((fmt.nbytes,), 0xEE, dtype=torch.uint8)
        files.read_into(key, packed)  # verifies the checksums
        assert torch.equal(packed, memory.packed(key))
        for projection, matrix in zip(Projection, fmt.view(packed), strict=True):
            place = key.layer, key.expert, projection
            assert (matrix.bias is not None) == bias
            assert not bias or torch.equal(matrix.bias, random_bias(experts, place))
            assert (matrix.order is not None) == (ordered and key.bits == 4)
            if matrix.order is not None:
                weights = random_codes(experts, *place).dequantize()
                assert torch.equal(dequantize(matrix, torch.bfloat16), weights)
    files.close()


def test_what_is_missing_or_of_another_shape_is_named():
    experts = make_experts(bias=True)
    packer = ExpertPacker(experts, QUANTIZERS["rtn"], MemoryWriter(experts))
    with pytest.raises(StoreError, match=r"lacks 36 .* expert 0 in layer 1"):
        packer.finish()
    for place in places(experts):
        packer.put(*place, random_weight(experts, *place))
        if place != (1, 2, Projection.UP):
            packer.put_bias(*place, random_bias(experts, place))
    with pytest.raises(StoreError, match=r"lacks 1 biases .* expert 2"):
        packer.finish()
    bias = r"bias of the gate .* \[5\], expected \[32\]"
    weight = r"gate .* \[64, 64\] .* \[32, 64\]"
    for rows, columns, length, sentence in ((32, 64, 5, bias), (64, 64, 32, weight)):
        packer.put(0, 0, Projection.GATE, torch.ones(rows, columns))
        packer.put_bias(0, 0, Projection.GATE, torch.zeros(length))
        with pytest.raises(StoreError, match=sentence):
            packer.finish()
