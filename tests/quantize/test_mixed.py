"""Checkpoints with several formats of experts dequantize correctly, bit for bit.

The format may depend on the layer or on the projection.
"""

import json

import pytest
import torch

from tests.cli.checkpoints import EXPERTS, MOE_LAYERS, command, make_model, quantized, refused, sections
from tests.quantize.readers.kinds import config_of, dtype_of, gptq, parts_of, random_integers, random_matrix
from vllm_dymoe.cache.store import FileStore
from vllm_dymoe.experts.format import Projection

WORDS = ("gate_proj", "up_proj", "down_proj")


def mixed_model(folder, kind, plain):
    """Make a model with experts of a kind; return it and all experts dequantized.

    Those with ``plain`` in their names stay unquantized.
    """
    model = make_model(folder, dtype=dtype_of(kind))
    wanted = {}
    for (position, expert, projection), weight in model.experts.items():
        stem = f"model.layers.{MOE_LAYERS[position]}.mlp.experts.{expert}.{WORDS[projection]}"
        if plain in stem:
            wanted[position, expert, projection] = weight
            continue
        matrix = random_matrix(kind, *weight.shape, seed=len(wanted))
        del model.tensors[f"{stem}.weight"]
        model.tensors |= {f"{stem}.{part}": tensor for part, tensor in parts_of(kind, matrix).items()}
        wanted[position, expert, projection] = matrix.dequantize().to(dtype_of(kind))
    model.config |= {"quantization_config": config_of(kind), "moe_intermediate_size": 64, "hidden_size": 96}
    return model, wanted


@pytest.mark.parametrize("kind", ["gptq", "awq", "nvfp4-modelopt", "fp8-compressed-tensors", "int8"])
@pytest.mark.parametrize("plain", [f"layers.{MOE_LAYERS[1]}.", "down_proj"])
def test_every_weight_is_what_the_checkpoint_says(tmp_path, monkeypatch, kind, plain):
    monkeypatch.setattr("tests.cli.checkpoints.INTERMEDIATE", 64)  # fills whole words in every format
    model, wanted = mixed_model(tmp_path / "model", kind, plain)
    model.save()
    out = tmp_path / "out"
    said = quantized(model, out, "--high", 16)
    assert "dequantized to 16 bits" in " ".join(said.split())
    found = {place: matrix.view(section.clone()).weight for place, matrix, section in sections(out, 16)}
    assert len(found) == len(wanted) == 3 * EXPERTS * len(MOE_LAYERS)
    for place, weight in wanted.items():
        assert torch.equal(found[place], weight), place
    assert FileStore(out).manifest.quantizer.endswith("rtn")
    report = json.loads(command("inspect", model.folder, "--json").stdout)
    assert "several formats" in report["kind"]


def test_one_expert_of_another_format_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.cli.checkpoints.INTERMEDIATE", 64)
    model, _ = mixed_model(tmp_path / "model", "gptq", "layers.2.mlp.experts.1.up_proj")
    model.save()
    sentence = refused("quantize", model.folder, "-o", tmp_path / "out")
    assert "layers.2.mlp.experts.1.up_proj" in sentence
    assert Projection.UP.name.lower() in sentence


@pytest.mark.parametrize("where", ["down_proj", "layers.2.mlp.experts.1.down_proj"])
def test_down_projections_that_config_json_says_nothing_of_are_refused_before_anything_is_packed(
    tmp_path, monkeypatch, where
):
    monkeypatch.setattr("tests.cli.checkpoints.INTERMEDIATE", 64)
    model, _ = mixed_model(tmp_path / "model", "gptq", "nothing")
    for number, name in enumerate([name for name in model.tensors if where in name and name.endswith(".qweight")]):
        matrix = random_integers(96, 64, 32, bits=8, symmetric=True, dtype=torch.float16, seed=number)
        model.tensors |= {name.replace("qweight", part): tensor for part, tensor in gptq(matrix).items()}
    model.save()
    monkeypatch.setattr("vllm_dymoe.quantize.convert.StoreWriter", lambda *_, **__: pytest.fail("it is written"))
    sentence = " ".join(refused("quantize", model.folder, "-o", tmp_path / "out").split())
    assert f"{where} in" in sentence
    assert "is no gptq at 4 bits in groups of 32" in sentence
    assert "with a rule for what has other bits or groups" in sentence
