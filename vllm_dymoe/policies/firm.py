"""FIRM-MoE: experts that several layers agree on are fetched ahead in parts, as often as HEOP finds it worth."""

from functools import cached_property
from typing import ClassVar, Literal

from pydantic import Field

from vllm_dymoe.policies.base import EVICTIONS, Evicts, Policy, PrefetchPolicy, ResidencyPolicy
from vllm_dymoe.prefetch import Predictor, RoutedModel
from vllm_dymoe.prefetch.meeting_of_layers import MeetingOfLayers
from vllm_dymoe.prefetch.side_stream import make_side_stream
from vllm_dymoe.prefetch.tuner import Heop, Setting

_LARGEST_P = 6
_LARGEST_K = 2  # times the experts per token


class Firm(Policy):
    """Every expert high; HEOP alone says how many are fetched ahead (Algorithm 1)."""

    name: ClassVar[str] = "firm"
    summary: ClassVar[str] = "FIRM-MoE: what several layers agree on is fetched ahead, tuned while serving"

    projections: int = Field(default=2, ge=1, le=3)
    """n: projections of an expert that are fetched ahead; the paper has 1 for small models."""

    k: int | None = Field(default=None, ge=1)
    """K that HEOP begins with: experts that each layer names; as many as a token uses if null."""
    p: int = Field(default=3, ge=1)
    """P that HEOP begins with: layers that meet."""
    search: Literal["from the best", "as printed"] = "from the best"
    """How HEOP walks: from the best in each direction in turn; or as the paper's Algorithm 1 has it, where K and P
    move one way each."""
    evicts: Evicts = "coldest"
    """Which expert of a layer leaves first: the coldest, the one whose last use is longest ago (LRU), or that came
    first."""

    @cached_property
    def residency(self) -> ResidencyPolicy:
        return ResidencyPolicy(evicts=EVICTIONS[self.evicts])

    @cached_property
    def prefetch(self) -> PrefetchPolicy:
        """Meeting of Layers (Eqs. 5 and 6), with as many slots as a token has experts. Of up to twice as many that are
        named, these are on the device already or worth less than what the slots would keep."""
        return PrefetchPolicy(
            "meeting of layers",
            self._predictor,
            needs_gates=True,
            projections=self.projections,
            wide=lambda top_k: top_k,
        )

    def _predictor(self, model: RoutedModel) -> Predictor:
        start = Setting(min(self.k or model.top_k, model.num_experts), self.p)
        largest = Setting(max(start.k, min(_LARGEST_K * model.top_k, model.num_experts)), max(start.p, _LARGEST_P))
        tuner = Heop(model.num_layers, start, largest, as_printed=self.search == "as printed")
        return MeetingOfLayers(model.gates, *start, tuner, model.held, make_side_stream(model.device), model.hidden)
