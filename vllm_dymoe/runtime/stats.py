"""A snapshot of everything that one rank counts, as plain numbers that travel between processes."""

from dataclasses import asdict, dataclass
from typing import Any

from vllm_dymoe.predict import PredictionStats
from vllm_dymoe.residency.tier import Tier
from vllm_dymoe.runtime.migration import OUTCOMES, MigrationStats
from vllm_dymoe.runtime.serving import Serving
from vllm_dymoe.transfer import Reason


@dataclass(frozen=True)
class RuntimeStats:
    """A snapshot of one rank.

    Attributes:
        planned: experts that the system gave each tier, over all layers and steps.
        hits: experts that a layer needed and found on the device.
        misses: experts that a layer needed and had to fetch.
        hit_rate: hits among both, 0 to 1.
        promotions: misses of a high version where the low one was there.
        reuses: hits that used a high version where a low one would have done.
        evictions: experts that made room for others.
        bytes_moved: bytes from host to device, by reason.
        transfers: blobs from host to device, by reason.
        failed_transfers: transfers that ended in an error.
        exposed_wait_seconds: host time spent waiting for transfers.
        budget_bytes: the hard limit of device memory for experts.
        peak_expert_bytes: the most device memory that experts ever held.
        prefetches: experts that were fetched ahead, by what became of them: useful (needed, and there in time), late
            (needed while they were on their way), wasted (not needed), cancelled (before a byte moved).
        prefetch_interval: one of so many predictions is acted on, by phase; more than 1 where they did not pay.
        predictions: experts named ahead (named), those that routers then chose in the same layers (wanted), and experts
            that are both (right): right / wanted is FIRM-MoE's prediction accuracy (Eq. 7), right / named its expert
            utilisation (Eq. 8).
        predictor_bytes: device memory that the predictor takes, within the budget.
        prediction_seconds: host time that predictions took.
        slots: slots by tier.
        resident_experts: experts that are complete on the device, by tier.
        choices: of routers, by the tier that served them, where versions move between steps; so are those below.
        moves: by outcome: published; failed; late, not there after a whole window; refused, no slot for it; outdated,
            not begun before the next plan.
        windows: of traffic that have ended.
        window_age_seconds: of the running one.
        migration_link_seconds: that the link worked for moves.
    """

    planned: dict[str, int]
    hits: int
    misses: int
    hit_rate: float
    promotions: int
    reuses: int
    evictions: int
    bytes_moved: dict[str, int]
    transfers: dict[str, int]
    failed_transfers: int
    exposed_wait_seconds: float
    budget_bytes: int
    peak_expert_bytes: int
    prefetches: dict[str, int]
    prefetch_interval: dict[str, int]
    predictions: dict[str, int]
    predictor_bytes: int
    prediction_seconds: float
    slots: dict[str, int]
    resident_experts: dict[str, int]
    choices: dict[str, int]
    moves: dict[str, int]
    windows: int
    window_age_seconds: float
    migration_link_seconds: float

    @classmethod
    def collect(cls, serving: Serving) -> "RuntimeStats":
        """Read the counters of one runtime."""
        counts, prefetch, predictor = serving.counts, serving.prefetch_stats, serving.predictor
        transfer, memory, migration = serving.engine.stats, serving.memory, serving.migration
        plan, moved = memory.plan, migration.stats if migration else MigrationStats()
        return cls(
            planned={tier.value: counts.planned[tier] for tier in Tier},
            hits=counts.hits,
            misses=counts.misses,
            hit_rate=counts.hit_rate,
            promotions=counts.promotions,
            reuses=counts.reuses,
            evictions=counts.evictions,
            bytes_moved={reason.name.lower(): transfer.bytes_moved[reason] for reason in Reason},
            transfers={reason.name.lower(): transfer.transfers[reason] for reason in Reason},
            failed_transfers=transfer.failed,
            exposed_wait_seconds=transfer.exposed_wait_seconds,
            budget_bytes=memory.budget.limit,
            peak_expert_bytes=memory.budget.peak,
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
        """The snapshot as JSON-serialisable data."""
        return asdict(self)
