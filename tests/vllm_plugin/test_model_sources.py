"""Models from ModelScope and object stores, through vLLM's own resolvers.

Stubs replace the services.
"""

import json
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from safetensors.torch import save_file
from vllm import envs
from vllm.transformers_utils import runai_utils

from tests.quantize.readers.kinds import config_of, random_matrix, tensors_of
from tests.vllm_plugin.test_prepare import MODEL, configure, refusal, with_quantization_config
from vllm_dymoe.plan.model import read_shape
from vllm_dymoe.quantize.tensors import CheckpointError
from vllm_dymoe.vllm_plugin import model_files
from vllm_dymoe.vllm_plugin.model_files import check_checkpoint, local_folder
from vllm_dymoe.vllm_plugin.quant_config import DymoeConfig

NAME = "someone/some-model"
MIXTRAL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_local_experts": 8,
    "vocab_size": 512,
}


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """Replace ModelScope by a stub with one model; return the requests to it.

    A request to the Hugging Face hub fails the test.
    """
    calls = []

    def snapshot_download(model_id, **choice):
        calls.append((model_id, choice.get("allow_patterns")))
        return str(tmp_path / "scope" / model_id)

    def other_hub(*args, **kwargs):
        raise AssertionError("the Hugging Face hub is asked")

    modules = {name: ModuleType(name) for name in ("modelscope", "modelscope.hub", "modelscope.utils")}
    modules["modelscope.hub.snapshot_download"] = SimpleNamespace(snapshot_download=snapshot_download)
    modules["modelscope.utils.file_utils"] = SimpleNamespace(get_model_cache_root=lambda: str(tmp_path / "scope"))
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "1")
    envs.disable_envs_cache()
    assert envs.VLLM_USE_MODELSCOPE
    monkeypatch.setattr(model_files, "snapshot_download", other_hub)
    monkeypatch.setattr(model_files, "get_safetensors_params_metadata", other_hub)
    return calls


def with_experts(folder, kind="awq"):
    """Write the experts of two layers in a format of another tool."""
    folder.mkdir(parents=True)
    names = [
        f"model.layers.{n}.mlp.experts.0.{p}.weight" for n in range(2) for p in ("gate_proj", "up_proj", "down_proj")
    ]
    save_file(tensors_of(kind, {name: random_matrix(kind, 64, 64) for name in names}), folder / "model.safetensors")
    return folder


def test_modelscope_has_the_files(asked, tmp_path):
    folder = with_experts(tmp_path / "scope" / NAME)
    text = SimpleNamespace(num_hidden_layers=2, num_attention_heads=2)
    model = SimpleNamespace(model=NAME, revision=None, hf_text_config=text, model_weights="")
    config = SimpleNamespace(model_config=model, load_config=SimpleNamespace(load_format="auto", download_dir=None))
    assert local_folder(config) == folder
    assert asked == [(NAME, ["*.json", "dymoe-experts-*.safetensors"])]
    quantization = DymoeConfig.from_config(config_of("awq"))
    quantization.maybe_update_config(NAME, hf_config=SimpleNamespace(get_text_config=lambda: text))
    assert {module.layer for module in quantization._modules[0]} == {0, 1}
    check_checkpoint(config, quantization.reader)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match="cannot be read"):
        check_checkpoint(config, quantization.reader)
    shutil.rmtree(folder)
    check_checkpoint(config, quantization.reader)  # vLLM has not downloaded it yet, and checks it later


@pytest.fixture
def store(monkeypatch, tmp_path):
    """Replace an object store: s3://models/NAME is tmp_path/NAME."""

    def pull_files(url, folder, allow_pattern=None, ignore_pattern=None):
        source = tmp_path / url.removeprefix("s3://models/").strip("/")
        for path in filter(Path.is_file, source.iterdir()):
            wanted = allow_pattern is None or any(path.match(pattern) for pattern in allow_pattern)
            if wanted and not any(path.match(pattern) for pattern in ignore_pattern or ()):
                shutil.copy(path, folder)

    monkeypatch.setattr(runai_utils, "runai_pull_files", pull_files)
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    envs.disable_envs_cache()
    return tmp_path


def test_an_object_store_has_16_bit_and_no_packed_experts(store):
    shutil.copytree(MODEL, store / "plain")
    config = configure(model="s3://models/plain", load_format="runai_streamer")
    assert config.model_config.model_weights == "s3://models/plain"
    mirror = local_folder(config)
    assert mirror == Path(config.model_config.model).resolve()
    assert (mirror / "config.json").is_file()
    assert not list(mirror.glob("*.safetensors"))
    shutil.copytree(MODEL, store / "ours")
    with_quantization_config(store / "ours", {"quant_method": "dymoe", "format_version": 6, "hi": 4})
    assert "is in an object store" in refusal(model="s3://models/ours", load_format="runai_streamer")


def test_plan_reads_the_config_of_modelscope(asked, tmp_path, monkeypatch):
    folder = tmp_path / "scope" / NAME
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(MIXTRAL))
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_: pytest.fail("the Hugging Face hub is asked"))
    assert read_shape(NAME).experts == 8
    assert asked == [(NAME, ["config.json"])]
