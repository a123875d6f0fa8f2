"""MoESys: while a layer computes, all experts of the next one are fetched (a baseline of DuoServe-MoE, section 6.1)."""

from functools import cached_property
from typing import ClassVar

from vllm_dymoe.config import ExpertBudget
from vllm_dymoe.predict.popularity import AllExperts
from vllm_dymoe.systems.base import Foresight, Residency, System


class LayerPrefetch(System):
    """Slots for a whole layer's experts, and nothing stays."""

    name: ClassVar[str] = "layer-prefetch"
    summary: ClassVar[str] = "MoESys: all experts of the next layer are fetched while one computes, and nothing stays"
    default_budget: ClassVar[ExpertBudget | None] = ExpertBudget(slots="layer")

    @cached_property
    def residency(self) -> Residency:
        return Residency(keeps=False)

    @cached_property
    def foresight(self) -> Foresight:
        return Foresight("all of the next layer", lambda model: AllExperts(model.num_layers, model.num_experts))
