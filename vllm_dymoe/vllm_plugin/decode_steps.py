"""Steps with device-side planning: what happens before and after the model runs.

Such a step may be the replay of a CUDA graph, in which no Python runs. Before the model runs, the number of rows that
are tokens is set; afterwards observers get what routers chose. Steps of few rows are small batches, others large
batches; so are steps with prompt tokens, if the policy treats these differently, and all steps while an observer needs
all inputs of routers: then no graph contains a MoE layer.
"""

from typing import Any

import torch

from vllm_dymoe.cache.device_table import DeviceFailures
from vllm_dymoe.executor.small_batch import SmallBatches
from vllm_dymoe.planner.routing import Routing
from vllm_dymoe.planner.table import Table
from vllm_dymoe.server import ExpertServer
from vllm_dymoe.vllm_plugin.data_parallel import GatheredOnDevice
from vllm_dymoe.vllm_plugin.expert_ids import all_experts, own_ids
from vllm_dymoe.vllm_plugin.observers import Observation, Observer
from vllm_dymoe.vllm_plugin.step import PromptTap, RankLayer, RunningStep


class DecodeSteps:
    """The device-planned steps of one rank.

    Args:
        longest: most tokens of a decoding request, including drafted ones.
    """

    def __init__(
        self, server: ExpertServer, table: Table, step: RunningStep, observation: Observation, longest: int,
        prompts: PromptTap | None = None,
    ) -> None:  # fmt: skip
        self._server, self._table, self._step, self._observation = server, table, step, observation
        self._layers = len(server.experts.layers) - server.experts.draft_layers  # of the model
        self._longest = longest
        self._prompts = prompts
        queue = server.disk_queue
        self._failures = DeviceFailures(table, None if queue is None else queue.why)
        self._tokens, self._large = 0, False  # of the running step
        self._recording = self._meets = False
        self._experts: int | None = None  # of all ranks, where a rank has some of them
        # int32 [layers, rows, top_k], the routers' choices in small batches, which a trace wants: the device plans with
        # the rank's own numbers of experts.
        self._everywhere: torch.Tensor | None = None
        if server.host_planned.records_actions:
            self._everywhere = torch.empty_like(table.ring_ids[0])

    @property
    def path(self) -> SmallBatches:
        """The object that runs the layers now; a resize replaces it."""
        assert self._server.small_batches is not None
        return self._server.small_batches

    def run(
        self, layer: RankLayer, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, *, capturing: bool
    ) -> torch.Tensor:  # fmt: skip
        """Run a layer with experts of all ranks: x [rows, hidden] to [rows, hidden].

        Warm-up runs have no tokens.
        """
        step, path, on_input = self._step, self.path, layer.weights_on_input
        if layer.expert_map is not None:
            self._experts = all_experts(layer.expert_map)
        if layer.meets:
            self._meets = True
            if not capturing:
                path.tell(step.tokens)
            gathered = GatheredOnDevice(x, weights, ids, path, layer.part)
            here = own_ids(layer.expert_map, gathered.ids)
            given = layer.position, gathered.x, gathered.weights, here, layer.activation
            told: dict[str, Any] = {"weights_on_input": on_input, "global_ids": gathered.ids}
            if len(here) <= path.most_rows:
                return gathered.combine(path.forward(*given, **told))
            return gathered.combine(path.forward_large(*given, captured=capturing, **told))
        rows, here = len(x), own_ids(layer.expert_map, ids)
        told = {"weights_on_input": on_input, "global_ids": ids}
        if not capturing:
            path.tell(0 if step.warming_up else step.real(rows))
        plain = capturing or not step.tokens or layer.position >= self._layers  # a draft reads no prompt
        if rows <= path.most_rows and (plain or not self._is_large):
            if here is not ids and self._everywhere is not None and layer.position < self._layers:
                self._everywhere[layer.position, :rows].copy_(ids)
            return path.forward(layer.position, x, weights, here, layer.activation, **told)
        if plain:
            given = layer.position, x, weights, here, layer.activation
            return path.forward_large(*given, captured=capturing, **told)
        return self._run_large(layer, x, weights, ids, here)

    def _run_large(
        self, layer: RankLayer, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, here: torch.Tensor
    ) -> torch.Tensor:
        """Run a layer of a large batch, and tell observers.

        Takes the ids for all ranks' experts, and for this rank's.
        """
        step, rows, path = self._step, len(x), self.path
        self._large = True
        tokens, marks = step.real(rows), None if self._prompts is None else self._prompts.marks(rows, x.device)
        given = layer.position, x, weights, here, layer.activation, marks
        out = path.forward_large(*given, weights_on_input=layer.weights_on_input, global_ids=ids)
        everywhere, own = None if here is ids else ids[:tokens], here[:tokens]
        if self._observation.observers:
            own = self._known(own)
        actions = path.large.actions(own) if self._server.host_planned.records_actions else None
        at = self._routing(layer.position, x[:tokens], own, weights[:tokens], everywhere, actions)
        if (migration := self._server.host_planned.migration) is not None:
            migration.see(at)  # a small step has no inputs that the host could read
        for observer in self._observation.observers:
            observer.see(at)
        return out

    def _known(self, ids: torch.Tensor) -> torch.Tensor:
        """Return ids with -1 for those of no expert.

        Observers use ids as indices before the step is known to fail.
        """
        return torch.where(ids < self._table.experts, ids, -1)

    @property
    def _asks(self) -> bool:
        return self._prompts is not None and self._prompts.asks

    @property
    def _is_large(self) -> bool:
        """Whether the running step is a large batch, however few its rows are."""
        if any(observer.needs_all_inputs for observer in self._observation.observers):
            return True
        return self._asks and not self._decodes

    def begin(self) -> None:
        self._tokens, self._large = self._step.tokens, self._is_large
        self._large |= self._step.tokens > self.path.most_rows
        self.path.begin_step(self._tokens, large=self._large)
        recording = bool(self._listeners) or self._server.host_planned.migration is not None
        if recording != self._recording:
            self._table.recording.fill_(recording)
            self._recording = recording

    def end_model(self) -> None:
        """Tell observers of a small batch, when the model has run.

        A draft may follow it.
        """
        tokens = self._tokens
        for observer in () if self._large or not tokens else self._listeners:
            for layer in range(self._layers):
                ids, weights = self._table.ring_ids[0, layer, :tokens], self._table.ring_weights[0, layer, :tokens]
                actions, x = self.path.actions(layer, ids), torch.empty(tokens, 0, device=ids.device)
                everywhere = None
                if self._experts is not None and self._everywhere is not None:
                    everywhere = self._everywhere[layer, :tokens]
                observer.see(self._routing(layer, x, ids, weights, everywhere, actions))

    def end(self) -> None:
        """End a step, drafts included.

        The step may be one without requests, in which other engines' tokens have met here.
        """
        tokens, self._tokens = self._tokens, 0
        self.path.tell(0)
        self._failures.send(self._step.number)
        self._server.host_planned.end_decode(tokens)

    def failure(self, step: int) -> str:
        """Return why a finished step failed on the device; empty if none did.

        Args:
            step: the number of the last step that is asked about.
        """
        return self._failures.take(step, self._experts)

    def _routing(
        self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor,
        everywhere: torch.Tensor | None = None, actions: torch.Tensor | None = None,
    ) -> Routing:  # fmt: skip
        layers, phase = self._layers, self._step.phase
        return Routing(layer, layers, x, ids, weights, phase, global_ids=everywhere, actions=actions)

    @property
    def _decodes(self) -> bool:
        return 0 < self._step.longest <= self._longest

    @property
    def _listeners(self) -> list[Observer]:
        every = () if self._meets else self._observation.observers  # recorded rows are those of all engines
        return [observer for observer in every if not observer.needs_inputs]
