"""MoESys: all experts of the next layer are fetched while a layer computes.

A baseline in DuoServe-MoE, section 6.1.
"""

from functools import cached_property
from typing import ClassVar

from vllm_dymoe.options import ExpertBudget
from vllm_dymoe.policies.base import Policy, PrefetchPolicy, ResidencyPolicy
from vllm_dymoe.prefetch.popularity import AllExperts


class LayerPrefetch(Policy):
    """Has slots for a whole layer's experts, and keeps none."""

    name: ClassVar[str] = "layer-prefetch"
    summary: ClassVar[str] = "MoESys: fetches all experts of the next layer while one computes, and keeps none"
    default_budget: ClassVar[ExpertBudget | None] = ExpertBudget(slots="layer")

    @cached_property
    def residency(self) -> ResidencyPolicy:
        return ResidencyPolicy(keeps=False)

    @cached_property
    def prefetch(self) -> PrefetchPolicy:
        return PrefetchPolicy(
            "all of the next layer",
            lambda model: AllExperts(model.num_layers, model.num_experts),
        )
