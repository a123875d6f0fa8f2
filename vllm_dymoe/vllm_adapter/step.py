"""The running step of a rank: which of its rows are requests' tokens, which of these prompts', and its phase.

vLLM also runs the model for no request: to profile, compile, capture graphs and warm kernels up. What executors ask for
comes through the worker's wrapper, and nothing else does: a step begins there, and what runs outside of one is warm-up.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_dymoe.kernels import Activation
from vllm_dymoe.residency.routing import Phase, PromptTokens
from vllm_dymoe.systems import System

_PROMPTS, _MARKS = "vllm_dymoe.prompts", "vllm_dymoe.marks"


@dataclass(frozen=True, slots=True, eq=False)
class RankLayer:
    """One MoE layer."""

    name: str  # as vLLM calls it
    position: int  # among the model's MoE layers, from 0
    activation: Activation
    expert_map: torch.Tensor | None
    """int [experts of all ranks + 1], this rank's number of each, -1 for another rank's, and at the end -1 for rows
    whose expert is -1; None where the rank has all experts."""
    weights_on_input: bool = False  # the router's weights multiply what experts read, and not what they give
    meets: bool = False  # tokens of all data-parallel ranks meet at this rank's experts
    part: int | None = None  # which of the step's rows a rank of tensor parallelism has; None where each has all


class RunningStep:
    """What one rank computes at the moment."""

    def __init__(self) -> None:
        self.number = 0  # of the last step that began; all ranks see the same steps, so they count alike
        self.longest = 0  # most tokens of one request in the step; 0 while vLLM warms up
        self.phase = Phase.DECODE  # also while vLLM warms up
        self._scheduled: Any = None

    @property
    def warming_up(self) -> bool:
        return self._scheduled is None

    @property
    def tokens(self) -> int:
        """Rows that requests asked for, which come first; 0 while vLLM warms up.

        Asked anew each time: drafts that a GPU's n-grams did not find are taken off after the step has begun.
        """
        return 0 if self._scheduled is None else int(self._scheduled.total_num_scheduled_tokens)

    def begin(self, scheduler_output: Any) -> None:
        """A step of at least one token begins: a prefill if a request computes more than one token that is not drafted,
        or a token of its prompt, of which chunks or a cached prefix may have left a single one.
        """
        drafted = scheduler_output.scheduled_spec_decode_tokens
        counts = scheduler_output.num_scheduled_tokens.items()
        new = {request.req_id for request in scheduler_output.scheduled_new_reqs}
        reads = scheduler_output.scheduled_cached_reqs.is_context_phase
        prefill = any(
            count - len(drafted.get(request, ())) > 1 or request in new or reads(request) for request, count in counts
        )
        self.number += 1
        self.longest = max(scheduler_output.num_scheduled_tokens.values())
        self._scheduled = scheduler_output
        self.phase = Phase.PREFILL if prefill else Phase.DECODE

    def begin_idle(self) -> None:
        """A step begins in which only other data-parallel ranks have tokens; they count it, too."""
        self.number += 1
        self._scheduled = SchedulerOutput.make_empty()

    def end(self) -> None:
        self._scheduled, self.phase, self.longest = None, Phase.DECODE, 0

    def real(self, rows: int) -> int:
        """How many of a layer's rows are tokens; the others, behind them, fill up a captured graph's batch."""
        return rows if self.warming_up else min(rows, self.tokens)


class PromptTap:
    """The prompts of each step, for a system that asks for them."""

    def __init__(
        self,
        system: Callable[[], System],  # the one in force
        step: RunningStep,
        drafted: int = 0,  # tokens that speculative decoding adds to a request's one; a longer query is a prompt's
        asked: Callable[[], bool] = lambda: False,  # whether something else asks for the prompts at the moment
    ) -> None:
        self._system, self._asked = system, asked
        self._step = step
        self._longest_decode = 1 + drafted

    @property
    def asks(self) -> bool:
        """Whether a prompt's tokens count otherwise than others."""
        precision = self._system().precision
        return precision.by_phase and len(precision.tiers) > 1

    def tokens(self, count: int, device: torch.device) -> PromptTokens | None:
        """Those among a MoE layer's tokens; None without, if nothing asks, or for only some of the step's tokens."""
        if self._step.warming_up or count != self._step.tokens or not (self.asks or self._asked()):
            return None
        context = get_forward_context()
        if _PROMPTS not in context.additional_kwargs:  # the first layer
            context.additional_kwargs[_PROMPTS] = self._find(context.attn_metadata, device)
        found: PromptTokens | None = context.additional_kwargs[_PROMPTS]
        return found

    def marks(self, rows: int, device: torch.device) -> torch.Tensor | None:
        """What :meth:`tokens` says, without waiting for the device: bool [rows]. None in a step that only decodes, or
        if the system does not ask."""
        if self._step.phase is not Phase.PREFILL or self._step.real(rows) != self._step.tokens or not self.asks:
            return None
        context = get_forward_context()
        if _MARKS not in context.additional_kwargs:
            if (metadata := _described(context.attn_metadata)) is None:
                return None
            places = torch.arange(rows, device=device)
            bounds = metadata.query_start_loc.clamp(max=self._step.tokens)
            request = torch.searchsorted(bounds[1:].contiguous(), places, right=True).clamp_(max=len(bounds) - 2)
            read = (bounds.diff() > self._longest_decode)[request] & (places < self._step.tokens)
            context.additional_kwargs[_MARKS] = read
        found: torch.Tensor = context.additional_kwargs[_MARKS]
        return found

    def _find(self, attention: Any, device: torch.device) -> PromptTokens | None:
        metadata, tokens = _described(attention), self._step.tokens
        starts = [] if metadata is None else metadata.query_start_loc.tolist()
        bounds = itertools.pairwise(min(place, tokens) for place in starts)  # requests too may be padding
        rows = torch.zeros(tokens, dtype=torch.bool, device=device)
        read = 0
        for first, last in bounds:
            if last - first > self._longest_decode:
                rows[first:last] = True
                read += last - first
        return PromptTokens(rows, mixed=read < tokens) if read else None


def _described(attention: Any) -> Any:
    """What an attention layer is told of the step's requests; None where no layer is."""
    layers = attention[0] if isinstance(attention, list) else attention or {}
    return next((told for told in layers.values() if getattr(told, "query_start_loc", None) is not None), None)
