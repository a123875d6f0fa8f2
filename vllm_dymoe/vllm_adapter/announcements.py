"""What people are told: the logger, the lines at start, and the summary for users of ``LLM()``."""

import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from vllm.logger import init_logger

from vllm_dymoe.config import ConfigError
from vllm_dymoe.residency.tier import Tier
from vllm_dymoe.runtime import MoERuntime
from vllm_dymoe.runtime.decode_path import DECODE_ROWS
from vllm_dymoe.runtime.sizing import tier_bits
from vllm_dymoe.runtime.stats import RuntimeStats
from vllm_dymoe.units import size

# vLLM configures the hierarchy below "vllm" only.
logger = init_logger("vllm.plugins.dymoe")


def end_with_sentences() -> None:
    """Where our refusal ends the command ``vllm``, its sentence is all that is printed; a program keeps its
    traceback."""
    if Path(sys.argv[0]).name != "vllm":
        return
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        if isinstance(error, ConfigError):
            print(error, file=sys.stderr)
        else:
            before(kind, error, traceback)

    sys.excepthook = hook


def _version() -> str:
    """Nothing for a checkout that is not installed, as a GPU host without a network may have it."""
    try:
        return f" {version('vllm-dymoe')}"
    except PackageNotFoundError:
        return ""


def describe_runtime(runtime: MoERuntime, rank: str = "", place: str = "") -> str:
    experts, options, plan = runtime.experts, runtime.options, runtime.plan
    parameters = ", ".join(f"{name} {value}" for name, value in options.system_options.items())
    tiers = []
    for tier, count in plan.slots.items():
        bits, least, most = tier_bits(options, tier), min(plan.quotas[tier]), max(plan.quotas[tier])
        tiers.append(
            f"{tier.value} = {bits} bits ({size(experts.formats[bits].whole_nbytes)} an expert): {count} slots, "
            f"{least if least == most else f'{least}-{most}'} of {experts.num_experts} experts per layer + "
            f"{plan.staging[tier]} for streaming"
        )
    return (
        f"vllm-dymoe{_version()} is active: {len(experts.layers)} MoE layers x {experts.num_experts} "
        f"experts, top {experts.top_k}; system {options.system}{f' ({parameters})' if parameters else ''}; "
        f"prefetch {_prefetch(runtime)}; {'; '.join(tiers)}; "
        f"budget {size(plan.limit)} of {size(experts.nbytes(options.hi))}{f' on {rank} alone' if rank else ''}; "
        f"decode is decided by {_decisions(runtime)}; "
        f"{f'{how}; ' if (how := runtime.host_side.describe()) else ''}"
        f"kernel {runtime.kernel.name}; host store: {runtime.store.description}"
        f"{f' ({place})' if place else ''}."
    )


def _decisions(runtime: MoERuntime) -> str:
    if runtime.decode is None:
        return f"the host{f', because {runtime.host_decides_because}' if runtime.host_decides_because else ''}"
    said = f"the device ({runtime.decode.kernel.name})"
    # Experts that layers do not keep, each once: at the high version where there are two.
    plan, memory, experts = runtime.plan, runtime.memory, runtime.experts
    tiers = list(plan.slots) if memory.nested else list(plan.slots)[:1]
    missing = {tier: sum(experts.num_experts - kept for kept in plan.quotas[tier]) for tier in tiers}
    moved = sum(count * experts.formats[memory.bits[tier]].nbytes for tier, count in missing.items())
    if runtime.system.residency.migrating is not None or not moved:
        return said
    return f"{said}; each chunk of a prompt moves up to {size(moved)} over the link"


def _prefetch(runtime: MoERuntime) -> str:
    """What is fetched ahead, in each kind of step."""
    if runtime.system.foresight is None:
        return "none"
    host = "none, because the cores that would copy compute" if runtime.engine.occupies_cores else _named(runtime)
    if runtime.decode is None:
        return host
    return f"none in steps of up to {DECODE_ROWS} tokens, the next layer's experts by themselves in larger ones"


def _named(runtime: MoERuntime) -> str:
    options, predictor, foresight = runtime.options, runtime.predictor, runtime.system.foresight
    if options.predictor is not None and predictor is not None:
        return f"trained, by {options.predictor} ({size(predictor.nbytes)} of the budget)"
    if options.system == "duoserve":
        return "popularity, because no predictor was given"
    return foresight.name if foresight else "none"


def warnings(runtime: MoERuntime, expert_ranks: int = 1) -> list[str]:
    """Sentences about settings that work, but badly, on one of so many ranks that share out the experts."""
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
    if options.predictor is not None and runtime.decode is not None:
        found.append(
            "predictor is not asked, because the device decides about experts; leave it out, or set decisions to "
            '"host".'
        )
    if options.lo == 0 and Tier.LO in runtime.system.precision.tiers:
        found.append(
            "lo is 0, so experts that matter less are skipped, which loses about ten times as much on a prompt as 2 "
            "bits do; set lo to 2."
        )
    for tier in plan.slots if runtime.system.residency.keeps and runtime.system.residency.migrating is None else ():
        every_base = runtime.memory.nested and tier is Tier.LO
        # Whatever its tier, an expert needs its base.
        of_layers = [1.0] * len(experts.layers) if every_base else shares[tier]
        wanted = [round(share * experts.top_k / expert_ranks) for share in of_layers]
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
                f"a layer keeps {least} experts of the {tier.value} tier but one token uses {uses}"
                f"{' here on average' if expert_ranks > 1 else ''}, "
                "so most experts are fetched for every token; raise expert_budget."
            )
    return found


@dataclass(frozen=True)
class Summary:
    """What all ranks counted since the start or the last reset, in vLLM's order; prints as aligned text."""

    ranks: tuple[RuntimeStats, ...]

    def to_dict(self) -> dict[str, Any]:
        return {"ranks": [{"rank": rank, **stats.to_dict()} for rank, stats in enumerate(self.ranks)]}

    def __str__(self) -> str:
        lines = []
        for rank, stats in enumerate(self.ranks):
            lines += [f"rank {rank}", *(f"  {name:<13} {value}" for name, value in in_words(stats).items())]
        return "\n".join(lines)


def in_words(stats: RuntimeStats) -> dict[str, str]:
    """One rank's counts by name; of foresight and of moves only where there were some."""

    def listed(counts: dict[str, int]) -> str:
        return ", ".join(f"{count} {outcome}" for outcome, count in counts.items())

    needed, choices = stats.hits + stats.misses, sum(stats.choices.values())
    named, wanted, right = (stats.predictions[kind] for kind in ("named", "wanted", "right"))
    rows = {
        "planned": ", ".join(f"{tier} {count}" for tier, count in stats.planned.items()),
        "hits": f"{stats.hits / needed:.1%} of {needed}" if needed else "no expert needed yet",
        "moved": ", ".join(f"{reason} {size(n)}" for reason, n in stats.bytes_moved.items()),
        "exposed wait": f"{stats.exposed_wait_seconds:.2f} s",
        "evictions": str(stats.evictions),
    }
    if stats.there:
        rows["there"] = f"{stats.there} of {stats.misses} misses were computed in host memory"
    if named and wanted:
        rows["foreseen"] = f"{right / wanted:.1%} of {wanted} wanted, {right / named:.1%} of {named} named"
        rows["prefetched"] = listed(stats.prefetches)
    if choices:
        places = stats.resident_experts.get("hi", 0)
        churn = stats.moves["published"] / max(1, stats.windows * places)
        outcomes = listed({outcome: count for outcome, count in stats.moves.items() if count}) or "none"
        rows["served high"] = f"{stats.choices['hi'] / choices:.1%} of {choices} choices"
        rows["moves"] = f"{outcomes}; the link worked {stats.migration_link_seconds:.2f} s for them"
        rows["windows"] = (
            f"{stats.windows}, {churn:.1%} of {places} high experts exchanged in each; the last one began "
            f"{stats.window_age_seconds:.1f} s ago"
        )
    held = stats.resident_experts
    return rows | {
        "resident": ", ".join(f"{tier} {held[tier]} of {slots} slots" for tier, slots in stats.slots.items() if slots),
        "memory": f"peak {size(stats.peak_expert_bytes)} of {size(stats.budget_bytes)}",
    }
