"""Which experts come next: one predictor for each idea, over one interface."""

from vllm_dymoe.predict.all_experts import AllExperts
from vllm_dymoe.predict.base import Candidate, Phase, Predictor

__all__ = ["AllExperts", "Candidate", "Phase", "Predictor"]
