"""On-demand loading: an expert comes when its router has named it, and nothing stays (a baseline of both DyMoE and
DuoServe-MoE, who measure Hugging Face Accelerate)."""

from functools import cached_property
from typing import ClassVar

from vllm_dymoe.policies.base import Policy, ResidencyPolicy


class OnDemand(Policy):
    """Every step fetches all that it needs."""

    name: ClassVar[str] = "on-demand"
    summary: ClassVar[str] = "Accelerate: an expert comes when it is needed, and nothing stays"

    overlap: bool = True
    """Whether experts arrive while others are computed; Accelerate's do not."""

    @cached_property
    def residency(self) -> ResidencyPolicy:
        return ResidencyPolicy(keeps=False, overlaps=self.overlap)
