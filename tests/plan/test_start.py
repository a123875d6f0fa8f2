"""What is chosen for a model on a machine, and how a machine is measured."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from tests.plan.test_plan import MIXTRAL, QWEN3_30B
from vllm_dymoe.experts.encoding import FP8, NVFP4
from vllm_dymoe.options import ConfigError
from vllm_dymoe.plan import machine as plan_machine
from vllm_dymoe.plan.costs import Costs
from vllm_dymoe.plan.device import DenseRate, ExpertRate
from vllm_dymoe.plan.machine import Gpu, Machine, Probe, machine_here, random_weight_bytes, read_machine
from vllm_dymoe.plan.model import attention_of, shape_of
from vllm_dymoe.plan.ranks import Ranks
from vllm_dymoe.plan.start import Asked, Model, Planner, choose, prefix_caching, read_model
from vllm_dymoe.resolve import resolve_options

GIB = 2**30
RATES = (
    ExpertRate("cpu", 3 * 2048 * 768, 1, False, 2e10, 8e10),
    ExpertRate("cpu", 3 * 2048 * 768, 256, False, 1e10, 1e12),
)
CPU = Machine(cores=16, host_memory=64 * GIB, memory_rate=4e10, kernel="AVX512", experts=RATES, disk=2e9)
RTX4090 = Gpu(
    name="NVIDIA GeForce RTX 4090", memory=24 * GIB, link=2.4e10, bandwidth=9e11, compute=1.5e14, capability=(8, 9),
)  # fmt: skip
DESKTOP = CPU.model_copy(update={"gpus": (RTX4090,)})
QWEN = Model("qwen", shape_of(QWEN3_30B, "config.json"))
MIX = Model("mixtral", shape_of(MIXTRAL, "config.json"))
FOUR_BITS = {"policy": "exact", "high": 4, "dense": 16}  # leaves little to choose, so it takes little time


@pytest.fixture(scope="module")
def on_desktop():
    return choose(DESKTOP, QWEN, Asked())


@pytest.fixture(scope="module")
def on_cpu():
    return choose(CPU, QWEN, Asked())


def test_a_cpu_computes_in_memory_with_a_few_slots(on_cpu):
    assert on_cpu.options["expert_budget"] == "top-k"
    assert on_cpu.options["host_store"] == "pinned"
    assert resolve_options(on_cpu.options, environment={}).high == 4
    assert on_cpu.environment["VLLM_CPU_KVCACHE_SPACE"].isdecimal(), "or vLLM takes most of the memory"
    assert "kv-cache-dtype" not in on_cpu.arguments


def test_experts_that_do_not_fit_into_memory_come_from_the_disk(on_cpu):
    small = choose(CPU.model_copy(update={"host_memory": 12 * GIB}), QWEN, Asked())
    assert "host_store" not in small.options
    assert small.tokens_per_second < on_cpu.tokens_per_second / 2


def test_a_gpu_gets_a_policy_a_context_and_a_chunk(on_desktop):
    length = int(on_desktop.arguments["max-model-len"])
    assert 4096 <= length <= QWEN.shape.longest
    assert "expert_budget" not in on_desktop.options, "what is left is known at start only"
    assert "VLLM_CPU_KVCACHE_SPACE" not in on_desktop.environment
    assert {subject for subject, *_ in on_desktop.reasons} >= {"policy", "precision", "misses", "KV cache", "context"}


def test_all_is_said_in_ten_lines(on_desktop, on_cpu, everything_fits):
    """The machine and the expected speed are the other two."""
    for start in (on_desktop, on_cpu, everything_fits):
        assert len(start.reasons) <= 8
        assert len({subject for subject, *_ in start.reasons}) == len(start.reasons)
    ((_, _, said),) = [row for row in everything_fits.reasons if row[0] == "expert budget"]
    assert "compare with plain vLLM" in said


@pytest.fixture(scope="module")
def everything_fits():
    large = RTX4090.model_copy(update={"memory": 96 * GIB})
    return choose(DESKTOP.model_copy(update={"gpus": (large,)}), QWEN, Asked({"high": 4, "policy": "exact"}))


def test_what_the_start_measures_is_only_predicted():
    """A way to serve misses that was written into the command would be final."""
    small = DESKTOP.model_copy(update={"gpus": (RTX4090.model_copy(update={"memory": 12 * GIB}),)})
    options = {"policy": "exact", "high": 4, "dense": 16}
    shared = choose(small, QWEN, Asked(options, max_model_len=8192))
    ((_, chosen, said),) = [row for row in shared.reasons if row[0] == "misses"]
    assert (chosen, said.partition(",")[0]) == ("auto", "probably shared with the CPU")
    assert "misses" not in shared.options


@pytest.mark.parametrize(
    ("asked", "options", "attention", "on_gpu", "chosen"),
    [
        (None, {}, "full", True, "on"),
        (None, {"policy": "dymoe"}, "full", True, "on"),
        (None, {"trace": "traces"}, "full", True, "off"),
        (True, {"trace": "traces"}, "full", True, "on"),
        (False, {}, "full", True, "off"),
        (None, {}, "recurrent", True, "auto"),
        (None, {}, "latent", True, "on"),
        (None, {}, "latent", False, "auto"),
    ],
)
def test_prefix_caching_is_chosen_unless_it_was_set(asked, options, attention, on_gpu, chosen):
    found, reason = prefix_caching(asked, resolve_options(options, environment={}), attention, on_gpu=on_gpu)
    assert found == chosen
    assert (reason == "set by you") == (asked is not None)


def test_a_cached_token_keeps_its_precision_where_that_varies():
    for options in ({}, *({"policy": policy, "low": 2} for policy in ("dymoe", "dynaexq", "adaptive"))):
        _, reason = prefix_caching(None, resolve_options(options, environment={}), "full", on_gpu=True)
        assert ("precision" in reason) == ("low" in options)


@pytest.mark.parametrize(
    ("config", "attention"),
    [
        (QWEN3_30B, "full"),
        ({"kv_lora_rank": 512}, "latent"),
        ({"linear_num_value_heads": 32}, "recurrent"),  # Qwen3-Next
        ({"mamba_d_state": 16}, "recurrent"),  # Jamba
        ({"conv_L_cache": 3}, "recurrent"),  # LFM2
        ({"attn_type_list": [0, 1]}, "recurrent"),  # MiniMax-Text-01
        ({"attn_type_list": [1, 1]}, "full"),  # MiniMax-M2
        ({"linear_attn_config": None}, "full"),
    ],
)
def test_what_a_model_keeps_of_earlier_tokens(config, attention):
    assert attention_of(config) == attention


def test_the_table_falls_with_context_and_requests(on_desktop):
    speeds = dict(on_desktop.table)
    assert list(speeds) == sorted(speeds)
    first, *_, last = speeds.values()
    assert first[0] > first[1] > first[2]
    assert last[0] < first[0]


ASKED = {
    "policy": ["exact", "dymoe", "dynaexq"], "high": [16, 8, 4], "dense": [16, 8], "misses": ["fetch", "share", "auto"],
    "expert_budget": ["25%", "auto"], "host_store": ["file", "auto"],
}  # fmt: skip


@settings(max_examples=6, deadline=None)
@given(
    some.fixed_dictionaries({}, optional={name: some.sampled_from(values) for name, values in ASKED.items()}),
    some.sampled_from([None, 4096]), some.sampled_from([None, "fp8"]), some.sampled_from([CPU, DESKTOP]),
)  # fmt: skip
def test_what_the_user_gave_always_wins(options, length, kind, machine):
    try:
        start = choose(machine, QWEN, Asked(options, max_model_len=length, kv_cache_dtype=kind))
    except ConfigError:
        return  # the model does not fit, or the options exclude each other
    for name, value in options.items():
        assert start.options[name] == value
    assert ("max-model-len" in start.arguments) == (length is None)
    assert kind is None or "kv-cache-dtype" not in start.arguments
    resolve_options(start.options, environment={})


def test_several_requests_keep_their_kv_cache_beside_the_experts():
    one, four = (choose(DESKTOP, QWEN, Asked(max_model_len=32768, max_num_seqs=count)) for count in (1, 4))
    assert "expert_budget" not in one.options
    reserved = 4 * 32768 * QWEN.shape.kv_bytes
    kept = reserved // (2 if four.arguments.get("kv-cache-dtype") == "fp8" else 1)
    assert four.options["expert_budget"] == "auto for 4 requests", "which the profile run can correct"
    ((_, _, said),) = [row for row in four.reasons if row[0] == "expert budget"]
    planned = float(said.partition(" GiB")[0]) * GIB
    assert planned <= 0.9 * 24 * GIB - QWEN.shape.memory_of_dense(8) - kept + 0.05 * GIB


def test_nothing_that_fits_is_a_sentence():
    with pytest.raises(ConfigError, match="GiB"):
        choose(DESKTOP, QWEN, Asked(max_model_len=40960, max_num_seqs=16, gpu_memory_utilization=0.2))


@pytest.mark.parametrize("length", [8192, 16384, 32768])
def test_a_cpus_kv_cache_has_room_for_vllms_own_block(length):
    """A context may be whole GiB, and vLLM keeps a block of 128 tokens for itself."""
    planner = Planner(CPU, MIX, Asked(FOUR_BITS, max_model_len=length))
    *_, planned = planner.chosen()
    token = MIX.shape.kv_bytes
    assert length * token % GIB == 0
    assert planner.kv_space(planned.kv_cache) >= (length + 128) * token


def test_a_context_beyond_the_models_is_planned_as_it_was_asked():
    """Such as Qwen3's with YaRN, which --hf-overrides sets."""
    start = choose(CPU, QWEN, Asked(FOUR_BITS, max_model_len=131072))
    assert int(start.environment["VLLM_CPU_KVCACHE_SPACE"]) * GIB > 131072 * QWEN.shape.kv_bytes
    assert ("context", "131072 tokens", "set by you") in start.reasons
    longest, longer = (
        Planner(DESKTOP, QWEN, Asked(FOUR_BITS, max_model_len=length, kv_cache_dtype="auto")).chosen()[2].choice.limit
        for length in (40960, 65536)
    )
    assert longest - longer == pytest.approx(24576 * QWEN.shape.kv_bytes, rel=0.2)


def test_a_context_that_config_json_does_not_name_is_vllms():
    start = choose(DESKTOP, Model("qwen", replace(QWEN.shape, longest=0)), Asked(FOUR_BITS))
    assert start.arguments["max-model-len"] == "2048"
    assert any("--max-model-len" in why for subject, _, why in start.reasons if subject == "context")


def test_a_budget_that_was_set_may_take_all_that_the_kv_cache_leaves():
    """An automatic one takes four fifths."""
    start = choose(DESKTOP, QWEN, Asked(FOUR_BITS | {"expert_budget": "100%"}, max_model_len=4096))
    ((_, _, said),) = [row for row in start.reasons if row[0] == "expert budget"]
    assert "all fit" in said
    needed = QWEN.shape.packed((4,)).nbytes(4) / GIB
    with pytest.raises(ConfigError, match=rf"{needed:.0f}\.\d GiB of experts"):
        choose(DESKTOP, QWEN, Asked({"expert_budget": "100%"}, max_model_len=131072))


def test_two_ranks_on_one_cpu_are_not_faster_than_one():
    one, two = (choose(CPU, QWEN, Asked(FOUR_BITS, max_model_len=4096, ranks=Ranks(tp=tp))) for tp in (1, 2))
    assert two.tokens_per_second < 1.1 * one.tokens_per_second


def test_the_table_counts_all_stages():
    start = choose(DESKTOP, QWEN, Asked(FOUR_BITS, max_model_len=4096, ranks=Ranks(pp=2)))
    ((_, (alone, *_)),) = start.table
    assert 0.8 / start.tpot < alone < 1.001 / start.tpot, "its requests have more tokens in the KV cache"


@pytest.mark.parametrize(
    ("capability", "changes", "kinds"),
    [
        ((8, 6), {}, {"auto", "fp8"}),
        ((8, 6), {"head_dim": 96}, {"auto"}),
        ((8, 6), {"model_type": "gpt_oss"}, {"auto"}),
        ((8, 6), {"add_swa_attention_sink_bias": True}, {"auto"}),
        ((8, 6), {"add_swa_attention_sink_bias": False}, {"auto", "fp8"}),
        ((8, 9), {"model_type": "gpt_oss"}, {"auto", "fp8"}),
        ((7, 5), {}, {"auto"}),
    ],
)
def test_the_kv_cache_is_halved_only_where_vllm_can(capability, changes, kinds):
    gpus = (RTX4090.model_copy(update={"capability": capability}),)
    model = Model("m", shape_of(QWEN3_30B | changes, "config.json"))
    planner = Planner(DESKTOP.model_copy(update={"gpus": gpus}), model, Asked())
    assert {setup.kv_cache_dtype for setup in planner._setups} == kinds


@pytest.fixture
def checkpoint(tmp_path):
    def write(**more):
        (tmp_path / "config.json").write_text(json.dumps(MIXTRAL | {"model_type": "mixtral"} | more))
        return str(tmp_path)

    return write


def test_a_checkpoint_decides_how_its_experts_are_stored(checkpoint):
    assert read_model(checkpoint()) == Model(checkpoint(), shape_of(MIXTRAL, ""))
    ours = {"quant_method": "dymoe", "format_version": 2, "hi": 8, "lo": 4, "group_size": 64, "quantizer": "rtn"}
    found = read_model(checkpoint(quantization_config=ours))
    assert (found.fixed["high"], found.fixed["low"], found.quantized) == (8, 4, False)
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
    found = read_model(checkpoint(quantization_config=awq))
    assert (found.fixed["high"], found.quantized) == (4, True)
    fmt = found.shape.packed((4,)).formats[4]
    assert (fmt.group_size, fmt.integer_zeros, fmt.hidden) == (128, True, found.shape.hidden)
    start = choose(DESKTOP, found, Asked(max_model_len=4096))
    assert not start.options.keys() & {"high", "low", "dense"}
    assert start.options.get("policy") != "dymoe", "which would need a low version"


@pytest.mark.parametrize(("said", "encoding"), [
    ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": []}, NVFP4),
    ({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}, FP8),
])  # fmt: skip
def test_experts_are_timed_in_the_checkpoints_encoding(checkpoint, tmp_path, said, encoding):
    shape = read_model(checkpoint(quantization_config=said)).shape
    assert Probe.of(tmp_path, shape).format.encoding == encoding
    assert Probe.of(tmp_path, shape).key != Probe.of(tmp_path, replace(shape, kept=None)).key
    assert shape.packed((encoding.bits,)).formats[encoding.bits].encoding == encoding


def test_a_description_is_read_or_refused(tmp_path):
    path = tmp_path / "machine.json"
    path.write_text(DESKTOP.model_dump_json())
    assert read_machine(path) == DESKTOP
    path.write_text(DESKTOP.model_dump_json().replace('"cores":16', '"cores":"many"'))
    with pytest.raises(ConfigError, match="cores"):
        read_machine(path)
    with pytest.raises(ConfigError, match="No such file"):
        read_machine(tmp_path / "none.json")


def test_a_card_without_a_data_sheet_is_planned_by_what_was_measured():
    known = DESKTOP.device()
    unknown = known
    measured = DESKTOP.model_copy(update={"gpus": (RTX4090.model_copy(update={"name": "NVIDIA Quadro X"}),)}).device()
    assert measured.link == known.link == 2.4e10
    ours, theirs = (device.expert_rate(3 * 2048 * 768, 1, nested=False).read for device in (measured, unknown))
    assert ours == pytest.approx(theirs, rel=0.1)


def test_a_machine_is_measured_once(tmp_path, monkeypatch):
    monkeypatch.setattr(plan_machine, "_MOST_OTHERS", 99)  # whatever else runs here
    probe, kept = Probe(str(tmp_path / "store"), 256, 64, 2, 8, 2, 1 << 16), tmp_path / "cache" / "machines.json"
    first = machine_here(probe, kept)
    assert first.cores > 0
    assert first.experts[0].read > 1e8
    monkeypatch.setattr("vllm_dymoe.plan.machine.subprocess.run", lambda *_, **__: pytest.fail("measured again"))
    again = machine_here(probe, kept)
    assert again.model_copy(update={"host_memory": 1}) == first.model_copy(update={"host_memory": 1})
    with pytest.raises(pytest.fail.Exception, match="measured again"):
        machine_here(probe, kept, retune=True)
    with pytest.raises(pytest.fail.Exception, match="measured again"):
        machine_here(replace(probe, hidden=512), kept)


@pytest.mark.parametrize("changed", ["card", "driver", "disk"])
def test_rates_are_those_of_one_card_driver_and_disk(tmp_path, monkeypatch, changed):
    probe, card = Probe("store", 256, 64, 2, 8, 2, 1), tmp_path / "gpus" / "0000:01:00.0"
    card.mkdir(parents=True)
    places = {"card": card / "information", "driver": tmp_path / "version", "disk": tmp_path / "disk"}
    for path in places.values():
        path.write_text("the first")
    monkeypatch.setattr(plan_machine, "_CARDS", card.parent)
    monkeypatch.setattr(plan_machine, "_DRIVER", places["driver"])
    monkeypatch.setattr(plan_machine, "storage_of", lambda folder: places["disk"].read_text())
    before = probe.key
    assert probe.key == before
    places[changed].write_text("another one")
    assert probe.key != before


@pytest.mark.parametrize(("sizes", "expected"), [
    ({}, 256), ({"index0": "48K", "index3": "33792K"}, 256), ({"index2": "2048K", "index3": "491520K"}, 960),
    ({"index3": "4194304K"}, 1024),
])  # fmt: skip
def test_weights_are_timed_past_the_largest_cache(tmp_path, monkeypatch, sizes, expected):
    for name, text in sizes.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "size").write_text(text + "\n")
    monkeypatch.setattr("vllm_dymoe.plan.machine._CACHES", tmp_path)
    assert random_weight_bytes(16 << 30) == expected << 20


def test_a_cpus_dense_layers_are_as_fast_as_measured():
    rates = (DenseRate(16, 1, 1e9), DenseRate(16, 16, 5e8), DenseRate(8, 1, 2e9))
    device = CPU.model_copy(update={"dense": rates}).device()
    assert device.dense_seconds(2e6, 16, 1) == pytest.approx(1e-3)
    assert device.dense_seconds(2e6, 16, 16) == pytest.approx(2e-3)
    assert 1e-3 < device.dense_seconds(2e6, 16, 4) < 2e-3
    assert device.dense_seconds(2e6, 16, 64) == pytest.approx(8e-3), "as many times as long as tokens are more"
    assert device.dense_seconds(1e6, 8, 1) == pytest.approx(5e-4)


def test_a_cpus_python_is_part_of_every_step(on_cpu):
    slow = choose(CPU.model_copy(update={"operation": 10 * CPU.operation}), QWEN, Asked())
    assert slow.tpot > on_cpu.tpot + 48 * 9 * CPU.operation
    once, twice = (Costs.on_cpu(seconds) for seconds in (1e-6, 2e-6))
    assert twice.request == pytest.approx(2 * once.request)
    assert once.request > 0


def test_what_is_measured_is_of_the_models_sizes(tmp_path):
    probe = Probe.of(tmp_path, QWEN.shape)
    assert (probe.hidden, probe.intermediate, probe.layers, probe.experts, probe.top_k) == (2048, 768, 48, 128, 8)
    attention, router = 2 * 2048 * 128 * (32 + 4), 2048 * 128
    assert probe.dense == attention + router
