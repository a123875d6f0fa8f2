"""MoESys: while a layer computes, all experts of the next one are fetched (a baseline of DuoServe-MoE, section 6.1)."""

from typing import ClassVar

from vllm_dymoe.config import ExpertBudget
from vllm_dymoe.predict import Predictor, RoutedModel
from vllm_dymoe.predict.all_experts import AllExperts
from vllm_dymoe.systems.base import System


class LayerPrefetch(System):
    """Slots for a whole layer's experts, and nothing stays; how many are needed does not matter to it."""

    name: ClassVar[str] = "layer-prefetch"
    summary: ClassVar[str] = "MoESys: all experts of the next layer are fetched while one computes, and nothing stays"
    default_budget: ClassVar[ExpertBudget | None] = ExpertBudget(slots="layer")
    keeps_experts: ClassVar[bool] = False

    @property
    def foresight(self) -> str | None:
        """It needs no predictor to know."""
        return "all of the next layer"

    def make_predictor(self, model: RoutedModel) -> Predictor:
        """Names every expert of the next layer."""
        return AllExperts(model.num_layers, model.num_experts)
