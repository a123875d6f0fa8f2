"""``vllm-dymoe quantize`` and ``inspect`` for other tools' checkpoints."""

import json

import pytest
import torch

from tests.cli import checkpoints
from tests.cli.checkpoints import MOE_LAYERS, NAMES, command, make_model, quantized, refused, sections
from tests.quantize.readers.kinds import FLOATS, INTEGERS, config_of, dtype_of, parts_of, random_matrix, tensors_of
from vllm_dymoe.cache.store import FileStore
from vllm_dymoe.experts.format import Projection
from vllm_dymoe.kernels import dequantize, unpack
from vllm_dymoe.quantize.tensors import read_tensors


def name_of(place):
    position, expert, projection = place
    return f"model.layers.{MOE_LAYERS[position]}.mlp.experts.{expert}.{NAMES['separate'][projection]}"


def make(folder, kind):
    """Create a model with separate tensors for all parts; return its matrices.

    Keys are places: (layer position, expert, projection).
    """
    model = make_model(folder, dtype=dtype_of(kind))
    model.config["quantization_config"] = config_of(kind)
    matrices = {
        place: random_matrix(kind, *weight.shape, seed=number)
        for number, (place, weight) in enumerate(model.experts.items())
    }
    named = {f"{name_of(place)}.weight": matrix for place, matrix in matrices.items()}
    dense = {name: tensor for name, tensor in model.tensors.items() if name not in named}
    model.tensors = dense | tensors_of(kind, named)
    return model, matrices


def stacked(folder, kind):
    """Create the same in gpt-oss's layout: one tensor per layer with all experts.

    Rows of gate and up alternate.
    """
    model, matrices = make(folder, kind)
    model.config["model_type"] = "gpt_oss"
    model.tensors = {name: tensor for name, tensor in model.tensors.items() if ".experts." not in name}
    experts = 1 + max(expert for _, expert, _ in matrices)
    stems = (("gate_up_proj", (Projection.GATE, Projection.UP)), ("down_proj", (Projection.DOWN,)))
    for position, layer in enumerate(MOE_LAYERS):
        for stem, projections in stems:
            packed = [
                [parts_of(kind, matrices[position, expert, of]) for of in projections] for expert in range(experts)
            ]
            for part in packed[0][0]:
                rows = [torch.stack([each[part] for each in one], 1).flatten(0, 1) for one in packed]
                model.tensors[f"model.layers.{layer}.mlp.experts.{stem}_{part}"] = torch.stack(rows)
    return model, matrices


@pytest.mark.parametrize("kind", [kind for kind in INTEGERS if kind != "int8"])  # the 4-bit formats
def test_integers_are_taken_as_they_are_and_the_low_precision_is_their_upper_halves(tmp_path, kind):
    model, matrices = make(tmp_path / "model", kind)
    model.save(shards=3)  # the tensors of a matrix are spread over several files
    out, name, ordered = tmp_path / "out", kind.removesuffix("-ordered"), kind == "gptq-ordered"
    said = quantized(model, out, "--low", 2)
    assert f"{name} checkpoint, 4 bits as they are, 2 bits inside the 4" in said
    store = FileStore(out)
    store.close()
    assert store.manifest.quantizer == f"{name} checkpoint"
    assert [fmt.act_order for fmt in store.experts.formats.values()] == [ordered] * 2
    for (place, low, base), (_, high, residual) in zip(sections(out, 2), sections(out, 4), strict=True):
        matrix, upper = matrices[place], low.view(base)
        assert torch.equal(unpack(upper), matrix.codes >> 2)
        packed = high.view(residual, upper)
        assert torch.equal(unpack(packed), matrix.codes)
        assert torch.equal(dequantize(packed, dtype_of(kind)), matrix.dequantize())
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["hi"], config["lo"], config["group_size"]) == ("dymoe", 4, 2, 32)
    assert config["dense"] == config_of(kind)
    assert config["zeros_in_steps"] == ([4, 2] if kind == "awq" else [])
    assert config["ordered"] == ([4, 2] if ordered else [])
    dense = read_tensors(out)
    assert sorted(name for name in dense if "4bit" not in name and "2bit" not in name) == sorted(model.dense)
    quantized(model, out, "--high", 16, "--overwrite")
    for place, matrix, section in sections(out, 16):
        assert torch.equal(matrix.view(section.clone()).weight, matrices[place].dequantize())
    report = json.loads(command("inspect", model.folder, "--json").stdout)
    assert report["kind"] == f"MoE checkpoint, experts quantized with {name} at 4 bits"
    assert (report["ordered"], report["group_size"]) == ([4] if ordered else [], 32)
    assert ("reordered columns" in command("inspect", model.folder).stdout) == ordered
    # This includes g_idx and weight_shape.
    assert report["expert_bytes"] == sum(tensor.nbytes for name, tensor in model.tensors.items() if ".experts." in name)


@pytest.mark.parametrize("kind", FLOATS)
def test_floats_are_taken_as_they_are(tmp_path, kind, monkeypatch):
    if kind == "mxfp4":
        monkeypatch.setattr(checkpoints, "INTERMEDIATE", 64)  # a multiple of the block size, 32
    model, matrices = (stacked if kind == "mxfp4" else make)(tmp_path / "model", kind)
    model.save(shards=2)
    out, high = tmp_path / "out", next(iter(matrices.values())).bits
    quantized(model, out, "--high", high, "--low", 2)
    for bits in (high, 2):
        for place, form, section in sections(out, bits):
            packed, matrix = form.view(section.clone()), matrices[place]
            error = dequantize(packed) - matrix.dequantize()
            if bits == high:
                assert torch.equal(unpack(packed), matrix.codes)
                assert not error.any()
            else:
                assert error.norm() < 0.6 * matrix.dequantize().norm()
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["codebooks"] == {str(high): matrix.encoding.name}
    assert f"at {high} bits" in json.loads(command("inspect", model.folder, "--json").stdout)["kind"]


FIRST = name_of((0, 0, Projection.GATE))


def set_config(**changes):
    return lambda model: model.config["quantization_config"].update(changes)


REFUSED = {
    "no codes": ("awq", lambda m: m.tensors.pop(f"{FIRST}.qweight"), "without qweight"),
    "a short tensor": (
        "awq",
        lambda m: m.tensors.update({f"{FIRST}.scales": m.tensors[f"{FIRST}.scales"][:2].clone()}),
        f"{FIRST} in .* is no awq at 4 bits .*: scales has shape [2, 80], expected [3, 80]",
    ),
    "an expert too few": (
        "awq",
        lambda m: [m.tensors.pop(f"{FIRST}.{part}") for part in ("qweight", "qzeros", "scales")],
        "lacks 1 projections of experts, the first being the gate projection of expert 0 in layer 1",
    ),
    "an unknown version": ("awq", set_config(version="gemv_fast"), 'version "gemv_fast", but only "gemm" can be read'),
    "a dtype that rounds scales": (
        "awq",
        lambda m: m.config.update(dtype="bfloat16"),
        "taken as it is at 4 bits: its scales are float16 and would be rounded to bfloat16; use dtype float16.",
    ),
    "a part that no format has": (
        "awq",
        lambda m: m.tensors.update({f"{FIRST}.qscales": torch.zeros(3, 80)}),
        f"{FIRST}.qscales (F32, [3, 80])",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_wrong_is_named(tmp_path, what):
    kind, spoil, sentence = REFUSED[what]
    model, _ = make(tmp_path / "model", kind)
    spoil(model)
    model.save()
    said = refused("quantize", model.folder, "-o", tmp_path / "out")
    assert all(part in said for part in sentence.split(".*")), said
    assert not (tmp_path / "out").exists()
