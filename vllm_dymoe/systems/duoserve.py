"""DuoServe-MoE: as many slots as a token uses experts, and a trained network that fills them ahead (4.2, 5.1, 5.3)."""

from typing import ClassVar, Literal

from vllm_dymoe.config import ExpertBudget
from vllm_dymoe.predict import Predictor, RoutedModel, TrainedPredictor
from vllm_dymoe.predict.popularity import Popularity
from vllm_dymoe.systems.base import System
from vllm_dymoe.systems.pace import Pace, PaidPace


class DuoServe(System):
    """Every expert high, none kept."""

    name: ClassVar[str] = "duoserve"
    summary: ClassVar[str] = "DuoServe-MoE: slots for one token's experts, nothing stays"
    default_budget: ClassVar[ExpertBudget | None] = ExpertBudget(slots="top-k")
    default_host_store: ClassVar[Literal["file", "pinned"] | None] = "pinned"  # 6.1: CUDA pinned memory
    keeps_experts: ClassVar[bool] = False

    @property
    def foresight(self) -> str | None:
        """Popularity (Eq. 2), an input of the network, stands in until one is trained."""
        return "popularity"

    @property
    def foresees_first_layer(self) -> bool:
        """The first experts of a prefill come while what is before them computes (5.2), in every layer."""
        return True

    @property
    def takes_predictor(self) -> bool:
        """It is made for one."""
        return True

    def make_predictor(self, model: RoutedModel) -> Predictor:
        """The network, or the next layer's most popular experts."""
        if model.predictor is not None:
            return TrainedPredictor.load(model)
        return Popularity(model.num_layers, model.num_experts, model.top_k)

    def make_pace(self) -> Pace:
        """Guesses have to pay for what they cost."""
        return PaidPace()
