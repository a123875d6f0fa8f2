"""The predictor of one rank, built from the gates that were found."""

from dataclasses import replace
from typing import Any

import torch

from vllm_dymoe.config import Options
from vllm_dymoe.predict import Gate, Predictor, RoutedModel
from vllm_dymoe.systems import make_system
from vllm_dymoe.vllm_adapter.gates import GateCheck, GateError, ModuleTree, find_gate
from vllm_dymoe.vllm_adapter.log import logger


class Foresight:
    """Finds gates while the model loads, and checks them when it runs.

    Args:
        options: validated options.

    Attributes:
        gates: of every layer, in order; empty where nobody needs them.
    """

    def __init__(self, options: Options) -> None:
        self._system = make_system(options)
        # A trained predictor asks no gate; they are still checked for the trace.
        self._needs_gates = self._system.needs_gates and options.predictor is None
        wanted = self._needs_gates or (options.trace is not None and options.trace.inputs)
        self._tree = ModuleTree() if wanted else None
        self._found: dict[int, tuple[str, Gate]] = {}
        self.gates: list[Gate] = []
        self._check = GateCheck([], [])

    def layer_loaded(self, position: int, routed_experts: Any) -> None:
        """Find the gate of one more layer."""
        if self._tree is None:
            return
        try:
            self._found[position] = (routed_experts.layer_name, find_gate(routed_experts, self._tree))
        except GateError as error:
            self._give_up(f"the gate of {routed_experts.layer_name} cannot be used: {error}")

    def predictor(self, model: RoutedModel) -> Predictor | None:
        """What foresees for the loaded model; None if nothing can or shall."""
        if self._tree is not None:
            self._tree.close()
            names, gates = zip(*(self._found[position] for position in range(model.num_layers)), strict=True)
            self.gates = list(gates)
            self._check = GateCheck(names, self.gates)
            model = replace(model, gates=self.gates)
        elif self._needs_gates:
            return None
        return self._system.make_predictor(model)

    def agrees(self, layer: int, x: torch.Tensor, ids: torch.Tensor) -> bool:
        """Whether the predictor may go on: the gate of a layer, if it needs one, has to choose what vLLM chose.

        Checked once for each layer, and true afterwards. Not to be asked while vLLM warms up: inputs may be anything
        then, on a CPU what was in the memory before.
        """
        if self._check:
            try:
                self._check.check(layer, x, ids)
            except GateError as error:
                self._give_up(str(error))
                return not self._needs_gates
        return True

    def known_gates(self) -> list[Gate]:
        """The gates of every layer; none once one was seen to choose otherwise than vLLM."""
        return self.gates

    def taken_over(self) -> None:
        """A trained predictor foresees from now on, which needs no gates; they are still checked for the trace."""
        self._needs_gates = False

    def _give_up(self, reason: str) -> None:
        if self._needs_gates:
            logger.warning(
                'vllm-dymoe: system "%s" fetches nothing ahead, because %s; experts are fetched when their router '
                "names them.",
                self._system.name,
                reason,
            )
        else:
            logger.warning("vllm-dymoe: the trace will not have what the next layer's gate says, because %s.", reason)
        if self._tree is not None:
            self._tree.close()
        self._tree, self._check, self.gates = None, GateCheck([], []), []
