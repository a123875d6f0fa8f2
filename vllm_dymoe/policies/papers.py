"""Four policies that follow their papers as closely as possible.

Only their defaults differ from those of the other policies. docs/options.md lists the remaining differences from the
papers. Numbers that a paper leaves open are ours: the share of heavy hitters (DyMoE: "top-k" tokens), alpha and margin
(DynaExq), and HEOP's first K and P, which are those of FIRM-MoE's ablation.
"""

from typing import ClassVar, Literal

from pydantic import Field, PositiveFloat

from vllm_dymoe.policies.base import Evicts, Policy
from vllm_dymoe.policies.duoserve import DuoServe
from vllm_dymoe.policies.dymoe import Dymoe
from vllm_dymoe.policies.dynaexq import DynaExq
from vllm_dymoe.policies.firm import Firm


class DymoePaper(Dymoe):
    """Eqs. 1 to 8, with the ceiling of Eq. 5 and LRU."""

    name: ClassVar[str] = "dymoe-paper"
    summary: ClassVar[str] = "DyMoE's Eqs. 1 to 8: heavy hitters in prompts, fewer high experts in deeper layers, LRU"

    high_by: Literal["threshold", "depth", "equal"] = "depth"
    heavy_share: float = Field(default=0.2, gt=0, le=1)
    ahead: Literal["all", "high"] = "high"
    evicts: Evicts = "least recent"


class DuoServePaper(DuoServe):
    """The paper's network, used in every step."""

    name: ClassVar[str] = "duoserve-paper"
    summary: ClassVar[str] = "DuoServe-MoE with the paper's network (set `predictor`), used in every step"

    paced: bool = False
    network: Literal["any", "paper"] = "paper"


class FirmPaper(Firm):
    """LRU, Algorithm 1 as printed, and the ablation's K, P and n."""

    name: ClassVar[str] = "firm-paper"
    summary: ClassVar[str] = "FIRM-MoE's Algorithm 1 as printed, from K = 3 and P = 3, with n = 1 and LRU"

    projections: int = Field(default=1, ge=1, le=3)
    k: int | None = Field(default=3, ge=1)
    search: Literal["from the best", "as printed"] = "as printed"
    evicts: Evicts = "least recent"


class DynaExqPaper(DynaExq):
    """High for the n most used experts of each layer.

    Uses are averaged over windows of time.
    """

    name: ClassVar[str] = "dynaexq-paper"
    summary: ClassVar[str] = "DynaExq's top-n of each layer at `high`, by an average of uses over windows of time"

    hotness: Literal["squared_gates", "uses"] = "uses"
    high_set: Literal["model", "layer"] = "layer"
    window_uses: PositiveFloat = 1e-6


PAPERS: tuple[type[Policy], ...] = (DymoePaper, DuoServePaper, FirmPaper, DynaExqPaper)
