"""Eight models on eight machines, and what the plugin chooses for each.

    python -m tests.plan.starts.pairs     # writes chosen.json, in five minutes

The results are tested, and docs/serve.md shows them in a table. The models' configurations are the published ones,
without weights; machines are described as a measurement would describe them.
"""

import json
from pathlib import Path
from typing import Any

from vllm_dymoe.plan.machine import read_machine
from vllm_dymoe.plan.ranks import Ranks
from vllm_dymoe.plan.start import Asked, Planner, choose, read_model

HERE = Path(__file__).resolve().parent
CHOSEN = HERE / "chosen.json"
PAIRS: dict[str, tuple[str, Asked]] = {
    "rtx3060-desktop": ("Qwen3-30B-A3B", Asked()),
    "rtx4060ti-laptop": ("DeepSeek-V2-Lite", Asked()),
    "rtx4090-desktop": ("Mixtral-8x7B-v0.1", Asked()),
    "rtx5090-workstation": ("gpt-oss-120b", Asked()),
    "h100-server": ("Qwen3-235B-A22B", Asked(max_num_seqs=4)),
    "two-a6000": ("GLM-4.5-Air", Asked(ranks=Ranks(tp=2))),
    "cpu-16-cores": ("OLMoE-1B-7B-0924", Asked()),
    "cpu-8-gib": ("Qwen3-30B-A3B", Asked()),
}


def planner(machine: str) -> Planner:
    name, asked = PAIRS[machine]
    model = read_model(str(HERE / "models" / name))
    return Planner(read_machine(HERE / "machines" / f"{machine}.json"), model, asked)


def chosen(machine: str) -> dict[str, Any]:
    """Choose options for a machine's model; return what is committed."""
    made = planner(machine)
    start = choose(made.machine, made.model, made.asked)
    why = {subject: [what, reason] for subject, what, reason in start.reasons}
    return {
        "model": PAIRS[machine][0], "options": dict(start.options), "arguments": dict(start.arguments), "why": why,
        "tokens_per_second": round(start.tokens_per_second, 2), "ttft": round(start.ttft, 3),
    }  # fmt: skip


def times_best(machine: str) -> float:
    """How many times as long as with the best candidate a decode step takes.

    Only candidates with answers that are good enough count.
    """
    made = planner(machine)
    *_, planned = made.chosen()
    everything = [one for one in made.candidates(all_of_them=True) if made.good(one[0], one[2].choice)]
    return planned.choice.tpot / min(one.choice.tpot for *_, one in everything)


if __name__ == "__main__":
    found = {machine: {**chosen(machine), "times_best": round(times_best(machine), 3)} for machine in PAIRS}
    CHOSEN.write_text(json.dumps(found, indent=1) + "\n")
