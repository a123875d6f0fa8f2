"""How far is a plan from what was measured? Predicts the rows of benchmarks/ablation, and writes the README's table.

Of that run the plan knows what a token takes with every expert resident, and the rate of the emulated link. What
routers choose is made up, as where nobody has recorded a trace.
"""

import json
import sys
from pathlib import Path
from typing import Any

from vllm_dymoe.cli.plan import LOCALITY, SKEW
from vllm_dymoe.plan.device import Device, FullLoad
from vllm_dymoe.plan.errors import Compared, compare, median_error, reversed_rankings
from vllm_dymoe.plan.model import read_shape
from vllm_dymoe.plan.replay import stated_skew
from vllm_dymoe.traces import TraceHeader

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))
from readme import markdown, put  # noqa: E402

MODEL = HERE.parent / "tiny_moe" / "model"
PROMPT = 24  # tokens, about
# Rows of that run whose systems a user can choose.
SYSTEMS: dict[str, dict[str, Any]] = {
    "on-demand": {"system": "on-demand"},
    "cache": {"system_options": {"look_ahead": 0}},
    "next-gate": {},
    "4/2": {"lo": 2, "system": "dymoe", "system_options": {"look_ahead": 0}},
    "4/2, next-gate": {"lo": 2, "system": "dymoe"},
    "4/0, next-gate": {"system": "dymoe"},
    "firm, n = 2": {"system": "firm"},
}


def compared() -> list[Compared]:
    """Every row of the shipped model."""
    data = json.loads((HERE.parent / "ablation" / "results.json").read_text())["models"]["shipped"]
    shape, resident = read_shape(str(MODEL)), data["resident"]
    full = FullLoad({(4, 1): resident["tpot_ms"] / 1e3}, {(4, 1): resident["ttft_ms"] / 1e3}, {(4, 1): PROMPT})
    device = Device("this machine", 0, 1.0, 1.0, 1.0, measured=full)
    header = TraceHeader("shipped", "", shape.moe_layers, shape.experts, shape.top_k, shape.hidden)
    rows = [
        {
            "kind": "speed", "label": name, "budget": budget, "batch": 1,
            "options": SYSTEMS[name] | {"link_gbps": link["gbps"]},
            "measured": {"tpot_ms": {"mean": case["tpot_ms"]}, "prompt_tokens": [PROMPT]},
        }
        for link in data["links"].values()
        for budget, cases in link["cases"].items()
        for name, case in cases.items()
        if name in SYSTEMS
    ]  # fmt: skip
    return compare(rows, shape, device, {1: stated_skew(header, 1, SKEW, LOCALITY)})


def main() -> None:
    """Write the table."""
    found = compared()
    lines = [
        [row.label, row.budget, f"{row.link / 1e6:.1f}", f"{1e3 * row.predicted:.1f}", f"{1e3 * row.measured:.1f}",
         f"{row.error:+.0%}"]
        for row in found
    ]  # fmt: skip
    head = ["", "budget", "link MB/s", "predicted ms", "measured ms", "error"]
    said = (
        f"{len(found)} rows, median error {median_error(found):.1%}, {len(reversed_rankings(found))} rankings reversed."
    )
    put(HERE / "README.md", "errors", f"{said}\n\n{markdown(head, lines)}")
    print(json.dumps({"rows": len(found), "median_error": median_error(found)}))


if __name__ == "__main__":
    main()
