"""Where every request wants every expert: how fast are versions that are there, beside experts that are fetched?

DynaExq's Figures 1 and 6 to 10, in real engines behind an emulated link, through ``vllm_dymoe.bench``. Domains follow
one another, so that versions go on moving. The same command goes on where it was interrupted. Writes speed.json,
speed.png and README.md's tables, and nothing where systems of one precision answer otherwise.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from speed_report import report
from texts import DOMAINS, MODEL, pieces
from transformers import AutoTokenizer

from vllm_dymoe.bench.cases import FULL, Case, Subject, Workload, full_load
from vllm_dymoe.bench.check import check_outputs
from vllm_dymoe.bench.prompts import Prompt, PromptSet
from vllm_dymoe.bench.rows import Row, append_row, read_rows
from vllm_dymoe.bench.run import environment, measure
from vllm_dymoe.cli.bench import over
from vllm_dymoe.plan.model import read_shape

HERE = Path(__file__).resolve().parent
LINK = "a6000"  # the paper's GPU, behind PCIe 4
BUDGET = "67%"  # every expert at 2 bits, and a quarter of them at 4
ENGINE = {"max_model_len": 512}
HI = {"hi": 4, "lo": 0, "system": "exact"}
FULL_LOAD = full_load(HI)
SUBJECTS = [
    Subject("fetching", HI | {"system_options": {"look_ahead": 0}}),
    Subject("fetching ahead", HI),
    Subject("dynaexq", {"hi": 4, "lo": 2, "system": "dynaexq"}),
]
BATCHES = (1, 4, 8, 16, 32)
PROMPT, ANSWER, GROUPS = 48, 64, 1  # tokens; groups of requests from each domain
LENGTHS = ((16, 16), (64, 16), (448, 16), (64, 128))  # of prompts and answers
PLANE_BATCHES = (1, 32)


def workload(name: str, prompt: int, answer: int, group: int, groups: int) -> tuple[Workload, PromptSet]:
    """Requests in groups, domain after domain, behind one group of warm-up.

    Args:
        name: of the set.
        prompt: tokens of each.
        answer: tokens of each.
        group: requests at once.
        groups: of each domain.
    """
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    wanted = {domain: group * groups for domain in DOMAINS}
    wanted[DOMAINS[0]] += group
    rows = [ids for domain in DOMAINS for ids in pieces(domain, tokenizer, prompt)[: wanted[domain]]]
    asked = PromptSet(name, tuple(Prompt(tokenizer.decode(ids)) for ids in rows))
    requests = group * groups * len(DOMAINS)
    return Workload(asked.digest, name, False, requests, group, answer, temperature=1.0), asked


def measure_speeds(folder: Path, batches: Sequence[int], lengths: Sequence[tuple[int, int]]) -> list[Row]:
    """Rows of every system at every batch, and at every pair of lengths."""
    base, asked = workload("by domain", PROMPT, ANSWER, 1, GROUPS)
    (full,) = measure([Case(str(MODEL), FULL_LOAD, FULL, 1, base, ENGINE)], asked, folder)
    shape = read_shape(str(MODEL))
    seconds = full["measured"]["tpot_ms"]["mean"] / 1e3 / shape.layers
    subjects = list(over(LINK, SUBJECTS, shape, seconds))
    rows = []
    for batch in batches:
        what, asked = workload("by domain", PROMPT, ANSWER, batch, GROUPS)
        cases = [Case(str(MODEL), subject, BUDGET, batch, what, ENGINE) for subject in subjects]
        cases.append(Case(str(MODEL), FULL_LOAD, FULL, batch, what, ENGINE))
        rows += measure(cases, asked, folder, progress=said)
    for prompt, answer in lengths:
        what, asked = workload(f"{prompt} and {answer} tokens", prompt, answer, 1, 2)
        rows += measure([Case(str(MODEL), s, BUDGET, 1, what, ENGINE) for s in subjects], asked, folder, progress=said)
    return rows


def said(label: str, done: int, total: int) -> None:
    """A line for each engine that starts."""
    if label:
        print(f"{done} of {total} rows; {label} ...", file=sys.stderr, flush=True)


def measure_plane(folder: Path, link_gbps: float, batches: Sequence[int]) -> Iterator[Row]:
    """What planning and moving cost a step, each in an engine of its own."""
    path = folder / "plane.jsonl"
    for batch in batches:
        for moves in (False, True):
            key = f"{batch}, {'moving' if moves else 'still'}"
            known = {row["key"]: row for row in read_rows(path)}
            if key not in known:
                said(f"the plane at batch {key}", 0, 1)
                job = {"batch": batch, "moves": moves, "link_gbps": link_gbps, "budget": BUDGET}
                command = [sys.executable, str(HERE / "plane.py"), json.dumps(job)]
                found = subprocess.run(command, env=environment(), check=True, stdout=subprocess.PIPE, text=True)
                append_row(path, {"key": key} | json.loads(found.stdout.splitlines()[-1]))
            yield {row["key"]: row for row in read_rows(path)}[key]


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, default=Path("hotness-rows"), help="folder for rows, to go on with")
    parser.add_argument("--batches", type=int, nargs="*", default=BATCHES, help="a part of it, for a short while")
    parser.add_argument("--lengths", type=int, nargs="*", default=range(len(LENGTHS)), help="by number, from 0")
    parser.add_argument("--plane", type=int, nargs="*", default=PLANE_BATCHES, help="batches")
    parser.add_argument("--no-readme", action="store_true", help="leave README.md and its like as they are")
    asked = parser.parse_args()
    os.environ.setdefault("DYMOE_STORE_DIR", str(asked.rows.resolve() / "stores"))
    # One core computes. Another copies: behind a GPU's link a copy takes nothing from computation.
    os.environ.update(OMP_NUM_THREADS="1", VLLM_CPU_OMP_THREADS_BIND="nobind")
    rows = measure_speeds(asked.rows, asked.batches, [LENGTHS[number] for number in asked.lengths])
    compared = check_outputs(rows)
    link_gbps = next(row["options"]["link_gbps"] for row in rows if row["label"] == "dynaexq")
    plane = list(measure_plane(asked.rows, link_gbps, asked.plane))
    results: dict[str, Any] = {
        "model": MODEL.name,
        "link": LINK,
        "link_bytes_per_second": link_gbps * 1e9,
        "budget": BUDGET,
        "answers_compared": compared,
        "rows": rows,
        "plane": plane,
    }
    print(json.dumps(report(results, None if asked.no_readme else HERE)))


if __name__ == "__main__":
    main()
