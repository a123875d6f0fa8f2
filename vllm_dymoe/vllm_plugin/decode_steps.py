"""Steps with device-side planning: what happens before and after the model runs.

Such a step may be the replay of a CUDA graph, in which no Python runs. Before the model it is set how many rows are
tokens; after the model, observers get what routers chose. Steps of few rows are small batches, others large batches; so
are steps with prompt tokens, if the policy treats these differently.
"""

import torch

from vllm_dymoe.cache.device_table import OutsideIds
from vllm_dymoe.executor.small_batch import SmallBatches
from vllm_dymoe.planner.constants import SMALL_BATCH_ROWS
from vllm_dymoe.planner.routing import Routing
from vllm_dymoe.planner.table import Table
from vllm_dymoe.server import ExpertServer
from vllm_dymoe.vllm_plugin.observers import Observation, Observer
from vllm_dymoe.vllm_plugin.step import PromptTap, RankLayer, RunningStep


class DecodeSteps:
    """The device-planned steps of one rank; a decoding request has up to ``longest`` tokens, including drafted ones."""

    def __init__(
        self, server: ExpertServer, table: Table, step: RunningStep, observation: Observation, longest: int,
        prompts: PromptTap | None = None,
    ) -> None:  # fmt: skip
        self._server, self._table, self._step, self._observation = server, table, step, observation
        self._longest = longest
        self._prompts = prompts
        self._outside = OutsideIds(table)
        self._tokens, self._large = 0, False  # of the running step
        self._recording = False

    @property
    def path(self) -> SmallBatches:
        """The object that runs the layers now; a resize replaces it."""
        assert self._server.small_batches is not None
        return self._server.small_batches

    def enter_layer(self, rows: int, *, capturing: bool) -> bool:
        """Return whether a layer of ``rows`` rows belongs to a small batch; vLLM's warm-up runs have no tokens."""
        step = self._step
        if not capturing:
            self.path.tell(0 if step.warming_up else step.real(rows))
        return rows <= SMALL_BATCH_ROWS and (capturing or step.warming_up or self._decodes or not self._asks)

    def run_large(
        self, layer: RankLayer, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, here: torch.Tensor,
        *, capturing: bool,
    ) -> torch.Tensor:  # fmt: skip
        """Run a layer of a large batch, and tell observers.

        Takes the ids for all ranks' experts, and for this rank's.
        """
        step, rows, path = self._step, len(x), self.path
        self._large = True
        if capturing or step.warming_up:
            return path.forward_large(layer.position, x, weights, here, layer.activation, captured=capturing)
        tokens, marks = step.real(rows), None if self._prompts is None else self._prompts.marks(rows, x.device)
        out = path.forward_large(layer.position, x, weights, here, layer.activation, marks)
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

    def begin(self) -> None:
        self._tokens, self._large = self._step.tokens, not (self._decodes or not self._asks)
        self._large |= self._step.tokens > SMALL_BATCH_ROWS
        self.path.begin_step(self._tokens, large=self._large)
        recording = bool(self._listeners) or self._server.host_planned.migration is not None
        if recording != self._recording:
            self._table.recording.fill_(recording)
            self._recording = recording

    def end(self) -> None:
        tokens, self._tokens = self._tokens, 0
        if not tokens:
            return
        self.path.tell(0)
        self._outside.send(self._step.number)
        self._server.host_planned.end_decode(tokens, large=self._large)
        for observer in () if self._large else self._listeners:
            for layer in range(self._table.layers):
                ids, weights = self._table.ring_ids[0, layer, :tokens], self._table.ring_weights[0, layer, :tokens]
                actions, x = self.path.actions(layer, ids), torch.empty(tokens, 0, device=ids.device)
                observer.see(self._routing(layer, x, ids, weights, actions=actions))

    def failure(self, step: int) -> str:
        """Return why a finished step up to this number failed on the device; empty if none did."""
        return str(self._outside.take(step) or "")

    def _routing(
        self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor,
        everywhere: torch.Tensor | None = None, actions: torch.Tensor | None = None,
    ) -> Routing:  # fmt: skip
        layers, phase = self._table.layers, self._step.phase
        return Routing(layer, layers, x, ids, weights, phase, global_ids=everywhere, actions=actions)

    @property
    def _decodes(self) -> bool:
        return 0 < self._step.longest <= self._longest

    @property
    def _listeners(self) -> list[Observer]:
        return [observer for observer in self._observation.observers if not observer.needs_inputs]
