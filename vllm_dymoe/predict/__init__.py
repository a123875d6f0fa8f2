"""Which experts come next: one predictor for each idea, over one interface."""

from vllm_dymoe.predict.accuracy import Measured, PredictionStats
from vllm_dymoe.predict.base import Candidate, OnDevice, Predictor
from vllm_dymoe.predict.checkpoint import PredictorError
from vllm_dymoe.predict.gate import Gate
from vllm_dymoe.predict.routed_model import RoutedModel
from vllm_dymoe.predict.trained import TrainedPredictor
