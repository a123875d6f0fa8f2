"""The lines at start: what is active, and what will not work well."""

from vllm_dymoe import __version__
from vllm_dymoe.config import Options
from vllm_dymoe.runtime import MoERuntime
from vllm_dymoe.runtime.sizing import tier_bits
from vllm_dymoe.units import size
from vllm_dymoe.vllm_adapter.log import logger


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
            f"{tier.value} = {bits} bits ({size(experts.formats[bits].nbytes)} an expert): {count} slots, "
            f"{per_layer} of {experts.num_experts} experts per layer + {plan.staging[tier]} for streaming"
        )
    return (
        f"vllm-dymoe {__version__} is active: {layers} MoE layers x {experts.num_experts} experts, "
        f"top {experts.top_k}; system {_system(options)}; prefetch {_prefetch(runtime)}; {'; '.join(tiers)}; "
        f"budget {size(plan.limit)} of {size(experts.nbytes(options.hi))}{f' on {rank} alone' if rank else ''}; "
        f"kernel {runtime.kernel.name}; host store: {runtime.store.description}"
        f"{f' ({place})' if place else ''}."
    )


def _system(options: Options) -> str:
    """Its name, and the parameters that were set."""
    parameters = ", ".join(f"{name} {value}" for name, value in options.system_options.items())
    return f"{options.system} ({parameters})" if parameters else options.system


def _prefetch(runtime: MoERuntime) -> str:
    """What foresees, what its predictor takes, and what stands in for one that is missing."""
    options, predictor, system = runtime.options, runtime.predictor, runtime.system
    if options.predictor is not None and predictor is not None:
        return f"trained, by {options.predictor} ({size(predictor.nbytes)} of the budget)"
    if options.system == "duoserve":
        return "popularity, because no predictor was given"
    return system.foresight or "none"


def warnings(runtime: MoERuntime) -> list[str]:
    """Sentences about settings that work, but badly."""
    experts, options, plan = runtime.experts, runtime.options, runtime.plan
    shares = runtime.system.shares(len(experts.layers), experts.top_k)
    found = []
    asked = options.model_fields_set & {"system", "system_options", "predictor"}
    if asked and runtime.system.foresight is not None and runtime.device.type == "cpu" and options.link_gbps is None:
        found.append(
            f'system "{options.system}" fetches nothing ahead while experts come from memory or the page cache, '
            "because the cores that would copy them are computing; it works where they come from a disk, on a GPU, and "
            "with link_gbps."
        )
    for tier in plan.slots if runtime.system.keeps_experts else ():
        wanted = [round(share * experts.top_k) for share in shares[tier]]
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
