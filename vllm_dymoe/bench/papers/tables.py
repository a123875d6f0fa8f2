"""A paper's tables: its rows, its numbers, where ours come from, and both side by side."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import getitem
from typing import Any

from vllm_dymoe.bench.cases import Case, Subject, Workload
from vllm_dymoe.bench.rows import Row
from vllm_dymoe.bench.table import markdown
from vllm_dymoe.observe.trace import Trace

Number = float | str | None
Numbers = Mapping[str, Number]
TRAINED = "trained here"
"""In place of a predictor's file: DuoServe-MoE's network, trained on the run's prompts that are not measured."""
_WHOLE = 1000  # numbers from here on are written without a fraction


@dataclass(frozen=True)
class At:
    """Where a system is measured."""

    budget: str  # of experts
    batch: int = 1  # requests at once
    prompt_tokens: int | None = None  # of each prompt; None takes the run's prompts as they are
    runs: int = 1  # of the same requests

    def case(self, subject: Subject, model: str, workload: Workload, engine: Mapping[str, Any]) -> Case:
        """Of a run's workload: at least as many requests as the batch has, at the length that is asked for."""
        requests = max(workload.requests, self.batch)
        asked = replace(workload, requests=requests, prompt_tokens=self.prompt_tokens, runs=self.runs)
        return Case(model, replace(subject, budgets=None), self.budget, self.batch, asked, engine)


@dataclass(frozen=True)
class Speed:
    """Ours come from rows of one system; for each column where it is measured, and what of the row it shows."""

    subject: Subject
    columns: Mapping[str, tuple[At, Callable[[Row], Number]]]


@dataclass(frozen=True)
class Quality:
    """Ours come from lm-eval, with options of the plugin; for each column the task of the paper."""

    options: Mapping[str, Any]
    tasks: Mapping[str, str]


Source = Speed | Quality | Callable[[Trace], Numbers] | str
"""Where ours come from; a function of a trace, or a sentence that says why there are none."""


@dataclass(frozen=True)
class Line:
    """One row: as the paper has it, where ours come from, and its numbers by column, if it prints them."""

    label: str
    ours: Source
    paper: Numbers = field(default_factory=dict)


@dataclass(frozen=True)
class PaperTable:
    """A table, or a figure as a table."""

    name: str  # as the paper has it
    about: str  # what it shows, and on what the paper measured it
    columns: Sequence[str]  # in their order
    lines: Sequence[Line]  # in theirs


def line(label: str, ours: Source, columns: Sequence[str] | Mapping[str, Any] = (), numbers: Any = ()) -> Line:
    return Line(label, ours, dict(zip(columns, numbers, strict=True)) if numbers else {})


def of(*path: str, unit: float = 1.0) -> Callable[[Row], Number]:
    """A number of what was measured, by its place in a row."""
    return lambda row: unit * float(reduce(getitem, path, row["measured"]))


TTFT = of("ttft_ms", "median", unit=1e-3)  # seconds to the first token
TPOT = of("tpot_ms", "mean", unit=1e-3)  # seconds for each later token
RATE = of("decode_tokens_per_second")


def spread(row: Row) -> Number:
    """Seconds for each later token, and half of the difference between the fastest and the slowest run."""
    runs = [value / 1e3 for value in row["measured"]["tpot_ms_of_runs"]]
    return f"{sum(runs) / len(runs):.4f} ± {(max(runs) - min(runs)) / 2:.4f}"


def bound(row: Row) -> tuple[float, float]:
    """Seconds for each later token of a system that foresees nothing, if all of its transfers T overlapped with its
    computation C, and by how much that is less: by 1 + C / T at most."""
    measured, tokens = row["measured"], row["measured"]["decode_tokens"]
    waited = measured["decode"]["exposed_wait_seconds"] / tokens
    computed = measured["tpot_ms"]["mean"] / 1e3 - waited
    rate = (row["options"] or {}).get("link_gbps")
    moved = sum(measured["decode"]["bytes_moved"].values()) / rate / 1e9 / tokens if rate else waited
    return max(moved, computed), (computed + moved) / max(moved, computed)


def least(row: Row) -> Number:
    seconds, gain = bound(row)
    return f"{seconds:.4f} ({gain:.2f} times)"


def cases_of(
    tables: Sequence[PaperTable], model: str, workload: Workload, engine: Mapping[str, Any],
    change: Callable[[Subject], Subject],
) -> list[Case]:  # fmt: skip
    """Everything that has to be measured for the tables, each once; ``change`` puts a subject behind the run's link."""
    found: dict[str, Case] = {}
    for source in (line.ours for table in tables for line in table.lines):
        if isinstance(source, Speed):
            subject = change(source.subject)
            for at, _ in source.columns.values():
                case = at.case(subject, model, workload, engine)
                found[case.key] = case
    return list(found.values())


def fill(
    line: Line,  # the paper's row
    row_of: Callable[[Subject, At], Row],  # what was measured of a subject there
    recorded: Callable[[], Trace],
    scores: Callable[[Quality], Numbers | str],  # of lm-eval by column, or why there are none
) -> tuple[Numbers, str]:
    """Our numbers for one row by column, and a sentence that says why there are none."""
    source = line.ours
    if isinstance(source, Speed):
        return {name: show(row_of(source.subject, at)) for name, (at, show) in source.columns.items()}, ""
    if isinstance(source, str):
        return {}, source
    if isinstance(source, Quality):
        found = scores(source)
        return ({}, found) if isinstance(found, str) else (found, "")
    try:
        return source(recorded()), ""
    except ValueError as error:
        return {}, f"{error}."


def lines(table: PaperTable, filled: Sequence[tuple[Numbers, str]]) -> tuple[list[str], list[list[str]], list[str]]:
    """Head, body and footnotes of a table, as text; ours of other tasks than the paper's come last."""
    rows = [(line, ours, why) for line, (ours, why) in zip(table.lines, filled, strict=True)]
    names = dict.fromkeys([*table.columns, *(name for _, ours, _ in rows for name in ours)])
    pairs = {name: [(line.paper.get(name), ours.get(name)) for line, ours, _ in rows] for name in names}
    head, body = [""], [[line.label] for line in table.lines]
    for name, values in pairs.items():
        for place, whose in enumerate(("paper", "ours")):
            if any(pair[place] is not None for pair in values):
                head.append(f"{name}, {whose}")
                for cells, pair in zip(body, values, strict=True):
                    cells.append(_cell(pair[place]))
    notes = []
    for sentence in dict.fromkeys(why for *_, why in rows if why):
        labels = [line.label for line, _, why in rows if why == sentence]
        notes.append(f"{'All rows' if len(labels) == len(rows) > 1 else ', '.join(labels)}: {sentence}")
    return head, body, notes


def _cell(value: Number) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return f"{value:,.0f}" if abs(value) >= _WHOLE else f"{value:.4g}"


def as_markdown(title: str, tables: Sequence[tuple[PaperTable, Sequence[tuple[Numbers, str]]]]) -> str:
    def parts() -> Iterator[str]:
        yield f"# {title}"
        for table, filled in tables:
            head, body, notes = lines(table, filled)
            yield f"## {table.name}: {table.about}"
            yield markdown(head, body)
            yield from notes

    return "\n\n".join(parts()) + "\n"
