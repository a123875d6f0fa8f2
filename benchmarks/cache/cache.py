"""Which experts is a cache to keep? Hits of each rule on what routers really chose, and the optimum.

Replays a trace token by token, as decode with one request would run it, with an equal share of slots for each layer.
The requests come in two orders: one domain after the other, and domains in turn, so that what is popular changes with
every request. Without ``--trace`` the shipped model is recorded first. Writes results.json and the README's tables.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from readme import markdown, put  # noqa: E402
from replay import POLICIES  # noqa: E402

from vllm_dymoe.residency import residency  # noqa: E402
from vllm_dymoe.traces import Trace  # noqa: E402

SHIPPED = HERE.parent / "tiny_moe" / "model"
SHARES = (8, 4, 8 / 3, 2, 4 / 3)  # of a layer's experts, one has a slot


def main() -> None:
    """Replay."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, help="file or folder of traces; the shipped model is recorded without")
    parser.add_argument("--requests", type=int, default=24, help="of each domain, to record")
    parser.add_argument("--new-tokens", type=int, default=96, help="of each request, to record")
    parser.add_argument("--aging", type=int, default=residency.AGING, help="heat loses 2 ** -AGING with each step")
    parser.add_argument("--no-readme", action="store_true", help="leave README.md and results.json as they are")
    arguments = parser.parse_args()
    residency.AGING = arguments.aging
    with tempfile.TemporaryDirectory() as work:
        trace = Trace.load(arguments.trace or record(Path(work), arguments.requests, arguments.new_tokens))
    results = measure(trace)
    if not arguments.no_readme:
        (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n")
        for order, rows in results["hit_rate"].items():
            put(HERE / "README.md", order, table(rows))
    print(json.dumps(results))


def record(work: Path, requests: int, tokens: int) -> Path:
    """A trace of the shipped model, which goes on from held-out texts of three domains."""
    command = [sys.executable, HERE.parent / "predictors" / "record.py", "--model", SHIPPED, "--out", work / "trace"]
    command += ["--requests", str(requests), "--new-tokens", str(tokens)]
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "DYMOE_STORE_DIR": str(work)}
    subprocess.run(command, check=True, stdout=sys.stderr, env=os.environ | environment)
    return work / "trace"


def measure(trace: Trace) -> dict[str, Any]:
    """Hit rates: by order of the requests, slots and rule, over all layers."""
    decoded = trace.select(~trace.prefill)
    experts = trace.header.num_experts
    slots = sorted({max(1, round(experts / share)) for share in SHARES})
    rates: dict[str, dict[str, dict[str, float]]] = {}
    for order, tokens in orders(decoded).items():
        routing = decoded.experts.numpy()[tokens]
        rates[order] = {str(count): {} for count in slots}
        for count in slots:
            for name, replay in POLICIES.items():
                hits = sum(replay(routing[:, layer], experts, count) for layer in range(routing.shape[1]))
                rates[order][str(count)][name] = hits / routing.size
            row = "  ".join(f"{name} {rate:.3f}" for name, rate in rates[order][str(count)].items())
            print(f"{order}, {count} of {experts} slots: {row}", file=sys.stderr)
    header = trace.header
    return {
        "model": Path(header.model).name,
        "layers": header.num_layers,
        "experts_per_layer": experts,
        "top_k": header.top_k,
        "tokens": decoded.num_tokens,
        "aging_shift": residency.AGING,
        "hit_rate": rates,
    }


def orders(trace: Trace) -> dict[str, np.ndarray]:
    """Tokens, request by request: "in turn" as they were recorded, "one after the other" sorted by domain."""
    requests = [tokens.numpy() for tokens in trace.by_request()]
    found = {"in-turn": np.concatenate(requests)}
    if trace.domain is not None:
        domains = trace.domain
        grouped = sorted(requests, key=lambda tokens: domains[int(trace.request[tokens[0]])])
        found["one-after-the-other"] = np.concatenate(grouped)
    return found


def table(rows: dict[str, dict[str, float]]) -> str:
    """Slots down, rules across."""
    return markdown(
        ["slots", *POLICIES],
        ([slots, *(f"{rate:.3f}" for rate in rates.values())] for slots, rates in rows.items()),
    )


if __name__ == "__main__":
    main()
