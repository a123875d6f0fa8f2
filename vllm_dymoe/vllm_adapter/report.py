"""What people are told: the logger, the lines at start, and the summary for users of ``LLM()``."""

from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from vllm.logger import init_logger

from vllm_dymoe.config import Options
from vllm_dymoe.residency.tier import Tier
from vllm_dymoe.runtime import MoERuntime
from vllm_dymoe.runtime.decode_path import DECODE_ROWS
from vllm_dymoe.runtime.sizing import tier_bits
from vllm_dymoe.runtime.stats import RuntimeStats
from vllm_dymoe.units import size

# vLLM configures the hierarchy below "vllm" only.
logger = init_logger("vllm.plugins.dymoe")


def announce(runtime: MoERuntime, rank: str, seconds: float, source: str = "", place: str = "") -> None:
    """Say in one line what is active, and warn if the cache cannot work.

    Args:
        runtime: that is ready.
        rank: which of several ranks this is, empty for the only one.
        seconds: from its creation until it was ready.
        source: what became of a quantized checkpoint's numbers, if it is one.
        place: why the host store is where it is, if nobody has asked for that.
    """
    logger.info("%s%s Experts were ready after %.1f s.", describe(runtime, rank, place), source, seconds)
    for warning in warnings(runtime):
        logger.warning("vllm-dymoe: %s", warning)


def describe(runtime: MoERuntime, rank: str = "", place: str = "") -> str:
    """Model, system, prefetch, tiers, budget, slots and store in one line; a budget is each rank's own."""
    experts, options, plan = runtime.experts, runtime.options, runtime.plan
    layers = len(experts.layers)
    tiers = []
    for tier, count in plan.slots.items():
        bits = tier_bits(options, tier)
        quotas = plan.quotas[tier]
        least, most = min(quotas), max(quotas)
        per_layer = f"{least}" if least == most else f"{least}-{most}"
        tiers.append(
            f"{tier.value} = {bits} bits ({size(experts.formats[bits].whole_nbytes)} an expert): {count} slots, "
            f"{per_layer} of {experts.num_experts} experts per layer + {plan.staging[tier]} for streaming"
        )
    return (
        f"vllm-dymoe {version('vllm-dymoe')} is active: {layers} MoE layers x {experts.num_experts} experts, "
        f"top {experts.top_k}; system {_system(options)}; prefetch {_prefetch(runtime)}; {'; '.join(tiers)}; "
        f"budget {size(plan.limit)} of {size(experts.nbytes(options.hi))}{f' on {rank} alone' if rank else ''}; "
        f"decode is decided by {_who_decides(runtime)}; "
        f"kernel {runtime.kernel.name}; host store: {runtime.store.description}"
        f"{f' ({place})' if place else ''}."
    )


def _who_decides(runtime: MoERuntime) -> str:
    """The one writer of what layers keep, and why it is the host."""
    if runtime.decode is None:
        return f"the host{f', because {runtime.host_decides_because}' if runtime.host_decides_because else ''}"
    foresight, more = runtime.system.foresight, ""
    ahead = foresight.projections_in_graph if foresight else 0
    if ahead and runtime.fetches_in_graphs:
        more = f", up to {ahead} projections of the next layer fetched ahead"
    elif ahead:
        more = ", nothing fetched ahead (it needs a predictor, and low versions that do not lie inside the high ones)"
    return f"the device ({runtime.decode.kernel.name}), in steps of up to {DECODE_ROWS} tokens{more}"


def _system(options: Options) -> str:
    """Its name, and the parameters that were set."""
    parameters = ", ".join(f"{name} {value}" for name, value in options.system_options.items())
    return f"{options.system} ({parameters})" if parameters else options.system


def _prefetch(runtime: MoERuntime) -> str:
    """What foresees, what its predictor takes, and what stands in for one that is missing."""
    options, predictor = runtime.options, runtime.predictor
    if options.predictor is not None and predictor is not None:
        return f"trained, by {options.predictor} ({size(predictor.nbytes)} of the budget)"
    if options.system == "duoserve":
        return "popularity, because no predictor was given"
    return foresight.name if (foresight := runtime.system.foresight) else "none"


def warnings(runtime: MoERuntime) -> list[str]:
    """Sentences about settings that work, but badly."""
    experts, options, plan = runtime.experts, runtime.options, runtime.plan
    shares = runtime.system.precision.all_shares(experts)
    found = []
    asked = options.model_fields_set & {"system", "system_options", "predictor"}
    if asked and runtime.system.foresight is not None and runtime.device.type == "cpu" and options.link_gbps is None:
        found.append(
            f'system "{options.system}" fetches nothing ahead while experts come from memory or the page cache, '
            "because the cores that would copy them are computing; it works where they come from a disk, on a GPU, and "
            "with link_gbps."
        )
    found += runtime.system.precision.warnings(len(experts.layers) - experts.draft_layers, experts.top_k)
    for tier in plan.slots if runtime.system.residency.keeps and runtime.system.residency.migrating is None else ():
        every_base = runtime.memory.nested and tier is Tier.LO
        # Whatever its tier, an expert needs its base.
        of_layers = [1.0] * len(experts.layers) if every_base else shares[tier]
        wanted = [round(share * experts.top_k) for share in of_layers]
        short = [(kept, uses) for kept, uses in zip(plan.quotas[tier], wanted, strict=True) if kept < uses]
        if not short:
            continue
        least, uses = min(short)
        if least == 0:
            found.append(
                f"with {plan.slots[tier]} slots in the {tier.value} tier some layers keep no expert at all, so their "
                "cache can never hit and every expert is fetched for every token; raise expert_budget."
            )
        else:
            found.append(
                f"a layer keeps {least} experts of the {tier.value} tier but one token uses {uses}, "
                "so most experts are fetched for every token; raise expert_budget."
            )
    return found


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
            **self._migration(),
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

    def _migration(self) -> dict[str, str]:
        """How much of the traffic high versions served, and what became of moves; nothing where none move."""
        stats = self.stats
        choices = sum(stats.choices.values())
        if not choices:
            return {}
        published, places = stats.moves["published"], stats.resident_experts.get("hi", 0)
        churn = published / max(1, stats.windows * places)
        outcomes = ", ".join(f"{count} {outcome}" for outcome, count in stats.moves.items() if count) or "none"
        return {
            "served high": f"{stats.choices['hi'] / choices:.1%} of {choices} choices",
            "moves": f"{outcomes}; the link worked {stats.migration_link_seconds:.2f} s for them",
            "windows": f"{stats.windows}, {churn:.1%} of {places} high experts exchanged in each; the last one began "
            f"{stats.window_age_seconds:.1f} s ago",
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
