"""DuoServe-MoE: as many slots as a token uses experts, and a trained network that fills them ahead (4.2, 5.1, 5.3)."""

from functools import cached_property
from typing import Any, ClassVar, Literal

from vllm_dymoe.options import ExpertBudget
from vllm_dymoe.policies.base import Policy, PrefetchPolicy, ResidencyPolicy
from vllm_dymoe.prefetch import Predictor, RoutedModel, TrainedPredictor
from vllm_dymoe.prefetch.on_device import PopularityOnDevice
from vllm_dymoe.prefetch.popularity import Popularity


class DuoServe(Policy):
    """Every expert high, none kept."""

    name: ClassVar[str] = "duoserve"
    summary: ClassVar[str] = "DuoServe-MoE: slots for one token's experts, nothing stays"
    default_budget: ClassVar[ExpertBudget | None] = ExpertBudget(slots="top-k")
    default_host_store: ClassVar[Literal["file", "pinned"] | None] = "pinned"  # 6.1: CUDA pinned memory

    @cached_property
    def residency(self) -> ResidencyPolicy:
        return ResidencyPolicy(keeps=False)

    @cached_property
    def prefetch(self) -> PrefetchPolicy:
        """The network, or popularity (Eq. 2) until one is trained. A prefill's first experts come while what is before
        them computes (5.2), in every layer."""
        ways: dict[str, Any] = {"takes_predictor": True, "first_layer": True, "paced": True}
        return PrefetchPolicy("popularity", _predictor, on_device=PopularityOnDevice, **ways)


def _predictor(model: RoutedModel) -> Predictor:
    if model.predictor is not None:
        return TrainedPredictor.load(model)
    return Popularity(model.num_layers, model.num_experts, model.top_k)
