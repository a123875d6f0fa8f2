"""FIRM-MoE: experts that several layers agree on are fetched ahead in parts, as often as HEOP finds it worth."""

from functools import cached_property
from typing import ClassVar

from pydantic import Field

from vllm_dymoe.policies.base import Policy, PrefetchPolicy
from vllm_dymoe.prefetch import Predictor, RoutedModel
from vllm_dymoe.prefetch.meeting_of_layers import MeetingOfLayers
from vllm_dymoe.prefetch.side_stream import make_side_stream
from vllm_dymoe.prefetch.tuner import Heop, Setting

# P to begin with and the largest that is tried. K begins with the model's experts per token and goes up to twice that.
_START_P, _LARGEST_P = 3, 6
_LARGEST_K = 2  # times the experts per token


class Firm(Policy):
    """Every expert high; HEOP alone says how many are fetched ahead (Algorithm 1)."""

    name: ClassVar[str] = "firm"
    summary: ClassVar[str] = "FIRM-MoE: what several layers agree on is fetched ahead, tuned while serving"

    projections: int = Field(default=2, ge=1, le=3)
    """n: projections of an expert that are fetched ahead; the paper has 1 for small models."""

    @cached_property
    def prefetch(self) -> PrefetchPolicy:
        """Meeting of Layers (Eqs. 5 and 6), with as many slots as a token has experts. Of up to twice as many that are
        named, these are on the device already or worth less than what the slots would keep."""
        return PrefetchPolicy(
            "meeting of layers", predictor, needs_gates=True, projections=self.projections, wide=lambda top_k: top_k
        )


def predictor(model: RoutedModel) -> Predictor:
    start = Setting(min(model.top_k, model.num_experts), _START_P)
    largest = Setting(max(start.k, min(_LARGEST_K * model.top_k, model.num_experts)), _LARGEST_P)
    tuner = Heop(model.num_layers, start, largest)
    return MeetingOfLayers(model.gates, *start, tuner, model.held, make_side_stream(model.device), model.hidden)
