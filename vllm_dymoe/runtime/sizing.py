"""From a byte budget to slots: how many of each tier, and what the smallest feasible budget is."""

from collections.abc import Mapping
from dataclasses import dataclass

from vllm_dymoe.config import ConfigError, ExpertBudget, Options
from vllm_dymoe.experts.cache import layer_quotas
from vllm_dymoe.experts.layout import ModelExperts
from vllm_dymoe.experts.tier import Tier
from vllm_dymoe.kernels.tiled import MINIMUM_WORKSPACE_BYTES

# On a CPU more buys nothing, since a tile should stay in the second-level cache; on a GPU tiles are launches.
_LARGEST_WORKSPACE_BYTES = {"cpu": 1 << 20, "cuda": 32 << 20}


@dataclass(frozen=True)
class SlotPlan:
    """How a budget is spent.

    Attributes:
        limit: the hard budget in bytes, on this rank.
        workspace_bytes: the part that the kernel's scratch takes.
        slots: number of slots of each tier in use.
        staging: slots of each tier that no layer keeps.
    """

    limit: int
    workspace_bytes: int
    slots: Mapping[Tier, int]
    staging: Mapping[Tier, int]

    def quotas(self, tier: Tier, num_layers: int) -> list[int]:
        """Experts that each layer may keep in ``tier``."""
        return layer_quotas(self.slots[tier], num_layers, self.staging[tier])


def workspace_bytes(experts: ModelExperts, device_type: str = "cpu") -> int:
    """Scratch that the kernel gets: one projection in float32 with its codes, within what suits the device."""
    largest = max(m.padded_rows * m.padded_columns * 5 for fmt in experts.formats.values() for m in fmt.matrices)
    return min(max(largest, MINIMUM_WORKSPACE_BYTES), _LARGEST_WORKSPACE_BYTES[device_type])


def tier_bits(options: Options, tier: Tier) -> int:
    """Bits per weight of a tier."""
    return options.hi if tier is Tier.HI else options.lo if tier is Tier.LO else 0  # asked for each expert of each step


def used_tiers(options: Options, tiers: frozenset[Tier]) -> tuple[Tier, ...]:
    """Tiers that need slots, the high one first: asked for by the policy, and stored."""
    return tuple(tier for tier in (Tier.HI, Tier.LO) if tier in tiers and tier_bits(options, tier) > 0)


def minimum_budget(experts: ModelExperts, options: Options, tiers: frozenset[Tier], workspace_bytes: int) -> int:
    """The smallest budget that can serve at all: one slot of each tier, and the workspace."""
    blobs = sum(experts.formats[tier_bits(options, tier)].nbytes for tier in used_tiers(options, tiers))
    return workspace_bytes + blobs


def limit_in_bytes(
    budget: ExpertBudget, experts: ModelExperts, options: Options, workspace_bytes: int, automatic: int
) -> int:
    """The hard limit that a budget means.

    A share counts experts, so that 100 % holds every one of them; the kernel's
    workspace comes on top of it and is part of the limit. Bytes are taken as they are.

    Args:
        automatic: bytes to use where the budget is automatic.
    """
    everything = experts.nbytes(options.hi)
    if budget.is_auto:
        return min(automatic, everything + workspace_bytes)
    limit = budget.resolve(everything)
    return limit + workspace_bytes if budget.share is not None else limit


def plan_slots(
    experts: ModelExperts, options: Options, tiers: frozenset[Tier], limit: int, workspace_bytes: int
) -> SlotPlan:
    """Spend ``limit`` bytes on slots; where two tiers are in use each gets half of the bytes.

    Raises:
        ConfigError: the budget cannot hold one expert of each tier.
    """
    least = minimum_budget(experts, options, tiers, workspace_bytes)
    if limit < least:
        raise ConfigError(
            f"vllm-dymoe: expert_budget is {limit} bytes on each rank, but one expert of each tier and the kernel's "
            f"workspace need {least}; set expert_budget to at least {least} bytes."
        )
    used = used_tiers(options, tiers)
    every_expert = len(experts.layers) * experts.num_experts
    spare = limit - least
    slots: dict[Tier, int] = {}
    # The low tier first: what it has no use for, once every expert has a slot there, goes to the high one.
    for position, tier in enumerate(reversed(used)):
        nbytes = experts.formats[tier_bits(options, tier)].nbytes
        share = spare // (len(used) - position)
        extra = min(share // nbytes, every_expert - 1)
        spare -= extra * nbytes
        slots[tier] = 1 + extra
    slots = {tier: slots[tier] for tier in used}
    # Where every expert has a slot, staging would only push the last ones out of their layers' shares.
    staging = {tier: 0 if count == every_expert else min(options.staging_slots, count) for tier, count in slots.items()}
    if not options.keep_experts:
        staging = slots
    return SlotPlan(limit, workspace_bytes, slots, staging)
