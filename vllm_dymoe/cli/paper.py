"""``vllm-dymoe bench --paper``: the tables and figures of one paper, its numbers beside ours."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
import typer

from vllm_dymoe.bench.cases import Subject
from vllm_dymoe.bench.papers import PAPERS
from vllm_dymoe.bench.papers.duoserve import RECIPE
from vllm_dymoe.bench.papers.tables import TRAINED, At, Quality, as_markdown, cases_of, fill, lines
from vllm_dymoe.bench.prompts import by_turns
from vllm_dymoe.bench.quality import available, score
from vllm_dymoe.bench.rows import Row, check_outputs
from vllm_dymoe.bench.run import run_logged
from vllm_dymoe.cli.bench import Bench
from vllm_dymoe.cli.display import print_table
from vllm_dymoe.cli.train import write
from vllm_dymoe.config import ConfigError
from vllm_dymoe.observe.trace import Trace
from vllm_dymoe.training import TrainingError

_RECORDED_TOKENS = 128  # of an answer at least: networks learn from them


class Paper:
    """Where a paper's rows get their numbers."""

    def __init__(
        self,
        bench: Bench,
        link: str | None,  # that is emulated; None for the machine's
        tasks: Sequence[str],  # of lm-eval
        limit: int | None,  # questions of each
        include: Path | None,  # folder of tasks that lm-eval does not know
    ) -> None:
        self._bench, self._link = bench, link
        self._tasks, self._limit, self._include = tasks, limit, include
        self._rows: dict[str, Row] = {}

    def show(self, name: str) -> None:
        if name not in PAPERS:
            raise ConfigError(f"{name} is none of the papers: {', '.join(PAPERS)}.")
        bench = self._bench
        tables = list(PAPERS[name]())
        cases = cases_of(tables, bench.model, bench.workload, bench.engine, self._changed)
        rows = bench.measure(cases)
        check_outputs(rows)
        self._rows = {row["key"]: row for row in rows}
        filled = [
            (table, [fill(line, self._row, lambda: self.recorded, self._scores) for line in table.lines])
            for table in tables
        ]
        for table, body in filled:
            head, cells, notes = lines(table, body)
            # A narrow column for each number, so that what the rows are called stays whole.
            print_table(f"{table.name}: {table.about}", [name.replace(", ", "\n") for name in head], cells)
            typer.echo("".join(f"{note}\n" for note in notes), nl=False)
        page = bench.out / f"{name}.md"
        rounded = bench.options.get("quantizer", "rtn")
        page.write_text(as_markdown(f"{name} on {bench.model}, experts quantized by {rounded}", filled))
        typer.echo(f"Written: {page}")
        ours = [bool(numbers) for _, body in filled for numbers, _ in body]
        typer.echo(f"{sum(ours)} of {len(ours)} rows have numbers of ours.")

    def _changed(self, subject: Subject) -> Subject:
        """With the trained predictor where it is asked for, and behind the run's link."""
        if (options := subject.options or {}).get("predictor") == TRAINED:
            subject = replace(subject, options={**options, "predictor": str(self._predictor)})
        return subject if self._link is None else self._bench.behind(self._link, subject)

    def _row(self, subject: Subject, at: At) -> Row:
        bench = self._bench
        return self._rows[at.case(self._changed(subject), bench.model, bench.workload, bench.engine).key]

    def _scores(self, source: Quality) -> Mapping[str, float] | str:
        if not self._tasks:
            return "quality is measured where --tasks names tasks of lm-eval, or `paper` for those of the paper."
        if (why := available()) is not None:
            return why
        wanted = dict(source.tasks) if self._tasks == ["paper"] else {task: task for task in self._tasks}
        bench = self._bench
        found = score(
            bench.model, source.options, list(wanted.values()), bench.out,
            limit=self._limit, include=self._include, engine=bench.engine,
        )  # fmt: skip
        return {column: found["scores"][task] for column, task in wanted.items()}

    @cached_property
    def recorded(self) -> Trace:
        """A trace of the prompts, recorded once, with the routers' inputs."""
        bench = self._bench
        if bench.asked.is_random:
            raise ValueError("random prompts say nothing about routers")
        folder = bench.out / "trace"
        if not list(folder.glob("*.safetensors")):
            prompts = bench.out / "prompts.jsonl"
            entries = ({"prompt": prompt.text} for prompt in by_turns(bench.asked.prompts))
            prompts.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
            command = [Path(sys.executable).with_name("vllm-dymoe"), "trace", bench.model, "--prompts", prompts]
            command += ["--out", folder, "--inputs", "--engine", json.dumps(dict(bench.engine))]
            command += ["--max-tokens", max(bench.workload.max_tokens, _RECORDED_TOKENS)]
            run_logged(list(map(str, command)), bench.out / "logs" / "trace.log", "recording the trace", {})
        return Trace.load(folder)

    @cached_property
    def _predictor(self) -> Path:
        """DuoServe-MoE's network from the requests behind those that are measured, trained once."""
        workload = self._bench.workload
        try:
            return train(self.recorded, workload.warm_up + workload.requests, self._bench.out)
        except ValueError as error:
            raise ConfigError(f"The paper's network cannot be trained: {error}.") from error


def train(trace: Trace, measured: int, out: Path) -> Path:
    """A network from the requests behind so many that are measured, unless ``out`` has it."""
    path = out / "predictor.safetensors"
    if not path.exists():
        others = list(trace.by_request())[measured:]
        if not others:
            raise TrainingError(f"none of the prompts is left to learn from behind {measured} that are measured")
        write(trace.select(torch.cat(others)), out / "trace", path, architecture="paper-shared", recipe=RECIPE)
    return path
