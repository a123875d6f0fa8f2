"""``vllm-dymoe quantize`` and ``inspect`` on checkpoints of published floats."""

import json

import pytest
import torch

from tests.cli import checkpoints
from tests.cli.checkpoints import MOE_LAYERS, command, make_model, refused
from tests.cli.test_quantized import name_of
from tests.quantize.readers import float_packing
from vllm_dymoe.kernels import dequantize, unpack
from vllm_dymoe.residency.format import BlobKey, Projection
from vllm_dymoe.store import FileStore


def separate(folder, kind):
    """A model with a tensor for each part of each projection, and its matrices by place."""
    model = make_model(folder)
    model.config["quantization_config"] = float_packing.CONFIGS[kind]
    matrices = {}
    for number, (place, weight) in enumerate(model.experts.items()):
        matrices[place] = float_packing.random_floats(kind, *weight.shape, seed=number)
        del model.tensors[f"{name_of(place)}.weight"]
        parts = float_packing.parts(kind, matrices[place])
        model.tensors |= {f"{name_of(place)}.{part}": tensor.contiguous() for part, tensor in parts.items()}
    return model, matrices


def stacked(folder, kind):
    """The same in gpt-oss's form: all experts of a layer in a tensor, rows of gate and up in turns."""
    model, matrices = separate(folder, kind)
    model.config["model_type"] = "gpt_oss"
    model.tensors = {name: tensor for name, tensor in model.tensors.items() if ".experts." not in name}
    experts = 1 + max(expert for _, expert, _ in matrices)
    for position, layer in enumerate(MOE_LAYERS):
        for stem, projections in (
            ("gate_up_proj", (Projection.GATE, Projection.UP)),
            ("down_proj", (Projection.DOWN,)),
        ):
            packed = [
                [float_packing.parts(kind, matrices[position, expert, of]) for of in projections]
                for expert in range(experts)
            ]
            for part in packed[0][0]:
                rows = [torch.stack([each[part] for each in one], 1).flatten(0, 1) for one in packed]
                model.tensors[f"model.layers.{layer}.mlp.experts.{stem}_{part}"] = torch.stack(rows)
    return model, matrices


@pytest.mark.parametrize(
    ("make", "kind"),
    [(separate, kind) for kind in float_packing.CONFIGS if kind != "mxfp4"] + [(stacked, "mxfp4")],
)
def test_numbers_are_taken_as_they_are(tmp_path, make, kind, monkeypatch):
    if make is stacked:
        monkeypatch.setattr(checkpoints, "INTERMEDIATE", 64)  # blocks of 32 hold no other
    model, matrices = make(tmp_path / "model", kind)
    model.save(shards=2)
    bits = next(iter(matrices.values())).bits
    result = command("quantize", model.folder, "-o", tmp_path / "out", "--hi", bits, "--lo", 2)
    assert result.exit_code == 0, result.output
    store = FileStore(tmp_path / "out")
    high = max(store.experts.formats)
    for (position, expert, projection), matrix in matrices.items():
        for bits, fmt in store.experts.formats.items():
            blob = torch.empty(fmt.nbytes, dtype=torch.uint8)
            store.read_into(BlobKey(position, expert, bits), blob)
            packed = fmt.view(blob)[projection]
            if bits == high:
                assert torch.equal(unpack(packed), matrix.codes)
                assert torch.equal(dequantize(packed), matrix.dequantize())
            else:
                error = dequantize(packed) - matrix.dequantize()
                assert error.norm() < 0.6 * matrix.dequantize().norm()
    store.close()
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["codebooks"] == {str(high): matrix.codebook.name}
    report = json.loads(command("inspect", model.folder, "--json").stdout)
    assert f"at {high} bits" in report["kind"]


def test_half_a_checkpoint_and_another_tools_name_are_one_sentence(tmp_path):
    model, _ = separate(tmp_path / "half", "nvfp4-modelopt")
    del model.tensors[f"{name_of((0, 1, Projection.UP))}.weight_scale_2"]
    model.save()
    assert "lacks" in refused("quantize", model.folder, "-o", tmp_path / "out")
    model, _ = separate(tmp_path / "mislabelled", "nvfp4-modelopt")
    model.config["quantization_config"] = float_packing.CONFIGS["fp8-modelopt"]
    model.save()
    assert "weight_scale_2" in refused("quantize", model.folder, "-o", tmp_path / "out")
