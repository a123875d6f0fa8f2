"""Does ``adaptive`` stay within 1.1 times dynaexq's time per token?

    python benchmarks/papers/emulated_card.py

The shipped model runs in vLLM on an emulated card. The link's rate follows from Qwen3-30B-A3B on an RTX 4090 behind
PCIe 4, where fetching a 4-bit expert takes about as long as a layer with every expert resident
(benchmarks/predictors/emulated_card.py). Here an expert takes as long as one of the eight layers under dynaexq, which
is measured first, behind a link that takes no time. Rounds alternate between the policies; the median of each counts.
Quality and slices are those of the same tokens. Results go into emulated_card.json, which README.md quotes.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

sys.path += [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1] / "quality")]

import torch
from quality import EXACT, Measurement
from rescues import SHARES, Kind, Rescues

RESULTS = Path(__file__).with_name("emulated_card.json")
QUANTIZER = "gptq"
ROUNDS = 2
_WINDOWS, _DECODED = 3, 96  # as in benchmarks/quality/quality.py


def measure(rescues: Rescues, layers: int, expert_bytes: int) -> Iterator[dict[str, Any]]:
    """Yield each policy's milliseconds, slices and KL.

    Results so far are yielded after each share of the residual slices.
    """
    rows: list[dict[str, Any]] = []
    decoded: dict[str, Any] = {"phases": (True,), "settles": True}
    unhindered = rescues.read(QUANTIZER, SHARES[0], Kind("", "dynaexq", {}), **decoded)["decode"]["ms"]
    link = expert_bytes / (1e-3 * unhindered / layers)
    for share in SHARES:
        kinds = [kind for kind in rescues.kinds(QUANTIZER, share) if kind.policy != "exact"]
        kinds.append(Kind("adaptive", "adaptive", {}))  # its threshold follows wait_share
        times: dict[str, list[float]] = {kind.name: [] for kind in kinds}
        found: dict[str, dict[str, Any]] = {}
        for _ in range(ROUNDS):
            for kind in kinds:
                of = rescues.read(QUANTIZER, share, kind, link_gbps=link / 1e9, **decoded)["decode"]
                times[kind.name].append(of["ms"])
                found[kind.name] = of
        for kind in kinds:
            kept = {name: found[kind.name][name] for name in ("kl_nats", "kl_error", "fetched_per_token")}
            row = {"residuals": share, "policy": kind.name, "ms": median(times[kind.name]), **kept}
            rows.append(row | {"rounds": [round(ms, 3) for ms in times[kind.name]]})
            print(row, flush=True)
        yield {"link_mb_s": link / 1e6, "quantizer": QUANTIZER, "rows": rows}


def main() -> None:
    torch.set_num_threads(1)
    measured = Measurement(_WINDOWS, _DECODED)
    reference = {True: measured.bench.score(EXACT, measured.texts[True], decode=True)}
    experts = measured.bench.store(f"nested {QUANTIZER}").experts
    for found in measure(Rescues(measured.bench, reference), len(experts.layers), experts.formats[4].whole_nbytes):
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
