"""Tables, and progress bars, on stderr if that is a terminal."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table


def print_table(
    title: str, heads: Sequence[str], rows: Iterable[Sequence[str | None]], *, whole: bool = False, bold: int = -1,
    left: bool = False,
) -> None:  # fmt: skip
    """Print a table.

    The first column, a row's name, is aligned left, and the others, its numbers, right. Without heads everything is
    aligned left. No word is broken.

    Args:
        whole: break no cell into several lines.
        bold: number of the row that stands out; -1 for none.
        left: the other columns have words and are aligned left, too.
    """
    console, rows = Console(highlight=False), list(rows)
    words = [" ".join([head, *(row[place] or "" for row in rows)]).split() for place, head in enumerate(heads)]
    longest = [max(map(len, column), default=0) for column in words]
    apart = 2 if sum(longest) + 3 * len(longest) <= console.width else 1
    table = Table(title=title, title_justify="left", show_header=bool(heads), box=None, padding=(0, apart, 0, 0))
    for place, (head, width) in enumerate(zip(heads, longest, strict=True)):
        table.add_column(head, justify="right" if place and not left else "left", no_wrap=whole, min_width=width)
    for number, row in enumerate(rows):
        table.add_row(*row, style="bold" if number == bold else None)
    console.print(table)


def _bar(*columns: ProgressColumn) -> Progress:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), *columns, TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


@contextmanager
def byte_progress(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yield a function to call with each number of bytes done."""
    with _bar(DownloadColumn(binary_units=True), TransferSpeedColumn()) as bar:
        task = bar.add_task(description, total=total)
        yield lambda nbytes: bar.advance(task, nbytes)


@contextmanager
def count_progress(description: str = "", *, lines: bool = False) -> Iterator[Callable[..., None]]:
    """Yield a function to call with the number done, the total, and the item.

    Args:
        lines: print a line for each current item if there is no terminal for the bar.
    """
    with _bar(MofNCompleteColumn()) as bar:
        task = bar.add_task(description, total=None)

        def advance(done: int, total: int, now: str = "") -> None:
            bar.update(task, completed=done, total=total, description=f"{description} {now}".strip())
            if lines and now and not bar.console.is_terminal:
                bar.console.print(f"{done} of {total} rows; {now} ...", highlight=False)

        yield advance
