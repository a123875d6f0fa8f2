"""Steps in which every request decodes, where the device decides about experts: what stands around the model then.

Such a step may be the replay of a CUDA graph, in which nothing of Python runs. What layers do otherwise is done here:
before the model how many rows are tokens, behind it what routers chose, for observers, and a timeline's span. No
transfer of the host can fail in it. Experts cannot be damaged, since their checksums were compared when memory was
filled with them.
"""

import torch

from vllm_dymoe.observe.timeline import Lane
from vllm_dymoe.residency.routing import Routing
from vllm_dymoe.runtime import MoERuntime
from vllm_dymoe.runtime.decode_path import DECODE_ROWS, DecodePath
from vllm_dymoe.vllm_adapter.announcements import logger
from vllm_dymoe.vllm_adapter.observers import Observation, Observer
from vllm_dymoe.vllm_adapter.step import RunningStep

_MANY = 100  # decode steps of a large batch, after which it is no accident


class DecodeSteps:
    """Those of one rank; a request has at most ``longest`` tokens in one, its own and those that are drafted."""

    def __init__(
        self, runtime: MoERuntime, path: DecodePath, step: RunningStep, observation: Observation, longest: int
    ) -> None:
        self._runtime, self._path, self._step, self._observation = runtime, path, step, observation
        self._longest, self._table = longest, path.table
        self._too_large = 0  # steps, until that is said
        self._tokens = 0  # of the running step, if it is such a one
        self._recording = False
        self._began: object = None

    def take(self, rows: int, *, capturing: bool) -> DecodePath | None:
        """What computes a layer of so many rows without the host; None where the host decides.

        Before a step of the host that was expected to be such a one observers hear nothing.
        """
        if rows > DECODE_ROWS or not (capturing or self._step.warming_up or self._decodes):
            self._tokens = 0
            return None
        if not capturing:  # what vLLM computes to warm up has no tokens, and changes nothing
            self._runtime.serving.enter_decode()
            self._path.tell(0 if self._step.warming_up else self._step.real(rows))
        return self._path

    def begin(self) -> None:
        self._tokens = self._step.tokens if self._decodes and self._step.tokens <= DECODE_ROWS else 0
        # Where every expert is there the host has nothing to fetch.
        follows = self._runtime.serving.migration is not None
        self._too_large += self._decodes and self._step.tokens > DECODE_ROWS and not follows
        if self._too_large == _MANY:
            self._too_large += 1
            logger.warning(
                "vllm-dymoe: %d decode steps had more than %d tokens; the host decides about these, layer by layer. "
                'For batches of this size start with decisions "host".',
                _MANY,
                DECODE_ROWS,
            )
        if not self._tokens:
            return
        self._runtime.serving.enter_decode()
        self._path.tell(self._tokens)
        recording = bool(self._listeners) or self._runtime.serving.migration is not None
        if recording != self._recording:
            self._table.recording.fill_(recording)
            self._recording = recording
        timeline = self._runtime.engine.timeline
        self._began = None if timeline is None else timeline.clock.mark()

    def end(self) -> None:
        tokens, self._tokens = self._tokens, 0
        if not tokens:
            return
        self._path.tell(0)
        self._runtime.serving.end_decode(tokens)
        timeline = self._runtime.engine.timeline
        if timeline is not None and self._began is not None:
            name = f"decode step {self._step.number}"
            timeline.add(Lane.COMPUTE, name, "step", self._began, timeline.clock.mark(), tokens=tokens)
        for observer in self._listeners:
            for layer in range(self._table.layers):
                ids, weights = self._table.ring_ids[0, layer, :tokens], self._table.ring_weights[0, layer, :tokens]
                nothing = torch.empty(tokens, 0, device=ids.device)
                observer.see(Routing(layer, self._table.layers, nothing, ids, weights, self._step.phase))

    @property
    def _decodes(self) -> bool:
        return 0 < self._step.longest <= self._longest

    @property
    def _listeners(self) -> list[Observer]:
        return [observer for observer in self._observation.observers if not observer.needs_inputs]
