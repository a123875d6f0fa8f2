"""Messages for users.

These are the logger, the lines at start, and the summary for users of ``LLM()``.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.logger import init_logger

from vllm_dymoe import __version__
from vllm_dymoe.cache.budget import precision_bits
from vllm_dymoe.options import ConfigError
from vllm_dymoe.planner.constants import SMALL_BATCH_ROWS
from vllm_dymoe.planner.precision import Precision
from vllm_dymoe.planner.prefetch import MOST_AHEAD
from vllm_dymoe.prefetch import TrainedPredictor
from vllm_dymoe.server import ExpertServer
from vllm_dymoe.server.stats import ServerStats
from vllm_dymoe.units import size

# vLLM configures only loggers below "vllm".
logger = init_logger("vllm.plugins.dymoe")


def end_with_sentences() -> None:
    """Make the command ``vllm`` print only the message of an error of ours.

    This concerns an error that ends the command; other programs keep their traceback.
    """
    if Path(sys.argv[0]).name != "vllm":
        return
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        if isinstance(error, ConfigError):
            print(error, file=sys.stderr)
        else:
            before(kind, error, traceback)

    sys.excepthook = hook


def describe_server(server: ExpertServer, rank: str = "", place: str = "") -> str:
    experts, options, plan = server.experts, server.options, server.slot_plan
    parameters = ", ".join(f"{name} {value}" for name, value in options.policy_options.items())
    precisions = []
    for precision, count in plan.slots.items():
        bits, least, most = precision_bits(options, precision), min(plan.quotas[precision]), max(plan.quotas[precision])
        precisions.append(
            f"{precision.value} = {bits} bits ({size(experts.formats[bits].whole_nbytes)} an expert): {count} slots, "
            f"{least if least == most else f'{least}-{most}'} of {experts.num_experts} experts per layer + "
            f"{plan.staging[precision]} for streaming"
        )
    return (
        f"vllm-dymoe {__version__} is active: {len(experts.layers)} MoE layers x {experts.num_experts} "
        f"experts, top {experts.top_k}; policy {options.policy}{f' ({parameters})' if parameters else ''}; "
        f"prefetch {_prefetch(server)}; {'; '.join(precisions)}; "
        f"budget {size(plan.limit)} of {size(experts.nbytes(options.high))}{f' on {rank} alone' if rank else ''}; "
        f"decode is planned by {_planning(server)}; "
        f"{f'{how}; ' if (how := server.cpu_execution.describe()) else ''}"
        f"kernel {server.kernel.name}; host store: {server.store.description}"
        f"{f' ({place})' if place else ''}."
    )


def _planning(server: ExpertServer) -> str:
    if server.small_batches is None:
        return f"the host{f', because {server.host_plans_because}' if server.host_plans_because else ''}"
    said = f"the device ({server.small_batches.kernel.name})"
    # Bytes of the experts that layers do not keep, each once: at the high version if there are two.
    plan, memory, experts = server.slot_plan, server.cache, server.experts
    precisions = list(plan.slots) if memory.nested else list(plan.slots)[:1]
    moved = sum(
        (experts.num_experts - kept) * formats[memory.bits[precision]].nbytes
        for precision in precisions
        for kept, formats in zip(plan.quotas[precision], experts.of_layers, strict=True)
    )
    if server.policy.residency.migrating is not None or not moved:
        return said
    return f"{said}; each chunk of a prompt moves up to {size(moved)} over the link"


def _prefetch(server: ExpertServer) -> str:
    """Return what is prefetched, in each kind of step."""
    if server.policy.prefetch is None:
        return "none"
    file = server.options.predictor_file
    unused = f"; predictor {file} is not used and takes no memory" if file is not None and server.unasked else ""
    if server.small_batches is not None and server.disk_queue is not None:
        return f"none, because a thread brings experts from the disk when the device has planned{unused}"
    if server.small_batches is not None:
        prefetch = server.small_batches.prefetch
        few = _by_name(server) if prefetch is not None and prefetch.has_slots else "none"
        ahead = "the next layer's experts in larger ones"
        return f"{few} in steps of up to {SMALL_BATCH_ROWS} tokens, {ahead}{unused}"
    if server.unasked or server.engine.occupies_cores:
        return "none, because the cores that would copy experts also compute" + unused
    return _by_name(server)


def _by_name(server: ExpertServer) -> str:
    options, predictor, prefetch = server.options, server.predictor, server.policy.prefetch
    trains = ", until one is trained" if options.train_predictor is not None else ""
    if predictor is not None and isinstance(predictor.predictor, TrainedPredictor):
        layers = predictor.predictor.network.look_ahead
        if server.small_batches is not None:
            layers = min(layers, MOST_AHEAD)
        source = options.predictor_file or "the steps of this server"
        return (
            f"trained, by {source} ({size(server.predictor_bytes)} of the budget), for "
            f"{f'up to {layers} layers' if layers > 1 else '1 layer'} ahead"
        )
    if options.policy == "duoserve":
        return "popularity, because no predictor was given"
    return prefetch.name + trains if prefetch else "none"


def warnings(server: ExpertServer, expert_ranks: int = 1) -> list[str]:
    """Return warnings about settings that work badly.

    Args:
        expert_ranks: number of ranks that share the experts; the warnings are for one of them.
    """
    experts, options, plan = server.experts, server.options, server.slot_plan
    shares = server.policy.precision.all_shares(experts)
    found = []
    asked = options.model_fields_set & {"policy", "policy_options", "predictor"}
    if asked and server.policy.prefetch is not None and server.device.type == "cpu" and options.link_gbps is None:
        found.append(
            f'policy "{options.policy}" prefetches nothing while experts come from memory or the page cache, '
            "because the cores that would copy them also compute; prefetch works from a disk, on a GPU, and "
            "with link_gbps."
        )
    if options.low == 0 and Precision.LOW in server.policy.precision.precisions:
        found.append(
            "low is 0, so less important experts are skipped, which costs about ten times as much quality on a prompt "
            "as 2 bits do; set low to 2."
        )
    for precision in plan.slots if server.policy.residency.keeps and server.policy.residency.migrating is None else ():
        every_base = server.cache.nested and precision is Precision.LOW
        # Every expert needs its base, whatever its precision.
        of_layers = [1.0] * len(experts.layers) if every_base else shares[precision]
        wanted = [round(share * experts.top_k / expert_ranks) for share in of_layers]
        short = [(kept, uses) for kept, uses in zip(plan.quotas[precision], wanted, strict=True) if kept < uses]
        if not short:
            continue
        least, uses = min(short)
        if least == 0:
            found.append(
                f"with {plan.slots[precision]} slots in the {precision.value} precision some layers keep no expert, so "
                "they never have a hit and every expert is fetched for every token; raise expert_budget."
            )
        else:
            found.append(
                f"a layer keeps {least} experts of the {precision.value} precision, but one token uses {uses}"
                f"{' here on average' if expert_ranks > 1 else ''}, "
                "so most experts are fetched for every token; raise expert_budget."
            )
    return found


@dataclass(frozen=True)
class Summary:
    """Counts of all ranks since the start or the last reset.

    Ranks are in vLLM's order. A summary prints as aligned text.
    """

    ranks: tuple[ServerStats, ...]

    def to_dict(self) -> dict[str, Any]:
        return {"ranks": [{"rank": rank, **stats.to_dict()} for rank, stats in enumerate(self.ranks)]}

    def __str__(self) -> str:
        lines = []
        for rank, stats in enumerate(self.ranks):
            lines += [f"rank {rank}", *(f"  {name:<13} {value}" for name, value in in_words(stats).items())]
        return "\n".join(lines)


def in_words(stats: ServerStats) -> dict[str, str]:
    """Return one rank's counts by name; prefetch and migration only if there were any."""

    def listed(counts: dict[str, int]) -> str:
        return ", ".join(f"{count} {outcome}" for outcome, count in counts.items())

    needed, choices = stats.hits + stats.misses, sum(stats.choices.values())
    predicted, chosen, correct = (stats.predictions[kind] for kind in ("predicted", "needed", "correct"))
    rows = {
        "planned": ", ".join(f"{precision} {count}" for precision, count in stats.planned.items()),
        "hits": f"{stats.hits / needed:.1%} of {needed}" if needed else "no expert needed yet",
        "moved": ", ".join(f"{reason} {size(n)}" for reason, n in stats.bytes_moved.items()),
        "exposed wait": f"{stats.exposed_wait_seconds:.2f} s",
        "evictions": str(stats.evictions),
    }
    if stats.cpu_executed:
        rows["by the CPU"] = f"{stats.cpu_executed} of {stats.misses} misses were computed from host memory"
    if predicted and chosen:
        rows["predicted"] = (
            f"{correct / chosen:.1%} of {chosen} needed, {correct / predicted:.1%} of {predicted} predicted"
        )
        rows["prefetched"] = listed(stats.prefetches)
    if choices:
        places = stats.resident_experts.get("high", 0)
        churn = stats.moves["published"] / max(1, stats.windows * places)
        outcomes = listed({outcome: count for outcome, count in stats.moves.items() if count}) or "none"
        rows["served high"] = f"{stats.choices['high'] / choices:.1%} of {choices} choices"
        rows["moves"] = f"{outcomes}; the link worked {stats.migration_link_seconds:.2f} s for them"
        rows["windows"] = (
            f"{stats.windows}, {churn:.1%} of {places} high experts replaced in each; the last one began "
            f"{stats.window_age_seconds:.1f} s ago"
        )
    held = stats.resident_experts
    return rows | {
        "resident": ", ".join(
            f"{precision} {held[precision]} of {slots} slots" for precision, slots in stats.slots.items() if slots
        ),
        "memory": f"peak {size(stats.peak_expert_bytes)} of {size(stats.budget_bytes)}",
    }
