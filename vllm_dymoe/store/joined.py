"""Two stores as one: a model's, and behind its layers those of the draft that proposes its tokens."""

from dataclasses import replace

import torch

from vllm_dymoe.residency.format import EVERY_PROJECTION, BlobKey, ModelExperts
from vllm_dymoe.store.base import HostStore
from vllm_dymoe.store.memory import MemoryStore


class JoinedStore:
    """The layers of one store, and behind them those of another, in the same formats."""

    def __init__(self, model: HostStore, draft: HostStore) -> None:
        self.experts = joined_experts(model.experts, draft.experts)
        self._model, self._draft = model, draft

    @property
    def description(self) -> str:
        """Both."""
        return f"{self._model.description}, for the draft {self._draft.description}"

    def read_into(
        self, key: BlobKey, destination: torch.Tensor, projections: range = EVERY_PROJECTION, *, wait: bool = True
    ) -> None:
        first = len(self._model.experts.layers)
        if key.layer < first:
            self._model.read_into(key, destination, projections, wait=wait)
        else:
            self._draft.read_into(replace(key, layer=key.layer - first), destination, projections, wait=wait)

    def close(self) -> None:
        """Close both."""
        self._model.close()
        self._draft.close()


def join(model: HostStore, draft: HostStore) -> HostStore:
    """One store of both; where both are in memory that stays one from which a device copies directly.

    Args:
        model: not to be used by itself any more.
        draft: like the model.
    """
    if isinstance(model, MemoryStore) and isinstance(draft, MemoryStore):
        model.take(draft, joined_experts(model.experts, draft.experts))
        return model
    return JoinedStore(model, draft)


def joined_experts(model: ModelExperts, draft: ModelExperts) -> ModelExperts:
    """What both stores hold; a draft's layers whose indices are the model's count on from its highest."""
    shift = max(model.layers) + 1 if set(model.layers) & set(draft.layers) else 0
    layers = (*model.layers, *(layer + shift for layer in draft.layers))
    return replace(model, layers=layers, draft_layers=len(draft.layers))
