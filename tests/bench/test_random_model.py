"""Layers with random weights are the worst case for a cache: what a token chooses says nothing about the next one."""

import torch

from tests.support.benchmarks import modules_of

LAYERS, EXPERTS, TOP_K, TOKENS = 4, 32, 4, 96


def test_routers_of_random_weights_choose_evenly(tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM

    with modules_of("budget"):
        import model
    sizes = {"HIDDEN": 256, "HEADS": 4, "KV_HEADS": 2, "HEAD_DIM": 64, "INTERMEDIATE": 64, "REAL_VOCABULARY": 6144}
    for name, size in (sizes | {"EXPERTS": EXPERTS, "TOP_K": TOP_K}).items():
        monkeypatch.setattr(model, name, size)
    model.write(tmp_path, LAYERS)
    served = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = torch.randint(served.config.vocab_size, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = served(tokens, output_router_logits=True).router_logits
    assert len(logits) == LAYERS
    for layer in logits:
        chosen = torch.zeros(TOKENS, EXPERTS).scatter(1, layer.topk(TOP_K).indices, 1.0)
        again = (chosen[1:] * chosen[:-1]).sum(1).mean() / TOP_K
        # By chance TOP_K / EXPERTS, 12.5 %; the standard error of 95 pairs of four is below 2 %.
        assert again < 0.22
        assert chosen.sum(0).topk(EXPERTS // 4).values.sum() < 0.5 * TOP_K * TOKENS  # of the busiest quarter
