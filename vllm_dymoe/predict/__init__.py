"""Which experts come next: one predictor for each idea, over one interface, and schemes that name them."""

from vllm_dymoe.predict.accuracy import Measured, PredictionStats
from vllm_dymoe.predict.base import Candidate, Predictor
from vllm_dymoe.predict.checkpoint import PredictorError
from vllm_dymoe.predict.gate import Gate
from vllm_dymoe.predict.schemes import SCHEMES, RoutedModel, Scheme, make_scheme

__all__ = [
    "SCHEMES",
    "Candidate",
    "Gate",
    "Measured",
    "PredictionStats",
    "Predictor",
    "PredictorError",
    "RoutedModel",
    "Scheme",
    "make_scheme",
]
