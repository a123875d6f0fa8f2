"""The identity of a model, for traces and trained predictors.

Such files outlive an engine.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelIdentity:
    """Identifies a model by what matters to its routers."""

    model: str  # name or folder, as given to vLLM
    fingerprint: str
    """Fingerprint of the weights, equal for a 16-bit checkpoint and for the output of ``vllm-dymoe quantize``."""
    num_layers: int  # MoE layers
    num_experts: int  # experts of a layer, on all ranks
    top_k: int  # experts for each token
    hidden: int  # model width
