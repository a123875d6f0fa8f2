"""The running step of a rank.

It knows which rows are tokens of requests, its phase, and the heavy hitters of its prompts.

vLLM also runs the model without requests: to profile, compile, capture graphs and warm up kernels. Requests' steps come
through the worker's wrapper, and nothing else does: a step begins there, and what runs outside of one is warm-up.

Heavy hitters, the tokens of a prompt that get most attention (DyMoE Eq. 1), are computed from queries and keys, since
vLLM's attention kernels return no scores: the last queries of each prompt are scored once more. The result is valid
until the next attention layer. Only keys of the running step are available, so attention is compared among the tokens
of a chunk. If an attention layer does not pass them (MLA), every token counts as a heavy hitter, and an expert's
importance is its load, which the paper finds to follow its heavy hitters closely (3.3).
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_world_size, tensor_model_parallel_all_reduce
from vllm.forward_context import get_forward_context
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_dymoe.kernels import Activation
from vllm_dymoe.planner.importance import attention_mass, mark_heavy_hitters
from vllm_dymoe.planner.routing import Phase, PromptTokens
from vllm_dymoe.policies import Policy

_KEY, _MARKS = "vllm_dymoe.prompts", "vllm_dymoe.marks"
WINDOW = 32  # last queries of a prompt, which stand for all of them


@dataclass(frozen=True, slots=True, eq=False)
class RankLayer:
    """One MoE layer."""

    position: int  # among the model's MoE layers, from 0
    activation: Activation
    expert_map: torch.Tensor | None
    """int [experts of all ranks + 3], this rank's number of each, -1 for another rank's, and what ``bounded_map``
    appends; None where the rank has all experts."""
    weights_on_input: bool = False  # the router's weights multiply what experts read, and not what they give
    meets: bool = False  # tokens of all data-parallel ranks meet at this rank's experts
    part: int | None = None  # which of the step's rows a rank of tensor parallelism has; None where each has all


class RunningStep:
    """What one rank computes at the moment."""

    def __init__(self) -> None:
        self.number = 0  # number of the last step; all ranks see the same steps, so they count alike
        self.longest = 0  # most tokens of one request in the step; 0 while vLLM warms up
        self.phase = Phase.DECODE  # also while vLLM warms up
        self.computed = dict.fromkeys(Phase, 0)  # requests' tokens since the start: of prompts, and decoded or drafted
        self._scheduled: Any = None

    @property
    def warming_up(self) -> bool:
        return self._scheduled is None

    @property
    def tokens(self) -> int:
        """Number of rows that belong to requests, which come first; 0 while vLLM warms up.

        It is not cached: drafts that a GPU's n-grams did not find are removed after the step has begun.
        """
        return 0 if self._scheduled is None else int(self._scheduled.total_num_scheduled_tokens)

    def begin(self, scheduler_output: Any) -> None:
        """Begin a step of at least one token.

        It is a prefill if a request computes several tokens that are not drafts, or a prompt token: chunks or a cached
        prefix may have left a single one.
        """
        drafted = scheduler_output.scheduled_spec_decode_tokens
        counts = scheduler_output.num_scheduled_tokens.items()
        new = {request.req_id for request in scheduler_output.scheduled_new_reqs}
        reads = scheduler_output.scheduled_cached_reqs.is_context_phase
        prompts = sum(
            count
            for request, count in counts
            if count - len(drafted.get(request, ())) > 1 or request in new or reads(request)
        )
        self.computed[Phase.PREFILL] += prompts
        self.computed[Phase.DECODE] += scheduler_output.total_num_scheduled_tokens - prompts
        self.number += 1
        self.longest = max(scheduler_output.num_scheduled_tokens.values())
        self._scheduled = scheduler_output
        self.phase = Phase.PREFILL if prompts else Phase.DECODE

    def begin_idle(self) -> None:
        """Begin a step in which only other data-parallel ranks have tokens.

        It is counted, too.
        """
        self.number += 1
        self.drop_tokens()

    def drop_tokens(self) -> None:
        """Treat all rows of this step as padding."""
        self._scheduled = SchedulerOutput.make_empty()

    def end(self) -> None:
        self._scheduled, self.phase, self.longest = None, Phase.DECODE, 0

    def real(self, rows: int) -> int:
        """Return how many of a layer's rows are tokens.

        The rows after them pad a captured graph's batch.
        """
        scheduled = self._scheduled  # not the properties, because this is called in every layer
        return rows if scheduled is None else min(rows, int(scheduled.total_num_scheduled_tokens))


@dataclass
class _Prompts:
    """The prompts in one forward of the model."""

    spans: list[tuple[int, int]]  # rows of each prompt
    heavy: torch.Tensor | None = None  # bool [tokens], as the last attention layer set it; None before the first
    rows: torch.Tensor | None = None  # bool [tokens], the spans as a mask; None before the first MoE layer


class PromptTap:
    """The prompts of each step, for a policy that uses them."""

    def __init__(
        self,
        policy: Callable[[], Policy],  # returns the policy in force
        step: RunningStep,
        drafted: int = 0,  # tokens that speculative decoding adds to each request's one; longer queries are prompts
        asked: Callable[[], bool] = lambda: False,  # whether something else needs the prompts now
    ) -> None:
        self._policy, self._asked = policy, asked
        self._step = step
        self._longest_decode = 1 + drafted

    def attend(self, layer: Any, query: torch.Tensor, key: torch.Tensor | None) -> None:
        """Take the queries and keys of an attention layer, padding included.

        Shapes are [rows, heads, dim] and [rows, kv_heads, dim].
        """
        share = self._share
        prompts = self.running() if share is not None and share < 1 else None
        if share is None or prompts is None or not prompts.spans or key is None or key.shape[0] != query.shape[0]:
            return
        masses = [
            attention_mass(query[first:last], key[first:last], layer.impl.scale, WINDOW, layer.sliding_window)
            for first, last in prompts.spans
        ]
        if get_tensor_model_parallel_world_size() > 1:  # each rank has some heads, and all must decide alike
            lengths = [mass.shape[0] for mass in masses]
            masses = list(tensor_model_parallel_all_reduce(torch.cat(masses)).split(lengths))
        prompts.heavy = torch.zeros(self._step.tokens, dtype=torch.bool, device=query.device)
        for (first, last), mass in zip(prompts.spans, masses, strict=True):
            mark_heavy_hitters(mass, share, prompts.heavy[first:last])

    def tokens(self, count: int, device: torch.device) -> PromptTokens | None:
        """Return the prompt tokens among a MoE layer's tokens.

        None if there are none, if no policy needs them, or for part of a step.
        """
        prompts = self.running() if self.wanted else None
        if prompts is None or not prompts.spans or count != self._step.tokens:
            return None
        if prompts.rows is None:
            prompts.rows = torch.zeros(count, dtype=torch.bool, device=device)
            for first, last in prompts.spans:
                prompts.rows[first:last] = True
        heavy = prompts.rows if prompts.heavy is None else prompts.heavy
        mixed = sum(last - first for first, last in prompts.spans) < count
        return PromptTokens(prompts.rows, heavy, mixed)

    @property
    def wanted(self) -> bool:
        """Whether anything needs to know a step's prompts now."""
        return self._share is not None or self._asked()

    @property
    def asks(self) -> bool:
        """Whether the policy treats prompt tokens differently."""
        return self._policy().precision.heavy_hitters is not None and len(self._policy().precision.precisions) > 1

    def marks(self, rows: int, device: torch.device) -> torch.Tensor | None:
        """Return :meth:`tokens` as marks, without waiting for the device.

        Marks are int8 [rows]: 2 for heavy hitters, 1 for others.

        None in a step that only decodes, or if the policy does not need them.
        """
        share = self._share if self.asks else None
        if share is None or self._step.phase is not Phase.PREFILL or self._step.real(rows) != self._step.tokens:
            return None
        context = get_forward_context()
        found = context.additional_kwargs.get(_MARKS)
        if found is None or share < 1:  # attention changes it in every layer
            metadata, places = _described(context.attn_metadata), torch.arange(rows, device=device)
            if metadata is None:
                return None
            bounds = metadata.query_start_loc.clamp(max=self._step.tokens)
            request = torch.searchsorted(bounds[1:].contiguous(), places, right=True).clamp_(max=len(bounds) - 2)
            read = (bounds.diff() > self._longest_decode)[request] & (places < self._step.tokens)
            found = 2 * read.to(torch.int8)
            context.additional_kwargs[_MARKS] = found
            prompts = self.running() if share < 1 else None
            if prompts is not None and prompts.heavy is not None:
                light = read[: len(prompts.heavy)] & ~prompts.heavy
                found[: len(light)] -= light.to(torch.int8)
        return found

    @property
    def _share(self) -> float | None:
        policy = self._policy()
        return policy.precision.heavy_hitters if len(policy.precision.precisions) > 1 else None

    def running(self) -> _Prompts | None:
        """Return the prompts of the running step, if any; None while vLLM warms up."""
        if self._step.warming_up:
            return None
        context = get_forward_context()
        prompts: _Prompts | None = context.additional_kwargs.get(_KEY)
        if prompts is None:
            prompts = context.additional_kwargs[_KEY] = self._find(context.attn_metadata)
        return prompts

    def _find(self, attention: Any) -> _Prompts:
        metadata, tokens = _described(attention), self._step.tokens
        starts = [] if metadata is None else metadata.query_start_loc.tolist()
        bounds = itertools.pairwise(min(place, tokens) for place in starts)  # requests may be padding, too
        return _Prompts([(first, last) for first, last in bounds if last - first > self._longest_decode])


def _described(attention: Any) -> Any:
    """Return the attention metadata of the step's requests.

    None if there is no attention layer.
    """
    layers = attention[0] if isinstance(attention, list) else attention or {}
    return next((told for told in layers.values() if getattr(told, "query_start_loc", None) is not None), None)
