"""One serving rank: the forward of its MoE layers.

It runs them in the steps of requests and while vLLM warms up.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from vllm_dymoe.cache.transfer import TransferError
from vllm_dymoe.executor.cpu_executor import CpuExecutor
from vllm_dymoe.options import ConfigError
from vllm_dymoe.planner.routing import Phase, Routing, RoutingError
from vllm_dymoe.prefetch import TrainedPredictor
from vllm_dymoe.server import ExpertServer
from vllm_dymoe.vllm_plugin.announcements import logger
from vllm_dymoe.vllm_plugin.data_parallel import Gathered, own_tokens
from vllm_dymoe.vllm_plugin.decode_steps import DecodeSteps
from vllm_dymoe.vllm_plugin.expert_ids import all_experts, own_ids
from vllm_dymoe.vllm_plugin.failures import StepFailures
from vllm_dymoe.vllm_plugin.gates import PredictorObserver
from vllm_dymoe.vllm_plugin.graphs import is_captured
from vllm_dymoe.vllm_plugin.observers import Observation
from vllm_dymoe.vllm_plugin.preemptions import Preemptions
from vllm_dymoe.vllm_plugin.step import PromptTap, RankLayer, RunningStep
from vllm_dymoe.vllm_plugin.training import ServedTraining


class RankServer:
    """What vLLM's layers, worker and attention call on a rank.

    The rank has loaded its model.
    """

    def __init__(
        self,
        server: ExpertServer,
        step: RunningStep,
        failures: StepFailures,
        predictor_observer: PredictorObserver,
        observation: Observation,
        drafted: int = 0,  # tokens that speculative decoding adds to each request's one
        training: ServedTraining | None = None,
    ) -> None:
        self.training = training
        self.server, self.step, self.failures = server, step, failures
        self.predictor_observer, self.observation = predictor_observer, observation
        self.prompts: PromptTap | None = None  # None if the policy does not use it
        takes = server.policy.prefetch is not None and server.policy.prefetch.takes_predictor
        if takes or server.policy.precision.heavy_hitters is not None:
            self.prompts = PromptTap(lambda: self.server.policy, step, drafted, self._predictor_asks)
        self._drafted = drafted
        self._decode = self._decode_steps()
        self._num_layers = len(server.experts.layers)  # without a draft's, which are added later
        self._preemptions = Preemptions()
        self.native: CpuExecutor | None = None  # runs the layers of this step without Python
        self._refused = ""  # why this step's layers cannot run, known before its model runs; empty if they can
        predictor_observer.listen(observation, lambda: self.server.drop_predictor())

    def use(self, server: ExpertServer) -> None:
        """Serve with another server, between two steps; the one before is not closed."""
        self.server = server
        self._decode = self._decode_steps()

    def _decode_steps(self) -> DecodeSteps | None:
        """Return what runs the layers on a device; None on a plain CPU."""
        if (small_batches := self.server.small_batches) is None:
            return None
        given = small_batches.table, self.step, self.observation, 1 + self._drafted, self.prompts
        return DecodeSteps(self.server, *given)

    def _predictor_asks(self) -> bool:
        predictor = self.server.predictor
        return predictor is not None and predictor.predictor.tells_phases

    def forward(self, layer: RankLayer, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Run the routed experts of one MoE layer, outside of any compilation.

        Rows that pad a captured graph's batch give zeros and are ignored, wherever vLLM has routed them: to expert -1
        from 0.32 on, before that to some expert. vLLM's warm-up rows are neither counted nor learnt from. A layer that
        cannot be computed returns zeros and fails the step (``failures``).

        Args:
            x: [rows, hidden], like the result.
            weights: float [rows, top_k].
            ids: int [rows, top_k], over the experts of all ranks.

        Raises:
            TransferError: in a warm-up that no other rank waits for.
        """
        server, step, rows = self.server, self.step, x.shape[0]
        weights = weights.float()  # some routers give 16 bits
        tokens, training = step.real(rows), self.training
        draft = layer.position >= self._num_layers
        if training is not None and not draft and (step.phase is Phase.DECODE or is_captured(x)):
            training.see(layer.position, x, ids)
        if self._decode is not None:
            return self._decode.run(layer, x, weights, ids, capturing=is_captured(x))
        phase, gathered = step.phase, None
        if layer.meets:
            part = layer.part
            own = tokens if part is None or step.warming_up else own_tokens(step.tokens, rows, part)
            gathered = Gathered(x, weights, ids, own, phase, sequence_parallel=part is not None)
            x, weights, ids, phase = gathered.x, gathered.weights, gathered.ids, gathered.phase
        elif tokens < rows:
            x, weights, ids = x[:tokens], weights[:tokens], ids[:tokens]
        here = ids if layer.expert_map is None else own_ids(layer.expert_map, ids)
        reads_prompts = phase is Phase.PREFILL and not draft and gathered is None
        prompts = self.prompts if reads_prompts else None
        prompt = None if prompts is None else prompts.tokens(tokens, x.device)
        everywhere = None if here is ids else ids
        told = phase, prompt, everywhere, layer.weights_on_input
        routing = Routing(layer.position, self._num_layers, x, here, weights, *told)
        if self._refused and not step.warming_up:  # by now all ranks have begun this step; they start over in the next
            self.failures.record(self._refused)
        try:
            if not x.shape[0]:  # no engine has requests
                out = torch.zeros_like(x)
            elif self.failures.sentence is not None and not step.warming_up:  # the step has failed already
                if everywhere is not None:  # other ranks compute the layer, and their thresholds move
                    server.policy.precision.select(routing)
                out = torch.zeros_like(x)
            elif step.warming_up:
                with server.host_planned.unobserved():
                    out = server.host_planned.forward(routing, layer.activation)
            else:
                observers = () if draft else self.observation.observers
                if observers:  # an invalid expert id fails the step before they see it
                    routing.check(server.experts.num_experts)
                for observer in observers:
                    if not observer.needs_actions:
                        observer.see(routing)
                layers = server.host_planned
                out = layers.forward(routing, layer.activation)
                for observer in observers:
                    if observer.needs_actions:
                        observer.see(routing)
                if layers.cpu is not None and gathered is None and everywhere is None:
                    layers.cpu.make_ready(layer.position, on_input=layer.weights_on_input)
        except (TransferError, RoutingError) as error:
            if isinstance(error, RoutingError) and layer.expert_map is not None:  # which has bounded the id
                experts = all_experts(layer.expert_map)
                error = RoutingError(error.layer, error.expert, experts, bounded=True)
            self._failed(error)
            out = torch.zeros_like(x)
        if gathered is not None:
            return gathered.combine(out)
        return out if tokens == rows else torch.nn.functional.pad(out, (0, 0, 0, rows - tokens))

    def begin_step(self, scheduler_output: Any, runner: Any = None) -> bool:
        self._preemptions.see(scheduler_output, runner, self.server)
        for observer in self.observation.observers:
            observer.begin_step(scheduler_output)
        if scheduler_output.total_num_scheduled_tokens == 0:
            return False
        self.step.begin(scheduler_output)
        self._begin_layers(self._start_over())
        self._begin_native()
        return True

    def _start_over(self) -> str:
        """Start over with the other ranks, if one of them failed a step.

        If ranks add up parts of the same experts, that one has learnt less than the others, and would choose other
        precisions.

        Returns:
            why that is impossible, or an empty string.
        """
        if self.server.ranks_add_up and self.failures.any_new():
            try:
                self.server.start_over()
            except ConfigError as error:
                return str(error)
        return ""

    def _begin_layers(self, refused: str = "") -> None:
        """Begin the layers' part of a step.

        A step that they cannot run fails, and has no tokens, so that nothing reads a slot. All ranks start over before
        the next one.

        Args:
            refused: why they cannot run it; empty if they can, given slots.
        """
        self._refused = refused or self.server.no_slots
        if self._refused:
            self.step.drop_tokens()
        else:
            self.server.host_planned.begin_step(self.step.phase)
        if self._decode is not None:
            if self._refused:
                self.failures.record(self._refused)  # now, because a replayed graph does not call ``forward``
            self._decode.begin()

    def _begin_native(self) -> None:
        """Begin a native step, if Python has nothing to do in its layers."""
        layers, watched = self.server.host_planned, self.training is not None or bool(self.observation.observers)
        marks = self.step.phase is Phase.PREFILL and self.prompts is not None and self.prompts.wanted
        if not (self._refused or watched or marks or layers.needs_python):
            assert layers.cpu is not None
            layers.cpu.begin_native(self.step.tokens)
            self.native = layers.cpu

    def end_native(self) -> None:
        """End what :meth:`begin_step` may have begun; Python runs the layers from here on."""
        if self.native is not None:
            self.native.end_native()
            self.native = None

    def device_failure(self, step: int) -> str:
        """Return why a finished step failed on the device; empty if none did.

        Args:
            step: the number of the last step that is asked about.
        """
        return "" if self._decode is None else self._decode.failure(step)

    @contextlib.contextmanager
    def idle_step(self) -> Iterator[None]:
        """Context for a step without requests, a dummy batch.

        This rank's experts serve the tokens of other ranks.
        """
        self.step.begin_idle()
        self._begin_layers()
        try:
            yield
        finally:
            if self._decode is not None:
                self._decode.end()
                self._decode.failure(self.step.number - 2)  # of steps that nobody asks about any more
            self.failures.finish(None)

    def end_model(self, runner: Any, scheduler_output: Any, output: Any) -> Any:
        """End a step's model; return its output, marked as failed if the step is."""
        failed = self.failures.sentence is not None
        if self._decode is not None:
            self._decode.end_model()
            if output is not None:
                self._decode.end()
        for observer in self.observation.observers:
            observer.end_step(runner, scheduler_output, self.step.number, failed=failed)
        if self.training is not None and not failed and (better := self.training.end_step(self.step)) is not None:
            self._use(better)
        return None if output is None else self.failures.finish(output)  # without an output, sample_tokens comes next

    def end_step(self, output: Any) -> Any:
        """End a step after sampling, and return its output as ``end_model`` does."""
        if self.step.warming_up:
            return output
        if self._decode is not None:
            self._decode.end()
        return self.failures.finish(output)

    def extend(self, server: ExpertServer) -> None:
        """Append a draft's layers to the model's."""
        self.server = server
        self._decode = self._decode_steps()

    def _use(self, predictor: TrainedPredictor) -> None:
        """Use a predictor that was trained here.

        Its network changes in place, so one call suffices.
        """
        before = self.server.predictor
        asked = None if before is None else before.predictor
        if not (isinstance(asked, TrainedPredictor) and asked.network is predictor.network):
            self.server.use_predictor(predictor)

    def close(self) -> None:
        """Shut down: stop threads, free memory and descriptors, and write recordings."""
        if self.observation.trace is not None:
            self.observation.trace.recorder.close()
        if self.training is not None:
            self.training.close()
        self.server.close()
        vars(self).clear()  # closures in vLLM's layers still refer to this object, and would keep all of it

    def _failed(self, error: TransferError | RoutingError) -> None:
        self.end_native()  # later layers do no work
        if not self.step.warming_up:
            self.failures.record(f"vllm-dymoe: {error}")
        elif self.failures.alone:
            raise error  # the start ends with this error
        else:
            logger.error("vllm-dymoe: %s", error)  # the other ranks wait for this one; the first step fails as well
