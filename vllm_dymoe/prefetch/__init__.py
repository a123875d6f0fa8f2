"""Which experts come next: one predictor for each idea, over one interface."""

from vllm_dymoe.prefetch.base import Candidate, Measured, PredictionStats, Predictor
from vllm_dymoe.prefetch.checkpoint import PredictorError
from vllm_dymoe.prefetch.gate import Gate, RoutedModel
from vllm_dymoe.prefetch.trained import TrainedPredictor
