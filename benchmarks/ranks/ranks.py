"""How fast are large models on several cards, and are more cards better?

    python benchmarks/ranks/ranks.py

Writes README.md here, with the functions of `plan`. Each card holds a part of its experts. Synthetic routing of all
requests chooses among all experts, each rank plans for its own, and every layer of a step waits for the rank that lacks
most.
"""

import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from readme import markdown, put  # noqa: E402

from vllm_dymoe.experts.identity import ModelIdentity  # noqa: E402
from vllm_dymoe.plan.choice import predict  # noqa: E402
from vllm_dymoe.plan.device import find_device  # noqa: E402
from vllm_dymoe.plan.model import shape_of  # noqa: E402
from vllm_dymoe.plan.ranks import Ranks  # noqa: E402
from vllm_dymoe.plan.routings import made_up  # noqa: E402

V4 = {"num_hidden_layers": 43, "hidden_size": 4096, "n_routed_experts": 256, "num_experts_per_tok": 6,
      "moe_intermediate_size": 2048, "n_shared_experts": 1, "vocab_size": 129280, "num_attention_heads": 64,
      "num_key_value_heads": 1, "head_dim": 512, "q_lora_rank": 1024, "o_lora_rank": 1024, "o_groups": 8}  # fmt: skip
K2 = {"num_hidden_layers": 61, "hidden_size": 7168, "n_routed_experts": 384, "num_experts_per_tok": 8,
      "moe_intermediate_size": 2048, "n_shared_experts": 1, "vocab_size": 163840, "num_attention_heads": 64,
      "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
      "first_k_dense_replace": 1, "intermediate_size": 18432}  # fmt: skip
SETUPS = [
    ("DeepSeek-V4-Flash on 8 x 24 GB", V4, "rtx4090", Ranks(tp=8, ep=True)),
    ("Kimi-K2 on 2 nodes of 8 x 48 GB", K2, "l40s", Ranks(tp=8, dp=2, ep=True, nodes=2, network=50e9)),
]
PARTS, REQUESTS, OPTIONS = (0.1, 0.25, 0.5, 0.75, 1.0), (1, 4, 16, 64), {"policy": "exact", "high": 4}
OPTIONS |= {"policy_options": {"look_ahead": 0}}
SPARE = 1 << 28  # bytes in addition to slots, for the workspace


def step(model, card, ranks, requests, part):
    """Return the seconds of a step, with a part of each rank's experts resident."""
    shape, own = ranks.shape(model), ranks.shape(model).packed((4,)).nbytes(4)
    identity = ModelIdentity("m", "", shape.moe_layers, model.experts, model.top_k, model.hidden)
    spread = made_up(identity, requests).spread(ranks.experts_over)
    row = predict(OPTIONS, round(part * own) + SPARE, part, shape, ranks.device(card), spread, 64, 2048)
    return ranks.whole(row, model, card, -(-requests // ranks.dp), 64).tpot


def table(name, config, gpu, ranks):
    """Return tokens per second of each card.

    A number is bold if it exceeds the number with so many more cards that they hold all experts.
    """
    model, card, lines = shape_of(config, name), find_device(gpu, None), []
    for requests in REQUESTS:
        cells = []
        for part in PARTS:
            more = replace(ranks, dp=ranks.dp * round(1 / part), nodes=ranks.nodes * round(1 / part), network=50e9)
            kept = requests / ranks.count / step(model, card, ranks, requests, part)
            bold = "**" * (part < 0.7 and kept > requests / more.count / step(model, card, more, requests, 1.0))
            cells.append(f"{bold}{kept:.2f}{bold}")
        lines.append([str(requests), *cells])
    head = ["requests", *(f"{part:.0%}" for part in PARTS)]
    return f"{name}, `{ranks.arguments.strip()}`:\n\n{markdown(head, lines)}"


if __name__ == "__main__":
    put(Path(__file__).with_name("README.md"), "ranks", "\n\n".join(table(*setup) for setup in SETUPS))
