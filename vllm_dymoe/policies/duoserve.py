"""DuoServe-MoE (4.2, 5.1, 5.3).

Slots for one token's experts, filled ahead by a trained network.
"""

from functools import cached_property
from typing import ClassVar, Literal

from vllm_dymoe.options import ExpertBudget
from vllm_dymoe.policies.base import Policy, PrefetchPolicy, ResidencyPolicy
from vllm_dymoe.prefetch import Predictor, RoutedModel, TrainedPredictor
from vllm_dymoe.prefetch.checkpoint import PredictorError, read_card
from vllm_dymoe.prefetch.popularity import Popularity

_PAPERS = ("paper", "paper-shared")  # architectures


class DuoServe(Policy):
    """Serves every expert high and keeps none."""

    name: ClassVar[str] = "duoserve"
    summary: ClassVar[str] = "DuoServe-MoE: slots for one token's experts, nothing is kept"
    default_budget: ClassVar[ExpertBudget | None] = ExpertBudget(slots="top-k")
    default_host_store: ClassVar[Literal["file", "pinned"] | None] = "pinned"  # 6.1: CUDA pinned memory

    paced: bool = True
    """Whether to act on predictions less often where they do not pay; the paper acts on all."""
    network: Literal["any", "paper"] = "any"
    """Allowed predictors: popularity and every trained network, or only the paper's network."""

    @cached_property
    def residency(self) -> ResidencyPolicy:
        return ResidencyPolicy(keeps=False)

    @cached_property
    def prefetch(self) -> PrefetchPolicy:
        """The paper's network, or popularity (Eq. 2) as long as none is trained.

        In a prefill the first experts of every layer are fetched while the layers before compute (5.2).
        """
        only_paper = self.network == "paper"
        return PrefetchPolicy(
            "the paper's network" if only_paper else "popularity", self._predictor, takes_predictor=True,
            first_layer=True, paced=self.paced, needs_predictor=only_paper,
        )  # fmt: skip

    def _predictor(self, model: RoutedModel) -> Predictor:
        if model.predictor is None and self.network == "any":
            return Popularity(model.num_layers, model.num_experts, model.top_k)
        found = TrainedPredictor.load(model)
        assert model.predictor is not None
        if self.network == "paper" and (name := read_card(model.predictor).architecture.get("name")) not in _PAPERS:
            raise PredictorError(
                f"predictor {model.predictor} is a {name} network, but this policy needs the paper's; train one with "
                "`vllm-dymoe train --architecture paper-shared`."
            )
        return found
