"""What is refused and set before any process starts, through vLLM's EngineArgs."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.utils.import_utils import resolve_obj_by_qualname

from tests.plan.test_start import CPU
from vllm_dymoe.experts.encoding import MXFP4, NESTED, STEPS
from vllm_dymoe.options import ConfigError
from vllm_dymoe.plan.start import Start
from vllm_dymoe.quantize.readers import Reader
from vllm_dymoe.resolve import ENVIRONMENT_PREFIX
from vllm_dymoe.vllm_plugin import prepare
from vllm_dymoe.vllm_plugin.prepare import WORKER_EXTENSION, experts_of
from vllm_dymoe.vllm_plugin.quant_config import read_options
from vllm_dymoe.vllm_plugin.worker import DymoeWorkerExtension

MODEL = Path(__file__).resolve().parents[2] / "benchmarks" / "tiny_moe" / "model"
EXPERTS = 8 * 32
DENSE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "head_dim": 32,
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 256,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}


@pytest.fixture(autouse=True)
def _no_options_from_outside(monkeypatch):
    """Keep the environment of the test run from affecting these tests."""
    for name in [name for name in os.environ if name.startswith(ENVIRONMENT_PREFIX)]:
        monkeypatch.delenv(name)


def configure(dymoe=None, model=MODEL, **settings):
    defaults = {"quantization": "dymoe", "max_model_len": 128}
    additional = {} if dymoe is None else {"additional_config": {"dymoe": dymoe}}
    return EngineArgs(model=str(model), **(defaults | additional | settings)).create_engine_config()


def refusal(dymoe=None, **settings):
    with pytest.raises(ConfigError) as caught:
        configure(dymoe, **settings)
    message = str(caught.value)
    assert message.startswith("vllm-dymoe: ")
    assert "\n" not in message
    return message


def with_quantization_config(folder, quantization_config):
    """Copy the shipped model's configuration, with the given quantization_config."""
    for path in MODEL.glob("*.json"):
        shutil.copy(path, folder)
    config = json.loads((MODEL / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization_config}))
    return folder


def test_wrong_options_are_refused(monkeypatch):
    assert 'expert_bugdet is not an option; did you mean "expert_budget"?' in refusal({"expert_bugdet": "25%"})
    assert "additional_config.dymoe must be an object of options" in refusal("25%")
    assert "add --quantization dymoe" in refusal({"high": 4}, quantization=None)
    monkeypatch.setenv("DYMOE_HIGH", "5")
    assert "DYMOE_HIGH = 5: input should be 16, 8, 4 or 2." in refusal()


def test_a_trace_needs_all_layers_in_one_process(tmp_path):
    traced = {"trace": {"folder": str(tmp_path)}}
    assert "leave --pipeline-parallel-size 2 out" in refusal(traced, pipeline_parallel_size=2)
    configure({"policy": "dymoe", "policy_options": {"high_by": "depth"}}, pipeline_parallel_size=2)
    configure(traced)


def test_what_cannot_meet_at_the_experts_of_several_engines_is_refused(tmp_path):
    both = {"data_parallel_size": 2, "enable_expert_parallel": True}
    configure(**both)
    configure(data_parallel_size=2, all2all_backend="deepep_low_latency")  # unused without expert parallelism
    for sentence, dymoe, settings in (
        ("not through deepep_low_latency", None, both | {"all2all_backend": "deepep_low_latency"}),
        ("leave --pipeline-parallel-size out", None, both | {"pipeline_parallel_size": 2}),
        ("leave trace out", {"trace": {"folder": str(tmp_path)}}, both),
    ):
        assert sentence in refusal(dymoe, **settings)


@pytest.mark.parametrize(("budget", "bits"), [(1000, 4), ("0.001%", 4), ("20 KiB", 16)])
def test_a_hopeless_budget_is_refused_with_the_number_that_works(budget, bits):
    message = refusal({"high": bits, "expert_budget": budget})
    found = re.search(
        r"expert_budget is \d+ bytes on each rank, but .* set expert_budget to at least (\d+) bytes", message
    )
    assert found, message
    least = int(found[1])
    configure({"high": bits, "expert_budget": least})
    assert f"at least {least} bytes" in refusal({"high": bits, "expert_budget": least - 1})


# Several engines that hold all experts share one copy of them, so data parallelism does not divide the memory.
@pytest.mark.parametrize("settings", [{}, {"tensor_parallel_size": 2}, {"data_parallel_size": 2}])
def test_host_memory_that_is_not_there_is_refused_before_anything_is_loaded(monkeypatch, settings):
    monkeypatch.setattr(prepare, "available_host_memory", lambda: 10**6)
    message = refusal({"host_store": "pinned"}, **settings)
    ranks = settings.get("tensor_parallel_size", 1)
    assert f"{10**6 // ranks} are available" in message
    needed, more = map(int, re.search(r"needs (\d+) bytes .* free (\d+) more", message).groups())
    assert needed == 10**6 // ranks + more
    for host_store in ("auto", "file"):
        configure({"host_store": host_store}, **settings)
    monkeypatch.setattr(prepare, "available_host_memory", lambda: needed * ranks)
    configure({"host_store": "pinned"}, **settings)


@pytest.mark.parametrize("damage", ["cut", "missing"])
def test_a_checkpoint_that_is_not_whole_is_refused_before_it_is_loaded(tmp_path, damage):
    model = shutil.copytree(MODEL, tmp_path / "model")
    (file,) = model.glob("*.safetensors")
    if damage == "cut":
        os.truncate(file, file.stat().st_size - 1)
    else:
        (model / "model.safetensors.index.json").write_text('{"weight_map": {"lm_head.weight": "lost.safetensors"}}')
    message = refusal(model=model)
    assert str(model / "lost.safetensors" if damage == "missing" else file) in message
    assert "download it again" in message


def test_32_bits_are_refused_before_vllm_refuses_them():
    assert "--dtype float32 is not supported" in refusal(dtype="float32")


def test_a_model_without_experts_is_refused_or_left_alone(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    message = refusal(model=tmp_path, skip_tokenizer_init=True)
    assert f"vLLM finds no experts in the config.json of {tmp_path}; leave --quantization dymoe out" in message
    config = configure(None, model=tmp_path, quantization=None, skip_tokenizer_init=True)
    assert not config.parallel_config.worker_extension_cls


def test_a_checkpoint_of_ours_needs_no_flag_and_cannot_be_contradicted(tmp_path):
    checkpoint = with_quantization_config(tmp_path, {"quant_method": "dymoe", "format_version": 5, "hi": 8, "lo": 2})
    config = configure(model=checkpoint, quantization=None)
    assert config.model_config.quantization == "dymoe"
    options = read_options(config, config.quant_config.checkpoint)
    assert (options.high, options.low) == (8, 2)
    message = refusal({"high": 4}, model=checkpoint, quantization=None)
    assert "high is 4, but this checkpoint was written with high = 8" in message


@pytest.mark.parametrize("method", ["hqq", "bitnet"])
def test_a_checkpoint_of_another_method_is_refused(tmp_path, method):
    with pytest.raises(ValueError, match=f"quantized with {method}"):
        configure(model=with_quantization_config(tmp_path, {"quant_method": method}))


def test_the_worker_methods_are_added_unless_a_users_own_are_there(said):
    for given in (None, WORKER_EXTENSION, "a.users.Extension"):
        config = configure(worker_extension_cls=given or "")
        assert config.parallel_config.worker_extension_cls == (given or WORKER_EXTENSION)
        assert any(WORKER_EXTENSION in line for _, line in said) == (given == "a.users.Extension")
    assert resolve_obj_by_qualname(WORKER_EXTENSION) is DymoeWorkerExtension


def test_the_experts_are_those_of_the_models_configuration():
    config = configure({"high": 4, "low": 2})
    experts = experts_of(config, read_options(config, None))
    assert (len(experts.layers), experts.num_experts, experts.top_k) == (8, 32, 4)
    assert experts.formats.keys() == {4, 2}
    assert (experts.formats[4].hidden, experts.formats[4].intermediate) == (256, 64)
    assert experts.nbytes(4) == EXPERTS * experts.formats[4].whole_nbytes


@pytest.mark.parametrize(("codebook", "nested"), [(None, True), (MXFP4, False)])
def test_a_codebook_has_no_low_version_inside(codebook, nested):
    config = configure({"high": 4, "low": 2})
    config.quant_config._reader = Reader("x", codebook or STEPS[4], None, {}, None)
    formats = experts_of(config, read_options(config, None)).formats
    assert formats[4].nested is nested
    assert formats[4].encoding is (codebook or NESTED[4])
    assert not formats[2].encoding.floats


def test_vllm_is_to_refuse_a_checkpoint_that_lacks_a_weight():
    """By default, vLLM checks only checkpoints that are not quantized."""
    assert configure().load_config.model_loader_extra_config == {"enable_weights_track": True}
    for given in ({"enable_weights_track": False}, {"enable_weights_track": True}):
        assert configure(model_loader_extra_config=given).load_config.model_loader_extra_config == given
    more = {"enable_multithread_load": True, "num_threads": 2}
    found = configure(model_loader_extra_config=more).load_config.model_loader_extra_config
    assert found == more | {"enable_weights_track": True}
    assert configure(load_format="dummy").load_config.model_loader_extra_config == {}
    assert configure(quantization=None).load_config.model_loader_extra_config == {}


def test_a_weight_in_two_places_counts_as_loaded_in_both():
    """A weight that is loaded nowhere still counts as missing."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.norm = torch.nn.Linear(2, 2, bias=False), torch.nn.LayerNorm(2, bias=False)
            self.experts = torch.nn.Module()
            self.experts.gate = self.gate
            self.routed = RoutedExperts.__new__(RoutedExperts)
            torch.nn.Module.__init__(self.routed)
            self.routed.bias = torch.nn.Parameter(torch.zeros(2))

        def load_weights(self, weights):
            return {name for name, _ in weights}

    model = Model()
    prepare.name_every_place(model)
    assert model.load_weights([("gate.weight", None)]) == {"gate.weight", "experts.gate.weight", "routed.bias"}
    assert model.load_weights([]) == {"routed.bias"}


@pytest.fixture
def asked(monkeypatch):
    """Record the questions to a planner that always chooses 8 bits."""
    asked = []

    def choose(model, wanted):
        asked.append((model, wanted))
        return CPU, Start({"high": 8, "dense": 8}, {}, {}, (), 10.0, 0.1, 1.0, ())

    monkeypatch.setattr(prepare, "choose_here", choose)
    return asked


def test_where_nothing_is_set_the_plugin_chooses(asked, said):
    config = configure(max_num_batched_tokens=2048)
    assert config.additional_config["dymoe"] == {"high": 8, "dense": 8}
    ((model, wanted),) = asked
    assert (model.name, model.shape.experts) == (str(MODEL), 32)
    assert (wanted.max_model_len, wanted.options) == (128, {})
    (line,) = [text for _, text in said if "no option was set" in text]
    assert '"high": 8' in line


def test_a_choice_by_disturbed_rates_is_said(monkeypatch, warnings):
    busy, start = CPU.model_copy(update={"others": 0.42}), Start({"high": 8}, {}, {}, (), 10.0, 0.1, 1.0, ())
    monkeypatch.setattr(prepare, "choose_here", lambda *_: (busy, start))
    configure(max_num_batched_tokens=2048)
    assert any("42%" in text for text in warnings())


def test_the_choice_is_part_of_what_decides_the_tokens_of_a_step(asked):
    """vLLM derives its configuration twice where the link sets the tokens of a step.

    The options must be the same both times.
    """
    config = configure()
    assert config.additional_config["dymoe"] == {"high": 8, "dense": 8}


@pytest.mark.parametrize(
    ("dymoe", "variables"), [({}, {}), ({"low": 0}, {}), (None, {"DYMOE_HIGH": "4"})], ids=["empty", "one", "variable"]
)
def test_what_the_user_set_leaves_the_defaults(asked, monkeypatch, dymoe, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    config = configure(dymoe)
    assert not asked
    assert (config.additional_config or {}).get("dymoe", {}) == (dymoe or {})


def test_the_folder_of_stores_is_no_choice(asked, monkeypatch, tmp_path):
    monkeypatch.setenv("DYMOE_STORE_DIR", str(tmp_path))
    configure(max_num_batched_tokens=2048)
    assert asked[0][1].options == {"store_dir": str(tmp_path)}


def test_what_cannot_be_chosen_is_said_and_the_defaults_are_used(said):
    config = configure()
    assert "dymoe" not in config.additional_config
    assert any("a test measures nothing" in text for _, text in said)
