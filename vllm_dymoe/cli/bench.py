"""``vllm-dymoe bench``: systems, budgets and batches on one model, measured and put side by side."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from vllm_dymoe.bench.cases import EVERYTHING, FULL, Subject, Workload, grid, subject_of
from vllm_dymoe.bench.check import check_outputs
from vllm_dymoe.bench.peers import PEERS, find_peer
from vllm_dymoe.bench.plots import draw
from vllm_dymoe.bench.prompts import read_prompts
from vllm_dymoe.bench.rows import Row, read_rows
from vllm_dymoe.bench.run import ROWS, measure
from vllm_dymoe.bench.systems import make_known
from vllm_dymoe.bench.table import HEAD, Bounds, bits_of, lines, markdown, rich_tables
from vllm_dymoe.config import ConfigError, Options
from vllm_dymoe.plan.device import emulated_rate, parse_rate
from vllm_dymoe.plan.model import ModelShape, read_shape


def run(
    model: str,
    *,
    systems: Sequence[str],
    peers: Sequence[str],
    budgets: Sequence[str],
    batches: Sequence[int],
    links: Sequence[str],
    prompts: str,
    requests: int,
    warm_up: int,
    max_tokens: int,
    temperature: float,
    options: Mapping[str, Any],
    engine: Mapping[str, Any],
    out: Path,
) -> None:
    """Measure what is missing, compare answers, and show everything.

    Raises:
        ConfigError: something cannot be measured, or answers differ where they must not.
    """
    make_known()
    asked = read_prompts(prompts)
    if not asked.is_random and len(asked.prompts) < requests + warm_up:
        raise ConfigError(
            f"{asked.name} has {len(asked.prompts)} prompts, but {requests} requests and {warm_up} to warm up were "
            "asked for; lower --requests."
        )
    if requests < max(batches):
        raise ConfigError(f"{requests} requests are no batch of {max(batches)}; raise --requests or lower --batch.")
    console = Console()
    subjects = [subject_of(system, options) for system in systems] + list(_peers(peers, console))
    workload = Workload(asked.digest, asked.name, asked.is_random, requests, warm_up, max_tokens, temperature)
    shape = read_shape(model)
    with progress() as advance:
        if links:
            full = grid(model, [Subject("", options)], [FULL], [1], workload, engine)[-1:]
            (found,) = measure(full, asked, out, progress=advance)
            seconds = found["measured"]["tpot_ms"]["mean"] / 1e3 / shape.layers
            subjects = [slowed for link in links for slowed in over(link, subjects, shape, seconds)]
        cases = grid(model, subjects, budgets, batches, workload, engine)
        rows = measure(cases, asked, out, expert_bytes=shape.packed((16,)).nbytes(16), progress=advance)
    report(rows, out, console, shape, title=_title(model, workload))


def _peers(names: Sequence[str], console: Console) -> Iterator[Subject]:
    """Those that can run here; of the others a sentence says why not.

    Raises:
        ConfigError: nothing of the name is known.
    """
    for name in names:
        peer = find_peer(name)
        if peer is None:
            raise ConfigError(f"{name} is no peer; known are {', '.join(PEERS)}, and servers by their address.")
        if (why := peer.missing()) is not None:
            console.print(why, soft_wrap=True, highlight=False)
            continue
        yield Subject(name, peer=name, budgets=None if peer.takes_budgets else (EVERYTHING,))


def over(link: str, subjects: Sequence[Subject], shape: ModelShape, layer_seconds: float) -> Iterator[Subject]:
    """Subjects behind an emulated link; a peer has none."""
    for subject in subjects:
        if subject.options is None:
            yield subject
            continue
        bits = Options.model_validate(subject.options).hi
        slow = link if "/s" in link else None
        rate = parse_rate(slow) if slow else emulated_rate(link, shape, bits, layer_seconds)
        yield replace(subject, options={**subject.options, "link_gbps": float(f"{rate / 1e9:.4g}")})


def report(rows: Sequence[Row], out: Path, console: Console, shape: ModelShape, title: str) -> None:
    """Table and pictures of rows whose answers are what they have to be."""
    compared = check_outputs(rows)
    bounds = bounds_of(rows, out, shape)
    for table in rich_tables(rows, bounds, title):
        console.print(table)
    if compared:
        console.print(f"{compared} answers of the same precision are the same, token by token.")
    (out / "table.md").write_text(f"{title}\n\n{markdown(HEAD, lines(rows, bounds))}\n")
    written = [out / ROWS, out / "table.md", *draw(rows, out)]
    console.print(f"Written: {', '.join(str(path) for path in written)}", soft_wrap=True)


def bounds_of(rows: Sequence[Row], out: Path, shape: ModelShape) -> Bounds:
    """What this machine reached before anything ran on it, and what a token has to read."""
    (found,) = [row for row in read_rows(out / ROWS) if row["kind"] == "machine"]
    bits = tuple(
        sorted({width for row in rows for width in (bits_of(row), (row["options"] or {}).get("lo", 0)) if width})
    )
    formats = shape.packed(bits).formats
    blobs = {width: fmt.whole_nbytes for width, fmt in formats.items()}
    tokens = {(width, row["batch"]): shape.step_bytes(blobs[width], row["batch"]) for row in rows for width in blobs}
    return Bounds(found["link_bytes_per_second"], found["memory_bytes_per_second"], tokens, blobs)


def _title(model: str, workload: Workload) -> str:
    said = f"{workload.requests} requests of {workload.max_tokens} tokens, prompts: {workload.name}, warm-up: "
    random = "; random prompts, whose hit rates say nothing and are left out" if workload.random else ""
    return f"{model}: {said}{workload.warm_up} requests{random}"


@contextmanager
def progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr if that is a terminal, lines otherwise: a row may take minutes."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None)

        def advance(label: str, done: int, total: int) -> None:
            progress.update(task, description=label, completed=done, total=total)
            if not console.is_terminal and label:
                console.print(f"{done} of {total} rows; {label} ...", highlight=False)

        yield advance
