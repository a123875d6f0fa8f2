"""Statistics of one rank.

A snapshot has all counters, as plain numbers that processes can exchange.
"""

# ruff: noqa: RUF009
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from vllm_dymoe.cache.migration import OUTCOMES, MigrationStats
from vllm_dymoe.cache.transfer import Reason
from vllm_dymoe.executor.host_planned import HostPlannedLayers
from vllm_dymoe.planner.precision import Precision
from vllm_dymoe.prefetch import Measured, PredictionStats


def _count(meaning: str, label: str | None = None, **more: Any) -> Any:
    """Return a field that is published as a metric.

    Args:
        meaning: the metric's help text.
        label: the metric's label for the keys of a dictionary; None for a single number.
    """
    return field(metadata={"meaning": meaning, "label": label, "gauge": False, **more})


def _now(meaning: str, label: str | None = None) -> Any:
    return _count(meaning, label, gauge=True)


_COUNTED = ("hits", "misses", "cpu_executed", "promotions", "reuses", "evictions")  # as in ResidencyCounts


@dataclass(frozen=True)
class ServerStats:
    """A snapshot of one rank.

    ``vllm_plugin.metrics`` publishes every field except ``hit_rate``.

    - A prefetch is useful (needed, and arrived in time), late (needed before it arrived), wasted (not needed) or
      cancelled (before a byte moved).
    - Of predictions, *predicted* experts were named by the predictor, *needed* ones were chosen by routers in the same
      layers, and *correct* ones are both. FIRM-MoE's prediction accuracy (Eq. 7) is correct / needed, its expert
      utilisation (Eq. 8) correct / predicted.
    - A move is published, failed, late (not finished after a whole window), refused (no slot) or outdated (not begun
      before the next plan).
    """

    hit_rate: float
    planned: dict[str, int] = _count("Experts given each precision.", "precision")
    hits: int = _count("Needed experts that were in a slot.")
    misses: int = _count("Needed experts that were not in a slot.")
    cpu_executed: int = _count("Misses executed by the CPU from host memory.")
    promotions: int = _count("Misses of a high version while the low one was resident.")
    reuses: int = _count("Hits of a high version where the low one was wanted.")
    evictions: int = _count("Experts evicted from slots.")
    transfers: dict[str, int] = _count("Packed experts transferred to the device.", "reason")
    bytes_moved: dict[str, int] = _count("Bytes transferred to the device.", "reason", name="transferred_bytes")
    host_hits: int = _count("Misses found in host memory, if that is a cache.")
    host_misses: int = _count("Misses that had to be read from disk.")
    host_predictions: dict[str, int] = _count("Slices read ahead from disk into host memory.", "outcome")
    host_slices: int = _now("Slices in host memory, if that is a cache.")
    host_bytes: int = _now("Bytes of host memory for experts, if that is a cache.")
    disk_bytes: int = _count("Bytes read from the store's files.")
    disk_reads: int = _count("Reads of the store's files.")
    disk_seconds: float = _count("Seconds in which at least one disk read was in flight.")
    disk_wait_seconds: float = _count("Seconds in which steps waited for disk reads.")
    disk_queue: int = _now("Disk reads that are queued or running.")
    failed_transfers: int = _count("Transfers that ended in an error.")
    exposed_wait_seconds: float = _count("Seconds in which the host waited for transfers.")
    prefetches: dict[str, int] = _count("Prefetched experts, by outcome.", "outcome")
    predictions: dict[str, int] = _count("Experts predicted, needed by routers, and correct (both).", "kind")
    prediction_seconds: float = _count("Seconds of host time spent on predictions.")
    predictor_bytes: int = _now("Device memory of the predictor.")
    prefetch_interval: dict[str, int] = _now("Interval of prefetch: one in so many predictions is used.", "phase")
    budget_bytes: int = _now("Device memory that experts may use, in bytes.")
    peak_expert_bytes: int = _now("Peak device memory used by experts, in bytes.")
    slots: dict[str, int] = _now("Slots on the device.", "precision")
    resident_experts: dict[str, int] = _now("Experts in slots.", "precision")
    choices: dict[str, int] = _count(
        "Routers' choices by the precision that served them, if versions move between steps.", "precision"
    )
    moves: dict[str, int] = _count("Moves of experts to the high precision between steps, by outcome.", "outcome")
    windows: int = _count("Windows completed; each one chooses the high experts anew.")
    window_age_seconds: float = _now("Age of the current window, in seconds.")
    migration_link_seconds: float = _count("Seconds in which the link worked for moves.")

    @classmethod
    def collect(
        cls, serving: HostPlannedLayers, predictor: Measured | None, predictor_bytes: int, intervals: dict[str, int]
    ) -> "ServerStats":
        """Collect a snapshot; ``intervals`` is ``prefetch_interval``."""
        counts, prefetch = serving.counts, serving.prefetch_stats
        transfer, cache, migration = serving.engine.stats, serving.cache, serving.migration
        host_cache, disk = serving.host_cache, serving.disk
        plan, moved = cache.slot_plan, migration.stats if migration else MigrationStats()
        return cls(
            planned={precision.value: counts.planned[precision] for precision in Precision},
            hit_rate=counts.hit_rate,
            **{name: getattr(counts, name) for name in _COUNTED},
            bytes_moved={reason.name.lower(): transfer.bytes_moved[reason] for reason in Reason},
            transfers={reason.name.lower(): transfer.transfers[reason] for reason in Reason},
            host_hits=host_cache.slots.counts.hits if host_cache else 0,
            host_misses=host_cache.slots.counts.misses if host_cache else 0,
            host_predictions=asdict(host_cache.slots.counts.predictions) if host_cache else {},
            host_slices=len(host_cache.slots.held) - len(host_cache.slots.coming) if host_cache else 0,
            host_bytes=host_cache.slots.nbytes if host_cache else 0,
            disk_bytes=disk.nbytes,
            disk_reads=disk.reads,
            disk_seconds=disk.seconds,
            disk_wait_seconds=host_cache.engine.stats.exposed_wait_seconds
            if host_cache
            else transfer.exposed_wait_seconds * (disk.reads > 0),
            disk_queue=len(host_cache.slots.coming) if host_cache else disk.under_way,
            failed_transfers=transfer.failed,
            exposed_wait_seconds=transfer.exposed_wait_seconds,
            budget_bytes=cache.budget.limit,
            peak_expert_bytes=cache.budget.reserved,
            prefetches=asdict(prefetch),
            prefetch_interval=intervals,
            predictions=asdict(predictor.stats if predictor else PredictionStats()),
            predictor_bytes=predictor_bytes,
            prediction_seconds=predictor.seconds if predictor else 0.0,
            slots={precision.value: count for precision, count in plan.slots.items()},
            resident_experts={precision.value: len(cache.table.residents(precision)) for precision in plan.slots},
            choices={precision.value: moved.choices[precision] for precision in (Precision.HIGH, Precision.LOW)},
            moves={outcome: moved.moves[outcome] for outcome in OUTCOMES},
            windows=moved.windows,
            window_age_seconds=migration.window_age if migration else 0.0,
            migration_link_seconds=moved.link_seconds,
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def total(counted: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the sum of several ranks' snapshots, given as plain data."""

    def add(values: list[Any]) -> Any:
        if isinstance(values[0], dict):
            return {key: sum(value.get(key, 0) for value in values) for key in values[0]}
        return sum(values)

    return {name: add([one[name] for one in counted]) for name in counted[0]}
