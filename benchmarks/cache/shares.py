"""Would slots be better shared out between bases and fine slices, and between layers, by what they turn out to save?

The plan of nested 4/2 follows what decode asks for (Eq. 4). Here the shipped model's routers choose over held-out
texts, token by token, and once more with a prompt before each, and the residency rule is replayed for every share of
every layer. The bound has hindsight: from the plan's shares on slots of either kind move, between layers too, to where
they are worth most over all that is read, as long as that saves bytes. A rule that moves shares by counters while it
serves knows less. Prints bytes moved, of those of uniform 4 bits.
"""

import argparse
import itertools
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer

from vllm_dymoe.config import Options
from vllm_dymoe.quantize.checkpoint import Checkpoint
from vllm_dymoe.residency.rule import FREE, HIGH, HIT, LOW, NOWHERE, decide_slices, record_uses
from vllm_dymoe.residency.tier import Tier
from vllm_dymoe.runtime.sizing import plan_slots
from vllm_dymoe.systems.dymoe import Dymoe

MODEL = Path(__file__).resolve().parents[1] / "tiny_moe" / "model"
DOMAINS = ("docs", "code", "arithmetic")
PROMPT, DECODED = 256, 96
BUDGETS = (0.25, 0.5, 0.75)

Step = tuple[NDArray[np.int64], NDArray[np.int8]]
"""Experts of a layer's step, ascending, and in which version each is wanted."""

Share = tuple[int, int]
"""Bases and fine slices that a layer may keep."""

Cost = Callable[[int, int, int], int]
"""(layer, bases, fine slices) to bytes that the layer moves."""


def probabilities() -> list[torch.Tensor]:
    """Of each text what the routers say: [layers, tokens, experts]."""
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32),
        AutoTokenizer.from_pretrained(MODEL),
    )
    found = []
    with torch.inference_mode():
        for domain in DOMAINS:
            text = (MODEL / "heldout" / f"{domain}.txt").read_text()[:8000]
            ids = tokenizer.encode(text)[: PROMPT + DECODED]
            found.append(torch.stack(model(torch.tensor([ids]), output_router_logits=True).router_logits).softmax(-1))
    return found


def steps_of(text: torch.Tensor, layer: int, top_k: int, system: Dymoe, *, prompt: bool) -> list[Step]:
    """A prompt, or the tokens behind it one by one."""
    layers, weights, chosen = len(text), *text[layer].topk(top_k)
    groups = [range(PROMPT)] if prompt else [range(at, at + 1) for at in range(PROMPT, len(chosen))]
    found = []
    for rows in groups:
        ids, values = chosen[rows.start : rows.stop].flatten().numpy(), weights[rows.start : rows.stop].flatten()
        active = np.unique(ids)
        load = np.bincount(ids, minlength=text.shape[2]) * float(prompt)  # every token of a prompt is a heavy hitter
        importance = load + np.bincount(ids, values.numpy(), text.shape[2]) / (1 + float(values.sum()))
        critical = system.precision.schedule.critical(layer, layers, len(active))
        high = active[np.argsort(-importance[active], kind="stable")[:critical]]
        found.append((active, np.where(np.isin(active, high), HIGH, LOW).astype(np.int8)))
    return found


def moved(steps: list[Step], experts: int, bases: int, fines: int, sizes: tuple[int, int]) -> int:
    """Bytes that a layer moves with these shares."""
    heat, used = np.zeros((2, 2, experts), np.int64)
    held, total = np.zeros(experts, np.int8), 0
    for number, (active, wanted) in enumerate(steps, start=1):
        record_uses(heat[0], used[0], active, number)
        record_uses(heat[1], used[1], active[wanted == HIGH], number)
        base, fine = decide_slices(active, wanted, held, heat, used, (0, bases, fines))
        total += sizes[0] * np.count_nonzero(base != HIT) + sizes[1] * np.count_nonzero(fine != HIT)
        held[base[base >= 0]] = NOWHERE
        held[active[base >= FREE]] = LOW
        held[fine[fine >= 0]] = LOW
        held[active[fine >= FREE]] = HIGH
    return int(total)


def climbed(cost: Cost, plan: list[Share], sizes: tuple[int, int], most: int) -> list[Share]:
    """Move slots from where one is worth least to where one more is worth most, as long as that saves bytes.

    Args:
        cost: bytes that a layer moves with a share.
        plan: to begin with.
        sizes: of a base and of a fine slice.
        most: slots of either kind that a layer has a use for.
    """
    shares, limit = list(plan), taken(plan, sizes)
    while True:
        now = [cost(layer, *share) for layer, share in enumerate(shares)]
        changes = []
        for layer, (bases, fines) in enumerate(shares):
            for more in ((1, 0), (0, 1), (2, 0), (0, 2), (1, 1), (-1, 0), (0, -1), (-2, 0), (0, -2), (-1, -1)):
                new = bases + more[0], fines + more[1]
                if 1 <= new[0] <= most and 0 <= new[1] <= new[0]:
                    changes.append((cost(layer, *new) - now[layer], layer, new))
        best, found = 0, None
        for (gain, layer, new), (loss, other, old) in itertools.product(changes, changes):
            if layer != other and gain + loss < best:
                tried = [new if at == layer else old if at == other else share for at, share in enumerate(shares)]
                if taken(tried, sizes) <= limit:
                    best, found = gain + loss, tried
        if found is None:
            return shares
        shares = found


def taken(shares: list[Share], sizes: tuple[int, int]) -> int:
    """Bytes of the slots."""
    return sum(bases * sizes[0] + fines * sizes[1] for bases, fines in shares)


def measure(rounding: str, texts: list[torch.Tensor], *, prompts: bool) -> list[dict[str, Any]]:
    """By budget: bytes that the plan's shares move, and the best ones, of uniform 4 bits'."""
    experts = Checkpoint(MODEL).model_experts((4, 2), 64, torch.bfloat16)
    layers, every, formats = len(experts.layers), experts.num_experts, experts.formats
    sizes = formats[2].nbytes, formats[4].nbytes
    system, uniform = Dymoe(retention=0.75, rounding=rounding), Dymoe(retention=1)

    def steps(which: Dymoe, layer: int) -> list[Step]:
        kinds = (True, False) if prompts else (False,)
        return [
            step
            for text, prompt in itertools.product(texts, kinds)
            for step in steps_of(text, layer, experts.top_k, which, prompt=prompt)
        ]

    wanted, high = ([steps(which, layer) for layer in range(layers)] for which in (system, uniform))

    @cache
    def cost(layer: int, bases: int, fines: int) -> int:
        return moved(wanted[layer], every, bases, fines, sizes)

    rows = []
    for budget in BUDGETS:
        limit = int(budget * layers * every * sum(sizes))
        options = Options(hi=4, lo=2, group_size=64)
        quotas = plan_slots(experts, options, system, limit, 0, system.precision.all_shares(experts)).quotas
        plan = list(zip(quotas[Tier.LO], quotas[Tier.HI], strict=True))
        whole = plan_slots(experts, options, uniform, limit, 0, uniform.all_shares(experts)).quotas[Tier.HI]
        four = sum(moved(of, every, share, share, sizes) for of, share in zip(high, whole, strict=True))
        ours, best = (
            sum(cost(layer, *share) for layer, share in enumerate(shares))
            for shares in (plan, climbed(cost, plan, sizes, every))
        )
        row = {"rounding": rounding, "prompts": prompts, "budget": budget}
        rows.append({**row, "plan_of_uniform": round(ours / four, 3), "hindsight_of_uniform": round(best / four, 3)})
        print(", ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    return rows


def main() -> None:
    """Replay, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounding", nargs="+", choices=("up", "nearest"), default=["nearest"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    texts = probabilities()
    rows = [
        row
        for rounding, prompts in itertools.product(arguments.rounding, (False, True))
        for row in measure(rounding, texts, prompts=prompts)
    ]
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
