"""What a running model did, for the users of ``LLM()``: one summary for each rank."""

from dataclasses import dataclass
from typing import Any

from vllm_dymoe.runtime.stats import RuntimeStats
from vllm_dymoe.vllm_adapter.report import size


@dataclass(frozen=True)
class RankSummary:
    """One rank's counts since the start or the last reset.

    Attributes:
        rank: the worker's place in vLLM's order of ranks.
        stats: its counters.
    """

    rank: int
    stats: RuntimeStats

    def to_dict(self) -> dict[str, Any]:
        """The summary as JSON-serialisable data."""
        return {"rank": self.rank, **self.stats.to_dict()}

    def __str__(self) -> str:
        """Aligned text for a terminal."""
        stats = self.stats
        needed = stats.hits + stats.misses
        rate = f"{stats.hit_rate:.1%} of {needed}" if needed else "no expert needed yet"
        moved = ", ".join(f"{reason} {size(n)}" for reason, n in stats.bytes_moved.items())
        slots = ", ".join(f"{tier} {count}" for tier, count in stats.slots.items())
        rows = {
            "hits": rate,
            "moved": moved,
            "exposed wait": f"{stats.exposed_wait_seconds:.2f} s",
            "evictions": str(stats.evictions),
            "slots": slots,
            "memory": f"peak {size(stats.peak_expert_bytes)} of {size(stats.budget_bytes)}",
        }
        lines = (f"  {name:<13} {value}" for name, value in rows.items())
        return "\n".join([f"rank {self.rank}", *lines])


def summarize(llm: Any) -> tuple[RankSummary, ...]:
    """Ask every rank of an ``LLM`` or ``LLMEngine`` for its counts, in rank order."""
    answers = llm.collective_rpc("dymoe_stats")
    return tuple(RankSummary(rank, RuntimeStats(**answer)) for rank, answer in enumerate(answers))
