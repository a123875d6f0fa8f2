"""Untrusted checkpoints: no file outside their folder, no cost beyond their size."""

import contextlib
import json
import time
from dataclasses import replace

import pytest
from safetensors.torch import save_file

from tests.cli.checkpoints import make_model, quantized, refused
from vllm_dymoe.quantize.checkpoint import Checkpoint
from vllm_dymoe.quantize.model_config import ModelConfig
from vllm_dymoe.quantize.tensors import INDEX, CheckpointError, weight_files

DEEP = "[" * 100_000


@pytest.fixture
def model(tmp_path):
    model = make_model(tmp_path / "model")
    model.save()
    return model


def with_index(model, names):
    (model.folder / INDEX).write_text(json.dumps({"weight_map": {str(n): name for n, name in enumerate(names)}}))


@pytest.mark.parametrize(
    "name", ["../private.safetensors", "/private.safetensors", "a/../../private.safetensors", "..", "", "a\0b", 5]
)
def test_an_index_names_files_of_its_folder(name, model, tmp_path):
    save_file({"private": next(iter(model.tensors.values()))}, tmp_path / "private.safetensors")
    with_index(model, ["model.safetensors", name])
    with pytest.raises(CheckpointError, match=r"index\.json"):
        weight_files(model.folder)
    refused("quantize", model.folder, "-o", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_inside_of_the_checkpoint_may_be_named(model):
    (model.folder / "part").mkdir()
    (model.folder / "model.safetensors").rename(model.folder / "part" / "model.safetensors")
    with_index(model, ["part/model.safetensors"])
    assert [path.name for path in weight_files(model.folder)] == ["model.safetensors"]
    Checkpoint.open(model.folder)


@pytest.mark.parametrize("indexed", [False, True])
def test_a_link_leads_to_a_file_of_the_checkpoint(indexed, model, tmp_path):
    save_file({"private": next(iter(model.tensors.values()))}, tmp_path / "private.safetensors")
    (model.folder / "more.safetensors").symlink_to(tmp_path / "private.safetensors")
    if indexed:
        with_index(model, ["model.safetensors", "more.safetensors"])
    assert "more.safetensors" in refused("quantize", model.folder, "-o", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_snapshot_of_the_hub_has_links_into_its_own_blobs(model, tmp_path):
    """huggingface_hub's layout: models--a--b/snapshots/REVISION/x -> ../../blobs/HASH."""
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs.mkdir(parents=True), snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(model.folder.iterdir())):
        path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    quantized(replace(model, folder=snapshot), tmp_path / "out")
    (tmp_path / "private.safetensors").write_bytes((blobs / "1").read_bytes())
    (snapshot / "more.safetensors").symlink_to(tmp_path / "private.safetensors")
    assert "more.safetensors" in refused("quantize", snapshot, "-o", tmp_path / "another")


def test_a_file_for_the_model_is_copied_only_from_its_folder(model, tmp_path):
    """A quantized model may be published, so a link must not put a private file there."""
    secret = tmp_path / "secret.json"
    secret.write_text("{}")
    (model.folder / "tokenizer.json").symlink_to(secret)
    refused("quantize", model.folder, "-o", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("key", ["num_experts", "num_hidden_layers", "hidden_size", "moe_intermediate_size"])
@pytest.mark.parametrize("value", [4_000_000, 10**18, 10**40])
def test_absurd_sizes_are_refused_at_once(key, value, model, tmp_path):
    if key == "num_hidden_layers" and value == 4_000_000:
        return
    model.config[key] = value
    model.save()
    begun = time.monotonic()
    said = refused("quantize", model.folder, "-o", tmp_path / "out")
    assert time.monotonic() - begun < 20
    assert "Traceback" not in said


@pytest.mark.parametrize("text", [DEEP, '{"a":' * 100_000, "9" * 5000, '{"quantization_config": ' + "9" * 5000 + "}"])
def test_deep_and_long_json_is_refused(text, model):
    for name in ("config.json", INDEX):
        before = (model.folder / "config.json").read_text()
        (model.folder / name).write_text(text)
        with pytest.raises(CheckpointError, match="cannot be read"):
            Checkpoint.open(model.folder)
        (model.folder / "config.json").write_text(before)


@pytest.mark.parametrize("said", [5, "gptq", [1], [["a", 1]], True, {"quant_method": 5}, {"quant_method": ["awq"]}])
def test_a_quantization_config_of_any_kind_is_read_or_refused(said, model):
    model.config["quantization_config"] = said
    model.save()
    with pytest.raises(CheckpointError):
        Checkpoint.open(model.folder)
    if not isinstance(said, dict):
        with pytest.raises(CheckpointError, match="quantization_config"):
            _ = ModelConfig(model.folder).quantization


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": ["qwen3_moe"]},
        {"model_type": {"a": 1}},
        {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [float("inf"), 128]}},
        {"num_hidden_layers": 1},  # the experts are in later layers
    ],
)
def test_values_of_another_kind_are_read_or_refused(config, model):
    model.config |= config
    model.save()
    with contextlib.suppress(CheckpointError):
        Checkpoint.open(model.folder).expert(0, 0)
