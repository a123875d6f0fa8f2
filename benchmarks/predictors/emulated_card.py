"""How much of the link's time do policies and predictors hide? Time per token on an emulated card.

    python benchmarks/predictors/emulated_card.py [--work FOLDER] [--requests 4]

The shipped model decodes behind an emulated link (``link_gbps``) with a quarter of its experts' bytes, planned as on a
GPU. The link's rate follows from the sizes of Qwen3-30B-A3B on PCIe 4: an expert of 4 bits (2.7 MB at 25 GB/s, 106 us)
takes about as long as a layer of an RTX 4090 with every expert resident. Here an expert takes as long as a layer of
this machine's emulated card with every expert resident, which is measured first.

Beside each time stands its bound: the link's time for what has to cross it, or the time with every expert resident if
that is longer. Where all misses are fetched that is their bytes, which prefetch does not change; where the CPU computes
some it is what has crossed the link. ``vllm-dymoe bench`` refuses to report if answers are not the same.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent))

from predictors import MODEL, recorded

RESULTS = Path(__file__).with_name("emulated_card.json")
LAYERS, TOP_K = 8, 4
_COMMAND = Path(sys.executable).with_name("vllm-dymoe")


def policies(predictor: Path) -> list[dict[str, Any]]:
    """The rows of the table, as ``vllm-dymoe bench`` takes them."""
    trained = {"predictor": str(predictor)}
    ways: list[tuple[str, dict[str, Any]]] = [
        ("on-demand", {"policy": "on-demand"}),
        ("duoserve, popularity", {"policy": "duoserve", "expert_budget": "25%"}),
        ("duoserve, linear+input", {"policy": "duoserve", "expert_budget": "25%", **trained}),
        ("firm", {"policy": "firm"}),
        ("exact, nothing ahead", {"policy": "exact", "policy_options": {"look_ahead": 0}}),
        ("exact, next gate", {"policy": "exact"}),
        ("exact, linear+input", {"policy": "exact", **trained}),
    ]
    return [
        {"label": f"{label}; {misses}", "misses": misses, **options}
        for misses in ("fetch", "share")
        for label, options in ways
    ]


def bench(rows: list[dict[str, Any]], budget: str, link: float, out: Path, requests: int) -> list[dict[str, Any]]:
    """Rows of ``vllm-dymoe bench`` behind a link of so many bytes per second."""
    command = [str(_COMMAND), "bench", str(MODEL), "--budget", budget, "--link", f"{link / 1e6:.4g}MB/s"]
    for row in rows:
        command += ["--policy", json.dumps(row)]
    command += ["--requests", str(requests), "--warm-up", "2", "--max-tokens", "48", "--out", str(out)]
    command += ["--options", json.dumps({"high": 4, "host_store": "pinned", "planning": "device"})]
    subprocess.run([*command, "--engine", json.dumps({"enforce_eager": True, "max_model_len": 512})], check=True)
    found: list[dict[str, Any]] = json.loads((out / "table.json").read_text())
    return found


def expert_bytes() -> int:
    """Bytes of an expert of the shipped model at 4 bits."""
    from vllm_dymoe.plan.model import read_shape

    return read_shape(str(MODEL)).packed((4,)).formats[4].whole_nbytes


def main() -> int:
    """Print the table, and write it to emulated_card.json, which the README quotes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "dymoe-predictors", help="a trace")
    parser.add_argument("--requests", type=int, default=4)
    plan = parser.parse_args()
    work = plan.work.resolve()
    recorded(work)
    predictor = work / "linear.safetensors"
    if not predictor.is_file():
        subprocess.run([str(_COMMAND), "train", str(work / "trace"), "--out", str(predictor)], check=True)
    everything = {"label": "everything resident", "policy": "exact", "policy_options": {"look_ahead": 0}}
    (full,) = bench([everything], "100%", 1e9, work / "full", plan.requests)
    link = expert_bytes() * LAYERS / (full["TPOT ms"] / 1e3)
    rows = []
    print("| policy | misses | ms a token | bound | ratio | hits | MB a token on demand, ahead |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for row in bench(policies(predictor), "25%", link, work / "quarter", plan.requests):
        label, misses = row["policy"].split(", behind")[0].rsplit("; ", 1)
        misses = misses.split(",")[0]
        moved = 1e6 * (row["demand MB/token"] + row["ahead"])
        if misses == "fetch":  # what is fetched ahead for nothing is not in the bound
            moved = (1 - row["hits"]) * TOP_K * LAYERS * expert_bytes()
        bound = max(full["TPOT ms"], 1e3 * moved / link)
        found = {"policy": label, "misses": misses, "ms": row["TPOT ms"], "bound_ms": bound, "hits": row["hits"]}
        rows.append(found | {"demand_mb": row["demand MB/token"], "ahead_mb": row["ahead"]})
        print(f"| {label} | {misses} | {row['TPOT ms']:.1f} | {bound:.1f} | {row['TPOT ms'] / bound:.2f} | "
              f"{row['hits']:.0%} | {row['demand MB/token']:.2f}, {row['ahead']:.2f} |")  # fmt: skip
    results = {"full_ms": full["TPOT ms"], "link_mb_s": link / 1e6, "rows": rows}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
