"""The summary for users of ``LLM()``."""

from dataclasses import replace

from vllm_dymoe import summary
from vllm_dymoe.runtime.stats import RuntimeStats

STATS = RuntimeStats(
    planned={"hi": 3, "lo": 1, "skip": 2},
    hits=3,
    misses=1,
    hit_rate=0.75,
    promotions=0,
    reuses=0,
    evictions=7,
    bytes_moved={"demand": 2 << 30, "prefetch": 0, "migration": 0},
    transfers={"demand": 1, "prefetch": 0, "migration": 0},
    failed_transfers=0,
    exposed_wait_seconds=1.25,
    prefetches={"useful": 0, "late": 0, "wasted": 0, "cancelled": 0},
    prefetch_interval={"prefill": 1, "decode": 1},
    predictions={"named": 0, "wanted": 0, "right": 0},
    predictor_bytes=1000,
    prediction_seconds=0.25,
    budget_bytes=4 << 30,
    peak_expert_bytes=3 << 30,
    slots={"hi": 5},
    resident_experts={"hi": 4},
    choices={"hi": 0, "lo": 0},
    moves={"published": 0, "late": 0},
    windows=0,
    window_age_seconds=0.0,
    migration_link_seconds=0.0,
)


class Ranks:
    """Answers as an engine with these ranks does."""

    def __init__(self, *stats: RuntimeStats) -> None:
        self.stats = stats

    def collective_rpc(self, method: str) -> list[dict]:
        assert method == "dymoe_stats"
        return [stats.to_dict() for stats in self.stats]


def test_every_rank_is_summarized():
    both = summary(Ranks(STATS, replace(STATS, hits=9)))
    assert both.ranks == (STATS, replace(STATS, hits=9))
    assert both.to_dict()["ranks"][1] == {"rank": 1, **both.ranks[1].to_dict()}
    assert [line for line in str(both).splitlines() if not line.startswith(" ")] == ["rank 0", "rank 1"]


def test_text_names_what_happened():
    text = str(summary(Ranks(STATS)))
    for part in ("75.0% of 4", "1.25 s", "2.0 GiB", "hi 4 of 5 slots", "hi 3, lo 1, skip 2"):
        assert part in text


def test_nothing_needed_is_not_a_hit_rate():
    text = str(summary(Ranks(replace(STATS, hits=0, misses=0, hit_rate=0.0))))
    assert "no expert needed yet" in text
    assert "%" not in text


def test_foresight_is_shown_where_there_is_some():
    prefetches = {"useful": 4, "late": 3, "wasted": 2, "cancelled": 1}
    foreseen = replace(STATS, predictions={"named": 8, "wanted": 10, "right": 6}, prefetches=prefetches)
    text = str(summary(Ranks(foreseen)))
    assert "foreseen      60.0% of 10 wanted, 75.0% of 8 named" in text
    assert "prefetched    4 useful, 3 late, 2 wasted, 1 cancelled" in text
    assert "foreseen" not in str(summary(Ranks(STATS)))


def test_moves_are_shown_where_there_are_some():
    moves = {"published": 6, "late": 1, "failed": 0}
    moved = replace(STATS, choices={"hi": 3, "lo": 1}, moves=moves, windows=3, migration_link_seconds=0.5)
    text = str(summary(Ranks(moved)))
    assert "served high   75.0% of 4 choices" in text
    assert "moves         6 published, 1 late; the link worked 0.50 s for them" in text
    assert "windows       3, 50.0% of 4 high experts exchanged in each" in text
    assert "moves" not in str(summary(Ranks(STATS)))
