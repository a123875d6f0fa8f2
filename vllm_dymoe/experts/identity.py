"""Whose experts they are, in what outlives an engine: traces and trained predictors."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelIdentity:
    """A model, as far as its routers go."""

    model: str  # its name or folder, as it was served
    fingerprint: str
    """Of its weights, the same for a 16-bit checkpoint and for what ``vllm-dymoe quantize`` makes of it."""
    num_layers: int  # MoE layers
    num_experts: int  # experts of a layer, on all ranks
    top_k: int  # experts for each token
    hidden: int  # model width
