"""The routing of one layer in one step, copied to the host at most once."""

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_dymoe.planner.constants import MOST_WEIGHT
from vllm_dymoe.planner.hotness import squared_gates
from vllm_dymoe.planner.plan import Grouped
from vllm_dymoe.planner.weights import weighted_inputs


class RoutingError(ValueError):
    """A router chose an expert that the model does not have.

    The message is for the user.
    """

    def __init__(self, layer: int, expert: int, experts: int, *, bounded: bool = False) -> None:
        beyond = (" or a lower one" if expert < 0 else " or a higher one") if bounded else ""
        super().__init__(
            f"the router of MoE layer {layer} (from 0) chose expert {expert}{beyond}, but there are {experts}; "
            "check the checkpoint and its config.json."
        )
        self.layer, self.expert = layer, expert


class Phase(Enum):
    """The phase of a whole step.

    A step is prefill if any of its requests still processes its prompt, even only its last token; otherwise decode.
    """

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """Which tokens of a step belong to prompts, and which of these matter most."""

    rows: Tensor  # bool [tokens], tokens of prompts; the others are decoded
    heavy: Tensor  # bool [tokens], heavy hitters among them; all of them if attention is unknown
    mixed: bool  # some tokens of the step are decoded


@dataclass(eq=False)
class Routing:
    """One layer's routing in one step, made once when vLLM enters the layer."""

    layer: int  # position among the model's MoE layers, from 0; a new step has begun if it does not grow
    num_layers: int  # how many MoE layers the model has
    x: Tensor
    """[tokens, hidden] bfloat16 or float16, the router's input. Later layers may overwrite it, so copy it to keep it.
    """
    ids: Tensor  # [tokens, top_k] int, experts of this rank; -1 where another rank has the expert
    weights: Tensor  # [tokens, top_k] float32 routing weights
    phase: Phase = Phase.DECODE  # of the whole step
    prompt: PromptTokens | None = None
    """Which tokens belong to prompts; None if the step only decodes, or if no policy needs it."""
    global_ids: Tensor | None = None
    """[tokens, top_k] int, experts as the router numbers them; None if this rank has all experts, as in ``ids``."""
    weights_on_input: bool = False  # weights multiply the experts' inputs instead of their outputs (Llama 4, Laguna)
    actions: Tensor | None = (
        None  # uint8 [tokens, top_k], see :func:`~.rule.actions_of`; set after planning, if recorded
    )

    @cached_property
    def host_ids(self) -> NDArray[np.int64]:
        """``ids`` on the host."""
        return self.ids.cpu().numpy().astype(np.int64, copy=False)

    def check(self, num_experts: int) -> None:
        """Raise RoutingError for an id that is not an expert's.

        Such an id would read another expert's bytes, or none.
        """
        for one in int(self.host_ids.max(initial=-1)), int(self.host_ids.min(initial=-1)):
            if one >= num_experts or one < -1:
                raise RoutingError(self.layer, one, num_experts)

    @cached_property
    def host_weights(self) -> NDArray[np.float32]:
        return self.weights.float().cpu().numpy()  # some routers give 16 bits

    @cached_property
    def uses(self) -> NDArray[np.int64] | None:
        """How many tokens with usable weights chose each expert.

        None if all weights are usable.
        """
        ids, counts = self.host_ids, np.abs(self.host_weights) < MOST_WEIGHT
        if counts.all():
            return None
        chosen = ids[counts & (ids >= 0)]
        return np.bincount(chosen, minlength=1 + max(self.active, default=0))

    @cached_property
    def squared_gates(self) -> NDArray[np.int64]:
        """Sums of :func:`~.hotness.squared_gates` for each expert of this rank.

        The array ends at the largest id in the step.
        """
        gates = squared_gates(torch.from_numpy(self.host_weights)).flatten()
        places = torch.from_numpy(self.host_ids).flatten()
        sums = gates.new_zeros(2 + int(places.max()))  # experts of other ranks go to place 0
        return sums.index_add_(0, places.clamp(min=-1) + 1, gates).numpy()[1:]

    @cached_property
    def grouped(self) -> Grouped:
        return group_by_expert(self.host_ids)

    def inputs(self) -> tuple[Tensor, Tensor]:
        """Return the experts' input, and the weights of their outputs.

        See ``weights_on_input``.
        """
        if not self.weights_on_input:
            return self.x, self.weights
        return weighted_inputs(self.x, self.weights), torch.ones_like(self.weights)

    @cached_property
    def counts(self) -> dict[int, int]:
        """How many tokens chose each active expert of this rank.

        Experts are in ascending order.
        """
        bounds = self.grouped.bounds
        return {expert: bounds[n + 1] - bounds[n] for n, expert in enumerate(self.grouped.experts)}

    @property
    def active(self) -> list[int]:
        return self.grouped.experts


def own_experts(everywhere: NDArray[np.int64], own: NDArray[np.int64], experts: Collection[int]) -> set[int]:
    """Return those of a step's experts that this rank has, as it numbers them.

    Args:
        everywhere: int [tokens, top_k], the step's choices as the router numbers them.
        own: the same choices as this rank numbers them, negative where another rank has the expert.
        experts: as the router numbers them.
    """
    return set(own[(own >= 0) & np.isin(everywhere, list(experts))].tolist())


def group_by_expert(ids: NDArray[np.int64]) -> Grouped:
    """Group the pairs of a step by expert.

    ``ids`` is [tokens, top_k]; negative ids (other ranks', padding) are left out.
    """
    tokens, top_k = ids.shape
    if tokens == 1:  # decode of one request: skip the array sort and the tensor division
        numbers = ids[0].tolist()
        if len(set(numbers)) == top_k and min(numbers, default=-1) >= 0:
            ranked = sorted(range(top_k), key=numbers.__getitem__)
            experts = [numbers[k] for k in ranked]
            return Grouped(experts, list(range(top_k + 1)), _one_row(top_k), torch.tensor(ranked))
    keys = np.maximum(ids.reshape(-1), -1)
    if keys.max(initial=0) < np.iinfo(np.int16).max:
        keys = keys.astype(np.int16)  # NumPy sorts int16 by radix sort
    order = keys.argsort(kind="stable")
    counts = np.bincount(keys + 1, minlength=1)
    pairs = torch.from_numpy(order[counts[0] :])
    active = counts[1:].nonzero()[0]
    bounds = [0, *counts[1:][active].cumsum().tolist()]
    return Grouped(active.tolist(), bounds, torch.div(pairs, top_k, rounding_mode="floor"), pairs)


@lru_cache
def _one_row(top_k: int) -> Tensor:
    return torch.zeros(top_k, dtype=torch.int64)
