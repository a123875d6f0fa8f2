"""A checkpoint that cannot be served: the start ends with a sentence, and nothing half-written stays."""

import os
from types import SimpleNamespace

import pytest
import torch

from tests.small_model import fill, make_experts, random_weight
from vllm_dymoe.config import Options
from vllm_dymoe.experts.layout import Projection
from vllm_dymoe.quantize import make_quantizer
from vllm_dymoe.quantize.packer import ExpertPacker
from vllm_dymoe.store import Manifest, StoreError
from vllm_dymoe.store.writer import StoreWriter
from vllm_dymoe.vllm_adapter.loading import Loading
from vllm_dymoe.vllm_adapter.store import LayerSpec

EXPERTS = make_experts()
SPEC = LayerSpec("layers.1.mlp.experts", 6, 2, 64, 32, torch.bfloat16, False, 0, 1, 0, 1)


def loading(packer):
    """A rank that has found no store and packs one."""
    loading = Loading(SimpleNamespace(), Options(system="on-demand"), None)
    loading.add_layer(SPEC)
    loading._packer, loading._source = packer, SimpleNamespace(placed=lambda files: files)
    return loading


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_end_the_start_and_leave_nothing(tmp_path, bad):
    packer = ExpertPacker(EXPERTS, make_quantizer("rtn"), StoreWriter(tmp_path / "s", Manifest(EXPERTS, "rtn", "m")))
    model = loading(packer)
    model.put(0, 0, Projection.GATE, random_weight(EXPERTS, 0, 0, Projection.GATE))
    weight = random_weight(EXPERTS, 1, 4, Projection.DOWN)
    weight[3, 5] = bad
    with pytest.raises(StoreError) as caught:
        model.put(1, 4, Projection.DOWN, weight)
    assert str(caught.value).startswith("vllm-dymoe: the down projection of expert 4 in layer 2 cannot be quantized")
    assert "1 of its weights are NaN or infinite; download the checkpoint again." in str(caught.value)
    assert not os.listdir(tmp_path)


def test_a_missing_expert_ends_the_start_and_leaves_nothing(tmp_path):
    packer = ExpertPacker(EXPERTS, make_quantizer("rtn"), StoreWriter(tmp_path / "s", Manifest(EXPERTS, "rtn", "m")))
    put = packer.put
    packer.put = lambda *what: None if what[:2] == (0, 5) else put(*what)
    fill(packer)
    model = loading(packer)
    with pytest.raises(StoreError, match=r"vllm-dymoe: .* lacks 3 .* gate projection of expert 5 in layer 1"):
        model.layer_loaded(0, None)
    assert not os.listdir(tmp_path)
