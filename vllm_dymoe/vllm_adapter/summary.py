"""What a running model did, for the users of ``LLM()``: one summary for each rank."""

from dataclasses import dataclass
from typing import Any

from vllm_dymoe.runtime.stats import RuntimeStats
from vllm_dymoe.units import size


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
        resident = ", ".join(f"{tier} {stats.resident_experts[tier]} of {n} slots" for tier, n in stats.slots.items())
        planned = ", ".join(f"{tier} {count}" for tier, count in stats.planned.items())
        rows = {
            "planned": planned,
            "hits": rate,
            "moved": moved,
            "exposed wait": f"{stats.exposed_wait_seconds:.2f} s",
            "evictions": str(stats.evictions),
            **self._foresight(),
            "resident": resident,
            "memory": f"peak {size(stats.peak_expert_bytes)} of {size(stats.budget_bytes)}",
        }
        lines = (f"  {name:<13} {value}" for name, value in rows.items())
        return "\n".join([f"rank {self.rank}", *lines])

    def _foresight(self) -> dict[str, str]:
        """How right the predictor was and what became of its guesses; nothing where nothing was foreseen."""
        stats = self.stats
        named, wanted, right = (stats.predictions[kind] for kind in ("named", "wanted", "right"))
        if not named or not wanted:
            return {}
        return {
            "foreseen": f"{right / wanted:.1%} of {wanted} wanted, {right / named:.1%} of {named} named",
            "prefetched": ", ".join(f"{count} {outcome}" for outcome, count in stats.prefetches.items()),
        }


@dataclass(frozen=True)
class Summary:
    """All ranks of one model.

    Attributes:
        ranks: in vLLM's order.
    """

    ranks: tuple[RankSummary, ...]

    @classmethod
    def of(cls, llm: Any) -> "Summary":
        """Ask an ``LLM`` or ``LLMEngine``."""
        answers = llm.collective_rpc("dymoe_stats")
        return cls(tuple(RankSummary(rank, RuntimeStats(**answer)) for rank, answer in enumerate(answers)))

    def to_dict(self) -> dict[str, Any]:
        """The summary as JSON-serialisable data."""
        return {"ranks": [rank.to_dict() for rank in self.ranks]}

    def __str__(self) -> str:
        """Aligned text for a terminal."""
        return "\n".join(str(rank) for rank in self.ranks)
