"""Whose experts they are, in what outlives an engine: traces and trained predictors."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelIdentity:
    """A model, as far as its routers go.

    Attributes:
        model: its name or folder, as it was served.
        fingerprint: of its weights, the same for a 16-bit checkpoint and for what ``vllm-dymoe quantize`` makes of it.
        num_layers: MoE layers.
        num_experts: experts of a layer, on all ranks.
        top_k: experts for each token.
        hidden: model width.
    """

    model: str
    fingerprint: str
    num_layers: int
    num_experts: int
    top_k: int
    hidden: int
