"""Multi-token prediction layers whose experts differ in format from the model's."""

import json
from dataclasses import dataclass

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e.architectures import QWEN3_NEXT, Architecture
from tests.e2e.engines import (
    answer,
    answers_at_budgets,
    equal_share,
    random_prompts,
    resize,
    server_of,
    small_engine,
)
from tests.e2e.quantized import write
from vllm_dymoe.experts.format import SliceKey
from vllm_dymoe.options import Options
from vllm_dymoe.quantize.checkpoint import Checkpoint
from vllm_dymoe.quantize.convert import convert

pytestmark = pytest.mark.engine

LEFT_OUT = r"-:.*mtp.*", r"-:.*(attn|shared_expert|mlp\.gate|lm_head).*"
SPECULATION = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}


def add_drafts(folder, **excluding):
    """Add a 16-bit draft layer to a checkpoint, as published ones have it.

    ``excluding`` are the changes to the quantization config that exclude the layer. By default they are ModelOpt's,
    which forget ``mtp.fc``.
    """
    tensors = load_file(folder / "model.safetensors")
    last = "model.layers.1."
    generator = torch.Generator().manual_seed(1)

    plain = load_file(folder.parent / "plain" / "model.safetensors")
    dtype = plain["model.norm.weight"].dtype

    def random(shape):
        return (torch.randn(shape, generator=generator) * 0.1).to(dtype)

    extra = {name.replace(last, "mtp.layers.0."): tensor.clone() for name, tensor in plain.items() if last in name}
    hidden = plain["model.norm.weight"].shape[0]
    extra |= {
        f"mtp.{name}.weight": torch.zeros(hidden, dtype=dtype)
        for name in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")
    }
    extra["mtp.fc.weight"] = random((hidden, 2 * hidden))
    save_file(tensors | extra, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= excluding or {
        "ignore": [*config["quantization_config"]["ignore"], "mtp.layers.0*"]
    }
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))


def check_draft(server, tensors):
    """Check that every weight of the draft's experts is the checkpoint's, at 16 bits."""
    (bits,) = server.experts.formats
    fmt = server.experts.of_layers[2][bits]
    for expert in range(server.experts.num_experts):
        packed = torch.empty(fmt.nbytes, dtype=torch.uint8)
        server.store.read_into(SliceKey(2, expert, bits), packed)
        for word, matrix in zip(("gate", "up", "down"), fmt.view(packed), strict=True):
            assert torch.equal(matrix.weight, tensors[f"mtp.layers.0.mlp.experts.{expert}.{word}_proj.weight"])


def answers(llm):
    return [a.tokens for a in answer(llm, random_prompts(), 12)]


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    """Qwen3-Next, quantized by ModelOpt to NVFP4, with a draft layer at 16 bits."""
    folder = tmp_path_factory.mktemp("drafts")
    write(QWEN3_NEXT, "nvfp4-modelopt", folder)
    add_drafts(folder / "quantized")
    return folder / "quantized"


@pytest.fixture(scope="module")
def want(quantized):
    """Answers without drafts."""
    with small_engine(quantized, {"expert_budget": "50%"}) as llm:
        return answers(llm)


def test_drafts_at_16_bits_share_the_slots_of_quantized_experts(quantized, want, tmp_path):
    """Drafts at 16 bits run in the slots of quantized experts.

    Tested with the checkpoint, and with its conversion by `vllm-dymoe quantize`.
    """
    with small_engine(quantized, {"expert_budget": "50%"}, **SPECULATION) as llm:
        server = server_of(llm)
        assert (len(server.experts.layers), server.experts.draft_layers) == (3, 1)
        assert server.experts.kinds == (0, 0, 1)
        check_draft(server, load_file(quantized / "model.safetensors"))
        assert type(llm.llm_engine.vllm_config.quant_config).__name__ == "DymoeModelOptNvFp4Config"
        assert answers_at_budgets(llm, ("100%", "30%"), lambda: answers(llm)) == want
    convert(Checkpoint.open(quantized), tmp_path / "ours", Options(high=4, group_size=64))
    with small_engine(tmp_path / "ours", {"expert_budget": "50%"}, **SPECULATION) as llm:
        server = server_of(llm)
        assert server.experts.draft_layers == 1
        assert answers(llm) == want


@dataclass(frozen=True)
class Separate(Architecture):
    """A model with one tensor for each projection, as quantizing tools write it.

    The architecture itself has stacks [experts, rows, columns].
    """

    def save(self, folder):
        super().save(folder)
        tensors, found = load_file(folder / "model.safetensors"), {}
        for name, tensor in tensors.items():
            place, _, joined = name.rpartition(".")
            words = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(joined)
            if not place.endswith(".experts") or words is None:
                found[name] = tensor
                continue
            for expert, stack in enumerate(tensor):
                parts = zip(words, stack.chunk(len(words)), strict=True)
                found |= {f"{place}.{expert}.{word}.weight": part.contiguous() for word, part in parts}
        save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
        return folder


def in_bfloat16(folder):
    tensors, path = load_file(folder / "model.safetensors"), folder / "config.json"
    half = {name: tensor.bfloat16() for name, tensor in tensors.items() if tensor.dtype == torch.float16}
    save_file(tensors | half, folder / "model.safetensors", metadata={"format": "pt"})
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": "bfloat16"}))


def test_drafts_that_a_rule_of_gptq_leaves_out_take_slots_of_the_budget(tmp_path):
    """A GPTQ rule that excludes the drafts does not keep their experts from us.

    For such a rule vLLM gives Qwen3.5's drafts no quantization configuration, and without one the plugin would not see
    their experts.
    """
    write(Separate("Qwen3_5MoeTextConfig", QWEN3_NEXT.sizes), "gptq", tmp_path)
    for name in ("plain", "quantized"):
        in_bfloat16(tmp_path / name)  # vLLM's linear attention computes in nothing else on a CPU
    add_drafts(tmp_path / "quantized", dynamic={rule: {} for rule in LEFT_OUT})
    with small_engine(tmp_path / "quantized", {"expert_budget": "50%"}) as llm:
        want = answer(llm, random_prompts(), 12)
    with small_engine(tmp_path / "quantized", {"expert_budget": "50%"}, **SPECULATION) as llm:
        server = server_of(llm)
        assert (len(server.experts.layers), server.experts.draft_layers) == (3, 1)
        check_draft(server, load_file(tmp_path / "quantized" / "model.safetensors"))
        got = answers_at_budgets(llm, ("100%", "30%"), lambda: answer(llm, random_prompts(), 12))
    # Linear attention sums the tokens of a step in another order when there are several. Measured: 42 of 43 equal.
    assert equal_share(got, want) > 0.9


@pytest.mark.parametrize("policy", ["exact", "duoserve"])
def test_the_device_plans_a_draft_as_well(quantized, want, policy):
    """Device planning of a draft's layer on the emulated card.

    Two tokens are proposed, so that the draft's layer runs twice in a step.
    """
    options = {"expert_budget": "50%", "policy": policy, "host_store": "pinned", "link_gbps": 8.0, "misses": "fetch"}
    speculation = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}
    with small_engine(quantized, options, **speculation) as llm:
        server = server_of(llm)
        assert (len(server.experts.layers), server.experts.draft_layers) == (3, 1)
        assert server.small_batches is not None
        for budget in ("100%", "30%"):
            resize(llm, budget)
            server.reset_stats()
            assert answers(llm) == want
            server.check_integrity()
            table = server.cache.device_table.table
            assert (table.step > 0).all()
        assert server.stats().misses > 0
