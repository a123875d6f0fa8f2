"""On-demand loading: an expert comes when its router has named it, and nothing stays (a baseline of both DyMoE and
DuoServe-MoE, who measure Hugging Face Accelerate)."""

from typing import ClassVar

from vllm_dymoe.systems.base import System


class OnDemand(System):
    """Every step fetches all that it needs."""

    name: ClassVar[str] = "on-demand"
    summary: ClassVar[str] = "Accelerate: an expert comes when it is needed, and nothing stays"
    keeps_experts: ClassVar[bool] = False

    overlap: bool = True
    """Whether experts arrive while others are computed. Accelerate, as the papers measure it, does not."""

    @property
    def overlaps(self) -> bool:
        """As the parameter says."""
        return self.overlap
