"""From a byte budget to slots: how many of each tier, and what the smallest feasible budget is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_dymoe.config import ConfigError, ExpertBudget, Options
from vllm_dymoe.kernels.cpu import MINIMUM_WORKSPACE_BYTES
from vllm_dymoe.residency.format import ModelExperts
from vllm_dymoe.residency.table import layer_shares
from vllm_dymoe.residency.tier import Tier
from vllm_dymoe.systems import System
from vllm_dymoe.systems.base import FEWEST_STAGING, Migrating

# On a CPU more buys nothing, since a tile should stay in the second-level cache; on a GPU tiles are launches.
_LARGEST_WORKSPACE_BYTES = {"cpu": 1 << 20, "cuda": 32 << 20}


@dataclass(frozen=True)
class SlotPlan:
    """How a budget is spent."""

    limit: int  # the hard budget in bytes, on this rank
    workspace_bytes: int  # the part that the kernel's scratch and the predictor take
    slots: Mapping[Tier, int]  # number of slots of each tier in use
    quotas: Mapping[Tier, Sequence[int]]  # experts of each tier that each layer may keep; the table's ``shares``

    @property
    def staging(self) -> Mapping[Tier, int]:
        """Slots of each tier that no layer keeps."""
        return {tier: count - sum(self.quotas[tier]) for tier, count in self.slots.items()}


def workspace_bytes(experts: ModelExperts, device_type: str = "cpu") -> int:
    """Scratch that the kernel gets: one projection in float32 with its codes, within what suits the device."""
    largest = max(m.padded_rows * m.padded_columns * 5 for fmt in experts.formats.values() for m in fmt.matrices)
    return min(max(largest, MINIMUM_WORKSPACE_BYTES), _LARGEST_WORKSPACE_BYTES[device_type])


def tier_bits(options: Options, tier: Tier) -> int:
    return options.hi if tier is Tier.HI else options.lo if tier is Tier.LO else 0  # asked for each expert of each step


def slot_bits(experts: ModelExperts, options: Options, tiers: frozenset[Tier]) -> dict[Tier, int]:
    """What the slots of each tier hold, the high one first: versions, or fine slices and their bases."""
    if Tier.HI in tiers and experts.formats[options.hi].nested:
        return {Tier.HI: options.hi, Tier.LO: options.hi // 2}
    return {tier: tier_bits(options, tier) for tier in used_tiers(options, tiers)}


def used_tiers(options: Options, tiers: frozenset[Tier]) -> tuple[Tier, ...]:
    """Tiers that need slots, the high one first: that the system asks for, and that are stored."""
    return tuple(tier for tier in (Tier.HI, Tier.LO) if tier in tiers and tier_bits(options, tier) > 0)


def minimum_budget(experts: ModelExperts, options: Options, system: System, workspace_bytes: int) -> int:
    """The smallest budget that can serve at all: one slot of each tier, or of each expert, and the workspace."""
    if system.residency.migrating is not None:
        return workspace_bytes + _resident_bytes(experts, options, system.residency.migrating, 1)
    bits = slot_bits(experts, options, system.precision.tiers).values()
    return workspace_bytes + sum(experts.formats[width].nbytes for width in bits)


def limit_in_bytes(
    budget: ExpertBudget, experts: ModelExperts, options: Options, workspace_bytes: int, automatic: int
) -> int:
    """The hard limit that a budget means; ``automatic`` bytes where it is automatic. A share counts experts, so that
    100 % holds every one of them; the kernel's workspace and the predictor come on top of it and are part of the limit,
    and so they are where a token's or a layer's experts are counted."""
    everything = experts.nbytes(options.hi)
    if budget.is_auto:
        return min(automatic, everything + workspace_bytes)
    if budget.bytes is not None:
        return budget.bytes
    if budget.share is not None:
        return int(budget.share * everything) + workspace_bytes
    slots = experts.top_k if budget.slots == "top-k" else experts.num_experts
    return slots * experts.formats[options.hi].whole_nbytes + workspace_bytes


def plan_slots(
    experts: ModelExperts,
    options: Options,
    system: System,
    limit: int,
    workspace_bytes: int,
    *,
    filled: bool = False,
) -> SlotPlan:
    """Spend ``limit`` bytes on slots; ConfigError if it cannot hold one expert of each tier, or every one where none is
    fetched.

    Where two tiers are in use their numbers of slots are to each other as the experts that are wanted in them, and so
    are each layer's. Where that would be more slots than experts, every expert has one, as many as possible a high one.

    Args:
        workspace_bytes: what the kernel and the predictor take of it.
        filled: slots for every expert are filled at start, and others not before a device decides: the host streams.
    """
    migrating = system.residency.migrating
    _check_budget(experts, options, system, limit, workspace_bytes)
    if migrating is not None:
        return _plan_residents(experts, options, migrating, limit, workspace_bytes)
    bits = slot_bits(experts, options, system.precision.tiers)
    layers = len(experts.layers)
    every_expert = layers * experts.num_experts
    shares = system.precision.all_shares(experts)
    weights = {tier: shares.get(tier, [1.0] * layers) for tier in bits}
    sizes = {tier: experts.formats[bits[tier]].nbytes for tier in bits}
    if Tier.HI in bits and experts.formats[bits[Tier.HI]].nested:
        high = sum(weights[Tier.HI]) / layers if Tier.LO in system.precision.tiers and options.lo else 1.0
        slots = _slice_slots(sizes, high, every_expert, limit - workspace_bytes)
        weights[Tier.LO] = [1.0] * layers  # every expert needs a base
    else:
        slots = _version_slots(sizes, weights, every_expert, limit - workspace_bytes)
    # Where every expert has a slot, staging would only push the last ones out of their layers' shares.
    complete = system.residency.keeps
    if filled:
        complete &= next(iter(slots.values()), 0) == every_expert and (len(bits) == 1 or system.precision.reuses_high)
    quotas = {}
    for tier, count in slots.items():
        staging = 0 if count == every_expert and complete else _staging(experts, system, count)
        quotas[tier] = layer_shares(count, weights[tier], staging, experts.num_experts)
    return SlotPlan(limit, workspace_bytes, slots, quotas)


def _version_slots(
    sizes: Mapping[Tier, int], weights: Mapping[Tier, Sequence[float]], every_expert: int, spare: int
) -> dict[Tier, int]:
    if len(sizes) < 2:
        return {tier: min(every_expert, spare // size) for tier, size in sizes.items()}
    low = _low_slots(sizes, weights, every_expert, spare)
    spare -= low * sizes[Tier.LO]
    high = min(every_expert, spare // sizes[Tier.HI])
    spare -= high * sizes[Tier.HI]  # what the high tier has no use for goes back to the low one
    return {Tier.HI: high, Tier.LO: min(every_expert, low + spare // sizes[Tier.LO])}


def _check_budget(experts: ModelExperts, options: Options, system: System, limit: int, workspace_bytes: int) -> None:
    """ConfigError for a budget that cannot work, with the smallest that can."""
    least, migrating = minimum_budget(experts, options, system, workspace_bytes), system.residency.migrating
    if limit < least:
        needed = "every expert at its low version, a high one" if migrating else "one expert of each tier"
        instead = ', or serve with system "dymoe", which fetches what is not there' if migrating else ""
        raise ConfigError(
            f"vllm-dymoe: expert_budget is {limit} bytes on each rank, but {needed} and the kernel's workspace need "
            f"{least}; set expert_budget to at least {least} bytes{instead}."
        )


def _staging(experts: ModelExperts, system: System, count: int) -> int:
    # C of Eq. 10 bounds what is fetched ahead: a quarter of the slots at most, or layers would keep too little.
    wide = system.foresight.wide(experts.top_k) if system.foresight else 0
    ahead = min(FEWEST_STAGING + wide, count // 4)
    return max(system.staging_slots(count), ahead if wide else 0)


def _resident_bytes(experts: ModelExperts, options: Options, migrating: Migrating, high: int) -> int:
    """Bytes with every expert there, so many of them high, and what moves need beside them: a fine slice comes into the
    slot that another one leaves, and of versions that exclude each other both of a pair come before either goes."""
    hi, lo = experts.formats[options.hi], experts.formats[options.lo]
    every = len(experts.layers) * experts.num_experts
    if hi.nested:
        return every * lo.nbytes + high * hi.nbytes
    staging = migrating.in_flight if high < every else 0
    return (every - high + staging) * lo.nbytes + (high + staging) * hi.nbytes


def _plan_residents(
    experts: ModelExperts,
    options: Options,
    migrating: Migrating,
    limit: int,
    workspace_bytes: int,
) -> SlotPlan:
    """A place for every expert, as many of them high as there is room for (DynaExq 3.5)."""
    layers, each = len(experts.layers), experts.num_experts
    every, nested = layers * each, experts.formats[options.hi].nested
    least, step = (_resident_bytes(experts, options, migrating, high) for high in (1, 2))
    high = min(every - 1, 1 + (limit - workspace_bytes - least) // (step - least))
    if limit - workspace_bytes >= _resident_bytes(experts, options, migrating, every):
        high = every
    places = layer_shares(high, [1.0] * layers, 0, each)
    low = [each if nested else each - count for count in places]
    staging = 0 if nested or high == every else migrating.in_flight
    slots, quotas = {Tier.HI: high + staging}, {Tier.HI: places}
    if any(low):
        slots, quotas = slots | {Tier.LO: sum(low) + staging}, quotas | {Tier.LO: low}
    return SlotPlan(limit, workspace_bytes, slots, quotas)


def expert_worth(experts: ModelExperts, migrating: Migrating, layers: Sequence[float]) -> NDArray[np.float64]:
    """What a high version is worth for each use of an expert: float64 [layers, experts].

    That is what it is in the layer, times the root of what the expert's low version loses, as a part of its layer's
    mean. The error itself pays more for points of a lattice, and nothing for GPTQ (benchmarks/LOG.md).
    """
    found = np.ones((len(experts.layers), experts.num_experts))
    for row, layer in zip(found, experts.layers, strict=True):
        lost = np.array(experts.lost.get(layer, ()))
        if migrating.by_gates and len(lost) == len(row) and lost.any():
            row[:] = np.sqrt(lost / lost.mean())
    return found * np.array(layers)[:, None]


def _slice_slots(sizes: Mapping[Tier, int], high: float, every_expert: int, spare: int) -> dict[Tier, int]:
    """Slots of fine slices and of bases, at least one of each: as many of the former as `high` of the latter need."""
    fine, base = sizes[Tier.HI], sizes[Tier.LO]
    bases = min(every_expert, max(1, min(int(spare / (base + high * fine)), (spare - fine) // base)))
    fines = max(1, min(every_expert, (spare - bases * base) // fine))
    bases = min(every_expert, (spare - fines * fine) // base)  # what fine slices have no use for
    return {Tier.HI: fines, Tier.LO: bases}


def _low_slots(
    sizes: Mapping[Tier, int], weights: Mapping[Tier, Sequence[float]], every_expert: int, spare: int
) -> int:
    """Slots of the low tier, where both are in use; at least one slot is left for the high one."""
    high, low = sizes[Tier.HI], sizes[Tier.LO]
    wanted_high, wanted_low = sum(weights[Tier.HI]), sum(weights[Tier.LO])
    share = wanted_low / (wanted_high + wanted_low)
    slots = spare / ((1 - share) * high + share * low)
    count = int(share * slots) if slots <= every_expert else every_expert - (spare - every_expert * low) // (high - low)
    # Tokens of a prompt may want the low tier where a single token never does: they stream through it.
    return max(1, min(max(count, FEWEST_STAGING), (spare - high) // low))
