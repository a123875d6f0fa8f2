"""Predictors of experts, one for each idea, with one interface."""

from vllm_dymoe.prefetch.base import Candidate, Measured, PredictionStats, Predictor
from vllm_dymoe.prefetch.checkpoint import PredictorError
from vllm_dymoe.prefetch.gate import Gate, RoutedModel
from vllm_dymoe.prefetch.trained import TrainedPredictor
