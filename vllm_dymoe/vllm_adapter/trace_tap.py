"""Whose tokens a step computes, for the recorder of routing.

vLLM's scheduler says which requests have how many tokens in a step, its model runner in which order they lie and where
in their requests they are. Both are read where a step begins and ends, never inside.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.parallel_state import get_tp_group

from vllm_dymoe.config import ConfigError, Options
from vllm_dymoe.predict import Gate
from vllm_dymoe.traces import TraceError, TraceHeader
from vllm_dymoe.traces.recorder import Recorder, Span
from vllm_dymoe.units import size
from vllm_dymoe.vllm_adapter.foresight import Foresight
from vllm_dymoe.vllm_adapter.log import logger

DOMAIN = "dymoe_domain"
"""Key of a request's extra arguments that gives it a domain."""


@dataclass(frozen=True)
class _Request:
    number: int
    prompt: int


class TraceTap:
    """Follows requests from their first step to their last.

    Args:
        recorder: takes the steps.
        gates: of every layer, asked for in each step, to record what they make of the layers' inputs before theirs.
    """

    def __init__(self, recorder: Recorder, gates: Callable[[], Sequence[Gate]] = tuple) -> None:
        self.recorder = recorder
        self._gates_now = gates
        self._gates: Sequence[Gate] = ()
        self._requests: dict[str, _Request] = {}
        self._seen = 0

    def begin_step(self, scheduler_output: Any) -> None:
        """Learn of new requests; a step without tokens only ends some."""
        for name in scheduler_output.finished_req_ids:
            self._requests.pop(name, None)
        for new in scheduler_output.scheduled_new_reqs:
            if new.req_id not in self._requests:  # one that was preempted may come as a new one
                self._requests[new.req_id] = _Request(self._seen, _prompt_length(new))
                domain = (getattr(new.sampling_params, "extra_args", None) or {}).get(DOMAIN)
                if domain and self.recorder.recording:
                    self.recorder.name(self._seen, str(domain))
                self._seen += 1
        if scheduler_output.total_num_scheduled_tokens:
            self._gates = self._gates_now()
            self.recorder.begin()

    def record(self, layer: int, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> None:
        """Take what a layer's router chose; see :meth:`Recorder.record`."""
        next_gate = None
        if layer + 1 < len(self._gates):
            next_gate, _ = self._gates[layer + 1].best(x, ids.shape[1])
        self.recorder.record(layer, x, weights, ids, next_gate)

    def end_step(self, runner: Any, scheduler_output: Any, step: int, *, failed: bool) -> None:
        """Tell the recorder whose tokens they were.

        Args:
            runner: vLLM's model runner.
            scheduler_output: of the step.
            step: its number, for :meth:`forget`.
            failed: whether some of what was recorded means nothing.
        """
        if failed or not self.recorder.recording:
            return
        state = getattr(runner, "execute_model_state", None)
        batch = getattr(state, "input_batch", None)
        if batch is not None:  # vLLM's second model runner makes a batch for each step
            starts = batch.query_start_loc_np[: batch.num_reqs + 1].tolist()
            counts = [last - first for first, last in itertools.pairwise(starts)]
            names, position = batch.req_ids, batch.positions
        else:
            names, position = runner.input_batch.req_ids, runner.positions
            counts = [scheduler_output.num_scheduled_tokens[name] for name in names]
        requests = (self._requests[name] for name in names)
        spans = [Span(request.number, count, request.prompt) for request, count in zip(requests, counts, strict=True)]
        gates_were_right = bool(self._gates_now())
        self.recorder.end(spans, position, step, next_gate=gates_were_right)

    def forget(self, step: int) -> None:
        """Leave out a step that failed on another rank, which is known when its tokens are there."""
        self.recorder.forget(step)


def _prompt_length(new: Any) -> int:
    return len(new.prompt_embeds if new.prompt_token_ids is None else new.prompt_token_ids)


def make_trace_tap(options: Options, header: TraceHeader, foresight: Foresight) -> TraceTap | None:
    """What records on this rank; None where nothing is to be recorded, or another rank does it.

    Args:
        options: validated options.
        header: whose routers they are.
        foresight: has found the gates, if the inputs are recorded.

    Raises:
        ConfigError: ``trace`` cannot be used.
    """
    if options.trace is None or get_tp_group().rank_in_group != 0:
        return None
    folder = options.trace.folder.expanduser().resolve()
    try:
        recorder = Recorder(
            folder,
            header,
            options.trace.limit,
            inputs=options.trace.inputs,
            say=lambda sentence: logger.info("vllm-dymoe: %s", sentence),
        )
    except TraceError as error:
        raise ConfigError(f"vllm-dymoe: {error}") from error
    logger.info(
        "vllm-dymoe: which experts every token chooses is recorded to %s, up to %s; a trace holds no text, but tells "
        "about prompts: keep it as you would keep them.",
        folder,
        size(options.trace.limit),
    )
    return TraceTap(recorder, foresight.known_gates if options.trace.inputs else tuple)
