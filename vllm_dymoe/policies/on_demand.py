"""On-demand loading: experts are fetched after routing, and none is kept.

A baseline of both DyMoE and DuoServe-MoE, which measure Hugging Face Accelerate.
"""

from functools import cached_property
from typing import ClassVar

from vllm_dymoe.policies.base import Policy, ResidencyPolicy


class OnDemand(Policy):
    """Fetches every expert of every step."""

    name: ClassVar[str] = "on-demand"
    summary: ClassVar[str] = "Accelerate: fetches every expert when it is needed, and keeps none"

    overlap: bool = True
    """Whether experts arrive while others are computed; Accelerate does not overlap them."""

    @cached_property
    def residency(self) -> ResidencyPolicy:
        return ResidencyPolicy(keeps=False, overlaps=self.overlap)
