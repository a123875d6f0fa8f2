"""Summarizes the times of single tokens into a row."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm_dymoe.server.stats import ServerStats, total


@dataclass
class Answers:
    """Times and counts of requests that arrived together."""

    first: list[float] = field(default_factory=list)  # seconds from their arrival to each one's first token
    between: list[float] = field(default_factory=list)  # seconds from each later token's predecessor to it
    seconds: float = 0.0  # from arrival to the last token of all
    lengths: list[int] = field(default_factory=list)  # tokens of each answer
    since: float = 0.0  # seconds from arrival to the moment at which every request has its first token
    decoded: int = 0  # tokens after that moment
    outputs: list[str] = field(default_factory=list)  # a digest of each answer's tokens
    decode: dict[str, Any] = field(default_factory=dict)
    """Counts of the plugin after that moment; empty for peers."""


def distribution(seconds: Sequence[float]) -> dict[str, Any]:
    """Return median, mean and 99th percentile (a value that occurs) in milliseconds."""
    ms = 1e3 * np.asarray(seconds)
    p99 = float(np.quantile(ms, 0.99, method="inverted_cdf"))
    return {"median": float(np.median(ms)), "mean": float(ms.mean()), "p99": p99, "count": len(ms)}


def summarise(answers: Sequence[Answers]) -> dict[str, Any]:
    between = [value for group in answers for value in group.between]
    decoding = sum(group.seconds - group.since for group in answers)
    decoded = sum(group.decoded for group in answers)
    seconds = sum(group.seconds for group in answers)
    found: dict[str, Any] = {
        "ttft_ms": distribution([value for group in answers for value in group.first]),
        "tpot_ms": distribution(between) if between else None,
        "decode_tokens_per_second": decoded / decoding if decoded else None,
        "tokens_per_second": sum(sum(group.lengths) for group in answers) / seconds,
        "decode_seconds": decoding,
        "decode_tokens": decoded,
        "outputs": [output for group in answers for output in group.outputs],
    }
    counted = [group.decode for group in answers if group.decode]
    return found | {"decode": _total(counted) if counted else None}


def side_by_side(engines: Sequence[Sequence[Answers]]) -> list[Answers]:
    """Merge answers of several engines at the same times, round by round.

    A round lasts as long as the slowest engine, and its decoding begins with that of the first engine.
    """
    if len(engines) == 1:
        return list(engines[0])
    found = []
    for parts in zip(*engines, strict=True):
        counted = [part.decode for part in parts if part.decode]
        first, between, lengths, outputs = (
            [value for part in parts for value in getattr(part, name)]
            for name in ("first", "between", "lengths", "outputs")
        )
        seconds = max(part.seconds for part in parts)
        since, decoded = min(part.since for part in parts), sum(part.decoded for part in parts)
        counts = total(counted) if counted else {}
        found.append(Answers(first, between, seconds, lengths, since, decoded, outputs, counts))
    return found


_AT_THE_END = {field.name for field in fields(ServerStats) if field.metadata.get("gauge", True)}


def _total(counted: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return summed counts; sizes are those at the end."""
    found = total(counted) | {name: value for name, value in counted[-1].items() if name in _AT_THE_END}
    found["peak_expert_bytes"] = max(part["peak_expert_bytes"] for part in counted)
    needed = found["hits"] + found["misses"]
    return found | {"hit_rate": found["hits"] / needed if needed else None}


def peak_bytes() -> int:
    """Return peak memory in bytes.

    On a GPU it is torch's maximum, on a CPU the memory that the process cannot give back.
    """
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(lines[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem"))
