"""Formats rows as tables: each number with its reference."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_dymoe.bench.cases import digest, full_load
from vllm_dymoe.bench.rows import Row, is_full_load

_NAMES = ("policy", "budget", "link MB/s", "batch")
_FORMATS = {
    "link MB/s": ".1f", "batch": "", "TTFT ms": ".0f", "TPOT ms": ".1f", "p99": ".1f", "tokens/s": ".2f",
    "of full load": ".0%", "hits": ".1%", "resident MB": ".1f", "demand MB/token": ".3g", "ahead": ".3g",
    "link used": ".0%", "memory used": ".0%", "experts peak MB": ".1f", "device peak MB": ".0f",
}  # fmt: skip
_FIRST_OF_BYTES = "resident MB"  # columns from here on form a second table on a terminal


@dataclass(frozen=True)
class Bounds:
    """Reference values for shares."""

    link: float | None = None  # bytes per second of the link, if it is not emulated
    memory: float | None = None  # bytes per second of device memory
    token_bytes: Mapping[tuple[int, int], float] = field(default_factory=dict)
    """Bytes that a step of one request has to read, by bits of experts and of dense layers, if the model is known."""
    expert_bytes: Mapping[int, int] = field(default_factory=dict)  # bytes of one expert, by bit-width


def options_of(row: Row) -> Mapping[str, Any]:
    """Return a row's options; a peer has none, and computes at 16 bits."""
    found: Mapping[str, Any] = {"high": 16} if row["options"] is None else row["options"]
    return found


def bits_of(row: Row) -> int:
    """Return the bits of the high precision."""
    return int(options_of(row).get("high", 4))


def _reference(row: Row) -> tuple[str, int]:
    """Return a key of the full load that a row is compared with."""
    return digest(full_load(options_of(row)).options), row["batch"]


def numbers(rows: Sequence[Row], bounds: Bounds) -> list[dict[str, Any]]:
    """Return the numbers of each row, by column; None where a number does not exist."""
    rows = [row for row in rows if row["kind"] == "speed"]
    full = {_reference(row): row["measured"] for row in filter(is_full_load, rows)}
    return [_numbers(row, bounds, full.get(_reference(row), {})) for row in rows]


def cells(numbers: Mapping[str, Any]) -> dict[str, str]:
    """Return the numbers of one row as text; empty where a number does not exist."""
    return {
        name: "" if value is None else value if isinstance(value, str) else format(value, _FORMATS[name])
        for name, value in numbers.items()
    }


def lines(rows: Sequence[Row], bounds: Bounds) -> list[dict[str, str]]:
    """Return the cells of each row by column."""
    return [cells(row) for row in numbers(rows, bounds)]


def _numbers(row: Row, bounds: Bounds, full_load: Row) -> dict[str, Any]:
    measured, options, bits = row["measured"], options_of(row), bits_of(row)
    tpot, rate, decode = measured["tpot_ms"] or {}, measured["decode_tokens_per_second"], measured["decode"] or {}
    full_rate = full_load.get("decode_tokens_per_second")
    emulated, moved, seconds = options.get("link_gbps"), decode.get("bytes_moved"), measured.get("decode_seconds")
    link = emulated * 1e9 if emulated else bounds.link
    tokens = 1e6 * max(1, measured.get("decode_tokens", 1))
    read = bounds.token_bytes.get((bits, options.get("dense", 16)))
    token_bytes = read if row["batch"] == 1 else None  # with a larger batch, experts coincide
    held, widths = decode.get("resident_experts", {}), {"high": bits, "low": options.get("low", 0)}
    resident = sum(count * bounds.expert_bytes.get(widths[precision], 0) for precision, count in held.items())
    return {
        "policy": row["label"],
        "budget": row["budget"],
        "link MB/s": 1e3 * emulated if emulated else None,
        "batch": row["batch"],
        "TTFT ms": measured["ttft_ms"]["median"],
        "TPOT ms": tpot.get("median"),
        "p99": tpot.get("p99"),
        "tokens/s": rate,
        "of full load": rate / full_rate if rate and full_rate else None,
        "hits": "random" if moved and row["workload"]["random"] else decode.get("hit_rate"),
        "resident MB": resident / 1e6 if held and bounds.expert_bytes else None,
        "demand MB/token": moved["demand"] / tokens if moved else None,
        "ahead": (sum(moved.values()) - moved["demand"]) / tokens if moved else None,
        "link used": sum(moved.values()) / seconds / link if moved and link and seconds else None,
        "memory used": (
            token_bytes / (tpot["mean"] / 1e3) / bounds.memory if token_bytes and tpot and bounds.memory else None
        ),
        "experts peak MB": decode["peak_expert_bytes"] / 1e6 if decode else None,
        "device peak MB": measured["peak_device_bytes"] / 1e6,
    }


def for_terminals(body: Sequence[Mapping[str, str]]) -> Iterator[list[str]]:
    """Return the columns of two tables, times and bytes, without empty columns."""
    names = list(body[0])
    first = names.index(_FIRST_OF_BYTES)
    for columns in (names[:first], [*_NAMES, *names[first:]]):
        yield [name for name in columns if any(line[name] for line in body)]


def markdown(head: Sequence[str], body: Iterable[Iterable[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *body))
