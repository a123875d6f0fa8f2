"""What does a byte budget cost in speed, and what does it save?

A synthetic model with the layer shapes of Qwen3-30B-A3B is written once, at 16 bits. Then `vllm-dymoe bench` measures
vLLM and every policy with random prompts. Results go into results.json and into the tables of this folder's README;
`make figures` draws the project's picture from them. ``--report`` only writes the tables again.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import model

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))
import torch  # noqa: E402
from readme import markdown, put  # noqa: E402

from vllm_dymoe.bench.rows import ROWS, read_rows  # noqa: E402
from vllm_dymoe.bench.table import cells  # noqa: E402

BUDGETS = ("top-k", "25%", "50%", "100%")
OTHERS = (
    {"label": "all in memory", "policy": "exact", "host_store": "pinned"},
    {"label": "all in memory, dense layers at 8 bits", "policy": "exact", "host_store": "pinned", "dense": 8},
)
SAME = tuple(other["label"] for other in OTHERS)  # the budget hardly changes their rows
PEER = "vllm"
ENGINE = {"max_model_len": 256, "enforce_eager": True}
COLUMNS = [
    "policy", "budget", "TTFT ms", "TPOT ms", "p99", "tokens/s", "of full load", "memory used", "experts peak MB",
    "device peak MB",
]  # fmt: skip
RESULTS = HERE / "results.json"
QUALITY = HERE.parent / "quality" / "results.json"


def bench(folder: Path, out: Path, *options: str) -> None:
    """Run the command once; rows in `out` are not measured again."""
    command = [Path(sys.executable).with_name("vllm-dymoe"), "bench", folder, "--out", out]
    command += ["--peer", PEER, *options]
    command += [part for policy in ("exact", *map(json.dumps, OTHERS)) for part in ("--policy", policy)]
    command += ["--prompts", "random:32", "--max-tokens", "24", "--engine", json.dumps(ENGINE)]
    command += [part for budget in BUDGETS for part in ("--budget", budget)]
    environment = os.environ | {"DYMOE_STORE_DIR": str(folder.parent / "stores")}
    subprocess.run([str(part) for part in command], check=True, env=environment)


def results(out: Path, layers: int) -> dict[str, Any]:
    """Return both runs as data.

    They are the numbers of `vllm-dymoe bench`, and tokens per second with prompts included.
    """
    rows, titles = [], {}
    for name in ("alone", "together"):
        measured = [row for row in read_rows(out / name / ROWS) if row["kind"] == "speed"]
        answered = {(row["label"], row["budget"]): row["measured"]["tokens_per_second"] for row in measured}
        for row in json.loads((out / name / "table.json").read_text()):
            rows.append({**row, "answered tokens/s": answered[row["policy"], row["budget"]]})
        title = (out / name / "table.md").read_text().partition("\n")[0]
        titles[str(rows[-1]["batch"])] = title.partition(": ")[2]
    bf16 = "with" if torch.cpu._is_avx512_bf16_supported() else "without"
    return {
        "layers": layers,
        "machine": f"{platform.machine()} CPU {bf16} bf16 instructions, {os.cpu_count()} cores",
        "runs": 1,
        "source": f"make bench-budget, {date.today()}",
        "expert_bytes_at_16_bits": 2 * layers * model.EXPERTS * 3 * model.HIDDEN * model.INTERMEDIATE,
        "titles": titles,
        "rows": rows,
    }


def summary(found: dict[str, Any]) -> str:
    """Return speed and quality by the bytes of experts on the device, in Markdown."""
    uniform = json.loads(QUALITY.read_text())["sections"]["uniform"]
    (four_bits,) = (row for row in uniform if (row["bits"], row["quantizer"]) == (4, "rtn"))
    rows = found["rows"]
    batch = {(row["policy"], row["budget"]): row["answered tokens/s"] for row in rows if row["batch"] > 1}
    lines = []
    for row in sorted(rows, key=lambda row: row["policy"] != PEER):
        name, budget = row["policy"], row["budget"]
        if row["batch"] > 1 or name.startswith("full load") or (name in SAME and budget not in ("top-k", "100%")):
            continue
        ours = name != PEER
        label = "" if name == "exact" else f", {name}"
        together = batch.get((name, budget))
        held = row["experts peak MB"] / 1e3 if ours else found["expert_bytes_at_16_bits"] / 1e9
        lines.append([
            f"dymoe, {budget}{label}" if ours else "vLLM, all in memory", f"{held:.3g}", f"{row['TTFT ms']:.0f}",
            f"{row['TPOT ms']:.1f}", "" if together is None else f"{together:.1f}",
            "" if "dense" in name else f"{four_bits['agreement'] if ours else 1:.0%}",
        ])  # fmt: skip
    head = ["", "experts on device, GB", "TTFT ms", "TPOT ms", "batch of 16, tokens/s", "likeliest token as at 16 bits"]
    return markdown(head, lines)


def report(found: dict[str, Any], readme: Path) -> None:
    """Write the tables of a page from the data."""
    said = f"{found['layers']} layers, {found['machine']}, one run ({found['source']})."
    put(readme, "summary", f"{summary(found)}\n\n{said}")
    parts = []
    for batch, title in found["titles"].items():
        rows = [cells({name: row[name] for name in COLUMNS}) for row in found["rows"] if row["batch"] == int(batch)]
        parts.append(f"Batch {batch}: {title}\n\n{markdown(COLUMNS, (list(row.values()) for row in rows))}")
    put(readme, "results", "\n\n".join(parts))


def main() -> None:
    """Prepare, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6, help="6 layers are 7.5 GB at 16 bits")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "dymoe-budget", help="for models")
    parser.add_argument("--report", action="store_true", help="measure nothing; write the tables from results.json")
    arguments = parser.parse_args()
    if arguments.report:
        report(json.loads(RESULTS.read_text()), HERE / "README.md")
        return
    folder, out = arguments.work / f"qwen3-{arguments.layers}-layers", arguments.work / f"rows-{arguments.layers}"
    if not (folder / "config.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        model.write(folder, arguments.layers)
    bench(folder, out / "alone", "--batch", "1", "--requests", "8", "--warm-up", "1")
    bench(folder, out / "together", "--batch", "16", "--requests", "32", "--warm-up", "16")
    found = results(out, arguments.layers)
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    report(found, HERE / "README.md")


if __name__ == "__main__":
    main()
