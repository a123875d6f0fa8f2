"""``vllm-dymoe quantize``: its output and refusals.

It must never leave half a checkpoint behind.
"""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from collections import namedtuple
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open

from tests.cli.checkpoints import (
    EXPERTS,
    INTERMEDIATE,
    MOE_LAYERS,
    STYLES,
    TOP_K,
    command,
    make_model,
    quantized,
    refused,
    sections,
)
from vllm_dymoe.cache.store import MANIFEST, FileStore, writer
from vllm_dymoe.experts.encoding import encoding_of
from vllm_dymoe.experts.format import Projection
from vllm_dymoe.kernels import dequantize
from vllm_dymoe.quantize import QUANTIZERS, quantize_matrix, tensors
from vllm_dymoe.quantize.quantizers import pack_bias
from vllm_dymoe.quantize.tensors import read_tensors


@pytest.fixture
def model(tmp_path):
    model = make_model(tmp_path / "model")
    model.save()
    return model


@pytest.fixture
def out(tmp_path):
    return tmp_path / "written" / "out"


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("quantizer", ["rtn", "hqq", "16 bits"])
def test_experts_are_what_quantizing_them_directly_gives(tmp_path, out, style, quantizer):
    model = make_model(tmp_path / "model", style)
    model.save()
    if quantizer == "16 bits":
        quantized(model, out, "--high", 16)
        for place, matrix, section in sections(out, 16):
            packed = matrix.view(section.clone())
            assert torch.equal(packed.weight, model.experts[place]), place
            assert packed.bias is None if not model.biases else torch.equal(packed.bias, model.biases[place]), place
        return
    said = quantized(model, out, "--high", 4, "--low", 2, "--group-size", 32, "--quantizer", quantizer)
    assert all(words in said for words in (f"vllm serve {out}", "high precision, 4 bits", "low precision, 2 bits"))
    seen = set()
    bases = {place: (matrix, section.clone()) for place, matrix, section in sections(out, 2)}
    for place, matrix, section in sections(out, 4):
        low, base = bases[place]
        expected, expected_base = torch.full_like(section, 0xEE), torch.full_like(base, 0xEE)
        quantize_matrix(model.experts[place], matrix, QUANTIZERS[quantizer], expected, expected_base)
        if model.biases:
            pack_bias(model.biases[place], low.view(expected_base))
        assert torch.equal(section, expected), place
        assert torch.equal(base, expected_base), place
        # The high version equals one that is packed alone.
        alone = replace(matrix, encoding=encoding_of(matrix.bits))
        single = torch.empty(alone.nbytes, dtype=torch.uint8)
        quantize_matrix(model.experts[place], alone, QUANTIZERS[quantizer], single)
        high = matrix.view(section.clone(), low.view(base))
        assert torch.equal(dequantize(high), dequantize(alone.view(single)))
        seen.add(place)
    assert seen == model.experts.keys()


def test_experts_without_a_gate_are_quantized(tmp_path, out):
    model = make_model(tmp_path / "model")
    model.config["model_type"] = "nemotron_h"
    model.tensors = {n: t for n, t in model.tensors.items() if ".experts." not in n or ".gate_proj." not in n}
    model.save()
    quantized(model, out, "--high", 16)
    seen = set()
    for place, matrix, section in sections(out, 16):
        if place[2] is Projection.GATE:
            assert not len(section)
            continue
        assert torch.equal(matrix.view(section.clone()).weight, model.experts[place]), place
        seen.add(place[2])
    assert seen == {Projection.UP, Projection.DOWN}
    model.config["model_type"] = "qwen3_moe"
    model.save()
    assert "the gate projection of expert 0" in refused("quantize", model.folder, "-o", tmp_path / "other")


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("shard_bytes", [5 * 10**9, 10_000])
def test_dense_tensors_are_copied_bit_for_bit(model, out, shards, shard_bytes, monkeypatch):
    (model.folder / "model.safetensors").unlink()
    model.save(shards=shards)
    monkeypatch.setattr(tensors, "_SHARD_BYTES", shard_bytes)
    quantized(model, out)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == model.dense.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in model.dense.values())
    files = sorted(set(index["weight_map"].values()))
    assert (len(files) > 1) == (shard_bytes == 10_000)
    assert files == sorted(path.name for path in out.glob("model-*.safetensors"))
    for name, tensor in model.dense.items():
        with safe_open(out / index["weight_map"][name], framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
            copied = file.get_tensor(name)
        assert read_tensors(out)[name].begin % tensor.itemsize == 0, f"{name} is not aligned"
        assert copied.dtype == tensor.dtype
        assert torch.equal(copied, tensor), name


def test_sizes_that_each_layer_has_and_router_biases_beside_the_experts(model, out):
    """Hunyuan and Laguna store sizes and router biases like this."""
    for key, each in (("num_experts_per_tok", "moe_topk"), ("moe_intermediate_size", "moe_intermediate_size")):
        model.config[each] = 3 * [model.config.pop(key)]
    bias = f"model.layers.{MOE_LAYERS[0]}.mlp.experts.e_score_correction_bias"
    model.tensors[bias] = torch.arange(EXPERTS).float()
    model.save()
    quantized(model, out, "--high", 16)
    assert FileStore(out).experts.top_k == TOP_K
    with safe_open(read_tensors(out)[bias].path, framework="pt") as file:
        assert torch.equal(file.get_tensor(bias), model.tensors[bias])


def test_config_and_small_files(model, out):
    (model.folder / "tokenizer.json").write_text("{}")
    (model.folder / "chat_template.jinja").write_text("{{ messages }}")
    (model.folder / "additional_chat_templates").mkdir()
    (model.folder / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    for unwanted in ("pytorch_model.bin", "pytorch_model.bin.index.json", ".gitattributes", "model.gguf"):
        (model.folder / unwanted).write_text("not for us")
    quantized(model, out, "--low", 2, "--group-size", 32, "--quantizer", "hqq")
    wanted = {"additional_chat_templates/tools.jinja", "chat_template.jinja", "config.json", MANIFEST, "tokenizer.json"}
    wanted |= {f"dymoe-experts-0000{layer}.safetensors" for layer in (1, 2)}
    wanted |= {"model-00001-of-00001.safetensors", "model.safetensors.index.json"}
    assert {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()} == wanted
    config = json.loads((out / "config.json").read_text())
    ours = {"quant_method": "dymoe", "format_version": 7, "hi": 4, "lo": 2, "group_size": 32, "quantizer": "hqq"}
    assert config.pop("quantization_config") == ours
    assert config == model.config
    manifest = FileStore(out).manifest
    assert manifest.experts.layers == MOE_LAYERS
    assert manifest.experts.top_k == 2
    assert manifest.quantizer == "hqq"
    assert len(manifest.model) == 16


@pytest.mark.parametrize("named", [True, False])
def test_auto_makes_bfloat16_of_32_bits(tmp_path, out, named):
    model = make_model(tmp_path / "model", dtype=torch.float32)
    if not named:
        del model.config["dtype"]
    model.save()
    quantized(model, out, "--high", 16)
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    for place, matrix, section in sections(out, 16):
        assert torch.equal(matrix.view(section.clone()).weight, model.experts[place].bfloat16())
    model.config["dtype"] = "float32"
    model.config["text_config"] = {**model.config, "torch_dtype": "bfloat16"}
    model.save()
    quantized(model, out, "--dtype", "float16", "--overwrite")
    config = json.loads((out / "config.json").read_text())
    assert config["dtype"] == config["text_config"]["dtype"] == config["text_config"]["torch_dtype"] == "float16"
    assert FileStore(out).experts.formats[4].dtype == torch.float16


def test_the_fingerprint_follows_the_weights_and_not_the_place(model, tmp_path):
    def fingerprint(folder, out):
        assert command("quantize", folder, "-o", out).exit_code == 0
        return FileStore(out).manifest.model

    original = fingerprint(model.folder, tmp_path / "a")
    shutil.copytree(model.folder, tmp_path / "copy")
    assert fingerprint(tmp_path / "copy", tmp_path / "b") == original
    name = f"model.layers.{MOE_LAYERS[1]}.mlp.experts.3.down_proj.weight"
    model.tensors[name] = model.tensors[name] * 1.5
    model.save()
    assert fingerprint(model.folder, tmp_path / "c") != original


def fail_after(monkeypatch, writes, error):
    """Let the disk fail after some writes to the store; each section takes two."""
    original, left = writer.write_at, [writes]

    def write_at(*args):
        if left[0] == 0:
            raise error
        left[0] -= 1
        original(*args)

    monkeypatch.setattr(writer, "write_at", write_at)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize(
    ("writes", "error"),
    [
        (0, OSError(errno.ENOSPC, "No space left on device")),
        (26, OSError(errno.EIO, "Input/output error")),
        (5, KeyboardInterrupt()),
        (3, ZeroDivisionError()),
    ],
)
def test_a_run_that_ends_early_leaves_what_was_there(model, out, monkeypatch, before, writes, error):
    """A full disk is reported in one sentence; other exceptions keep their types."""
    if before:
        quantized(model, out, "--high", 8)
    held = {path.name: path.read_bytes() for path in out.iterdir()} if before else None
    fail_after(monkeypatch, writes, error)
    arguments = ("quantize", model.folder, "-o", out, "--overwrite")
    if isinstance(error, OSError):
        assert error.strerror in refused(*arguments)
    else:
        assert isinstance(command(*arguments).exception, ZeroDivisionError | SystemExit)
    assert list(out.parent.iterdir()) == ([out] if before else [])
    if before:
        assert {path.name: path.read_bytes() for path in out.iterdir()} == held


def test_overwrite_replaces_the_whole_folder_or_nothing(model, out, monkeypatch):
    out.mkdir(parents=True)  # an existing empty folder may be filled
    quantized(model, out, "--high", 8)
    assert "--overwrite" in refused("quantize", model.folder, "-o", out)
    rename = os.rename

    def fail_for_new(source, target):
        if ".partial-" in str(source) and not str(source).endswith("-replaced"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fail_for_new)
        refused("quantize", model.folder, "-o", out, "--overwrite")
    assert FileStore(out).experts.formats.keys() == {8}
    assert list(out.parent.iterdir()) == [out]
    (out / "left from before").write_text("")
    quantized(model, out, "--high", 4, "--overwrite")
    assert FileStore(out).experts.formats.keys() == {4}
    assert not (out / "left from before").exists()
    assert list(out.parent.iterdir()) == [out]


def test_a_run_killed_between_two_renames_loses_nothing(model, out):
    quantized(model, out, "--high", 8)
    program = (
        "import os, signal; from vllm_dymoe.cli import main;"
        "rename = os.rename; os.rename = lambda source, target: ("
        "rename(source, target), str(target).endswith('-replaced') and os.kill(os.getpid(), signal.SIGKILL)); main()"
    )
    command = [sys.executable, "-c", program, "quantize", model.folder, "-o", out, "--overwrite"]
    assert subprocess.run(command, check=False).returncode == -9
    assert not out.exists()
    assert "--overwrite" in refused("quantize", model.folder, "-o", out)
    assert FileStore(out).experts.formats.keys() == {8}
    quantized(model, out, "--high", 4, "--overwrite")
    assert FileStore(out).experts.formats.keys() == {4}
    assert list(out.parent.iterdir()) == [out]


def test_too_small_a_disk_is_refused_and_nothing_is_left(model, out, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(writer.shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 1000, 1000))
    sentence = refused("quantize", model.folder, "-o", out)
    assert re.search(r"out needs [\d.]+ KiB, but its disk has 1000 B left \([\d.]+ KiB too little\); free", sentence)
    assert not list(out.parent.iterdir())


def rename_tensor(model, old, new):
    model.tensors[new] = model.tensors.pop(old)


GATE = "model.layers.1.mlp.experts.0.gate_proj.weight"
FUSED = "model.layers.1.mlp.experts.gate_up_proj"
SPOILED = {
    "biases": (
        "separate",
        lambda m: m.tensors.update({"model.layers.1.mlp.experts.0.gate_proj.bias": torch.zeros(INTERMEDIATE)}),
        "biases for some projections of its experts, but not for 23 others",
    ),
    "a lost bias": ("gpt-oss", lambda m: m.tensors.pop(FUSED + "_bias"), "biases for some .* not for 1 others"),
    "a bias of another width": (
        "gpt-oss",
        lambda m: m.tensors.update({FUSED + "_bias": torch.zeros(EXPERTS, INTERMEDIATE)}),
        r"gate_up_proj_bias .* \[4, 80\].* \[4, 160\]\.",
    ),
    "infinite biases": (
        "gpt-oss",
        lambda m: m.tensors[FUSED + "_bias"].fill_(torch.inf),
        "bias of the gate projection of expert . in layer 1 cannot be stored: 80 of its weights are NaN or infinite",
    ),
    "mxfp4": (
        "fused",
        lambda m: m.tensors.update({FUSED + "_blocks": torch.zeros(EXPERTS, 160, 3, 16, dtype=torch.uint8)}),
        "gate_up_proj_blocks .* belongs to experts but is not",
    ),
    "transposed": (
        "fused",
        lambda m: m.tensors.update({FUSED: m.tensors[FUSED].transpose(1, 2).contiguous()}),
        "but config.json says",
    ),
    "another width": ("separate", lambda m: m.config.update(moe_intermediate_size=64), r"\[96, 80\].* \[96, 64\]"),
    "too few experts named": ("separate", lambda m: m.config.update(num_experts=3), "config.json says 3"),
    "too many experts named": ("separate", lambda m: m.config.update(num_experts=5), "lacks 6 projections"),
    "no number of experts": ("separate", lambda m: m.config.pop("num_experts"), "num_experts or num_local_experts"),
    "no size": ("separate", lambda m: m.config.update(num_experts_per_tok="two"), "'two', not a size"),
    "a lost expert": ("separate", lambda m: m.tensors.pop(GATE), "lacks 1 projections"),
    "a doubled expert": (
        "separate",
        lambda m: m.tensors.update({GATE.replace("gate_proj", "w1"): m.tensors[GATE].clone()}),
        "exists twice",
    ),
    "experts in two stacks": (
        "separate",
        lambda m: rename_tensor(m, GATE, "other." + GATE),
        "several places, model.layers and other.model.layers",
    ),
    "no experts": ("separate", lambda m: setattr(m, "tensors", dict(m.dense)), "only Mixture-of-Experts"),
    "ours": ("separate", lambda m: m.config.update(quantization_config={"quant_method": "dymoe"}), "dymoe checkpoint"),
    "quantized text": (
        "separate",
        lambda m: m.config.update(text_config=m.config | {"quantization_config": {"quant_method": "hqq"}}),
        "with hqq already",
    ),
}


@pytest.mark.parametrize("what", SPOILED)
def test_models_that_cannot_be_quantized_are_refused(tmp_path, out, what):
    style, spoil, sentence = SPOILED[what]
    model = make_model(tmp_path / "model", style)
    spoil(model)
    model.save()
    found = refused("quantize", model.folder, "-o", out)
    assert re.search(sentence, found), found
    assert not out.exists()


def test_folders_that_are_no_checkpoint_are_refused(tmp_path, out):
    assert "hf download some/model" in refused("quantize", "some/model", "-o", out)
    assert "no config.json" in refused("quantize", tmp_path, "-o", out)
    (tmp_path / "config.json").write_text("{")
    assert "config.json cannot be read" in refused("quantize", tmp_path, "-o", out)
    (tmp_path / "config.json").write_text("[]")
    assert "not a JSON object" in refused("quantize", tmp_path, "-o", out)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_text("")
    assert "no *.safetensors files" in refused("quantize", tmp_path, "-o", out)


def test_help_needs_neither_torch_nor_vllm():
    program = (
        "import sys; from typer.testing import CliRunner; from vllm_dymoe.cli import app;"
        "results = [CliRunner().invoke(app, [*c, '--help']) for c in ([], ['quantize'], ['inspect'])];"
        "assert all(result.exit_code == 0 for result in results);"
        "assert 'quantize' in results[0].output;"
        "assert not {'torch', 'vllm', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_targets_and_options_that_cannot_be_used_are_refused(model, out, tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("precious")
    source = ("quantize", model.folder, "-o")
    assert "is not a dymoe checkpoint" in refused(*source, tmp_path / "precious", "--overwrite")
    assert (tmp_path / "precious" / "file").read_text() == "precious"
    assert "write to another folder" in refused(*source, model.folder, "--overwrite")
    assert "/proc/nowhere" in refused(*source, "/proc/nowhere/out")  # read-only even for root
    assert "must be below high" in refused(*source, out, "--high", 2, "--low", 4)
    assert command(*source, out, "--high", 3).exit_code == 2


def test_files_that_are_not_the_checkpoints_are_not_read_and_damaged_ones_refused(model, out):
    source = ("quantize", model.folder, "-o", out)
    whole = model.folder / "model.safetensors"
    (model.folder / "consolidated.safetensors").write_bytes(b"a second copy under other names, as Mistral has")
    shutil.copy(whole, model.folder / "again.safetensors")
    assert "is both in" in refused(*source)
    (model.folder / "again.safetensors").unlink()
    whole.write_bytes(whole.read_bytes()[:-100])
    assert "download it again" in refused(*source)
    whole.unlink()
    model.save(shards=3)
    (model.folder / "stray.safetensors").write_bytes(b"not a safetensors file, and not in the index")
    quantized(model, out)
    assert not (out / "stray.safetensors").exists()
    (model.folder / "part-1.safetensors").unlink()
    assert "part-1.safetensors cannot be read" in refused(*source, "--overwrite")
