"""Damaged, truncated, mislabelled and half-converted checkpoints.

Each is refused with one sentence before anything is loaded.
"""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from tests.quantize.readers.kinds import config_of, parts_of, random_matrix, tensors_of
from tests.vllm_plugin.test_prepare import configure, refusal, with_quantization_config
from vllm_dymoe.quantize.readers import make_reader
from vllm_dymoe.quantize.tensors import CheckpointError
from vllm_dymoe.vllm_plugin.model_files import check_checkpoint

KINDS = ["mxfp4", "mxfp4-compressed-tensors", "mxfp4-deepseek-v4", "mxfp8-modelopt", "nvfp4-modelopt"]
KINDS += ["nvfp4-compressed-tensors", "fp8-blocks", "fp8-compressed-tensors"]
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def stem(layer, expert, projection):
    return f"model.layers.{layer}.mlp.experts.{expert}.{projection}"


def experts(kind):
    """Return tensors of two experts in two layers, and of one in a draft layer.

    The draft (multi-token prediction) layer comes last and is not quantized.
    """
    tensors = {"model.layers.8.mlp.experts.0.up_proj.weight": torch.zeros(64, 64, dtype=torch.bfloat16)}
    for layer in range(2):
        if kind == "mxfp4":  # gpt-oss: one tensor per layer with all experts
            made = parts_of(kind, random_matrix(kind, 64, 64))
            for name in ("gate_up_proj", "down_proj"):
                place = f"model.layers.{layer}.mlp.experts.{name}"
                tensors |= {f"{place}_{part}": tensor.expand(2, *tensor.shape) for part, tensor in made.items()}
            continue
        stems = (stem(layer, expert, projection) for expert in range(2) for projection in PROJECTIONS)
        tensors |= tensors_of(kind, {name: random_matrix(kind, 64, 64) for name in stems})
    return tensors


def write(folder, kind, tensors, says=None):
    with_quantization_config(folder, config_of(says or kind))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def places(tensors):
    """Return the tensor names of one matrix in the middle of the checkpoint."""
    where = stem(1, 0, "up_proj") + "." if stem(1, 0, "up_proj") + ".weight_scale" in tensors else None
    names = [name for name in tensors if where and name.startswith(where)]
    return names or [name for name in tensors if "layers.1." in name and ("experts.0.up" in name or "gate_up" in name)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_checkpoint_is_accepted_and_one_that_is_cut_off_is_one_sentence(tmp_path, kind):
    path = write(tmp_path, kind, experts(kind)) / "model.safetensors"
    configure(model=tmp_path)
    path.write_bytes(path.read_bytes()[:-100])
    assert f"{path} cannot be read" in refusal(model=tmp_path)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("which", [0, -1])
def test_a_matrix_without_one_of_its_tensors_is_named(tmp_path, kind, which):
    tensors = experts(kind)
    del tensors[places(tensors)[which]]
    sentence = refusal(model=write(tmp_path, kind, tensors))
    assert any(name in sentence for name in places(tensors))
    assert "is damaged or half converted" in sentence


@pytest.mark.parametrize("kind", KINDS)
def test_an_expert_that_was_not_converted_is_named(tmp_path, kind):
    tensors = experts(kind)
    for name in places(tensors):
        del tensors[name]
    plain = f"{stem(1, 0, 'up_proj')}.weight" if kind != "mxfp4" else "model.layers.1.mlp.experts.gate_up_proj"
    tensors[plain] = torch.zeros(64, 64, dtype=torch.bfloat16)
    sentence = refusal(model=write(tmp_path, kind, tensors))
    assert plain.removesuffix(".weight") in sentence
    assert "download" not in sentence


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("says", KINDS)
def test_every_format_under_the_name_of_every_other_is_noticed(tmp_path, kind, says):
    if kind == says:
        return
    refusal(model=write(tmp_path, kind, experts(kind), says))


def in_the_cache(cache, checkpoint):
    """Return the configuration of a model that the hub's client has downloaded."""
    revision, repository = "0" * 40, cache / "models--someone--some-model"
    snapshot = repository / "snapshots" / revision
    snapshot.parent.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)
    shutil.copytree(checkpoint, snapshot)
    text = SimpleNamespace(num_hidden_layers=2)
    model = SimpleNamespace(model="someone/some-model", revision=None, hf_text_config=text)
    return SimpleNamespace(model_config=model, load_config=SimpleNamespace(load_format="auto", download_dir=str(cache)))


def test_what_was_downloaded_is_checked_too(tmp_path):
    kind = "fp8-blocks"
    reader = make_reader(config_of(kind))
    tensors = experts(kind)
    (tmp_path / "model").mkdir()
    path = write(tmp_path / "model", kind, tensors) / "model.safetensors"
    check_checkpoint(in_the_cache(tmp_path / "whole", path.parent), reader)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"snapshots/0+/model.safetensors"):
        check_checkpoint(in_the_cache(tmp_path / "cut", path.parent), reader)
    del tensors[places(tensors)[-1]]
    write(tmp_path / "model", kind, tensors)
    with pytest.raises(CheckpointError, match="half converted"):
        check_checkpoint(in_the_cache(tmp_path / "half", path.parent), reader)


def test_what_is_not_downloaded_yet_is_left_to_vllm(tmp_path):
    (tmp_path / "model").mkdir()
    write(tmp_path / "model", "fp8-blocks", experts("fp8-blocks"))
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    reader = make_reader(config_of("fp8-blocks"))
    config = in_the_cache(tmp_path / "cache", tmp_path / "model")
    check_checkpoint(config, reader)
    config.model_config.model = "someone/another-model"
    check_checkpoint(config, reader)


@pytest.mark.parametrize("name", ["more.safetensors", "dymoe-experts-00000.safetensors"])
def test_a_link_out_of_the_folder_is_not_served(tmp_path, name):
    """Links from a hub's cache, and from a user's folder, may lead only to downloads."""
    kind = "fp8-blocks"
    reader = make_reader(config_of(kind))
    (tmp_path / "model").mkdir()
    path = write(tmp_path / "model", kind, experts(kind)) / "model.safetensors"
    local = SimpleNamespace(model=str(path.parent), hf_text_config=SimpleNamespace(num_hidden_layers=2))
    config = SimpleNamespace(model_config=local, load_config=SimpleNamespace(load_format="auto"))
    check_checkpoint(config, reader)
    blobs = tmp_path / "hub" / "models--a--b" / "blobs"
    blobs.mkdir(parents=True)
    path.rename(blobs / "0123")
    path.symlink_to(blobs / "0123")
    check_checkpoint(config, reader)
    save_file({"private": torch.zeros(3)}, tmp_path / "private.safetensors")
    (path.parent / name).symlink_to(tmp_path / "private.safetensors")
    with pytest.raises(CheckpointError, match=name):
        check_checkpoint(config, reader)


def test_a_snapshot_of_the_hub_has_links_and_is_served(tmp_path):
    kind = "fp8-blocks"
    (tmp_path / "model").mkdir()
    folder = write(tmp_path / "model", kind, experts(kind))
    config = in_the_cache(tmp_path / "cache", folder)
    snapshot = next((tmp_path / "cache").glob("models--*/snapshots/*"))
    (snapshot.parents[1] / "blobs").mkdir()
    for number, path in enumerate(sorted(snapshot.iterdir())):
        path.rename(snapshot.parents[1] / "blobs" / str(number))
        path.symlink_to(f"../../blobs/{number}")
    check_checkpoint(config, make_reader(config_of(kind)))
