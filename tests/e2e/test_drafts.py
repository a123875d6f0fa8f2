"""Multi-token prediction whose draft has experts: vLLM's own tokens, out of the same slots, with drafts accepted."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e.architectures import ARCHITECTURES
from tests.e2e.engines import answer, engine, recorded_layers, runtime_of
from tests.e2e.test_models import TOKENS, prompts

pytestmark = pytest.mark.engine

LAYERS, HIDDEN = 2, 128
DRAFTED = 2


@pytest.fixture
def checkpoint(tmp_path):
    """GLM-4 MoE with a layer of multi-token prediction, under the names of the published checkpoints.

    The embedding outweighs all layers, so that the next token mostly follows from the last one, and the draft, which
    sees it, is sometimes right.
    """
    folder = ARCHITECTURES["glm-4-moe"].save(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"] *= 50
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor *= 0.3
    last, extra = f"model.layers.{LAYERS - 1}.", f"model.layers.{LAYERS}."
    generator = torch.Generator().manual_seed(1)
    for name in [name for name in tensors if name.startswith(last)]:
        noise = torch.randn(tensors[name].shape, generator=generator) * 0.1 * tensors[name].float().abs().mean()
        tensors[name.replace(last, extra)] = (tensors[name] + noise).to(tensors[name].dtype)
    ones, identity = torch.ones(HIDDEN).bfloat16(), torch.eye(HIDDEN).bfloat16()
    tensors |= {
        f"{extra}enorm.weight": ones,
        f"{extra}hnorm.weight": ones.clone(),
        f"{extra}eh_proj.weight": torch.cat((identity, 0.1 * identity), 1),
        f"{extra}embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
        f"{extra}shared_head.head.weight": tensors["lm_head.weight"].clone(),
        f"{extra}shared_head.norm.weight": tensors["model.norm.weight"].clone(),
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_nextn_predict_layers": 1}))
    return folder


def serve(model, dymoe=None, **settings):
    settings |= {"skip_tokenizer_init": True, "max_num_seqs": 8, "max_model_len": 128}
    return engine(model, dymoe, **settings)


def accepted(llm):
    values = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    return values["vllm:spec_decode_num_accepted_tokens"], values["vllm:spec_decode_num_draft_tokens"]


def test_drafts_with_experts_are_served_out_of_the_same_slots(checkpoint):
    with serve(checkpoint) as llm:
        want = [a.tokens for a in answer(llm, prompts(), TOKENS)]
    speculation = {"method": "mtp", "num_speculative_tokens": DRAFTED}
    with serve(checkpoint, {"hi": 16}, speculative_config=speculation, disable_log_stats=False) as llm:
        runtime, layers, counts = runtime_of(llm), [], []
        assert (runtime.experts.layers, runtime.experts.draft_layers) == ((1, 2), 1)
        for budget in ("100%", "30%"):
            runtime.resize(budget)
            before = accepted(llm)
            with recorded_layers(runtime) as outputs:
                got = [a.tokens for a in answer(llm, prompts(), TOKENS)]
            runtime.check_integrity()
            assert runtime.budget.peak <= runtime.budget.limit
            assert got == want, budget
            layers.append(outputs)
            counts.append([after - earlier for after, earlier in zip(accepted(llm), before, strict=True)])
        assert all(torch.equal(a, b) for a, b in zip(*layers, strict=True))
        assert counts[0] == counts[1]
        right, drafted = counts[0]
        # Measured: 8 of 76. A draft that knows nothing is right for one token in 512.
        assert 0.05 < right / drafted <= 1, counts
