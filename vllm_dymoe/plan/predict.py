"""Times from bytes: what a step reads of device memory, and what it waits for from the link.

With every expert there a step takes what was measured so, or

    t = (bytes of weights / bandwidth of memory) + layers * (the host's time for a layer)

Each miss adds its bytes / the link, and what it costs the host, where a run has measured that. What was named ahead may
travel while the layer before computes: of the link's time for a layer, the smaller of

    accuracy * (its misses)        and        utilisation * (a layer's computation)

is hidden, since a wrong guess takes the link from a right one. A prompt streams what is not there while it computes,
so that it takes the longer of the two, and one expert more (DuoServe-MoE 5.2).
"""

from dataclasses import dataclass

from vllm_dymoe.config import Options
from vllm_dymoe.plan.device import Device
from vllm_dymoe.plan.model import ModelShape
from vllm_dymoe.plan.replay import LayerDemand, Routings, replay
from vllm_dymoe.residency.format import ModelExperts
from vllm_dymoe.residency.tier import Tier
from vllm_dymoe.runtime.sizing import SlotPlan, slot_bits, tier_bits
from vllm_dymoe.systems import System, make_system
from vllm_dymoe.systems.dymoe import Dymoe

_NEXT_GATE = 0.75  # of the next layer's experts, where no trace says how right its gate is (papers: 0.6 to 0.9)
_ITEM = 2


@dataclass(frozen=True)
class Prediction:
    """One row of a plan.

    Attributes:
        tpot: seconds of a decode step.
        ttft: seconds to the first token.
        hit_rate: of the experts that a decode step needs.
        moved: bytes of experts that a decode step moves.
    """

    tpot: float
    ttft: float
    hit_rate: float
    moved: float


def step_bytes(shape: ModelShape, experts: ModelExperts, options: Options, demand: LayerDemand) -> float:
    """Bytes of device memory that a decode step reads."""
    bits = {tier: tier_bits(options, tier) for tier in Tier}
    each = {tier: experts.formats[width].whole_nbytes if width else 0 for tier, width in bits.items()}
    layer = sum(count * each[tier] for tier, count in demand.active.items())
    return shape.token_weights * _ITEM + shape.moe_layers * layer


def predict(
    shape: ModelShape, options: Options, plan: SlotPlan, device: Device, routings: Routings, prompt: int
) -> Prediction:
    """What a system does with the slots of a budget, at the routings' batch and prompts of so many tokens."""
    system = make_system(options)
    experts = shape.packed(tuple(dict.fromkeys(options.stored_bits)), options.group_size)
    critical = None
    if isinstance(system, Dymoe):
        depth, schedule = routings.header.num_layers, system.precision.schedule
        critical = lambda layer, active: schedule.critical(layer, depth, active)  # noqa: E731
    quotas = plan.quotas if system.residency.keeps else {}
    demand = replay(routings, quotas, critical, low=options.lo > 0, nested=_nested(experts, plan))
    link = device.link if options.link_gbps is None else options.link_gbps * 1e9
    each = _slot_bytes(experts, options, system)
    layer_bytes = sum(demand.missing[tier] * nbytes for tier, nbytes in each.items())
    computing = device.step.get((options.hi, routings.batch))
    if computing is None:
        read = step_bytes(shape, experts, options, demand) / device.bandwidth
        computing = read + shape.moe_layers * device.layer_seconds
    waiting = layer_bytes / link
    accuracy, utilisation = foresight(system, routings)
    hidden = min(accuracy * waiting, utilisation * computing / shape.layers)
    needed = sum(demand.active.values())
    return Prediction(
        tpot=computing + shape.moe_layers * (waiting - hidden + demand.misses * device.miss),
        ttft=_prompt_seconds(shape, experts, options, plan, device, routings, prompt, link),
        hit_rate=1 - demand.misses / needed if needed else 1.0,
        moved=shape.moe_layers * layer_bytes,
    )


def _nested(experts: ModelExperts, plan: SlotPlan) -> bool:
    """Whether slots are of fine slices and of bases."""
    return Tier.HI in plan.slots and any(fmt.nested for fmt in experts.formats.values())


def _slot_bytes(experts: ModelExperts, options: Options, system: System) -> dict[Tier, int]:
    """What one slot of each tier holds."""
    return {
        tier: experts.formats[bits].nbytes for tier, bits in slot_bits(experts, options, system.precision.tiers).items()
    }


def foresight(system: System, routings: Routings) -> tuple[float, float]:
    """How much of what a layer wants is named ahead, and how much of what is named is wanted (FIRM-MoE Eqs. 7, 8)."""
    if system.foresight is None:
        return 0.0, 0.0
    if system.name == "layer-prefetch":
        return 1.0, routings.active / routings.header.num_experts
    if system.foresight.name == "popularity":
        return routings.popularity, routings.popularity
    right = routings.next_gate if routings.next_gate is not None else _NEXT_GATE
    return right, right


def _prompt_seconds(
    shape: ModelShape,
    experts: ModelExperts,
    options: Options,
    plan: SlotPlan,
    device: Device,
    routings: Routings,
    prompt: int,
    link: float,
) -> float:
    system, active = make_system(options), routings.distinct(prompt)
    high = 1.0
    if isinstance(system, Dymoe):
        high = system.precision.schedule.realised(shape.moe_layers, max(1, round(active)))
    each, streaming = _slot_bytes(experts, options, system), 0.0
    for tier, share in ((Tier.HI, high), (Tier.LO, 1.0 if _nested(experts, plan) else 1 - high)):
        if share > 0 and tier in plan.slots:
            kept = sum(plan.quotas[tier]) / shape.moe_layers / shape.experts
            streaming += share * active * max(0.0, 1 - kept) * each[tier]
    streaming *= shape.moe_layers / link
    blob = experts.formats[options.hi].whole_nbytes
    at = options.hi, routings.batch
    if at in device.prompt:
        computing = device.prompt[at] * prompt
    else:
        per_token = shape.token_weights + shape.moe_layers * shape.top_k * 3 * shape.hidden * shape.intermediate
        reading = (shape.token_weights * _ITEM + shape.moe_layers * active * blob) / device.bandwidth
        computing = max(2 * per_token * prompt / device.compute, reading) + shape.moe_layers * device.layer_seconds
    return max(computing, streaming) + (blob / link if streaming else 0.0)
