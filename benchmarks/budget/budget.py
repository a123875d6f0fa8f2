"""What does a byte budget cost, and what does it save? vLLM and this plugin, by one command.

A synthetic model with the layer shapes of Qwen3-30B-A3B is written once, at 16 bits, and `vllm-dymoe bench` asks each
policy random prompts. Puts its table into this folder's README, and a shorter one into the project's.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import model

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))
import torch  # noqa: E402
from readme import markdown, put  # noqa: E402

from vllm_dymoe.bench.rows import ROWS, is_full_load, read_rows  # noqa: E402

BUDGETS = ("top-k", "25%", "50%", "100%")
OTHERS = (
    {"label": "all in memory", "policy": "exact", "host_store": "pinned"},
    {"label": "all in memory, dense layers at 8 bits", "policy": "exact", "host_store": "pinned", "dense": 8},
)
SAME = tuple(other["label"] for other in OTHERS)  # their rows differ little from budget to budget
QUALITY = HERE.parent / "quality" / "results.json"


def bench(folder: Path, out: Path, *options: str) -> None:
    """One run of the command; rows that `out` has are not measured again."""
    command = [Path(sys.executable).with_name("vllm-dymoe"), "bench", folder, "--out", out]
    command += ["--peer", "vllm", *options]
    command += [part for policy in ("exact", *map(json.dumps, OTHERS)) for part in ("--policy", policy)]
    command += ["--prompts", "random:32", "--max-tokens", "24", "--engine", '{"max_model_len": 256}']
    command += [part for budget in BUDGETS for part in ("--budget", budget)]
    environment = os.environ | {"DYMOE_STORE_DIR": str(folder.parent / "stores")}
    subprocess.run([str(part) for part in command], check=True, env=environment)


def table(rows: Sequence[dict[str, Any]], everything: int) -> str:
    """The front page's: speed and quality over the bytes of experts on the device, of ``everything`` at 16 bits."""
    uniform = json.loads(QUALITY.read_text())["sections"]["uniform"]
    (four_bits,) = (row for row in uniform if (row["bits"], row["quantizer"]) == (4, "rtn"))
    batch = {(row["label"], row["budget"]): row["measured"]["tokens_per_second"] for row in rows if row["batch"] > 1}
    lines = []
    for row in sorted(rows, key=lambda row: row["options"] is not None):
        if row["batch"] > 1 or is_full_load(row) or (row["label"] in SAME and row["budget"] not in ("top-k", "100%")):
            continue
        measured, ours, dense = row["measured"], row["options"] is not None, "dense" in (row["options"] or {})
        label = "" if row["label"] == "exact" else f", {row['label']}"
        together = batch.get((row["label"], row["budget"]))
        held = measured["decode"]["peak_expert_bytes"] if ours else everything
        lines.append([
            f"dymoe, {row['budget']}{label}" if ours else "vLLM, all in memory",
            f"{held / 1e9:.3g}",
            f"{measured['ttft_ms']['median']:.0f}",
            f"{measured['tpot_ms']['median']:.1f}", "" if together is None else f"{together:.1f}",
            "" if dense else f"{four_bits['agreement'] if ours else 1:.0%}",
        ])  # fmt: skip
    head = ["", "experts on device, GB", "TTFT ms", "TPOT ms", "batch of 16, tokens/s", "likeliest token as at 16 bits"]
    return markdown(head, lines)


def main() -> None:
    """Prepare, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6, help="6 layers are 7.5 GB at 16 bits")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "dymoe-budget", help="for models")
    arguments = parser.parse_args()
    folder, out = arguments.work / f"qwen3-{arguments.layers}-layers", arguments.work / f"rows-{arguments.layers}"
    if not (folder / "config.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        model.write(folder, arguments.layers)
    bench(folder, out / "alone", "--batch", "1", "--requests", "8", "--warm-up", "1")
    bench(folder, out / "together", "--batch", "16", "--requests", "32", "--warm-up", "16")
    rows = [row for name in ("alone", "together") for row in read_rows(out / name / ROWS) if row["kind"] == "speed"]
    weights = arguments.layers * model.EXPERTS * 3 * model.HIDDEN * model.INTERMEDIATE
    bf16 = "with" if torch.cpu._is_avx512_bf16_supported() else "without"
    machine = f"{platform.machine()} CPU {bf16} bf16 instructions, {os.cpu_count()} cores"
    said = f"{arguments.layers} layers, {machine}, one run."
    single, batch = ((out / name / "table.md").read_text().rstrip() for name in ("alone", "together"))
    tables = (single.replace(str(folder), "one at a time"), batch.replace(str(folder), "together"), said)
    put(HERE / "README.md", "results", "\n\n".join(tables))
    put(HERE.parents[1] / "README.md", "budget", f"{table(rows, 2 * weights)}\n\n{said}")


if __name__ == "__main__":
    main()
