"""Layers while they load, and what they share.

A start that fails ends with one sentence and leaves no files.
"""

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.small_model import fill, make_experts, random_weight
from vllm_dymoe.cache.store import HostPlace, Manifest, StoreError
from vllm_dymoe.cache.store.writer import StoreWriter
from vllm_dymoe.experts.format import Projection, SliceKey
from vllm_dymoe.kernels import Activation, Curve, Decode, Grouped
from vllm_dymoe.options import ConfigError, Options
from vllm_dymoe.quantize import QUANTIZERS
from vllm_dymoe.quantize.packer import ExpertPacker
from vllm_dymoe.vllm_plugin import loading as loading_module
from vllm_dymoe.vllm_plugin.loading import Loading
from vllm_dymoe.vllm_plugin.model_store import LayerSpec, layer_numbers

EXPERTS = make_experts()
SPEC = LayerSpec("layers.1.mlp.experts", 6, 2, 64, 32, torch.bfloat16, False, 0, 1, 0, 1)
CONFIG = SimpleNamespace(
    device_config=SimpleNamespace(device="cpu", device_type="cpu"),
    parallel_config=SimpleNamespace(
        local_world_size=1,
        data_parallel_size_local=1,
        data_parallel_size=1,
        enable_expert_parallel=False,
        enable_eplb=False,
    ),
)


def loading(packer):
    loading = Loading(CONFIG, Options(policy="on-demand"), None)
    for number in (1, 2):
        loading.add_layer(replace(SPEC, name=f"layers.{number}.mlp.experts"))
    loading._model._packer, loading._model.place = packer, HostPlace(False)
    return loading


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        (torch.inf, "expert 5 in layer 2 .*NaN"),
        (None, "expert 5 in layer 2; download"),
    ],
)
def test_a_weight_that_is_missing_or_not_finite_ends_the_start_and_leaves_nothing(tmp_path, bad, sentence):
    packer = ExpertPacker(EXPERTS, QUANTIZERS["rtn"], StoreWriter(tmp_path / "s", Manifest(EXPERTS, "rtn", "m")))
    model, put = loading(packer), packer.put
    packer.put = lambda *what: None if what[:3] == (1, 5, Projection.DOWN) else put(*what)
    fill(packer)
    packer.put = put
    if bad is not None:
        weight = random_weight(EXPERTS, 1, 5, Projection.DOWN)
        weight[3, 5] = bad
        model._model.put(1, 5, Projection.DOWN, weight)
    assert not model._model.layer_loaded(0)
    with pytest.raises(StoreError, match=f"^vllm-dymoe: .*{sentence}"):
        model.layer_loaded(1, None)
    assert not os.listdir(tmp_path)


def model_of(*layers):
    model = Loading(CONFIG, Options(), None)
    for number, changes in enumerate(layers, 1):
        assert model.add_layer(replace(SPEC, name=f"layers.{number}.mlp.experts", **changes)) == number - 1
    return model


@pytest.mark.parametrize(
    "other", [{"hidden": 128}, {"bias": True}, {"activation": Activation(Curve.RELU2, has_gate=False)}]
)
def test_layers_of_another_kind_of_experts_are_refused(other):
    with pytest.raises(ConfigError, match=r"layers\.3\.mlp\.experts differ"):
        model_of({}, {}, other)


def test_a_store_has_room_for_the_widest_layer_and_the_one_with_most_experts():
    experts = model_of({"intermediate": 96}, {"num_experts": 12, "top_k": 1}, {"top_k": 4}).experts
    assert experts.formats[4].intermediate == 96
    assert (experts.layers, experts.num_experts, experts.top_k) == ((1, 2, 3), 12, 4)


def test_layers_have_the_numbers_of_the_model_and_none_has_anothers():
    assert layer_numbers(["model.layers.3.mlp.experts", "model.layers.5.mlp.experts"]) == (3, 5)
    both = [f"layers.{number}.mlp.{kind}_experts" for number in (1, 2) for kind in ("text", "vision")]
    assert layer_numbers(both) == (1, 4, 2, 5)


def test_narrower_and_fewer_experts_are_filled_up_with_zeros(tmp_path):
    """A layer half as wide, and one with fewer experts, get zeros after their weights."""
    narrow, few = replace(SPEC, name="layers.2.x", intermediate=16), replace(SPEC, name="layers.3.x", num_experts=4)
    biased = [replace(spec, bias=True) for spec in (SPEC, narrow, few)]
    loading = Loading(CONFIG, Options(high=16, policy="on-demand"), None)
    for spec in biased:
        loading.add_layer(spec)
    experts = loading.experts
    packer = ExpertPacker(experts, QUANTIZERS["rtn"], StoreWriter(tmp_path / "s", Manifest(experts, "rtn", "m")))
    model = loading._model
    model._packer, model.place = packer, HostPlace(False)
    given = {}
    for layer, spec in enumerate(biased):
        for expert in range(spec.num_experts):
            for projection in Projection:
                whole = random_weight(experts, layer, expert, projection)
                rows, columns = (64, spec.intermediate) if projection is Projection.DOWN else (spec.intermediate, 64)
                given[layer, expert, projection] = whole[:rows, :columns] + 1
                model.put(layer, expert, projection, given[layer, expert, projection])
                model.put(layer, expert, projection, torch.ones(rows), bias=True)
        assert model.layer_loaded(layer) == (layer == 2)
    packed_bytes = torch.empty(experts.formats[16].nbytes, dtype=torch.uint8)
    for layer in range(3):
        for expert in range(6):
            model.store.read_into(SliceKey(layer, expert, 16), packed_bytes)
            for projection, packed in zip(Projection, experts.formats[16].view(packed_bytes), strict=True):
                want = given.get((layer, expert, projection), torch.zeros(0, 0, dtype=torch.bfloat16))
                rows, columns = want.shape
                assert torch.equal(packed.weight[:rows, :columns], want)
                assert not packed.weight[rows:].any()
                assert not packed.weight[:, columns:].any()
                assert packed.bias.sum() == rows


@pytest.mark.parametrize("readable", [True, False])
def test_a_start_on_a_gpu_tests_the_kernels_that_it_will_use(readable, monkeypatch, tmp_path):
    asked, ways = {}, (Decode.TENSOR_CORES, Grouped.PLAIN)

    def tested(experts, options, device, activations, **given):
        asked.update(given, device=device, activations=activations)
        return ways

    monkeypatch.setattr(loading_module, "tested", tested)
    model = model_of({}, {"activation": Activation.GELU}, {})
    model._model.rates = tmp_path / "rates.json"
    store = SimpleNamespace(experts=EXPERTS, readable=readable)
    assert model._tested(store, torch.device("cuda")) == ways
    assert asked["from_disk"] != readable
    assert asked["device"].type == "cuda"
    assert asked["activations"] == [SPEC.activation, Activation.GELU]
    assert asked["kept"] == tmp_path / "self-test.json"


@pytest.mark.parametrize(
    ("fastest", "chosen", "rounds"),
    [
        (((3, 1), (3, 1)), (Decode.CHAINED, Grouped.IN_REGISTERS), 1),
        (((3, 1), (2, 1)), (Decode.DEPENDENT, Grouped.IN_REGISTERS), 2),
        (((1, 0), (3, 1)), (Decode.TENSOR_CORES, Grouped.PLAIN), 2),
        (((3, 0), (0, 0)), (Decode.PLAIN, Grouped.PLAIN), 2),
    ],
)
def test_kinds_of_layers_are_tested_as_all_of_them_will_be_used(fastest, chosen, rounds, monkeypatch):
    asked = []

    def tested(kind, options, device, activations, *, kept, say, at_most, from_disk):
        asked.append((kind, at_most))
        decode, grouped = fastest[kind]
        return min(at_most[0], Decode(decode)), min(at_most[1], Grouped(grouped))

    monkeypatch.setattr(loading_module, "tested", tested)
    experts = SimpleNamespace(of_kinds=(0, 1), of_kind=lambda kind: kind)
    model = model_of({}, {"activation": Activation.GELU}, {})
    assert model._tested(SimpleNamespace(experts=experts, readable=True), torch.device("cuda")) == chosen
    assert len(asked) == 2 * rounds
    assert {at_most for _, at_most in asked[-2:]} == {chosen if rounds > 1 else (max(Decode), max(Grouped))}
