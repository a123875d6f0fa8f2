"""FIRM-MoE: experts that several layers agree on are prefetched in parts.

HEOP tunes how many.
"""

from functools import cached_property
from typing import ClassVar, Literal

from pydantic import Field

from vllm_dymoe.policies.base import EVICTIONS, Evicts, Policy, PrefetchPolicy, ResidencyPolicy
from vllm_dymoe.prefetch import Predictor, RoutedModel
from vllm_dymoe.prefetch.meeting_of_layers import MeetingOfLayers
from vllm_dymoe.prefetch.side_stream import make_side_stream
from vllm_dymoe.prefetch.tuner import Heop, Setting

_LARGEST_P = 6
_LARGEST_K = 2  # multiple of the experts per token


class Firm(Policy):
    """Serves every expert high, with a tuned number of prefetched experts.

    HEOP alone tunes that number (Algorithm 1).
    """

    name: ClassVar[str] = "firm"
    summary: ClassVar[str] = "FIRM-MoE: prefetches the experts that several layers agree on, tuned while serving"

    projections: int = Field(default=2, ge=1, le=3)
    """n: projections of an expert that are fetched ahead; the paper uses 1 for small models."""

    k: int | None = Field(default=None, ge=1)
    """Initial K of HEOP: experts that each layer names; null for the number of experts per token."""
    p: int = Field(default=3, ge=1)
    """Initial P of HEOP: layers that take part in a meeting."""
    search: Literal["from the best", "as printed"] = "from the best"
    """How HEOP searches: from the best setting, one direction after another; or as Algorithm 1 is printed, where K and
    P each move in one direction only.
    """
    evicts: Evicts = "coldest"
    """Which expert of a layer is evicted first: the coldest, the least recently used (LRU), or the first admitted."""

    @cached_property
    def residency(self) -> ResidencyPolicy:
        return ResidencyPolicy(evicts=EVICTIONS[self.evicts])

    @cached_property
    def prefetch(self) -> PrefetchPolicy:
        """Meeting of Layers (Eqs. 5 and 6), with a staging slot per expert of a token.

        Meetings name up to twice as many experts. More staging slots would not pay: the other named experts are
        resident, or less useful than experts that a layer could keep in those slots.
        """
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
