"""How many staging slots keep the link busy? One engine, every number of slots in turns, prefill apart from decode.

The settings are those of ablation.py: the link is as slow beside this machine's computation as PCIe 4 is beside an RTX
3090's. Slots are taken from what layers keep, so that more of them cost hits. Reported are medians of paired ratios: every
round measures each number of slots once, and is compared with its own two.
"""

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}

from hardware import LINKS, Shape, ratio
from report import QWEN3_30B
from rich.console import Console
from rich.table import Table
from serve import Answers, engine, fill, runtime_of, total

LINK = "PCIe 4 x16"
BASE = 2


def resident(llm: Any, plan: argparse.Namespace) -> tuple[float, list[list[int]]]:
    """Seconds of a layer of one token with every expert on the device, and the answers."""
    runtime = runtime_of(llm)
    layers = len(runtime.experts.layers)
    for layer in range(layers):
        fill(runtime, layer)
    Answers(llm, plan.prompts[:1], plan)
    answers = Answers(llm, plan.prompts, plan)
    assert total(answers.decode + answers.prefill, "misses") == 0
    return statistics.median(answers.decode_seconds) / layers, answers.tokens


def measure(llm: Any, budget: str, slots: int, gbps: float, plan: argparse.Namespace) -> tuple[dict[str, float], Any]:
    """One number of slots, once."""
    runtime = runtime_of(llm)
    runtime.options = runtime.options.model_copy(update={"staging_slots": slots})
    runtime.resize(budget)
    Answers(llm, plan.prompts[-1:], plan)
    answers = Answers(llm, plan.prompts, plan)
    hits, misses = total(answers.decode, "hits"), total(answers.decode, "misses")
    moved = sum(sum(stats["bytes_moved"].values()) for stats in answers.prefill)
    return {
        "prefill_ms": 1e3 * statistics.mean(answers.prefill_seconds),
        "decode_ms": 1e3 * statistics.median(answers.decode_seconds),
        "prefill_link_used": moved / (gbps * 1e9) / sum(answers.prefill_seconds),
        "hit_rate": hits / (hits + misses),
        "wait_ms": 1e3 * total(answers.decode, "exposed_wait_seconds") / len(answers.decode_seconds),
        "minimum_budget": runtime.minimum_budget,
    }, answers.tokens


def main() -> None:
    """Measure one model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a checkpoint with 4-bit experts, as ablation.py makes it")
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 2, 3, 4, 6, 8])
    parser.add_argument("--budgets", nargs="+", default=["25%", "75%"])
    parser.add_argument("--prefetch", nargs="+", default=["next-gate", "none"])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=24)
    parser.add_argument("--new-tokens", type=int, default=12)
    parser.add_argument("--temperature", type=float, default=1)
    parser.add_argument("--miniature", action="store_true", help="give it the link of what it is a miniature of")
    plan = parser.parse_args()
    results: dict[str, Any] = {}
    for prefetch in plan.prefetch:
        options = {"hi": 4, "lo": 0, "expert_budget": "100%", "prefetch": prefetch, "link_gbps": 100.0}
        with engine(plan.model, options) as llm:
            config = llm.llm_engine.model_config.hf_text_config
            numbers = range(2, 2 + 2 * plan.prompt_tokens)
            plan.prompts = [[7 * n % config.vocab_size for n in numbers[i::2]] for i in range(2)]
            layer_seconds, expected = resident(llm, plan)
            runtime = runtime_of(llm)
            expert = next(iter(runtime.experts.formats.values())).nbytes
            shape = Shape(
                config.hidden_size,
                config.num_attention_heads,
                config.num_key_value_heads,
                config.head_dim,
                config.num_experts_per_tok,
                expert,
            )
            rate = expert / (ratio(Shape(**QWEN3_30B) if plan.miniature else shape, LINK) * layer_seconds)
            runtime.engine._delivery._bytes_per_second = rate
            print(f"{prefetch}: a layer computes {1e3 * layer_seconds:.2f} ms, {LINK} is {rate / 1e6:.1f} MB/s here")
            for budget in plan.budgets:
                rounds: list[dict[int, dict[str, float]]] = []
                for number in range(plan.rounds):
                    order = plan.slots if number % 2 == 0 else plan.slots[::-1]
                    rounds.append({})
                    for slots in order:
                        rounds[-1][slots], tokens = measure(llm, budget, slots, rate / 1e9, plan)
                        if tokens != expected:
                            raise SystemExit(f"{slots} slots at {budget} answered otherwise: the numbers mean nothing")
                results[f"{prefetch}, {budget}"] = {slots: summary(rounds, slots) for slots in plan.slots}
                show(f"{Path(plan.model).name}, {prefetch}, {budget}", results[f"{prefetch}, {budget}"])
    print(json.dumps({"model": plan.model, "rounds": plan.rounds, "cases": results}))


def summary(rounds: list[dict[int, dict[str, float]]], slots: int) -> dict[str, float]:
    """Medians over the rounds; times also as ratios to the same round's two slots."""
    found = {name: statistics.median(r[slots][name] for r in rounds) for name in rounds[0][slots]}
    for name in ("prefill_ms", "decode_ms"):
        ratios = sorted(r[slots][name] / r[BASE][name] for r in rounds)
        found[f"{name}_ratio"] = statistics.median(ratios)
        found[f"{name}_ratio_low"], found[f"{name}_ratio_high"] = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
    return found


def show(title: str, cases: dict[int, dict[str, float]]) -> None:
    """One table."""
    table = Table(title=title)
    for head in ("slots", "prefill ms", "x of 2 (quartiles)", "link used", "decode ms", "x of 2 (quartiles)", "hits"):
        table.add_column(head, justify="right")
    for slots, case in cases.items():
        row = [str(slots)]
        for name in ("prefill_ms", "decode_ms"):
            low, middle, high = (case[f"{name}_ratio{end}"] for end in ("_low", "", "_high"))
            row += [f"{case[name]:.1f}", f"{middle:.3f} ({low:.3f} to {high:.3f})"]
            row += [f"{case['prefill_link_used']:.0%}"] if name == "prefill_ms" else [f"{case['hit_rate']:.1%}"]
        table.add_row(*row)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
