"""FIRM-MoE: Tables 1 and 2."""

from collections.abc import Iterator, Mapping
from typing import Any

from vllm_dymoe.bench.cases import Subject
from vllm_dymoe.bench.papers.tables import RATE, At, PaperTable, Speed, least, line, spread

# Slots of the paper's caches as shares of Qwen1.5-MoE's 1440 experts.
_CACHES = {"128": "9%", "256": "18%", "512": "36%", "768": "53%"}
_RUNS, _BOUND, _RATES = (
    {cache: (At(share, runs=3), show) for cache, share in _CACHES.items()} for show in (spread, least, RATE)
)
_K, _P = 3, 3


def _parts(ahead: str, **parameters: Any) -> Mapping[str, Any]:
    """Of one cache, in which what came first goes first, with as many slots for guesses and no pace."""
    return {"system": "compared", "system_options": {"ahead": ahead, "first_in": True, **parameters}}


_TABLE_1: Mapping[str, tuple[Mapping[str, Any], tuple[float, ...]]] = {
    "Baseline": (_parts("next gate", whole=True), (0.483, 0.452, 0.339, 0.328)),
    "+ FG": (_parts("next gate", projections=1), (0.365, 0.345, 0.273, 0.233)),
    "+ MoL": (_parts("meeting of layers", whole=True, k=_K, p=_P), (0.400, 0.370, 0.281, 0.259)),
    "+ FG + MoL": (_parts("meeting of layers", projections=1, k=_K, p=_P), (0.337, 0.317, 0.284, 0.230)),
    "All": (_parts("tuned meeting", projections=1), (0.292, 0.277, 0.263, 0.212)),
    "All, and the hottest kept": ({"system": "firm", "system_options": {"projections": 1}}, ()),
    "an oracle": (_parts("oracle"), ()),
}
_TABLE_2 = {1: (3.51, 3.6, 3.8, 4.71), 2: (3.75, 3.87, 4.32, 4.92)}


def tables() -> Iterator[PaperTable]:
    here = ", ".join(f"{share} for {cache}" for cache, share in _CACHES.items())
    about = f"s per token of Qwen1.5-MoE-A2.7B on an RTX 3090 and PCIe 4; here as shares of the experts, {here}"
    without = Subject("Baseline, nothing ahead", _parts("nothing", whole=True))
    yield PaperTable("Table 1", f"{about}; ± half of what three runs differ by", tuple(_CACHES), [
        *(line(label, Speed(Subject(label, options), _RUNS), _CACHES, numbers)
          for label, (options, numbers) in _TABLE_1.items()),
        line("nothing ahead", Speed(without, _RUNS)),
        line("bound: all of it overlaps", Speed(without, _BOUND)),
    ])  # fmt: skip
    about = "tokens per second of Qwen1.5-MoE-A2.7B, by projections that are fetched ahead"
    yield PaperTable("Table 2", about, tuple(_CACHES), [
        line(f"n = {n}", Speed(_firm(n), _RATES), _CACHES, numbers) for n, numbers in _TABLE_2.items()
    ])  # fmt: skip


def _firm(projections: int) -> Subject:
    return Subject(f"firm, n = {projections}", {"system": "firm", "system_options": {"projections": projections}})
