"""Systems that exist to be compared: parts of the papers' systems, one at a time, over the same cache."""

from typing import ClassVar, Literal

from vllm_dymoe.predict import Predictor, RoutedModel
from vllm_dymoe.predict.all_experts import AllExperts
from vllm_dymoe.predict.meeting_of_layers import MeetingOfLayers
from vllm_dymoe.predict.popularity import Popularity
from vllm_dymoe.predict.side_stream import make_side_stream
from vllm_dymoe.predict.tuner import Heop, Setting
from vllm_dymoe.systems import SYSTEMS
from vllm_dymoe.systems.exact import Exact
from vllm_dymoe.systems.pace import Pace, Unpaced


class Compared(Exact):
    """Every expert high, with one of the predictors and FIRM-MoE's two numbers."""

    name: ClassVar[str] = "compared"
    summary: ClassVar[str] = "parts of systems, for measurements"

    ahead: Literal["next gate", "meeting of layers", "popularity", "layer"] = "next gate"
    """What names experts of the next layer."""
    projections: int = 3
    """FIRM-MoE's n."""
    tune: bool = False
    """Whether HEOP changes K and P of a meeting of layers, in half of the paper's steps."""

    @property
    def projections_ahead(self) -> int:
        """As the parameter says."""
        return self.projections

    def make_predictor(self, model: RoutedModel) -> Predictor | None:
        """The one that is asked for; a trained one stands in for any."""
        side_stream = make_side_stream(model.device)
        if self.ahead == "next gate" or model.predictor is not None:
            return super().make_predictor(model)
        if self.ahead == "popularity":
            return Popularity(model.num_layers, model.num_experts, model.top_k)
        if self.ahead == "layer":
            return AllExperts(model.num_layers, model.num_experts)
        # The paper's K is three quarters of the experts per token: 3 of Qwen1.5-MoE's 4.
        start, largest = Setting(model.top_k, 3), Setting(2 * model.top_k, 6)
        tuner = Heop(model.num_layers, start, largest, update_every=4, rounds=16) if self.tune else None
        return MeetingOfLayers(model.gates, *start, tuner, model.hits, side_stream)

    def make_pace(self) -> Pace:
        """HEOP is a controller already."""
        return Unpaced() if self.tune else super().make_pace()


class ComparedAlone(Compared):
    """The same without a cache: as many slots as the budget has, and nothing stays."""

    name: ClassVar[str] = "compared alone"
    keeps_experts: ClassVar[bool] = False


SYSTEMS |= {system.name: system for system in (Compared, ComparedAlone)}
