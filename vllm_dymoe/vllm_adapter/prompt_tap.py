"""Which tokens of a step are prompts', and which of them attention dwells on (DyMoE Eq. 1).

vLLM's attention kernels return no scores. They are handed queries and keys, though, outside of any compiled graph:
there the last queries of each prompt are asked once more, for their scores alone. What they say holds until the next
attention layer, so each MoE layer has the heavy hitters of the attention before it.

Only keys of the running step are there. In a chunked prefill, and behind a cached prefix, attention is therefore
compared among the tokens of the chunk. Where no attention layer hands over queries and keys (MLA), every token counts
as a heavy hitter, and an expert's importance is its number of tokens: its load, which the paper finds to follow its
heavy hitters closely (3.3).
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_world_size, tensor_model_parallel_all_reduce
from vllm.forward_context import get_forward_context

from vllm_dymoe.policy import Policy, PromptTokens
from vllm_dymoe.policy.importance import attention_mass, mark_heavy_hitters

_KEY = "vllm_dymoe.prompts"
WINDOW = 32
"""Last queries of a prompt that stand for all of them."""


@dataclass
class _Step:
    """One forward of the model.

    Attributes:
        spans: rows of each prompt.
        mixed: some rows are no prompt's.
        heavy: bool [rows], as the last attention layer left it; None before the first.
        prompts: bool [rows], the spans as a mask; None before the first MoE layer.
    """

    spans: list[tuple[int, int]]
    mixed: bool
    heavy: torch.Tensor | None = None
    prompts: torch.Tensor | None = None


class PromptTap:
    """The prompts of each step, for a policy that asks for them.

    Args:
        policy: the one in force, asked anew in every step.
        drafted: tokens that speculative decoding adds to a request's one; a longer query is a prompt's.
    """

    def __init__(self, policy: Callable[[], Policy], drafted: int = 0) -> None:
        self._policy = policy
        self._longest_decode = 1 + drafted

    def attend(self, layer: Any, query: torch.Tensor, key: torch.Tensor | None) -> None:
        """See the queries [rows, heads, dim] and keys [rows, kv_heads, dim] that an attention layer is about to use."""
        share = self._share
        step = self._step()
        if share is None or step is None or not step.spans or key is None or key.shape[0] != query.shape[0]:
            return
        masses = [
            attention_mass(query[first:last], key[first:last], layer.impl.scale, WINDOW, layer.sliding_window)
            for first, last in step.spans
        ]
        if get_tensor_model_parallel_world_size() > 1:  # each rank has some heads, and all must decide alike
            lengths = [mass.shape[0] for mass in masses]
            masses = list(tensor_model_parallel_all_reduce(torch.cat(masses)).split(lengths))
        step.heavy = torch.zeros(query.shape[0], dtype=torch.bool, device=query.device)
        for (first, last), mass in zip(step.spans, masses, strict=True):
            mark_heavy_hitters(mass, share, step.heavy[first:last])

    def tokens(self, rows: int, device: torch.device) -> PromptTokens | None:
        """The prompts among a MoE layer's rows; None if there are none, or the policy does not ask."""
        step = self._step() if self._share is not None else None
        if step is None or not step.spans:
            return None
        if step.prompts is None or step.prompts.shape[0] != rows:
            step.prompts = torch.zeros(rows, dtype=torch.bool, device=device)
            for first, last in step.spans:
                step.prompts[first:last] = True
        heavy = step.prompts if step.heavy is None or step.heavy.shape[0] != rows else step.heavy
        return PromptTokens(step.prompts, heavy, step.mixed or step.spans[-1][1] < rows)

    @property
    def _share(self) -> float | None:
        """Of heavy hitters; None where every expert gets the same tier."""
        policy = self._policy()
        return policy.heavy_share if len(policy.tiers) > 1 else None

    def _step(self) -> _Step | None:
        """What is known of the running step; None while vLLM warms up."""
        context = get_forward_context()
        step: _Step | None = context.additional_kwargs.get(_KEY)
        if step is None and context.attn_metadata is not None:
            step = self._begin(context.attn_metadata)
            context.additional_kwargs[_KEY] = step
        return step

    def _begin(self, attention: Any) -> _Step:
        starts = query_starts(attention)
        if starts is None:
            return _Step([], False)
        places = starts.tolist()
        spans = [(first, last) for first, last in itertools.pairwise(places) if last - first > self._longest_decode]
        return _Step(spans, sum(last - first for first, last in spans) < places[-1])


def query_starts(attention: Any) -> Any:
    """The first row of each request, and the one behind the last, as a tensor.

    Args:
        attention: a step's attn_metadata.

    Returns:
        None where no attention layer says so.
    """
    layers = attention[0] if isinstance(attention, list) else attention
    found = (getattr(metadata, "query_start_loc", None) for metadata in layers.values())
    return next((starts for starts in found if starts is not None), None)
