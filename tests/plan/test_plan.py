"""The plan: sizes of real models, the roofline, replays, and recommended options."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from tests.cli.checkpoints import command, refused
from vllm_dymoe.cache.budget import limit_in_bytes, workspace_bytes
from vllm_dymoe.experts.identity import ModelIdentity
from vllm_dymoe.options import ConfigError, ExpertBudget
from vllm_dymoe.plan.choice import (
    GOOD_ENOUGH,
    ServeSettings,
    choices,
    predict,
    recommended,
    room_for_experts,
    shown,
)
from vllm_dymoe.plan.costs import Costs
from vllm_dymoe.plan.device import Device, find_device, parse_rate, rates_of
from vllm_dymoe.plan.model import attention_of, is_moe, shape_of
from vllm_dymoe.plan.routings import Routings, made_up
from vllm_dymoe.resolve import resolve_options
from vllm_dymoe.trace.synthetic import synthetic_trace

QWEN3_30B = {
    "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1,
    "max_position_embeddings": 40960, "vocab_size": 151936, "intermediate_size": 6144,
}  # fmt: skip
MIXTRAL = {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000,
}  # fmt: skip
DEEPSEEK_V2_LITE = {
    "hidden_size": 2048, "num_hidden_layers": 27, "num_attention_heads": 16, "kv_lora_rank": 512,
    "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "q_lora_rank": None,
    "moe_intermediate_size": 1408, "n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "intermediate_size": 10944, "vocab_size": 102400,
}  # fmt: skip


# Sizes of published models.
NEMOTRON_3_NANO = {
    "model_type": "nemotron_h", "hidden_size": 2688, "num_hidden_layers": 52, "n_routed_experts": 128,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856, "intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712,
    "n_shared_experts": 1, "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 131072,
}  # fmt: skip
LLAMA_4_SCOUT = {
    "hidden_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8,
    "intermediate_size": 8192, "intermediate_size_mlp": 16384, "interleave_moe_layer_step": 1, "head_dim": 128,
    "num_local_experts": 16, "num_experts_per_tok": 1, "vocab_size": 202048,
}  # fmt: skip
STEP_3_5_FLASH = {
    "hidden_size": 4096, "num_hidden_layers": 45, "num_attention_heads": 64, "num_attention_groups": 8,
    "head_dim": 128, "moe_num_experts": 288, "moe_top_k": 8, "moe_intermediate_size": 1280, "intermediate_size": 11264,
    "share_expert_dim": 1280, "moe_layers_enum": ",".join(map(str, range(3, 45))), "vocab_size": 128896,
}  # fmt: skip
JAMBA = {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "expert_layer_period": 2, "expert_layer_offset": 1, "num_experts": 16, "num_experts_per_tok": 2,
    "intermediate_size": 14336, "attn_layer_period": 8, "attn_layer_offset": 4, "vocab_size": 65536,
    "tie_word_embeddings": False,
}  # fmt: skip
LONGCAT_FLASH = {
    "model_type": "longcat_flash", "hidden_size": 6144, "num_layers": 28, "num_attention_heads": 64,
    "ffn_hidden_size": 12288, "expert_ffn_hidden_size": 2048, "n_routed_experts": 512, "moe_topk": 12,
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "vocab_size": 131072,
}  # fmt: skip
HUNYUAN_A13B = {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "num_experts": 64, "moe_topk": [8] * 32, "moe_intermediate_size": [3072] * 32,
    "intermediate_size": 3072, "num_shared_expert": [1] * 32, "vocab_size": 128167, "tie_word_embeddings": True,
}  # fmt: skip
LING_FLASH_2 = {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128, "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 1024,
    "intermediate_size": 9216, "num_shared_experts": 1, "first_k_dense_replace": 1, "vocab_size": 157184,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "billions", "layers"),
    [
        (QWEN3_30B, 30.53, 48), (MIXTRAL, 46.70, 32), (DEEPSEEK_V2_LITE, 15.71, 26), (LLAMA_4_SCOUT, 107.8, 48),
        (LONGCAT_FLASH, 560.7, 28), (HUNYUAN_A13B, 80.4, 32), (LING_FLASH_2, 102.9, 31),
        (NEMOTRON_3_NANO, 31.6, 23), (STEP_3_5_FLASH, 196.8, 42), (JAMBA, 51.6, 16),
    ],
)  # fmt: skip
def test_sizes_add_up_to_what_the_model_is_named_after(config, billions, layers):
    """States count as attention, and some layers have more heads: up to 4 %."""
    shape = shape_of(config, "config.json")
    of_state = attention_of(config) == "recurrent"
    assert shape.moe_layers == layers
    assert sum(is_moe(config, layer) for layer in range(shape.layers)) == layers
    weights = shape.dense_weights + shape.moe_layers * shape.experts * shape.expert_weights
    assert weights / 1e9 == pytest.approx(billions, rel=0.04 if of_state or config is STEP_3_5_FLASH else 2e-3)


def test_experts_without_a_gate_are_two_matrices():
    shape = shape_of(NEMOTRON_3_NANO, "config.json")
    assert shape.packed((16,)).nbytes(16) == 2 * 23 * 128 * 2 * 2688 * 1856
    latent = shape_of(NEMOTRON_3_NANO | {"moe_latent_size": 1024}, "config.json")
    assert latent.packed((16,)).nbytes(16) == 2 * 23 * 128 * 2 * 1024 * 1856
    assert latent.dense_weights - shape.dense_weights == 23 * 2 * 2688 * 1024


def test_groups_of_attention_are_heads_of_the_kv_cache():
    shape = shape_of(STEP_3_5_FLASH, "config.json")
    assert (shape.kv_heads, shape.kv_bytes) == (8, 2 * 45 * 2 * 8 * 128)


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, 8),
        ({"mlp_only_layers": [0, 3]}, 6),
        ({"decoder_sparse_step": 2}, 4),
        ({"first_k_dense_replace": 1}, 7),
        ({"mlp_layer_types": ["dense"] * 3 + ["sparse"] * 5, "first_k_dense_replace": 1}, 5),
        ({"mlp_layer_types": ["hash_moe"] * 3 + ["moe"] * 5}, 8),
        ({"moe_layer_freq": [0, 0, *[1] * 6]}, 6),
        ({"moe_layer_freq": 2, "first_k_dense_replace": 1}, 3),
        ({"moe_layers": [1, 3, 5]}, 3),
        ({"moe_layers_enum": "4, 5,6,7"}, 4),
        ({"moe_layers_enum": [4, 5]}, 2),
        ({"dense_mlp_idx": 2}, 6),
        ({"expert_layer_period": 4, "expert_layer_offset": 1}, 2),
        ({"moe_layer_start_index": [1, 2]}, 7),
        ({"layers_block_type": ["mamba", "moe", "attention", "moe"]}, 2),
        ({"hybrid_override_pattern": "ME*-E"}, 2),
    ],
)
def test_layers_without_experts_are_known(changes, layers):
    assert sum(is_moe(QWEN3_30B | changes, layer) for layer in range(8)) == layers


@pytest.mark.parametrize(
    ("changes", "longest"),
    [
        ({}, 40960),
        ({"max_position_embeddings": None}, 0),
        ({"max_position_embeddings": None, "max_seq_len": 2048}, 2048),  # DBRX
        ({"seq_length": 8192}, 8192),
        ({"model_max_length": 65536}, 65536),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 163840),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 40960),
        ({"rope_scaling": {"rope_type": "linear", "factor": float("nan")}}, 40960),
        ({"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2}, "sliding_attention": {}}}, 81920),
        ({"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 4096}, 4096),  # Phi-3.5-MoE
        ({"rope_scaling": {"type": "longrope"}}, 40960),
    ],
)
def test_a_models_longest_context_is_vllms_default(changes, longest):
    assert shape_of(QWEN3_30B | changes, "config.json").longest == longest


def test_a_model_without_experts_is_refused():
    dense = {key: value for key, value in MIXTRAL.items() if key != "num_local_experts"}
    with pytest.raises(ConfigError, match="Mixture-of-Experts"):
        shape_of(dense, "x/config.json")


def test_devices_are_found_however_they_are_written():
    assert find_device("NVIDIA GeForce RTX-4090", None).memory == find_device("rtx4090", None).memory == 24 * 2**30
    assert find_device("rtx4090", "25 GB/s").link == parse_rate("25GB/s") == 25e9
    for name, link in (("gtx970", None), ("rtx4090", "fast"), ("rtx4090", "0GB/s")):
        with pytest.raises(ConfigError):
            find_device(name, link)


ROOT = Path(__file__).resolve().parents[2]
REPORT = ROOT / "benchmarks/gpu/gpu-NVIDIA-H200-2026-11-26.json"


def test_the_rates_of_the_package_are_those_of_the_reports():
    """After ``make gpu``, copy the reports' rates to vllm_dymoe/plan/measured.json."""
    reports = sorted((ROOT / "benchmarks/gpu").glob("gpu-*.json"))
    found = [asdict(rate) for report in reports for rate in rates_of(json.loads(report.read_text()))]
    assert json.loads((ROOT / "vllm_dymoe/plan/measured.json").read_text()) == found


def test_experts_are_read_as_fast_as_on_a_card_that_was_measured():
    mixtral, qwen = 3 * 4096 * 14336, 3 * 2048 * 768
    h200, rtx4090 = find_device("h200", None), find_device("rtx4090", None)
    assert h200.expert_rate(mixtral, 1, nested=False).read == 1965e9
    assert h200.expert_rate(qwen, 1, nested=False).read == 1233e9, "small experts are slower"
    assert h200.expert_rate(qwen, 16, nested=False).read == 1382e9
    assert h200.expert_rate(mixtral // 2, 700, nested=False).compute == 172.5e12
    assert h200.expert_rate(mixtral, 1, nested=True).read == 1772e9
    share = rtx4090.expert_rate(mixtral, 1, nested=False).read / 1008e9
    assert share == pytest.approx(1965 / 4800), "the same share of its own data sheet"
    assert share < 0.5 < rtx4090.bandwidth / 1008e9


def test_a_card_that_was_measured_here_counts_by_its_own_report(tmp_path):
    report = json.loads(REPORT.read_text()) | {"card": "NVIDIA GeForce RTX 4090"}
    own = tmp_path / "gpu.json"
    own.write_text(json.dumps(report))
    assert find_device("rtx4090", None, own).expert_rate(3 * 2048 * 768, 1, nested=False).read == 1233e9
    named, remark = "kernels, Qwen3-30B-A3B, 4 bits, 1 tokens, tensor cores", "{} GB/s, 9.0 TFLOP/s"
    for other, read in ((500, 1233e9), (2000, 2000e9)):
        speeds = [{"name": named, "remark": remark.format(other)}]
        own.write_text(json.dumps(report | {"parts": report["parts"] | {"decode": {"speeds": speeds}}}))
        found = find_device("rtx4090", None, own)
        assert found.expert_rate(3 * 2048 * 768, 1, nested=False).read == read, "the fastest way counts"
        assert found.expert_rate(3 * 2048 * 768, 16, nested=False).read == 1382e9
    with pytest.raises(ConfigError, match="no speeds for rtx4080"):
        find_device("rtx4080", None, own)
    own.write_text("{}")
    with pytest.raises(ConfigError, match="not a report"):
        find_device("rtx4090", None, own)


HEADER = ModelIdentity("m", "f", 8, 32, 4, 64)


def test_tokens_of_a_batch_share_experts():
    trace = synthetic_trace(HEADER, requests=8, prompt=1, decode=32)

    def used(batch):
        found = Routings(trace, batch)
        return np.mean([len(found.trace.experts[step.tokens, 0].unique()) for of in found.steps for step in of])

    assert used(1) == 4
    assert 12 < used(8) < 32
    assert Routings(trace).prompt(9).tokens.tolist() == list(range(9))


DEVICE = Device("d", 24 * 2**30, bandwidth=8e11, compute=8e13, link=2e10)
QWEN = shape_of(QWEN3_30B, "config.json")


def predicted(options, budget, routings, device=DEVICE, prompt=512, costs=None):
    settled = resolve_options(options, environment={})
    experts = QWEN.packed(tuple(settled.stored_bits))
    limit = limit_in_bytes(ExpertBudget.parse(budget), experts, settled, workspace_bytes(experts, "cuda"), 0)
    free = costs or Costs.nothing()
    return predict(options, limit, 1.0, QWEN, device, routings, prompt, 2048, costs=free)


@pytest.fixture(scope="module")
def skewed():
    return made_up(ModelIdentity("m", "f", 48, 128, 8, 2048), 1)


def test_everything_moved_takes_the_link_and_the_computation(skewed):
    alone = {"policy": "on-demand", "policy_options": {"overlap": False}}
    found, overlapping = (predicted(options, "25%", skewed) for options in (alone, {"policy": "on-demand"}))
    experts = 48 * 8 * QWEN.packed((4,)).formats[4].nbytes
    assert found.moved == pytest.approx(experts)
    reading = (2 * QWEN.token_weights + experts) / DEVICE.bandwidth
    assert found.tpot == pytest.approx(experts / DEVICE.link + reading, rel=1e-3)
    assert experts / DEVICE.link < overlapping.tpot < found.tpot
    assert found.hit_rate == 0


def test_a_gpu_that_decides_waits_for_the_host_absent(skewed):
    gpu, costs = replace(DEVICE, decides=True), Costs(1e-3, 1e-4, 1e-5, 1e-6, 0.0)
    alone, host = (predicted({}, "25%", skewed, card, costs=costs) for card in (gpu, DEVICE))
    assert alone.moved == pytest.approx(host.moved)
    assert 48 * 0.5e-3 < host.tpot - alone.tpot < 48 * (1e-3 + 8 * 1e-4)
    wide = made_up(ModelIdentity("m", "f", 48, 128, 8, 2048), 17)
    beside = replace(gpu, host=1e11)
    few, many = (
        [predicted({"misses": misses}, "25%", of, beside).tpot for misses in ("fetch", "share")]
        for of in (skewed, wide)
    )
    assert few[0] > few[1]
    assert many[0] == many[1], "it may fetch what the host could compute"


def test_what_is_in_neither_memory_is_read_from_the_disk(skewed):
    slow = {"device": replace(DEVICE, disk=1e9)}
    everything = predicted({"high": 4}, "25%", skewed)
    assert predicted({"high": 4}, "25%", skewed, **slow) == everything, "nothing is"
    held = [None, 40 * 2**30, 8 * 2**30, 4 * 2**30]
    rows = [
        predicted({"high": 4}, "25%", skewed, device=replace(DEVICE, disk=1e9, host_memory=nbytes)) for nbytes in held
    ]
    assert rows[0] == rows[1]
    assert rows[1].tpot < rows[2].tpot < rows[3].tpot
    assert rows[1].ttft < rows[2].ttft < rows[3].ttft


def test_every_chunk_of_a_prompt_reads_the_experts_again(skewed):
    one, four = (predicted({}, "25%", skewed, prompt=tokens).ttft for tokens in (2048, 8192))
    assert four == pytest.approx(4 * one, rel=0.01)


def test_every_choice_fits_beside_the_rest(skewed):
    device, serving = find_device("rtx4090", None), ServeSettings()
    room = room_for_experts(QWEN, device, serving, 1)
    found = list(choices(QWEN, device, skewed, serving, 512))
    assert 10e9 < room < 24 * 2**30 - QWEN.dense_bytes
    assert all(row.limit <= room for row in found)
    assert {row.given["policy"] for row in shown(found, ["dymoe", "firm"])} == {"dymoe", "firm"}
    assert [row.part for row in shown(found, [])] == [0.25, 0.5, 0.75, 1.0]
    best = recommended(found)
    assert best.agreement >= GOOD_ENOUGH
    assert all(best.tpot <= 1.05 * row.tpot for row in found if row.agreement >= 0.95)


def test_the_quality_of_the_package_is_that_of_the_benchmark():
    root = Path(__file__).resolve().parents[2]
    sections = json.loads((root / "benchmarks/quality/results.json").read_text())["sections"]
    measured = {(f"{row['bits']}", row["quantizer"]): row["agreement"] for row in sections["uniform"]}
    measured |= {(row["reading"], row["quantizer"]): row["agreement"] for row in sections["readings"]}
    for row in sections["precisions"]:
        if row["phase"] == "prompt" and row["skipped_weights"] != "renormalize" and ", r = 0.75" in row["experts"]:
            measured.setdefault((row["experts"].split(",")[0], row["quantizer"]), row["agreement"])
    shipped = json.loads((root / "vllm_dymoe/plan/quality.json").read_text())
    for precisions, of in shipped.items():
        for quantizer, value in of.items():
            assert value == pytest.approx(
                measured.get((precisions, quantizer), 1.0 if precisions == "16" else 0), abs=1e-4
            )


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B))
    return tmp_path


def test_the_command_ends_with_one_to_paste(folder, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    result = command("plan", folder, "--gpu", "rtx4090", "--link", "25GB/s", "--policy", "on-demand")
    assert result.exit_code == 0, result.output
    (line,) = re.findall(r"^vllm serve .*$", result.stdout, re.MULTILINE)
    options = json.loads(re.search(r"--additional-config '(.*)'", line)[1])["dymoe"]
    assert resolve_options(options, environment={}).expert_budget.bytes > 10e9
    assert "its link 25.0 GB/s" in result.stdout
    (row,) = re.findall(r"^on-demand .*$", result.stdout, re.MULTILINE)
    assert len(row.split()) == 9  # words are not broken


def test_the_picture_has_speed_and_hits_of_each_policy(folder, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("vllm_dymoe.cli.plan.draw", lambda path, panels: drawn.append(panels) or path)
    result = command("plan", folder, "--gpu", "rtx4090", "--figure", tmp_path / "plan.svg")
    assert result.exit_code == 0, result.output
    assert f"Written: {tmp_path / 'plan.svg'}" in result.stdout.replace("\n", "")
    ((speeds, hits),) = drawn
    assert speeds.lines.keys() == hits.lines.keys() >= {"exact, 4 bits", "dymoe, 4/2 bits"}
    budgets, rates = zip(*speeds.lines["exact, 4 bits"], strict=True)
    assert len(budgets) == 4
    assert sorted(budgets) == list(budgets)
    assert sorted(rates) == list(rates), "more memory is faster"
    assert rates[-1] == pytest.approx(1e3 / 8.9, rel=0.05), "as the table of docs/bench.md says"
    assert hits.lines["exact, 4 bits"][-1][1] > 90


def test_the_command_shows_one_rank_and_serves_all(folder):
    shown_ = command("plan", folder, "--gpu", "rtx4090", "--dp", "2", "--ep", "--cards-per-switch", "2").stdout
    for said in ("--data-parallel-size 2 --enable-expert-parallel", "64 x 768", "13.4"):
        assert said in shown_


def test_what_cannot_be_planned_is_a_sentence(folder):
    assert "--gpu rtx4090" in refused("plan", folder)
    assert "best" in refused("plan", folder, "--gpu", "rtx4090", "--policy", "best")
    assert "device memory" in refused("plan", folder, "--gpu", "rtx4090", "--max-num-seqs", 10**6)
