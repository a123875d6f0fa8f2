"""A snapshot of everything that one rank counts, as plain numbers that travel between processes."""

from dataclasses import asdict, dataclass, field
from typing import Any

from vllm_dymoe.predict import PredictionStats
from vllm_dymoe.residency.tier import Tier
from vllm_dymoe.runtime.migration import OUTCOMES, MigrationStats
from vllm_dymoe.runtime.serving import Serving
from vllm_dymoe.transfer import Reason


def _count(meaning: str, label: str | None = None, **more: Any) -> dict[str, Any]:
    """What a field is as a metric; ``label`` names the keys of a dictionary."""
    return {"meaning": meaning, "label": label, "gauge": False, **more}


def _now(meaning: str, label: str | None = None) -> dict[str, Any]:
    return _count(meaning, label, gauge=True)


@dataclass(frozen=True)
class RuntimeStats:
    """A snapshot of one rank; ``vllm_adapter.metrics`` publishes every field but ``hit_rate``.

    A prefetch is useful (needed, and there in time), late (needed while it was on its way), wasted (not needed) or
    cancelled (before a byte moved). Experts that are predicted are named; wanted are those that routers then chose in
    the same layers, and right those that are both: right / wanted is FIRM-MoE's prediction accuracy (Eq. 7), right /
    named its expert utilisation (Eq. 8). A move is published, failed, late (not there after a whole window), refused
    (no slot for it) or outdated (not begun before the next plan).
    """

    planned: dict[str, int] = field(metadata=_count("Experts that the system gave each tier.", "tier"))
    hits: int = field(metadata=_count("Experts that a layer needed and found on the device."))
    misses: int = field(metadata=_count("Experts that a layer needed and did not find on the device."))
    there: int = field(metadata=_count("Misses that were computed where they lie in host memory."))
    promotions: int = field(metadata=_count("Misses that replaced a low version by a high one."))
    reuses: int = field(metadata=_count("Hits that used a high version where a low one would have done."))
    evictions: int = field(metadata=_count("Experts that made room for others."))
    transfers: dict[str, int] = field(metadata=_count("Blobs moved from host to device.", "reason"))
    bytes_moved: dict[str, int] = field(
        metadata=_count("Bytes moved from host to device.", "reason", name="transferred_bytes")
    )
    host_hits: int = field(metadata=_count("Misses of the device that were in host memory, where that is a level."))
    host_misses: int = field(metadata=_count("Misses of the device that had to wait for the disk as well."))
    host_guesses: dict[str, int] = field(metadata=_count("Slices read ahead into host memory.", "outcome"))
    host_slices: int = field(metadata=_now("Slices that are in host memory, where that is a level."))
    host_bytes: int = field(metadata=_now("Host memory that the level takes."))
    disk_bytes: int = field(metadata=_count("Bytes read from the store's files."))
    disk_reads: int = field(metadata=_count("Reads of the store's files."))
    disk_seconds: float = field(metadata=_count("Time in which at least one of them was under way."))
    disk_wait_seconds: float = field(metadata=_count("Time spent waiting for them."))
    disk_queue: int = field(metadata=_now("Reads that wait or run now."))
    failed_transfers: int = field(metadata=_count("Transfers that ended in an error."))
    exposed_wait_seconds: float = field(metadata=_count("Host time spent waiting for transfers."))
    prefetches: dict[str, int] = field(metadata=_count("Experts fetched ahead, by what became of them.", "outcome"))
    predictions: dict[str, int] = field(
        metadata=_count("Experts named ahead, wanted by routers, and right: both.", "kind")
    )
    prediction_seconds: float = field(metadata=_count("Host time spent on predicting experts."))
    predictor_bytes: int = field(metadata=_now("Device memory of the predictor, within the budget."))
    prefetch_interval: dict[str, int] = field(metadata=_now("One of so many predictions is acted on.", "phase"))
    budget_bytes: int = field(metadata=_now("The hard limit of device memory for experts."))
    peak_expert_bytes: int = field(metadata=_now("The most device memory that experts ever held."))
    slots: dict[str, int] = field(metadata=_now("Slots for experts on the device.", "tier"))
    resident_experts: dict[str, int] = field(metadata=_now("Experts that are complete on the device.", "tier"))
    choices: dict[str, int] = field(
        metadata=_count("Choices of routers by what served them, where versions move.", "tier")
    )
    moves: dict[str, int] = field(metadata=_count("Experts moved to the high version between steps.", "outcome"))
    windows: int = field(metadata=_count("Windows of traffic after which high experts were chosen anew."))
    window_age_seconds: float = field(metadata=_now("Age of the running window."))
    migration_link_seconds: float = field(metadata=_count("Time that the link worked for moves."))
    hit_rate: float

    @classmethod
    def collect(cls, serving: Serving) -> "RuntimeStats":
        """Read the counters of one runtime."""
        counts, prefetch, predictor = serving.counts, serving.prefetch_stats, serving.predictor
        transfer, memory, migration = serving.engine.stats, serving.memory, serving.migration
        level, disk = serving.level, serving.disk
        plan, moved = memory.plan, migration.stats if migration else MigrationStats()
        return cls(
            planned={tier.value: counts.planned[tier] for tier in Tier},
            hits=counts.hits,
            misses=counts.misses,
            there=counts.there,
            hit_rate=counts.hit_rate,
            promotions=counts.promotions,
            reuses=counts.reuses,
            evictions=counts.evictions,
            bytes_moved={reason.name.lower(): transfer.bytes_moved[reason] for reason in Reason},
            transfers={reason.name.lower(): transfer.transfers[reason] for reason in Reason},
            host_hits=level.slots.counts.hits if level else 0,
            host_misses=level.slots.counts.misses if level else 0,
            host_guesses=asdict(level.slots.counts.guesses) if level else {},
            host_slices=len(level.slots.held) - len(level.slots.coming) if level else 0,
            host_bytes=level.slots.nbytes if level else 0,
            disk_bytes=disk.nbytes,
            disk_reads=disk.reads,
            disk_seconds=disk.seconds,
            disk_wait_seconds=level.engine.stats.exposed_wait_seconds
            if level
            else transfer.exposed_wait_seconds * (disk.reads > 0),
            disk_queue=len(level.slots.coming) if level else disk.under_way,
            failed_transfers=transfer.failed,
            exposed_wait_seconds=transfer.exposed_wait_seconds,
            budget_bytes=memory.budget.limit,
            peak_expert_bytes=memory.budget.reserved,
            prefetches={name: getattr(prefetch, name) for name in ("useful", "late", "wasted", "cancelled")},
            prefetch_interval=serving.prefetcher.intervals if serving.prefetcher else {},
            predictions=asdict(predictor.stats if predictor else PredictionStats()),
            predictor_bytes=predictor.nbytes if predictor else 0,
            prediction_seconds=predictor.seconds if predictor else 0.0,
            slots={tier.value: count for tier, count in plan.slots.items()},
            resident_experts={tier.value: len(memory.table.residents(tier)) for tier in plan.slots},
            choices={tier.value: moved.choices[tier] for tier in (Tier.HI, Tier.LO)},
            moves={outcome: moved.moves[outcome] for outcome in OUTCOMES},
            windows=moved.windows,
            window_age_seconds=migration.window_age if migration else 0.0,
            migration_link_seconds=moved.link_seconds,
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
