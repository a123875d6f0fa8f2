"""``vllm-dymoe bench --paper``: the tables and figures of one paper, its numbers beside ours."""

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors import safe_open

from vllm_dymoe.bench.cases import FULL, Subject, Workload, grid
from vllm_dymoe.bench.check import check_outputs
from vllm_dymoe.bench.papers import PAPERS
from vllm_dymoe.bench.papers.base import TRAINED, At, Quality, Recorded
from vllm_dymoe.bench.papers.compare import as_markdown, cases_of, fill, lines
from vllm_dymoe.bench.papers.duoserve import RECIPE
from vllm_dymoe.bench.plots import draw
from vllm_dymoe.bench.prompts import PromptSet, by_turns
from vllm_dymoe.bench.quality import available, score
from vllm_dymoe.bench.rows import Row
from vllm_dymoe.bench.run import environment, measure
from vllm_dymoe.bench.systems import make_known
from vllm_dymoe.cli.bench import over, progress
from vllm_dymoe.cli.trace import write_prompts
from vllm_dymoe.cli.train import write
from vllm_dymoe.config import ConfigError
from vllm_dymoe.observe.trace import Trace
from vllm_dymoe.plan.model import ModelShape, read_shape
from vllm_dymoe.training import TrainingError

_RECORDED_TOKENS = 128  # of an answer at least: networks learn from them
_GATE = re.compile(r"layers\.(\d+)\..*\b(?:gate|router)\.weight$")


def run(
    paper: str,
    model: str,
    asked: PromptSet,
    workload: Workload,
    *,
    link: str | None,
    tasks: Sequence[str],
    limit: int | None,
    include: Path | None,
    engine: Mapping[str, Any],
    out: Path,
) -> None:
    """Measure what is missing of a paper's rows, and show its tables.

    Raises:
        ConfigError: the paper is not known, an engine has failed, or answers differ.
    """
    if paper not in PAPERS:
        raise ConfigError(f"{paper} is none of the papers: {', '.join(PAPERS)}.")
    make_known()
    shape, console = read_shape(model), Console()
    tables = list(PAPERS[paper](shape.moe_layers))
    rows: dict[str, Row] = {}

    @cache
    def recorded() -> Recorded:
        return _record(model, asked, workload, engine, out, shape)

    @cache
    def trained() -> str:
        try:
            return str(_train(recorded().trace, workload.warm_up + workload.requests, out))
        except ValueError as error:
            raise ConfigError(f"The paper's network cannot be trained: {error}.") from error

    with progress() as advance:
        rate = None
        if link is not None:
            full = grid(model, [Subject("", {})], [FULL], [1], workload, engine)[-1:]
            (found,) = measure(full, asked, out, progress=advance)
            rate = found["measured"]["tpot_ms"]["mean"] / 1e3 / shape.layers

        def change(subject: Subject) -> Subject:
            if (subject.options or {}).get("predictor") == TRAINED:
                subject = replace(subject, options={**(subject.options or {}), "predictor": trained()})
            return subject if link is None or rate is None else next(over(link, [subject], shape, rate))

        cases = cases_of(tables, model, workload, engine, change)
        rows = {row["key"]: row for row in measure(cases, asked, out, progress=advance)}
    check_outputs(rows.values())

    def row_of(subject: Subject, at: At) -> Row:
        return rows[at.case(change(replace(subject, budgets=None)), model, workload, engine).key]

    def scores(source: Quality) -> Mapping[str, float] | str:
        if not tasks:
            return "quality is measured where --tasks names tasks of lm-eval, or `paper` for those of the paper."
        if (why := available()) is not None:
            return why
        wanted = dict(source.tasks) if tasks == ["paper"] else {task: task for task in tasks}
        found = score(model, source.options, list(wanted.values()), out, limit=limit, include=include, engine=engine)
        return {column: found["scores"][task] for column, task in wanted.items()}

    filled = [(table, [fill(line, row_of, recorded, scores) for line in table.lines]) for table in tables]
    for table, body in filled:
        _print(console, f"{table.name}: {table.about}", *lines(table, body))
    page = out / f"{paper}.md"
    page.write_text(as_markdown(f"{paper} on {model}", filled))
    written = [page, *(draw(list(rows.values()), out) if rows else [])]
    console.print(f"Written: {', '.join(str(path) for path in written)}", soft_wrap=True)
    ours = sum(bool(row.ours) for _, body in filled for row in body)
    console.print(f"{ours} of {sum(len(body) for _, body in filled)} rows have numbers of ours.")


def _record(
    model: str, asked: PromptSet, workload: Workload, engine: Mapping[str, Any], out: Path, shape: ModelShape
) -> Recorded:
    """A trace of the prompts, recorded once, with the routers' inputs.

    Raises:
        ValueError: prompts are random, or recording failed.
    """
    if asked.is_random:
        raise ValueError("random prompts say nothing about routers")
    folder = out / "trace"
    if not list(folder.glob("*.safetensors")):
        prompts = out / "prompts.jsonl"
        write_prompts(prompts, [(prompt.text, prompt.domain) for prompt in by_turns(asked.prompts)])
        command = [Path(sys.executable).with_name("vllm-dymoe"), "trace", model, "--prompts", prompts, "--out", folder]
        length = str(max(workload.max_tokens, _RECORDED_TOKENS))
        command += ["--inputs", "--max-tokens", length, "--engine", json.dumps(dict(engine))]
        # Every expert stays high, and heavy hitters are recorded as well.
        command += ["--options", '{"system": "dymoe", "system_options": {"retention": 1}}']
        given = [str(part) for part in command]
        done = subprocess.run(given, capture_output=True, text=True, check=False, env=environment())
        if done.returncode:
            raise ValueError(f"the trace could not be recorded: {done.stderr[-500:]}")
    sizes = {"layers": shape.moe_layers, "experts": shape.experts, "top-k": shape.top_k}
    return Recorded(Trace.load(folder), gates_of(Path(model)), sizes)


def _train(trace: Trace, measured: int, out: Path) -> Path:
    """DuoServe-MoE's network from the requests behind those that are measured, trained once.

    Raises:
        TrainingError: there are too few.
    """
    path = out / "predictor.safetensors"
    if not path.exists():
        others = list(trace.by_request())[measured:]
        if not others:
            raise TrainingError(f"none of the prompts is left to learn from behind {measured} that are measured")
        write(trace.select(torch.cat(others)), out / "trace", path, architecture="paper-shared", recipe=RECIPE)
    return path


def gates_of(folder: Path) -> list[torch.Tensor]:
    """Routers' weights [experts, hidden] of a checkpoint, by layer; none where its names are others."""
    found: dict[int, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no dictionary
                if match := _GATE.search(name):
                    found[int(match[1])] = file.get_tensor(name)
    return [found[layer] for layer in sorted(found)]


def _print(console: Console, title: str, head: list[str], body: list[list[str]], notes: list[str]) -> None:
    table = Table(title=title, title_justify="left")
    for name in head:  # a narrow column for each number, so that what the rows are called stays whole
        table.add_column(name.replace(", ", "\n"), justify="right" if name else "left", no_wrap=not name)
    for line in body:
        table.add_row(*line)
    console.print(table)
    for note in notes:
        console.print(note, soft_wrap=True, highlight=False)
