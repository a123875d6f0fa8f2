"""Puts the results of benchmarks into a README, as tables between two markers."""

from collections.abc import Iterable
from pathlib import Path


def markdown(head: list[str], lines: Iterable[list[str]]) -> str:
    """Return a table."""
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *lines))


def put(readme: Path, marker: str, text: str) -> None:
    """Replace the text between ``<!-- marker:begin -->`` and ``<!-- marker:end -->``.

    Raises ValueError unless both occur once.
    """
    begin, end = f"<!-- {marker}:begin -->\n", f"<!-- {marker}:end -->"
    before, rest = readme.read_text().split(begin)
    _, after = rest.split(end)
    readme.write_text(before + begin + text.rstrip("\n") + "\n" + end + after)
