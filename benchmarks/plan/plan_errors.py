"""How far is a plan from what was measured? Runs `vllm-dymoe bench` on two models over emulated links, and compares.

The shipped model answers its prompts; layers with the shapes of Qwen3-30B-A3B and random weights answer random ones.
Of a run the plan knows what a token takes with every expert resident, with each system's choices and without, what a
miss costs the host (on-demand), and the rate of the link; these rows are not compared. What routers choose is made up:
as where nobody has recorded a trace for the shipped model, and evenly for the random one. Every row is measured twice
and the faster one counts, since whoever shares the machine can only make it slower. With --measured only the table is
written anew.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm_dymoe.bench.rows import Row, read_rows
from vllm_dymoe.bench.run import ROWS
from vllm_dymoe.cli.plan import LOCALITY, SKEW
from vllm_dymoe.plan.device import measured_device
from vllm_dymoe.plan.errors import Compared, compare, median_error, reversed_rankings
from vllm_dymoe.plan.model import ModelShape, read_shape
from vllm_dymoe.plan.replay import stated_skew
from vllm_dymoe.traces import TraceHeader

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE.parent), str(HERE.parent / "budget")]
import model  # noqa: E402
from readme import markdown, put  # noqa: E402
from twice import twice  # noqa: E402

SHIPPED, LAYERS = HERE.parent / "tiny_moe" / "model", 4
ROUTERS = {"shipped": (SKEW, LOCALITY), "random": (0.0, 0.0)}
CACHE = '{"label": "cache", "system_options": {"look_ahead": 0}}'
FIXED = ("on-demand", CACHE, "exact", "firm")
MIXED = ('{"label": "4/2", "system": "dymoe", "lo": 2}', '{"label": "4/0", "system": "dymoe"}')


def bench(folder: Path, out: Path, link: str, budgets: tuple[str, ...], systems: tuple[str, ...], *more: str) -> None:
    """One run of the command; rows that `out` has are not measured again."""
    command: list[Any] = [Path(sys.executable).with_name("vllm-dymoe"), "bench", folder, "--out", out, "--link", link]
    command += ["--requests", "8", "--warm-up", "2", "--max-tokens", "24", "--engine", '{"max_model_len": 256}', *more]
    command += [part for budget in budgets for part in ("--budget", budget)]
    command += [part for system in systems for part in ("--system", system)]
    subprocess.run([str(part) for part in command], check=True)


def measure(work: Path) -> dict[str, list[Row]]:
    """Every row that a plan is compared with, by model."""
    os.environ["DYMOE_STORE_DIR"] = str(work / "stores")
    # One core computes. Another copies: behind a GPU's link a copy takes nothing from computation.
    os.environ.update(OMP_NUM_THREADS="1", VLLM_CPU_OMP_THREADS_BIND="nobind")
    folder = work / f"qwen3-{LAYERS}-layers"
    if not (folder / "config.json").exists():
        model.write(folder, LAYERS)

    def shipped(out: Path) -> None:
        bench(SHIPPED, out, "rtx3090", ("25%", "50%", "75%", "100%"), FIXED + MIXED)
        bench(SHIPPED, out, "h100", ("25%",), FIXED)

    def random(out: Path) -> None:
        bench(folder, out, "rtx3090", ("25%", "75%"), FIXED, "--prompts", "random:24")

    twice(shipped, work / "shipped", same_link=True)
    twice(random, work / "random", same_link=True)
    return {name: [_kept(row) for row in read_rows(work / name / ROWS)] for name in ROUTERS}


def _kept(row: Row) -> Row:
    """What predictions are made from and compared with."""
    if row["kind"] != "speed":
        return row
    kept = {name: row[name] for name in ("kind", "label", "budget", "batch", "options")}
    measured = row["measured"]
    decode = measured["decode"]
    counted = {"decode_steps": measured["decode_steps"],
               "decode": {"misses": decode["misses"], "bytes_moved": decode["bytes_moved"]}}  # fmt: skip
    times = {name: {kind: round(measured[name][kind], 3) for kind in ("median", "mean")}
             for name in ("ttft_ms", "tpot_ms")}  # fmt: skip
    times["tpot_ms"]["runs"] = [round(ms, 3) for ms in measured["tpot_ms"]["runs"]]
    return kept | {"measured": times | counted | {"prompt_tokens": measured["prompt_tokens"]}}


def compared(results: dict[str, Any]) -> dict[str, list[Compared]]:
    """Every row of each model, predicted now."""
    found = {}
    for name, rows in results.items():
        shape = read_shape(str(SHIPPED)) if name == "shipped" else _random()
        header = TraceHeader(name, "", shape.moe_layers, shape.experts, shape.top_k, shape.hidden)
        routings = {1: stated_skew(header, 1, *ROUTERS[name])}
        found[name] = compare(rows, shape, measured_device(rows, name), routings)
    return found


def reversed_in_both(rows: Sequence[Compared], measured: Sequence[Row]) -> set[tuple[str, str, str, float]]:
    """Systems, budget and link where a plan ranks them the other way round than both runs did."""
    runs = {(row["label"], row["budget"], row["options"]["link_gbps"] * 1e9): row["measured"]["tpot_ms"]["runs"]
            for row in measured if "link_gbps" in row.get("options", {})}  # fmt: skip
    found = []
    for run in range(2):
        alone = [replace(row, measured=runs[row.label, row.budget, row.link][run] / 1e3) for row in rows]
        found.append({(one.label, other.label, one.budget, one.link) for one, other in reversed_rankings(alone)})
    return found[0] & found[1]


def _random() -> ModelShape:
    """Of the model with random weights, from its config.json alone."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(model.config(LAYERS)))
        return read_shape(folder)


def said(what: str, rows: Sequence[Compared]) -> str:
    """How far off."""
    largest = max(abs(row.error) for row in rows)
    return f"{what}: {len(rows)} rows, median error {median_error(rows):.1%}, largest {largest:.0%}."


def write(results: dict[str, Any], readme: Path) -> None:
    """The table of errors."""
    found = compared(results)
    parts = [said("Both models", [row for rows in found.values() for row in rows])]
    for name, rows in found.items():
        lines = [
            [row.label, row.budget, f"{row.link / 1e6:.1f}", f"{1e3 * row.predicted:.1f}", f"{1e3 * row.measured:.1f}",
             f"{row.error:+.0%}"]
            for row in rows
        ]  # fmt: skip
        head = [f"{name} model", "budget", "link MB/s", "predicted ms", "measured ms", "error"]
        wrong = len(reversed_in_both(rows, results[name]))
        parts += [f"{said(f'The {name} model', rows)} {wrong} clear rankings are reversed.", markdown(head, lines)]
    put(readme, "errors", "\n\n".join(parts))


def main() -> None:
    """Measure, compare, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measured", action="store_true", help="compare with the rows of the last run")
    parser.add_argument(
        "--work", type=Path, default=Path(tempfile.gettempdir()) / "dymoe-plan", help="for models, rows"
    )
    arguments = parser.parse_args()
    if not arguments.measured:
        (HERE / "results.json").write_text(json.dumps(measure(arguments.work), indent=1) + "\n")
    write(json.loads((HERE / "results.json").read_text()), HERE / "README.md")


if __name__ == "__main__":
    main()
