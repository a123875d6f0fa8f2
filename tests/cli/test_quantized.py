"""``vllm-dymoe quantize`` and ``inspect`` on checkpoints that other tools have quantized."""

import functools
import json

import pytest
import torch

from tests.cli.checkpoints import MOE_LAYERS, NAMES, command, make_model, refused
from tests.quantize.readers import packing
from vllm_dymoe.kernels import dequantize, unpack
from vllm_dymoe.quantize.tensors import read_tensors
from vllm_dymoe.residency.format import BlobKey, Projection
from vllm_dymoe.store import FileStore

CONFIGS = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False},
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4,
                    "type": "int",
                    "strategy": "group",
                    "group_size": 32,
                    "symmetric": False,
                },
            }
        },
    },
}
CONFIGS["gptq in order of activations"] = CONFIGS["gptq"] | {"desc_act": True}
PACKERS = {
    "awq": packing.awq,
    "gptq": packing.gptq,
    "gptq in order of activations": packing.gptq,
    "compressed-tensors": functools.partial(packing.compressed_tensors, symmetric=False),
}
METHODS = sorted(CONFIGS)


def name_of(place):
    position, expert, projection = place
    return f"model.layers.{MOE_LAYERS[position]}.mlp.experts.{expert}.{NAMES['separate'][projection]}"


def quantized_model(folder, method, dtype=torch.float16, **settings):
    """A model with quantized experts, and their matrices by place."""
    model = make_model(folder, dtype=dtype)
    model.config["quantization_config"] = CONFIGS[method]
    settings = {"shuffled": "order" in method} | settings
    matrices = {}
    for number, (place, weight) in enumerate(model.experts.items()):
        matrices[place] = packing.random_prequantized(*weight.shape, 32, seed=number, **settings)
        del model.tensors[f"{name_of(place)}.weight"]
        parts = PACKERS[method](matrices[place])
        model.tensors |= {f"{name_of(place)}.{part}": tensor for part, tensor in parts.items()}
    return model, matrices


@pytest.mark.parametrize("method", METHODS)
def test_numbers_are_taken_as_they_are_and_the_low_tier_is_their_upper_halves(tmp_path, method):
    model, matrices = quantized_model(tmp_path / "model", method)
    model.save(shards=3)  # tensors of one matrix lie in several files
    result = command("quantize", model.folder, "-o", tmp_path / "out", "--lo", 2)
    assert result.exit_code == 0, result.output
    name, _, ordered = method.partition(" in ")
    assert f"{name} checkpoint, 4 bits as they are, 2 bits inside the 4" in result.stdout
    store = FileStore(tmp_path / "out")
    assert store.manifest.quantizer == f"{name} checkpoint"
    assert [fmt.act_order for fmt in store.experts.formats.values()] == [bool(ordered)] * 2
    for place, matrix in matrices.items():
        experts, base = {}, None
        for bits in (2, 4):
            fmt = store.experts.formats[bits]
            blob = torch.empty(fmt.nbytes, dtype=torch.uint8)
            store.read_into(BlobKey(*place[:2], bits), blob)
            experts[bits] = base = fmt.view(blob, base)
        assert torch.equal(unpack(experts[2][place[2]]), matrix.codes >> 2)
        packed = experts[4][place[2]]
        assert torch.equal(unpack(packed), matrix.codes)
        assert torch.equal(dequantize(packed, torch.float16), matrix.weights())
    store.close()
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["hi"], config["lo"], config["group_size"]) == ("dymoe", 4, 2, 32)
    assert config["dense"] == CONFIGS[method]
    assert (config["zeros_in_steps"], config["ordered"]) == ([4, 2], [4, 2] if ordered else [])
    dense = read_tensors(tmp_path / "out")
    assert sorted(name for name in dense if "4bit" not in name and "2bit" not in name) == sorted(model.dense)


@pytest.mark.parametrize("method", METHODS)
def test_16_bits_are_the_dequantized_weights(tmp_path, method):
    model, matrices = quantized_model(tmp_path / "model", method)
    model.save()
    assert command("quantize", model.folder, "-o", tmp_path / "out", "--hi", 16).exit_code == 0
    store = FileStore(tmp_path / "out")
    fmt = store.experts.formats[16]
    for place, matrix in matrices.items():
        blob = torch.empty(fmt.nbytes, dtype=torch.uint8)
        store.read_into(BlobKey(*place[:2], 16), blob)
        assert torch.equal(fmt.view(blob)[place[2]].weight, matrix.weights())
    store.close()


@pytest.mark.parametrize("method", METHODS)
def test_inspect_says_what_it_is(tmp_path, method):
    model, _ = quantized_model(tmp_path / "model", method)
    model.save()
    report = json.loads(command("inspect", model.folder, "--json").stdout)
    name, _, ordered = method.partition(" in ")
    assert report["kind"] == f"MoE checkpoint, experts quantized with {name} at 4 bits"
    assert report["ordered"] == ([4] if ordered else [])
    shown = "columns in another order at 4 bits" in command("inspect", model.folder).stdout
    assert shown == bool(ordered)
    # g_idx and weight_shape included.
    assert report["expert_bytes"] == sum(tensor.nbytes for name, tensor in model.tensors.items() if ".experts." in name)
    assert report["group_size"] == 32


FIRST = name_of((0, 0, Projection.GATE))
REFUSED = {
    "no zero points": (lambda m: m.tensors.pop(f"{FIRST}.qzeros"), f"lacks {FIRST}.qzeros; download"),
    "no codes": (lambda m: m.tensors.pop(f"{FIRST}.qweight"), f"lacks {FIRST}.qweight; download"),
    "a short tensor": (
        lambda m: m.tensors.update({f"{FIRST}.scales": m.tensors[f"{FIRST}.scales"][:2].clone()}),
        f"{FIRST} in .* is no awq matrix: scales has shape [2, 80], expected [3, 80].",
    ),
    "an expert too few": (
        lambda m: [m.tensors.pop(f"{FIRST}.{part}") for part in ("qweight", "qzeros", "scales")],
        "lacks 1 projections of experts, the first being the gate projection of expert 0 in layer 1",
    ),
    "an unknown version": (
        lambda m: m.config["quantization_config"].update(version="gemv_fast"),
        'version "gemv_fast", and only "gemm" can be read',
    ),
    "a dtype that rounds scales": (
        lambda m: m.config.update(dtype="bfloat16"),
        "taken as it is at 4 bits: its scales are float16 and would be rounded to bfloat16; use dtype float16.",
    ),
    "a part that nobody knows": (
        lambda m: m.tensors.update({f"{FIRST}.qscales": torch.zeros(3, 80)}),
        f"{FIRST}.qscales (F32, [3, 80])",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_wrong_is_named(tmp_path, what):
    spoil, sentence = REFUSED[what]
    model, _ = quantized_model(tmp_path / "model", "awq")
    model.config["quantization_config"] = dict(CONFIGS["awq"])
    spoil(model)
    model.save()
    said = refused("quantize", model.folder, "-o", tmp_path / "out")
    assert all(part in said for part in sentence.split(".*")), said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--hi", 8), "hi = 8 was asked for, but the experts of this awq checkpoint have 4 bits"),
        (("--group-size", 64), "can only be held in groups of 32"),
    ],
)
def test_other_formats_are_refused(tmp_path, options, sentence):
    model, _ = quantized_model(tmp_path / "model", "awq")
    model.save()
    assert sentence in refused("quantize", model.folder, "-o", tmp_path / "out", *options)
