"""Observers of routing while a rank serves.

They are traces, calibrations, and the check of gates (``gates``). vLLM's scheduler says which requests have how many
tokens in a step, its model runner where their rows are.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from vllm.distributed.parallel_state import get_tp_group

from vllm_dymoe.experts.identity import ModelIdentity
from vllm_dymoe.options import ConfigError, Options
from vllm_dymoe.planner.routing import Routing
from vllm_dymoe.prefetch import Gate
from vllm_dymoe.prefetch.gate import weights_of
from vllm_dymoe.quantize.recording import CalibrationError, PartWriter
from vllm_dymoe.trace.recorder import Recorder, Span
from vllm_dymoe.trace.trace import TraceError
from vllm_dymoe.units import size
from vllm_dymoe.vllm_plugin.announcements import logger


class Observer:
    """Gets what the routers of a rank choose in steps of requests.

    Warm-up steps and padding are left out. Observers that need the routers' inputs get nothing of device-planned small
    batches, which do not keep them; others get all layers of these after the model has run.
    """

    needs_inputs: bool = False
    needs_all_inputs: bool = False
    """Whether no step may be without them: then every device-planned step is a large batch."""
    needs_actions: ClassVar[bool] = False
    """Whether it gets a layer after that has run; otherwise before, as a gate is checked before it predicts."""

    def begin_step(self, scheduler_output: Any) -> None:
        """Begin a step; a step without tokens only ends some requests."""

    def see(self, routing: Routing) -> None:
        """See one layer before or after it runs; not called for the rest of a failed step."""
        raise NotImplementedError

    def end_step(self, runner: Any, scheduler_output: Any, step: int, *, failed: bool) -> None:
        """Handle the end of the model in a step.

        Args:
            step: the step's number.
            failed: the step failed; discard what was seen of it.
        """

    def forget(self, step: int) -> None:
        """Discard a step that failed on another rank.

        That is known when its tokens arrive.
        """


class Observation:
    """The observers of one rank, in the order in which they are told."""

    def __init__(self, recordable: dict[str, Any] | None = None) -> None:
        # Description of a calibration of this rank's inputs; None on ranks whose inputs another rank records.
        self.recordable = recordable
        self.observers: tuple[Observer, ...] = ()
        self.trace: TraceObserver | None = None
        self._calibration: CalibrationObserver | None = None

    def start_trace(self, trace: "TraceObserver | None") -> None:
        """Record a trace from now on, if this rank has one."""
        self.trace = trace
        if trace is not None:
            self.join(trace)

    def join(self, observer: Observer) -> None:
        self.observers = (*self.observers, observer)

    def leave(self, observer: Observer) -> None:
        """Remove an observer, if it is registered; it may do so while it is being called."""
        self.observers = tuple(other for other in self.observers if other is not observer)

    def forget(self, step: int) -> None:
        for observer in self.observers:
            observer.forget(step)

    def record(self, path: Path, tokens: int) -> None:
        """Record the inputs of the next tokens as one part of a calibration.

        Raises:
            CalibrationError: the part cannot be begun.
        """
        if self.recordable is None:
            return
        if self._calibration is not None:  # of a caller that went away
            self.leave(self._calibration)
            self._calibration.part.discard()
            self._calibration = None
        self._calibration = CalibrationObserver(path, tokens, self.recordable)
        self.join(self._calibration)

    def end_record(self) -> None:
        """Complete the part of a calibration.

        Raises:
            CalibrationError: it could not be written, or tokens are missing.
        """
        calibration, self._calibration = self._calibration, None
        if calibration is not None:
            self.leave(calibration)
            calibration.finish()


class CalibrationObserver(Observer):
    """Records every layer's inputs in one part.

    Errors are reported at the end and fail no request.
    """

    needs_inputs = needs_all_inputs = True

    def __init__(self, path: Path, tokens: int, model: Mapping[str, Any]) -> None:
        dtype: torch.dtype = getattr(torch, model["dtype"])
        self.part = PartWriter(path, len(model["layers"]), model["hidden_size"], model["top_k"], dtype, tokens)
        self._problem: CalibrationError | None = None

    def see(self, routing: Routing) -> None:
        if self._problem is None:
            try:
                self.part.add(routing.layer, routing.x, routing.weights, _chosen(routing))
            except CalibrationError as error:
                self._problem = error

    def finish(self) -> None:
        if self._problem is not None:
            self.part.discard()
            raise self._problem
        self.part.finish()


class _Request(NamedTuple):
    number: int
    prompt: int


class TraceObserver(Observer):
    """Records a trace, following requests from first to last step.

    Gates are looked up in each step.
    """

    needs_actions = True

    def __init__(self, recorder: Recorder, gates: Callable[[], Sequence[Gate]] = tuple) -> None:
        self.recorder = recorder
        self.needs_inputs = self.needs_all_inputs = recorder.inputs
        self._gates_now = gates
        self._gates: Sequence[Gate] = ()
        self._gates_given = False
        self._requests: dict[str, _Request] = {}
        self._numbers = itertools.count()

    def begin_step(self, scheduler_output: Any) -> None:
        for name in scheduler_output.finished_req_ids:
            self._requests.pop(name, None)
        for new in scheduler_output.scheduled_new_reqs:
            if new.req_id not in self._requests:  # a preempted request may come again as a new one
                number = next(self._numbers)
                prompt = new.prompt_embeds if new.prompt_token_ids is None else new.prompt_token_ids
                self._requests[new.req_id] = _Request(number, len(prompt))
        if scheduler_output.total_num_scheduled_tokens:
            self._gates = self._gates_now()
            self.recorder.begin()

    def see(self, routing: Routing) -> None:
        layer, ids = routing.layer, _chosen(routing)
        next_gate = None
        if layer + 1 < len(self._gates):
            next_gate, _ = self._gates[layer + 1].best(routing.x, ids.shape[1])
        columns = {"weights": routing.weights, "router_inputs": routing.x, "next_gate": next_gate}
        self.recorder.record(layer, ids, **columns, fates=routing.actions)

    def end_step(self, runner: Any, scheduler_output: Any, step: int, *, failed: bool) -> None:
        if failed or not self.recorder.recording:
            return
        batch = getattr(getattr(runner, "execute_model_state", None), "input_batch", None)
        if batch is not None:  # vLLM's second model runner makes a batch for each step
            starts = batch.query_start_loc_np[: batch.num_reqs + 1].tolist()
            counts = [last - first for first, last in itertools.pairwise(starts)]
            names, position = batch.req_ids, batch.positions
        else:
            names, position = runner.input_batch.req_ids, runner.positions
            counts = [scheduler_output.num_scheduled_tokens[name] for name in names]
        requests = (self._requests[name] for name in names)
        spans = [Span(request.number, count, request.prompt) for request, count in zip(requests, counts, strict=True)]
        gates = self._gates_now()
        if gates and not self._gates_given:
            self._gates_given = True
            self.recorder.take_gates(weights_of(gates, self.recorder.header.hidden, position.device))
        self.recorder.end(spans, position, step, next_gate=bool(gates))  # their predictions are recorded

    def forget(self, step: int) -> None:
        self.recorder.forget(step)


def observe_trace(
    options: Options, header: Callable[[], ModelIdentity], gates: Callable[[], Sequence[Gate]]
) -> TraceObserver | None:
    """Return the observer that records a trace on this rank.

    None if no trace was requested, or if another rank records it.

    Raises:
        ConfigError: the trace cannot be recorded.
    """
    if options.trace is None or get_tp_group().rank_in_group != 0:
        return None
    folder = options.trace.folder.resolve()
    try:
        recorder = Recorder(
            folder, header(), options.trace.limit, inputs=options.trace.inputs,
            say=lambda sentence: logger.info("vllm-dymoe: %s", sentence),
        )  # fmt: skip
    except TraceError as error:
        raise ConfigError(f"vllm-dymoe: {error}") from error
    logger.info(
        "vllm-dymoe: the experts of every token are recorded to %s, up to %s; a trace holds no text, but reveals "
        "information about prompts: protect it as you protect them.", folder, size(options.trace.limit),
    )  # fmt: skip
    return TraceObserver(recorder, gates if options.trace.inputs else tuple)


def _chosen(routing: Routing) -> torch.Tensor:
    """Return expert ids as the router numbers them, including those of other ranks."""
    return routing.ids if routing.global_ids is None else routing.global_ids
