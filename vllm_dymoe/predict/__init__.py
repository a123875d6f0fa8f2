"""Which experts come next: one predictor for each idea, over one interface."""

from vllm_dymoe.predict.base import Candidate, Measured, PredictionStats, Predictor
from vllm_dymoe.predict.checkpoint import PredictorError
from vllm_dymoe.predict.gate import Gate, RoutedModel
from vllm_dymoe.predict.trained import TrainedPredictor
