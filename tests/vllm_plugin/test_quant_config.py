"""What follows from a quantized checkpoint: options, refusals, dense methods."""

import copy
import pickle
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.quantization.auto_awq import AutoAWQConfig

from tests.vllm_plugin.test_prepare import configure, refusal, with_quantization_config
from vllm_dymoe.cache.store.manifest import describe_encodings
from vllm_dymoe.experts.encoding import encoding_of
from vllm_dymoe.experts.format import ExpertFormat
from vllm_dymoe.options import ConfigError
from vllm_dymoe.quantize.readers import PLAIN_READER, make_reader
from vllm_dymoe.quantize.readers.base import (
    check_compatible,
    describe,
    format_fields,
    quantizer_name,
    store_group_sizes,
)
from vllm_dymoe.quantize.readers.modules import modules_of
from vllm_dymoe.quantize.tensors import CheckpointError
from vllm_dymoe.vllm_plugin import quant_config
from vllm_dymoe.vllm_plugin.loading import Loading
from vllm_dymoe.vllm_plugin.model_store import LayerSpec
from vllm_dymoe.vllm_plugin.moe_method import DymoeMoEMethod
from vllm_dymoe.vllm_plugin.quant_config import DymoeConfig, read_options

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}


def reader(group_size=128):
    return make_reader(AWQ | {"group_size": group_size})


def options(folder, dymoe, quantization=AWQ):
    config = configure(dymoe, model=with_quantization_config(folder, quantization))
    return read_options(config, None, config.quant_config.reader)


@pytest.mark.parametrize(("quantization", "held"), [(None, False), (AWQ, True)])
def test_a_worker_process_reads_the_experts_as_the_engine_does(quantization, held):
    """vLLM pickles the configuration for its workers, which get an equal object."""
    config = DymoeConfig({}) if quantization is None else DymoeConfig.from_config(quantization)
    sent = pickle.loads(pickle.dumps(config))
    assert (sent.reader.held, sent.reader.encoding) == (held, config.reader.encoding)


def test_bits_and_groups_are_the_checkpoints(tmp_path):
    found = options(tmp_path, {"low": 2})
    assert (found.stored_bits, found.group_size) == ((4, 2), 128)
    assert options(tmp_path, {}, AWQ | {"group_size": 64}).group_size == 64
    assert options(tmp_path, {"group_size": 32}).group_size == 32
    assert options(tmp_path, {"high": 16, "low": 4}).stored_bits == (16, 4)


@pytest.mark.parametrize(
    ("quantization", "dymoe", "sentence"),
    [
        (
            AWQ,
            {"high": 8},
            "high is 8, but the experts of this awq checkpoint have 4 bits; set high to 4, which",
        ),
        (AWQ, {"high": 2}, "high is 2, but"),
        (AWQ, {"quantizer": "16/8"}, "quantizer"),
        (AWQ | {"group_size": 32}, {"group_size": 64}, "can only be held in groups of 32"),
    ],
)
def test_other_bits_and_groups_are_refused(tmp_path, quantization, dymoe, sentence):
    assert sentence in refusal(dymoe, model=with_quantization_config(tmp_path, quantization))


def test_variants_and_dense_layers_that_cannot_run_are_refused(tmp_path):
    gemv = with_quantization_config(tmp_path, AWQ | {"version": "gemv"})
    with pytest.raises(ValueError, match="gemm"):
        configure(model=gemv)
    asymmetric = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": False, "desc_act": False}
    with pytest.raises(ConfigError, match="dense layers of the gptq checkpoint"):
        DymoeConfig.from_config(asymmetric)


@pytest.mark.parametrize(
    ("group_size", "columns", "ranks", "sizes"),
    [
        (128, 14336, 1, (128, 64, 32)),
        (128, 14336 // 8, 8, (128, 64, 32)),
        (128, 96, 2, (32,)),
        (64, 100, 1, (64, 32)),
        (64, 50, 2, ()),
        (-1, 50, 2, (128, 64, 32)),
        (96, 96, 1, (32,)),
    ],
)
def test_groups_of_a_store(group_size, columns, ranks, sizes):
    assert store_group_sizes(reader(group_size), columns, ranks) == sizes


def test_ranks_that_cut_groups_are_refused_unless_nothing_is_held_as_it_is():
    with pytest.raises(CheckpointError, match=r"50 columns .*high to 16"):
        check_compatible(reader(), (4,), 32, 50, 2)
    check_compatible(reader(), (16,), 64, 50, 2)


def test_what_is_said_of_the_numbers():
    assert describe(reader(), (4, 2), "hqq") == "awq checkpoint, 4 bits as they are, 2 bits inside the 4"
    assert describe(reader(), (16,), "rtn") == "awq checkpoint, 16 bits dequantized"
    source = "awq checkpoint"
    names = [quantizer_name(reader(), bits, "rtn") for bits in ((4,), (4, 2), (16, 4), (16,), (16, 2))]
    assert names == [source, source, source, source, f"{source}, rtn"]
    assert quantizer_name(PLAIN_READER, (4, 2), "hqq") == "hqq"


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": True}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "ignore": ["re:.*self_attn.*"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "actorder": "group"},
        }
    },
}


def test_ranks_cannot_share_a_matrix_whose_groups_are_scattered(tmp_path):
    ordered = make_reader(GPTQ)
    with pytest.raises(CheckpointError, match=r"--enable-expert-parallel"):
        check_compatible(ordered, (4,), 32, 64, 2)
    check_compatible(ordered, (4, 2), 32, 64, 1)
    check_compatible(ordered, (16,), 32, 64, 2)
    check_compatible(ordered, (16, 2), 32, 64, 2)
    checkpoint = with_quantization_config(tmp_path, GPTQ)
    settings = {"model": checkpoint, "dtype": "float16", "tensor_parallel_size": 2}
    config = configure(**settings, enable_expert_parallel=True)
    assert read_options(config, None, config.quant_config.reader).stored_bits == (4,)
    assert "add --enable-expert-parallel" in refusal({}, **settings)


@pytest.mark.parametrize("config", [GPTQ, COMPRESSED, AWQ, None])
def test_what_the_formats_of_a_checkpoint_are(config):
    """For the checkpoint as published, and for its conversion."""
    ordered = (4,) if config in (GPTQ, COMPRESSED) else ()
    reader = make_reader(config)
    own = {"integer_zeros": config is AWQ, "act_order": bool(ordered), "encoding": encoding_of(4)}
    assert format_fields(reader, {}, 4) == own
    assert format_fields(reader, {}, 2) == {"integer_zeros": False, "act_order": False, "encoding": encoding_of(2)}
    ours = {"quant_method": "dymoe", "format_version": 5, "hi": 16, "lo": 4, "group_size": 32, "quantizer": "rtn"}
    ours |= describe_encodings({4: ExpertFormat(64, 64, group_size=32, dtype=torch.bfloat16, **own)})
    load, dymoe = SimpleNamespace(load_format="auto"), {"high": 16, "low": 4, "group_size": 32}
    served = SimpleNamespace(
        additional_config={"dymoe": dymoe},
        load_config=load,
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(moe_intermediate_size=64)),
        parallel_config=SimpleNamespace(enable_expert_parallel=False, enable_eplb=False, tensor_parallel_size=1),
    )
    sizes = {"num_experts": 2, "top_k": 1, "hidden": 64, "intermediate": 64, "dtype": torch.float16, "bias": False}
    spec = LayerSpec(name="model.layers.0.mlp.experts", rank=0, ranks=1, expert_rank=0, expert_ranks=1, **sizes)
    for checkpoint, read_by in ((None, reader), (ours, make_reader(None))):
        model = Loading(served, read_options(served, checkpoint, read_by), checkpoint, read_by)
        model.add_layer(spec)
        assert [fmt.act_order for fmt in model.experts.formats.values()] == [False, bool(ordered)]
        assert [fmt.integer_zeros for fmt in model.experts.formats.values()] == [False, config is AWQ]


OURS = {"quant_method": "dymoe", "format_version": 5, "hi": 4, "zeros_in_steps": [4], "dense": AWQ}


@pytest.mark.parametrize("quantization", [AWQ, OURS])
def test_dense_layers_are_left_to_vllms_own_configuration(quantization):
    """For the checkpoint as published, and for its conversion."""
    config = DymoeConfig.from_config(quantization)
    assert config.checkpoint == (OURS if quantization is OURS else None)
    assert (not config.reader.held) == (quantization is OURS)
    assert isinstance(config._dense, AutoAWQConfig)
    mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    config.packed_modules_mapping = mapping
    assert config._dense.packed_modules_mapping is mapping
    config.packed_modules_mapping.update(gate_up_proj=["gate_proj", "up_proj"])
    assert "gate_up_proj" in config._dense.packed_modules_mapping
    assert config.get_supported_act_dtypes() == [torch.bfloat16, torch.float16]


def test_a_draft_with_a_config_of_its_own_joins_the_models_experts(monkeypatch):
    """Drafts of Step-3.5 and Nemotron-H have a quantization config of their own."""
    mine = SimpleNamespace(loading=object())
    model = DymoeMoEMethod.__new__(DymoeMoEMethod)
    model.loading = mine.loading
    others = {"model.layers.0.attn": SimpleNamespace(loading=None), "model.layers.0.experts.dymoe": model}
    compilation = SimpleNamespace(static_forward_context=others)
    monkeypatch.setattr(
        quant_config, "get_current_vllm_config", lambda: SimpleNamespace(compilation_config=compilation)
    )
    layer = RoutedExperts.__new__(RoutedExperts)
    torch.nn.Module.__init__(layer)
    layer.moe_config = FusedMoEConfig.__new__(FusedMoEConfig)
    draft = DymoeConfig()
    assert draft.get_quant_method(layer, "model.layers.2.experts").loading is mine.loading
    assert draft.loading is mine.loading


def test_a_rule_that_leaves_drafts_out_does_not_keep_their_experts_from_us():
    """For such a rule vLLM's Qwen3.5 draft runs its experts without quantization.

    It looks for "mtp" in the rules.
    """
    said = GPTQ | {
        "desc_act": False,
        "dynamic": {r"-:.*mtp.*": {}, r".*mtp_like.*": {"bits": 8}, "lm_head": {"bits": 8}},
    }
    model = SimpleNamespace(quantization_config=copy.deepcopy(said))  # vLLM passes a copy; drafts read the model's own
    assert DymoeConfig.override_quantization_method(said, "dymoe", model) == "dymoe"
    for shown in (said, model.quantization_config):
        assert not any(pattern.startswith("-:") and "mtp" in pattern for pattern in shown["dynamic"])
    config = DymoeConfig.from_config(said)
    tensors = {f"model.layers.0.mlp.experts.0.up_proj.{part}": "I32" for part in ("qweight", "qzeros")}
    drafts = {"mtp.layers.0.mlp.experts.0.up_proj.weight": "BF16"}
    config._modules = modules_of(tensors | drafts, 1)
    assert (config.reader.bits, config.draft_reader.held) == (4, False)
    config._modules = None, [replace(module, plain=None) for module in config._modules[1]]
    assert not config.draft_reader.held  # without known tensor names, the rule decides
