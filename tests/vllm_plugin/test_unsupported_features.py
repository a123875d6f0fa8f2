"""Features of vLLM that cannot work are refused by name; similar ones are not."""

import contextlib
import json
import shutil
import threading
from types import SimpleNamespace

import pytest
import torch
from vllm import envs
from vllm.v1.worker.gpu_worker import Worker

from tests.vllm_plugin.test_prepare import MODEL, configure, refusal
from vllm_dymoe.cache.store import MANIFEST, Manifest
from vllm_dymoe.options import ConfigError
from vllm_dymoe.vllm_plugin import moe_method, patches, prepare
from vllm_dymoe.vllm_plugin.balance import refuse_balancing
from vllm_dymoe.vllm_plugin.moe_method import DymoeMoEMethod
from vllm_dymoe.vllm_plugin.patches import PATCHES, apply_patches
from vllm_dymoe.vllm_plugin.prepare import experts_of, refuse_unsupported_features
from vllm_dymoe.vllm_plugin.quant_config import read_options
from vllm_dymoe.vllm_plugin.sleep import past_the_pool

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def engine_config(model=None, **changes):
    parallel = {
        "data_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "use_ubatching": False,
        "distributed_executor_backend": "mp",
    }
    config = {"lora_config": None, "speculative_config": None, "weight_transfer_config": None}
    return SimpleNamespace(
        model_config=SimpleNamespace(**{"model": "the model", "get_num_experts": lambda: 32} | (model or {})),
        parallel_config=SimpleNamespace(**{name: changes.pop(name, value) for name, value in parallel.items()}),
        **config | changes,
    )


def draft(experts, model="another", method="mtp"):
    config = SimpleNamespace(model=model, get_num_experts=lambda: experts)
    return SimpleNamespace(draft_model_config=config, method=method)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"prefill_context_parallel_size": 2}, "prefill context parallelism"),
        ({"use_ubatching": True}, "concurrent micro-batches"),
        (
            {"speculative_config": SimpleNamespace(draft_model_config=None, enable_adaptive_verification=True)},
            "adaptive verification of drafts",
        ),
        ({"speculative_config": draft(8)}, "a separate speculative draft model with experts"),
        ({"weight_transfer_config": object()}, "weight transfer"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_work_is_refused_by_its_name(changes, sentence):
    with pytest.raises(ConfigError, match=sentence):
        refuse_unsupported_features(engine_config(**changes))


@pytest.mark.parametrize("drafts", [None, draft(8, "the model"), draft(0)])
def test_nothing_else_is_refused(drafts):
    refuse_unsupported_features(engine_config(speculative_config=drafts))


def test_what_vllm_configures_itself_is_refused_and_accepted():
    speculation = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    assert configure(speculative_config=speculation).speculative_config.method == "ngram"
    speculation = {"method": "draft_model", "model": str(MODEL), "num_speculative_tokens": 2}
    assert "a separate speculative draft model with experts" in refusal(speculative_config=speculation)


@pytest.mark.parametrize("second", [True, False])
def test_only_the_executor_that_calls_workers_is_accepted_of_ray(second, monkeypatch):
    monkeypatch.setattr(envs, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND", second, raising=False)
    with contextlib.nullcontext() if second else pytest.raises(ConfigError, match="graphs"):
        refuse_unsupported_features(engine_config(distributed_executor_backend="ray"))


@pytest.mark.parametrize(
    "targets", [None, ["experts"], [*ATTENTION, "experts.3.up_proj"], ["model.layers.0.mlp.experts"]]
)
def test_lora_that_reaches_the_experts_is_refused(targets):
    assert "LoRA on the experts is not supported" in refusal(enable_lora=True, lora_target_modules=targets)


def patched(name, original):
    return next(patch for patch in PATCHES if patch.target[1] == name).wrapped(original)


@pytest.mark.parametrize(
    ("ours", "name"), [(True, "experts.3.up_proj"), (False, "experts"), (True, "shared_experts.up_proj")]
)
def test_an_adapter_of_packed_experts_is_refused(ours, name):
    layer = torch.nn.Module()
    layer.quant_method = DymoeMoEMethod.__new__(DymoeMoEMethod) if ours else object()
    adapter = SimpleNamespace(loras={"layers.0.self_attn.q_proj": 1, f"layers.0.mlp.{name}": 2})
    manager = SimpleNamespace(_adapter_manager=SimpleNamespace(model=torch.nn.Sequential(layer)))
    load, request = patched("_load_adapter", lambda *_: adapter), SimpleNamespace(lora_path="/adapters/1")
    if ours and name.startswith("experts"):
        with pytest.raises(ConfigError, match=r"layers.0.mlp.experts.3.up_proj"):
            load(manager, request)
    else:
        assert load(manager, request) is adapter


@pytest.mark.parametrize(
    ("method", "stages", "layers", "refused"),
    [("dymoe", 1, {}, True), (None, 1, {}, False), ("dymoe", 1, {"layer": True}, False)],
)
def test_a_model_with_experts_of_its_own_code_is_refused(method, stages, layers, refused):
    made, layers = [], {name: DymoeMoEMethod.__new__(DymoeMoEMethod) for name in layers}
    for layer in layers.values():
        layer.loading = SimpleNamespace(model_made=made.append)
    config = engine_config(compilation_config=SimpleNamespace(static_forward_context=layers))
    config.model_config.quantization, config.parallel_config.pipeline_parallel_size = method, stages
    initialize = patched("initialize_model", lambda **_: 7)
    if refused:
        with pytest.raises(ConfigError, match="int runs none of its experts"):
            initialize(vllm_config=config, prefix="")
    else:
        assert initialize(vllm_config=config, prefix="") == 7
        assert made == [7] * bool(layers)


@pytest.mark.parametrize("layers", [0, 3])
def test_every_stage_says_how_many_layers_are_its_own_once(monkeypatch, layers):
    """A stage without layers does so, too, because the others wait for it.

    Only the last stage has a draft.
    """
    said, method = [], DymoeMoEMethod.__new__(DymoeMoEMethod)
    method.loading = SimpleNamespace(model_made=lambda _: None, layers=layers, around=(0, 0))
    monkeypatch.setattr(moe_method, "layers_around", lambda own: said.append(own) or (5, 7))
    forward_context = {"layer": method} if layers else {}
    config = engine_config(compilation_config=SimpleNamespace(static_forward_context=forward_context))
    config.model_config.quantization, config.parallel_config.pipeline_parallel_size = "dymoe", 2
    initialize = patched("initialize_model", lambda **_: 7)
    for runner in ("generate", "draft"):
        initialize(vllm_config=config, prefix="", model_config=SimpleNamespace(runner_type=runner))
        assert said == [layers]
    assert method.loading.around == ((5, 7) if layers else (0, 0))


@pytest.mark.parametrize(
    ("method", "other", "why", "refused"),
    [
        ("dymoe", {"weights_path": "/another"}, "", "packed in a store"),
        ("dymoe", {}, "it has changed", "has changed"),
        ("dymoe", {}, "", None),
        (None, {"weights_path": "/another"}, "", None),
    ],
)
def test_only_our_weights_cannot_be_replaced_by_others(method, other, why, refused, monkeypatch):
    apply_patches()
    asked, quantization = [], SimpleNamespace(loading=SimpleNamespace(not_readable_again=why))
    monkeypatch.setattr(patches, "_rank", lambda config: object())
    worker = SimpleNamespace(
        vllm_config=SimpleNamespace(model_config=SimpleNamespace(quantization=method), quant_config=quantization),
        model_runner=SimpleNamespace(reload_weights=lambda *_, **__: asked.append(True)),
    )
    if refused:
        with pytest.raises(ConfigError, match=refused):
            Worker.reload_weights(worker, **other)
    else:
        Worker.reload_weights(worker, **other)
    assert asked == ([] if refused else [True])


@pytest.mark.parametrize(("device", "pooled"), [("cuda", True), ("cuda", False), ("cpu", True)])
def test_slots_are_made_past_the_pool_that_vllm_has_for_sleep(device, pooled, monkeypatch):
    """``torch.cuda.use_mem_pool`` affects allocations of the thread that entered it."""
    entered = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", entered.append)
    config = SimpleNamespace(
        model_config=SimpleNamespace(enable_cumem_allocator=pooled), device_config=SimpleNamespace(device_type=device)
    )
    past = device == "cuda" and pooled
    assert (past_the_pool(config, threading.get_ident) != threading.get_ident()) is past
    assert entered == [3] * past
    with pytest.raises(ConfigError, match="as it is"):
        past_the_pool(config, lambda: (_ for _ in ()).throw(ConfigError("as it is")))


def packed_for(folder, ranks):
    """Write the shipped model's configuration and a store's manifest for ``ranks``.

    There are no weights.
    """
    for path in MODEL.glob("*.json"):
        shutil.copy(path, folder)
    config = configure({"high": 4})
    experts = experts_of(config, read_options(config, None))
    manifest = Manifest(experts, "rtn", "0" * 16, (0, ranks))
    (folder / MANIFEST).write_text(json.dumps(manifest.to_json()))
    ours = {"quant_method": "dymoe", "format_version": 5, "hi": 4, "lo": 0, "group_size": 64, "quantizer": "rtn"}
    text = json.loads((MODEL / "config.json").read_text()) | {"quantization_config": ours}
    (folder / "config.json").write_text(json.dumps(text))
    return folder


def test_a_store_of_another_tensor_parallel_size_is_refused_before_anything_starts(tmp_path):
    folder = packed_for(tmp_path, ranks=1)
    configure(model=folder, quantization=None)
    message = refusal(model=folder, quantization=None, tensor_parallel_size=2)
    assert f"the experts in {folder} are packed for --tensor-parallel-size 1, not 2; " in message


def test_a_checkpoint_that_we_have_written_has_no_draft(tmp_path, monkeypatch):
    """Otherwise its draft would run with weights that were never loaded."""
    folder = packed_for(tmp_path, ranks=1)
    monkeypatch.setattr(prepare, "drafted_by_experts", lambda config: True)
    monkeypatch.setattr(prepare, "refuse_unsupported_features", lambda config: None)
    assert "has no layers of multi-token prediction" in refusal(model=folder, quantization=None)


@pytest.mark.parametrize(
    ("parallel", "others", "named"),
    [
        ({"pipeline_parallel_size": 2}, {}, "--pipeline-parallel-size"),
        ({"enable_elastic_ep": True}, {}, "--enable-elastic-ep"),
        ({}, {"trace": True}, "trace"),
        ({}, {"trace": False}, None),
        ({"enable_eplb": False, "pipeline_parallel_size": 2}, {"trace": True}, None),
    ],
)
def test_what_was_not_tried_with_experts_that_move_is_refused(parallel, others, named):
    given = {"enable_eplb": True, "enable_elastic_ep": False, "pipeline_parallel_size": 1} | parallel
    refused = pytest.raises(ConfigError, match=f"support {named},")
    with contextlib.nullcontext() if named is None else refused:
        refuse_balancing(SimpleNamespace(**given), others)
