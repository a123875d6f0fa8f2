"""Multi-token prediction layers whose experts have another format than the model's, through the real engine."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e.architectures import QWEN3_NEXT
from tests.e2e.engines import answer, answers_at_budgets, random_prompts, resize, server_of, small_engine
from tests.e2e.quantized import write
from vllm_dymoe.experts.format import SliceKey
from vllm_dymoe.options import Options
from vllm_dymoe.quantize.checkpoint import Checkpoint
from vllm_dymoe.quantize.convert import convert

pytestmark = pytest.mark.engine

SPECULATION = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}


def add_drafts(folder):
    """A 16-bit draft layer as in published checkpoints, and a quantization config that excludes it, except for
    ``mtp.fc``, which its list forgets.
    """
    tensors = load_file(folder / "model.safetensors")
    last = "model.layers.1."
    generator = torch.Generator().manual_seed(1)

    def random(shape):
        return (torch.randn(shape, generator=generator) * 0.1).bfloat16()

    plain = load_file(folder.parent / "plain" / "model.safetensors")
    extra = {name.replace(last, "mtp.layers.0."): tensor.clone() for name, tensor in plain.items() if last in name}
    hidden = plain["model.norm.weight"].shape[0]
    extra |= {
        f"mtp.{name}.weight": torch.zeros(hidden).bfloat16()
        for name in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")
    }
    extra["mtp.fc.weight"] = random((hidden, 2 * hidden))
    save_file(tensors | extra, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    if "quantization_config" in config:
        config["quantization_config"]["ignore"] += ["mtp.layers.0*"]
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))


def check_draft(server, tensors):
    """Every weight of the draft's experts is the checkpoint's, at 16 bits."""
    (bits,) = server.experts.formats
    fmt = server.experts.of_layers[2][bits]
    for expert in range(server.experts.num_experts):
        packed = torch.empty(fmt.nbytes, dtype=torch.uint8)
        server.store.read_into(SliceKey(2, expert, bits), packed)
        for word, matrix in zip(("gate", "up", "down"), fmt.view(packed), strict=True):
            assert torch.equal(matrix.weight, tensors[f"mtp.layers.0.mlp.experts.{expert}.{word}_proj.weight"])


def answers(llm):
    return [a.tokens for a in answer(llm, random_prompts(), 12)]


def test_drafts_at_16_bits_share_the_slots_of_quantized_experts(tmp_path):
    """ModelOpt's NVFP4 checkpoints of Qwen3-Next and Qwen3.5, and the checkpoint that `vllm-dymoe quantize` makes of
    one.
    """
    write(QWEN3_NEXT, "nvfp4-modelopt", tmp_path)
    add_drafts(tmp_path / "quantized")
    with small_engine(tmp_path / "quantized", {"expert_budget": "50%"}) as llm:
        want = answers(llm)
    with small_engine(tmp_path / "quantized", {"expert_budget": "50%"}, **SPECULATION) as llm:
        server = server_of(llm)
        assert (len(server.experts.layers), server.experts.draft_layers) == (3, 1)
        assert server.experts.kinds == (0, 0, 1)
        check_draft(server, load_file(tmp_path / "quantized" / "model.safetensors"))
        assert type(llm.llm_engine.vllm_config.quant_config).__name__ == "DymoeModelOptNvFp4Config"
        assert answers_at_budgets(llm, ("100%", "30%"), lambda: answers(llm)) == want
    convert(Checkpoint.open(tmp_path / "quantized"), tmp_path / "ours", Options(high=4, group_size=64))
    with small_engine(tmp_path / "ours", {"expert_budget": "50%"}, **SPECULATION) as llm:
        server = server_of(llm)
        assert server.experts.draft_layers == 1
        assert answers(llm) == want


@pytest.mark.parametrize("policy", ["exact", "duoserve"])
def test_the_device_plans_a_draft_as_well(tmp_path, policy):
    """On the emulated card; several tokens are proposed, so that the draft's layer runs as often in a step."""
    write(QWEN3_NEXT, "nvfp4-modelopt", tmp_path)
    add_drafts(tmp_path / "quantized")
    options = {"expert_budget": "50%", "policy": policy, "host_store": "pinned", "link_gbps": 8.0, "misses": "fetch"}
    speculation = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}
    with small_engine(tmp_path / "quantized", options | {"planning": "host"}, **speculation) as llm:
        assert server_of(llm).small_batches is None
        want = answers(llm)
    with small_engine(tmp_path / "quantized", options, **speculation) as llm:
        server = server_of(llm)
        assert (len(server.experts.layers), server.experts.draft_layers) == (3, 1)
        assert server.small_batches is not None, server.host_plans_because
        for budget in ("100%", "30%"):
            resize(llm, budget)
            server.reset_stats()
            assert answers(llm) == want
            server.check_integrity()
            table = server.cache.device_table.table
            assert (table.step > 0).all()
        assert server.stats().misses > 0
