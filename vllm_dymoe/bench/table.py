"""Rows as one table: each with what it is a share of."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from vllm_dymoe.bench.rows import Row, is_full_load

HEAD = (
    "", "budget", "link MB/s", "batch", "TTFT ms", "TPOT ms", "p99", "tokens/s", "of full load", "hits", "resident MB",
    "MB/token: demand", "ahead", "link used", "memory used", "experts peak MB", "device peak MB",
)  # fmt: skip


_TIMES = HEAD.index("resident MB")  # columns from here on are about bytes


@dataclass(frozen=True)
class Bounds:
    """What a share is taken of.

    Attributes:
        link: bytes per second that the link reaches, where it is not emulated.
        memory: bytes per second that device memory reaches.
        token_bytes: bytes that a token has to read at a bit-width and batch, if the model is known.
        expert_bytes: of one expert at a bit-width.
    """

    link: float | None = None
    memory: float | None = None
    token_bytes: Mapping[tuple[int, int], float] | None = None
    expert_bytes: Mapping[int, int] | None = None


def full_loads(rows: Iterable[Row]) -> dict[tuple[int, int], float]:
    """Tokens per second with every expert on the device, by bit-width and batch."""
    return {
        (bits_of(row), row["batch"]): row["measured"]["decode_tokens_per_second"] for row in rows if is_full_load(row)
    }


def bits_of(row: Row) -> int:
    """Of the high tier; a peer computes at 16 bits unless it says otherwise."""
    return int((row["options"] or {"hi": 16}).get("hi", 4))


def cells(row: Row, full: Mapping[tuple[int, int], float], bounds: Bounds) -> list[str]:
    """One line; empty where a number does not exist."""
    measured, bits = row["measured"], bits_of(row)
    tpot, decode, rate = measured["tpot_ms"], measured["decode"], measured["decode_tokens_per_second"]
    whole = full.get((bits, row["batch"]))
    emulated = (row["options"] or {}).get("link_gbps")
    found = [
        row["label"],
        row["budget"],
        _number(emulated and 1e3 * emulated, ".1f"),
        str(row["batch"]),
        f"{measured['ttft_ms']['median']:.0f}",
        _number(tpot and tpot["median"], ".1f"),
        _number(tpot and tpot["p99"], ".1f"),
        _number(rate, ".2f"),
        _number(rate and whole and rate / whole, ".0%"),
    ]
    memory = bounds.token_bytes and bounds.memory and tpot and bounds.token_bytes.get((bits, row["batch"]))
    used = memory / (tpot["mean"] / 1e3) / bounds.memory if memory and bounds.memory else None
    if decode is None:
        return [*found, "", "", "", "", "", _number(used, ".0%"), "", f"{measured['peak_device_bytes'] / 1e6:.0f}"]
    moved, link = decode["bytes_moved"], emulated * 1e9 if emulated else bounds.link
    tokens = max(1, measured["decode_tokens"])
    share = sum(moved.values()) / measured["decode_seconds"] / link if link and measured["decode_seconds"] else None
    return [
        *found,
        "random" if row["workload"]["random"] else _number(decode["hit_rate"], ".1%"),
        _resident(row, bounds),
        f"{moved['demand'] / tokens / 1e6:.3g}",
        f"{sum(n for reason, n in moved.items() if reason != 'demand') / tokens / 1e6:.3g}",
        _number(share, ".0%"),
        _number(used, ".0%"),
        f"{decode['peak_expert_bytes'] / 1e6:.1f}",
        f"{measured['peak_device_bytes'] / 1e6:.0f}",
    ]


def _resident(row: Row, bounds: Bounds) -> str:
    if bounds.expert_bytes is None:
        return ""
    options = row["options"] or {}
    bits = {"hi": bits_of(row), "lo": options.get("lo", 0)}
    held = row["measured"]["decode"]["resident_experts"]
    return f"{sum(count * bounds.expert_bytes.get(bits[tier], 0) for tier, count in held.items()) / 1e6:.1f}"


def _number(value: Any, form: str) -> str:
    return "" if value is None else format(value, form)


def lines(rows: Sequence[Row], bounds: Bounds) -> list[list[str]]:
    """All rows, in their order."""
    full = full_loads(rows)
    return [cells(row, full, bounds) for row in rows if row["kind"] == "speed"]


def rich_tables(rows: Sequence[Row], bounds: Bounds, title: str) -> Iterator[Table]:
    """For a terminal: times, then bytes; columns without a number are left out."""
    body = lines(rows, bounds)
    for name, places in ((title, range(_TIMES)), ("Bytes", [0, 1, 2, 3, *range(_TIMES, len(HEAD))])):
        shown = [place for place in places if any(line[place] for line in body)]
        table = Table(title=name, title_justify="left")
        for place in shown:
            table.add_column(HEAD[place], justify="right" if place else "left")
        for line in body:
            table.add_row(*(line[place] for place in shown))
        yield table


def markdown(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """For a document."""
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *body))
