"""What the earlier chunks of a prompt have said of experts.

DyMoE judges experts by a whole prompt (Eq. 2). vLLM reads a long one in chunks, of which the last may be one token, so
their loads are added up. Of what vLLM has cached, and does not read, nothing is known.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(eq=False)
class Reading:
    """A prompt that is read.

    Attributes:
        length: its tokens.
        read: how many tokens the running step will have read, or found in vLLM's cache.
        load: float64 [layers, 2, experts], of these tokens: heavy hitters that used an expert, and the sum of routing
            weights; None where nothing is known.
    """

    length: int
    read: int = 0
    load: Tensor | None = None

    def add(self, layer: int, layers: int, load: Tensor) -> None:
        """Add what a part of the prompt says in one layer: float64 [2, experts]."""
        if self.load is None:
            self.load = load.new_zeros(layers, *load.shape)
        self.load[layer] += load


class Chunks:
    """The prompts of a rank's requests, while they are read."""

    def __init__(self) -> None:
        self._reading: dict[str, Reading] = {}
        self._scheduled: dict[tuple[int, int], list[Reading]] = {}

    def begin_step(self, scheduler_output: Any) -> None:
        """A step begins, or only ends some requests."""
        self._scheduled = {}
        ended = [name for name, reading in self._reading.items() if reading.read >= reading.length]
        for name in (*scheduler_output.finished_req_ids, *ended):
            self._reading.pop(name, None)
        for new in scheduler_output.scheduled_new_reqs:
            tokens = new.prompt_token_ids
            self._reading[new.req_id] = Reading(len(new.prompt_embeds if tokens is None else tokens))
            self._schedule(new.req_id, new.num_computed_tokens, scheduler_output.num_scheduled_tokens)
        cached = scheduler_output.scheduled_cached_reqs
        for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            if cached.is_context_phase(name):
                self._schedule(name, computed, scheduler_output.num_scheduled_tokens)

    @property
    def any(self) -> bool:
        """Whether the running step reads a prompt that has not been taken."""
        return bool(self._scheduled)

    def take(self, end: int, count: int) -> Reading | None:
        """The prompt of which the running step reads ``count`` tokens up to ``end``, each once; None without one.

        vLLM's runners order requests as it suits them, and say of each how much it computes and where it stands.
        """
        found = self._scheduled.get((end, count))
        return found.pop(0) if found else None

    def asks(self, reading: Reading) -> bool:
        """Whether a later step reads more of a prompt."""
        return reading.read < reading.length

    def _schedule(self, name: str, computed: int, counts: Mapping[str, int]) -> None:
        reading, count = self._reading.get(name), counts.get(name, 0)
        if reading is None or not count:
            return
        if reading.read != computed:  # behind a cached prefix, or begun anew
            reading.load = None
        reading.read = computed + count
        self._scheduled.setdefault((reading.read, count), []).append(reading)


def load_of(ids: Tensor, weights: Tensor, heavy: Tensor, experts: int) -> Tensor:
    """What tokens say of a layer's experts: float64 [2, experts], as in :class:`Reading`.

    Args:
        ids: int [tokens, top_k], negative where another rank has the expert.
        weights: float32 [tokens, top_k].
        heavy: bool [tokens].
    """
    values = weights.double()
    places = (ids.flatten().long() + 1).clamp_min_(0)  # other ranks' experts fall into the first place
    hits = heavy.unsqueeze(1).expand_as(values).double()
    sums = values.new_zeros(2, experts + 1)
    return sums.index_add_(1, places, torch.stack((hits, values)).flatten(1))[:, 1:]
