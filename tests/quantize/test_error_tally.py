"""The record of errors: its numbers, for any order of the work."""

from functools import partial

import pytest
import torch

from tests.quantize.recordings import correlated_inputs
from tests.small_model import fill, make_experts, random_weight
from vllm_dymoe.cache.store import Manifest
from vllm_dymoe.cache.store.writer import StoreWriter
from vllm_dymoe.experts.format import Projection, SliceKey
from vllm_dymoe.kernels import dequantize
from vllm_dymoe.quantize import QUANTIZERS, quantize_matrix
from vllm_dymoe.quantize.error_tally import ErrorTally
from vllm_dymoe.quantize.gptq import Curvature, quantize_gptq
from vllm_dymoe.quantize.packer import ExpertPacker

ODD = {"hidden": 72, "intermediate": 40}  # no multiples of a group size


def packed_store(folder, experts, quantizer="rtn"):
    packer = ExpertPacker(experts, QUANTIZERS[quantizer], StoreWriter(folder, Manifest(experts, quantizer, "0123")))
    fill(packer)
    return packer.finish()


@pytest.mark.parametrize("quantizer", ["rtn", "hqq"])
def test_weight_errors_are_those_of_the_bytes(tmp_path, quantizer):
    experts = make_experts(bits=(16, 2), **ODD)
    store = packed_store(tmp_path / "store", experts, quantizer)
    errors = store.manifest.errors
    assert list(errors.weight) == [2], "16 bits are copied"
    assert errors.output == {}
    fmt, packed = experts.formats[2], torch.empty(experts.formats[2].nbytes, dtype=torch.uint8)
    for layer in range(2):
        error = whole = 0.0
        for expert in range(experts.num_experts):
            store.read_into(SliceKey(layer, expert, 2), packed)
            for projection, matrix in zip(Projection, fmt.view(packed), strict=True):
                weight = random_weight(experts, layer, expert, projection).double()
                error += (dequantize(matrix, torch.float64) - weight).square().sum().item()
                whole += weight.square().sum().item()
        assert errors.weight[2][layer] == pytest.approx((error / whole) ** 0.5, rel=1e-3)  # four digits are written


def test_output_errors_are_those_of_the_outputs():
    experts = make_experts(layers=1, num_experts=2, bits=(4,), **ODD)
    tally, expected = ErrorTally(experts), [0.0, 0.0]
    for expert in range(2):
        inputs = correlated_inputs(200, 72, expert)
        curvature = Curvature.of(inputs.t() @ inputs)
        weight = random_weight(experts, 0, expert, Projection.GATE)
        matrix = experts.formats[4].matrices[Projection.GATE]
        section = torch.empty(matrix.nbytes, dtype=torch.uint8)
        quantize_matrix(weight, matrix, partial(quantize_gptq, curvature=curvature), section)
        packed = matrix.view(section)
        tally.add((0, expert, Projection.GATE), weight, dequantize(packed), matrix.bits, curvature)
        for place, of in enumerate((dequantize(packed, torch.float64) - weight.double(), weight.double())):
            expected[place] += (inputs.double() @ of.t()).square().sum().item()
    assert tally.record().output[4][0] == pytest.approx((expected[0] / expected[1]) ** 0.5, rel=1e-3)
