"""A paper's tables with ours beside its numbers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from vllm_dymoe.bench.cases import Case, Subject, Workload
from vllm_dymoe.bench.papers.base import At, Line, Missing, Number, PaperTable, Quality, Recorded, Routed, Speed
from vllm_dymoe.bench.rows import Row
from vllm_dymoe.bench.table import markdown


@dataclass(frozen=True)
class Filled:
    """One row of a table.

    Attributes:
        line: the paper's.
        ours: by column.
        why: nothing is here, in a sentence; empty if something is.
    """

    line: Line
    ours: Mapping[str, Number]
    why: str = ""


_WHOLE = 1000
"""Numbers from here on are written without a fraction."""
Change = Callable[[Subject], Subject]
"""Puts a subject behind the run's link."""


def cases_of(
    tables: Sequence[PaperTable], model: str, workload: Workload, engine: Mapping[str, object], change: Change
) -> list[Case]:
    """Everything that has to be measured for the tables, each once."""
    found: dict[str, Case] = {}
    for source in speeds(tables):
        subject = change(replace(source.subject, budgets=None))
        for at, _ in source.columns.values():
            case = at.case(subject, model, workload, engine)
            found[case.key] = case
    return list(found.values())


def speeds(tables: Sequence[PaperTable]) -> Iterator[Speed]:
    """Lines that come from a system's rows."""
    for table in tables:
        yield from (line.ours for line in table.lines if isinstance(line.ours, Speed))


def fill(
    line: Line,
    row_of: Callable[[Subject, At], Row],
    recorded: Callable[[], Recorded],
    scores: Callable[[Quality], Mapping[str, float] | str],
) -> Filled:
    """Our numbers for one row.

    Args:
        line: the paper's row.
        row_of: what was measured of a subject there.
        recorded: the trace.
        scores: of lm-eval by column, or why there are none.
    """
    source = line.ours
    if isinstance(source, Missing):
        return Filled(line, {}, source.why)
    if isinstance(source, Speed):
        return Filled(line, {name: of(row_of(source.subject, at)) for name, (at, of) in source.columns.items()})
    if isinstance(source, Quality):
        found = scores(source)
        return Filled(line, {}, found) if isinstance(found, str) else Filled(line, found)
    assert isinstance(source, Routed)
    try:
        return Filled(line, source.measure(recorded()))
    except ValueError as error:
        return Filled(line, {}, f"{error}.")


def head(table: PaperTable, filled: Sequence[Filled]) -> list[tuple[str, bool]]:
    """Columns that have a number, each with whether it is the paper's; ours of other tasks come last."""
    shown = []
    extra = dict.fromkeys(name for row in filled for name in row.ours if name not in table.columns)
    for name in (*table.columns, *extra):
        if any(row.line.paper.get(name) is not None for row in filled):
            shown.append((name, True))
        if any(row.ours.get(name) is not None for row in filled):
            shown.append((name, False))
    return shown


def lines(table: PaperTable, filled: Sequence[Filled]) -> tuple[list[str], list[list[str]], list[str]]:
    """Head, body and footnotes of a table, as text."""
    columns = head(table, filled)
    body = [
        [row.line.label, *(_cell((row.line.paper if paper else row.ours).get(name)) for name, paper in columns)]
        for row in filled
    ]
    why: dict[str, list[str]] = {}
    for row in filled:
        if row.why:
            why.setdefault(row.why, []).append(row.line.label)
    notes = [
        f"{'All rows' if len(labels) == len(filled) > 1 else ', '.join(labels)}: {sentence}"
        for sentence, labels in why.items()
    ]
    return ["", *(f"{name}, {'paper' if paper else 'ours'}" for name, paper in columns)], body, notes


def as_markdown(paper: str, tables: Sequence[tuple[PaperTable, Sequence[Filled]]]) -> str:
    """All tables as one page."""
    parts = [f"# {paper}"]
    for table, filled in tables:
        names, body, notes = lines(table, filled)
        parts += [f"## {table.name}: {table.about}", markdown(names, body), *notes]
    return "\n\n".join(parts) + "\n"


def _cell(value: Number) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return f"{value:,.0f}" if abs(value) >= _WHOLE else f"{value:.4g}"
