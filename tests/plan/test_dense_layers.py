"""Dense layers of quantized checkpoints: how they are stored, and planned."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as some

from tests.plan.test_plan import DEEPSEEK_V2_LITE as DEEPSEEK
from tests.plan.test_plan import QWEN3_30B
from tests.plan.test_start import CPU, DESKTOP
from tests.quantize.readers.kinds import FLOATS, FP8_WEIGHTS, INTEGERS, NVFP4_WEIGHTS
from vllm_dymoe.plan import machine as plan_machine
from vllm_dymoe.plan.device import DenseRate
from vllm_dymoe.plan.machine import Probe, machine_here
from vllm_dymoe.plan.model import HeldDense, shape_of
from vllm_dymoe.plan.ranks import Ranks
from vllm_dymoe.plan.start import Asked, Model, Planner, choose, read_model

PLAIN = shape_of(DEEPSEEK, "")
LAYERS = PLAIN.layers
ATTENTION = LAYERS * PLAIN.attention_weights
SHARED = (LAYERS - 1) * 3 * 2048 * 2 * 1408
MLP = 3 * 2048 * 10944
ALL = ATTENTION + SHARED + MLP
AWQ, GPTQ, INT4 = (INTEGERS[kind][0] for kind in ("awq", "gptq", "compressed-tensors"))


def groups(*named):
    made = {
        str(number): {"targets": targets, "format": fmt, "weights": {"type": "float", **weights}}
        for number, (targets, fmt, weights) in enumerate(named)
    }
    return {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": made, "ignore": []}


EXPERTS_ONLY = groups((["re:.*mlp\\.experts\\..*"], "nvfp4-pack-quantized", NVFP4_WEIGHTS))
DENSE_TOO = groups(
    (["re:.*mlp\\.experts\\..*"], "nvfp4-pack-quantized", NVFP4_WEIGHTS),
    (["re:.*self_attn.*"], "float-quantized", FP8_WEIGHTS),
)
EACH_ATTENTION = [f"model.layers.{layer}.self_attn.{name}_proj" for layer in range(LAYERS) for name in "qkvo"]


def mixed(**layers):
    named = {name.replace("__", "."): {"quant_algo": algorithm} for name, algorithm in layers.items()}
    return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": named}


FORMATS = {  # quantization_config, and the format, bits and weights of what it quantizes outside of experts
    "awq": (AWQ, "awq at 4 bits in groups of 32", 4.5, ALL),
    "awq, attention at 16 bits": (AWQ | {"modules_to_not_convert": ["self_attn", "gate"]}, "awq", 4.5, SHARED + MLP),
    "gptq": (GPTQ | {"group_size": 128}, "gptq at 4 bits in groups of 128", 4.125, ALL),
    "gptq, rules": (GPTQ | {"dynamic": {"-:.*shared_experts.*": {}}}, "gptq", 4.5, ATTENTION + MLP),
    "gptq, a list": (
        GPTQ | {"modules_in_block_to_quantize": ["self_attn.o_proj", "mlp.experts"]}, "gptq", 4.5, ATTENTION
    ),
    "gptq, a list of lists": (
        GPTQ | {"modules_in_block_to_quantize": [["mlp.down_proj"], ["mlp.experts"]]}, "gptq", 4.5, MLP
    ),
    "auto-round, rules": (
        INTEGERS["auto-round"][0] | {"extra_config": {".*shared_experts.*": {"bits": 16}}},
        "auto-round at 4 bits", 4.5, ATTENTION + MLP,
    ),
    "compressed-tensors": (INT4, "compressed-tensors at 4 bits in groups of 32", 4.5, ALL),
    "compressed-tensors, attention at 16 bits": (
        INT4 | {"ignore": ["re:.*self_attn.*", "lm_head"]}, "compressed-tensors", 4.5, SHARED + MLP
    ),
    "experts only": (EXPERTS_ONLY, None, 0, 0),
    "experts in NVFP4, attention in FP8": (DENSE_TOO, "compressed-tensors at 8 bits", 8, ATTENTION),
    "mxfp4": (FLOATS["mxfp4"], None, 0, 0),
    "mxfp4-compressed-tensors": (FLOATS["mxfp4-compressed-tensors"], "compressed-tensors at 4 bits", 4.25, ALL),
    "mxfp4-deepseek-v4": (FLOATS["mxfp4-deepseek-v4"], "fp8 at 8 bits", 8, ALL),
    "mxfp4-quark": (FLOATS["mxfp4-quark"], "quark at 4 bits", 4.25, ALL),
    "mxfp8-modelopt": (FLOATS["mxfp8-modelopt"], "modelopt at 8 bits", 8.25, ALL),
    "nvfp4-modelopt": (FLOATS["nvfp4-modelopt"], "modelopt at 4 bits in groups of 16", 4.5, ALL),
    "nvfp4-modelopt, wildcards": (
        FLOATS["nvfp4-modelopt"] | {"ignore": ["model.layers.*.self_attn*", "lm_head"]}, "modelopt", 4.5, SHARED + MLP
    ),
    "modelopt, mixed": (
        mixed(model__layers__0__mlp__experts="NVFP4", model__layers__3__self_attn__o_proj="FP8"),
        "modelopt at 8 bits", 8, PLAIN.attention_weights,
    ),
    "fp8-blocks": (FLOATS["fp8-blocks"], "fp8 at 8 bits", 8, ALL),
    "fp8-blocks, each attention at 16 bits": (
        FLOATS["fp8-blocks"] | {"modules_to_not_convert": EACH_ATTENTION}, "fp8", 8, SHARED + MLP
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", FORMATS)
def test_a_configuration_says_how_dense_layers_are_stored(kind):
    said, fmt, bits, weights = FORMATS[kind]
    shape = shape_of(DEEPSEEK, "", said)
    assert not shape.unknown
    if fmt is None:
        assert shape == PLAIN
        return
    held = shape.held
    assert held.format.startswith(fmt)
    assert held.bits == pytest.approx(bits, rel=0.05)
    assert held.weights == weights
    assert shape.dense_bytes == PLAIN.dense_bytes - 2 * weights + held.nbytes
    assert replace(shape, held=None) == PLAIN


@given(some.sets(some.integers(0, LAYERS - 1)), some.sampled_from(["awq", "fp8-blocks", "nvfp4-modelopt"]))
def test_layers_that_are_left_out_keep_their_16_bits(layers, kind):
    said = FORMATS[kind][0] | {"modules_to_not_convert": [f"model.layers.{layer}.self_attn" for layer in layers]}
    assert shape_of(DEEPSEEK, "", said).held.weights == ALL - len(layers) * PLAIN.attention_weights


def test_what_cannot_be_read_is_said(tmp_path):
    said = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    shape = shape_of(DEEPSEEK, "", said)
    assert shape.held is None
    assert "bitsandbytes" in shape.unknown
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK | {"quantization_config": said}))
    reasons = choose(CPU, Model("x", shape, {"high": 4, "low": 0}, quantized=True), Asked(max_model_len=4096)).reasons
    assert "planned at 16 bits, because" in why(reasons)
    assert "bitsandbytes" in why(reasons)


def why(reasons):
    (found,) = [reason for subject, _, reason in reasons if subject == "dense layers"]
    return found


@pytest.fixture(scope="module")
def awq(tmp_path_factory):
    folder = tmp_path_factory.mktemp("awq")
    said = {"dtype": "float16", "quantization_config": AWQ}
    (folder / "config.json").write_text(json.dumps(QWEN3_30B | {"model_type": "qwen3_moe"} | said))
    return read_model(str(folder))


def planned(machine, model, requests=1):
    planner = Planner(machine, model, Asked(max_model_len=4096))
    setup, length, _ = planner.chosen()
    return planner.tried(setup, length, requests).choice


def with_rates(fmt, *rates):
    """Return the CPU with rates of a format, and of 16 bits, at 1 and 16 tokens."""
    found = [DenseRate(4.5, tokens, rate, fmt, "TheKernel") for tokens, rate in zip((1, 16), rates, strict=True)]
    return CPU.model_copy(update={"dense": (*found, DenseRate(16, 1, 2e10), DenseRate(16, 16, 2e10))})


@pytest.mark.parametrize("requests", [1, 16])
def test_a_slower_operator_makes_a_step_as_much_slower(awq, requests):
    held = awq.shape.held
    fast, slow = (with_rates(held.format, *rates) for rates in ((2e10, 1e10), (1e10, 2e9)))
    one, other = (planned(machine, awq, requests).tpot for machine in (fast, slow))
    rates = {1: (2e10, 1e10), 16: (1e10, 2e9)}[requests]
    expected = held.weights * (1 / rates[1] - 1 / rates[0])
    assert other - one == pytest.approx(expected, rel=1e-3)


def test_a_format_that_was_not_measured_is_as_fast_as_16_bits_and_that_is_said(awq):
    held = awq.shape.held
    measured, other = with_rates(held.format, 2e10, 2e10), with_rates("another format", 1e9, 1e9)
    assert planned(measured, awq).tpot == pytest.approx(planned(other, awq).tpot)
    failed = other.model_copy(update={"unmeasured": "vLLM has no kernel"})
    told = [why(choose(machine, awq, Asked(max_model_len=4096)).reasons) for machine in (measured, other, failed)]
    assert all(held.format in text for text in told)
    assert "measured with TheKernel" in told[0]
    assert "as fast as 16 bits, because it was not measured on this machine" in told[1]
    assert "vLLM has no kernel" in told[2]
    assert "--retune" in told[2]


def test_a_gpu_reads_the_bytes_that_are_stored(awq):
    plain = Model(awq.name, replace(awq.shape, held=None), awq.fixed, quantized=True)
    assert awq.shape.dense_bytes < 0.6 * plain.shape.dense_bytes
    assert planned(DESKTOP, awq).tpot < planned(DESKTOP, plain).tpot
    assert why(choose(DESKTOP, awq, Asked(max_model_len=4096)).reasons).startswith("the checkpoint decides: awq")


def test_ranks_share_them():
    shape = replace(PLAIN, held=HeldDense("f", 4, ALL, "a"))
    assert Ranks(tp=2, pp=2).shape(shape).held.weights == ALL // 4


def test_what_is_measured_is_of_the_checkpoints_layers(awq, tmp_path):
    probe = Probe.of(tmp_path, awq.shape)
    assert probe.held == 2 * 2048 * 128 * (32 + 4)
    assert (probe.held_layer, probe.dtype) == ("model.layers.0.self_attn.o_proj", "float16")
    assert probe.model == awq.name
    assert probe.format.dtype.itemsize == 2
    assert len({replace(probe, held_format=fmt).key for fmt in ("one", "another")}) == 2


def test_a_measurement_that_fails_is_kept_with_its_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(plan_machine, "IN_VLLM", "vllm_dymoe.plan.nowhere")
    monkeypatch.setattr(plan_machine, "_MOST_OTHERS", 99)  # whatever else runs here
    probe = Probe(str(tmp_path / "store"), 256, 64, 2, 8, 2, 1 << 16, held=1 << 16, bits=4.5, held_format="f")
    for _ in range(2):
        found = machine_here(probe, tmp_path / "machines.json")
        assert "nowhere" in found.unmeasured
        assert {rate.format for rate in found.dense} == {""}
