"""MoESys: while a layer computes, all experts of the next one are fetched (a baseline of DuoServe-MoE, section 6.1)."""

from functools import cached_property
from typing import ClassVar

from vllm_dymoe.options import ExpertBudget
from vllm_dymoe.policies.base import Policy, PrefetchPolicy, ResidencyPolicy
from vllm_dymoe.prefetch.popularity import AllExperts


class LayerPrefetch(Policy):
    """Slots for a whole layer's experts, and nothing stays."""

    name: ClassVar[str] = "layer-prefetch"
    summary: ClassVar[str] = "MoESys: all experts of the next layer are fetched while one computes, and nothing stays"
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
