"""The predictor of one rank and the gates it needs.

Gates are found without knowing the architecture, then checked.

A block of a model contains its experts and the linear layer that routes to them, under names and at depths that
differ. The search goes from the experts up to the first module with a linear layer from the hidden size to the number
of experts. When the layer runs for the first request, the gate has to choose as vLLM does.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from vllm_dymoe.options import ConfigError, Options
from vllm_dymoe.planner.hotness import usable
from vllm_dymoe.planner.routing import Routing
from vllm_dymoe.policies import make_policy
from vllm_dymoe.prefetch import Gate, Predictor, PredictorError, RoutedModel
from vllm_dymoe.vllm_plugin.announcements import logger
from vllm_dymoe.vllm_plugin.observers import Observation, Observer

# Near ties count as equal within this share of a token's largest score. Two logits that bfloat16 rounds (by 2^-9 of
# their size) once for vLLM and once for us may come 2^-7 of their size closer or farther apart, and scores by that
# share for each unit of the logits: enough for logits up to 4. Such ties occur if the processor sums in another order,
# and in Llama-4, whose experts' input has been multiplied by the router's weight and rounded.
NEAR_TIE = 2**-5
_AGREEMENT = 0.95


class GateError(ValueError):
    """A gate that cannot be found or used.

    The message is the reason, as part of a sentence for the user.
    """


def _logits(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Compute logits with a gate module of vLLM, including its kernels and adapters."""
    dtype = module.params_dtype if hasattr(module, "params_dtype") else module.weight.dtype
    out = module(x if x.dtype == dtype else x.to(dtype))
    return out[0] if isinstance(out, tuple) else out


def find_gate(experts: Any, model: torch.nn.Module) -> Gate:
    """Return the gate of a RoutedExperts of vLLM, found in its model.

    GateError if no linear layer qualifies, or several, or if its scores are used in an unknown way.
    """
    sizes = hidden, num_experts = experts.hidden_size, experts.moe_config.num_experts
    within = set(experts.modules())
    place = next((name for name, module in model.named_modules() if module is experts), "")
    found: list[torch.nn.Module] = []
    while place and not found:
        place = place.rpartition(".")[0]
        around = model.get_submodule(place).modules()
        found = [module for module in around if module not in within and _sizes(module) == sizes]
    if len(found) != 1:
        layers = f"{len(found)} linear layers next to it lead" if found else "no linear layer next to it leads"
        raise GateError(f"{layers} from {hidden} to {num_experts} features")
    if experts.scoring_func not in ("softmax", "sigmoid"):
        raise GateError(f"its scoring function is {experts.scoring_func}, which is not supported yet")
    grouped = experts.use_grouped_topk
    return Gate(
        logits=partial(_logits, found[0]),
        scoring=experts.scoring_func,
        correction=experts.e_score_correction_bias,
        groups=(experts.num_expert_group or 0) if grouped else 0,
        top_groups=(experts.topk_group or 0) if grouped else 0,
        local=None if experts.expert_map is None else tuple(experts.expert_map.tolist()),
    )


def _sizes(module: torch.nn.Module) -> tuple[Any, Any]:
    return (
        getattr(module, "input_size", getattr(module, "in_features", None)),
        getattr(module, "output_size", getattr(module, "out_features", None)),
    )


def checked(gate: Gate, name: str, x: torch.Tensor, ids: torch.Tensor) -> Gate:
    """Return a layer's gate if it chooses as vLLM does.

    A correction that vLLM does not apply is left out (its CPU build applies none for Ernie-4.5).

    Args:
        name: the layer, for the error.
        x: the experts' input [tokens, hidden].
        ids: vLLM's choice [tokens, top_k], negative for another rank's experts.

    Raises:
        GateError: the gate would have chosen other experts.
    """
    share = gate.agreement(x, ids, NEAR_TIE)
    if share >= _AGREEMENT:
        return gate
    plain = replace(gate, correction=None)
    if gate.correction is None or plain.agreement(x, ids, NEAR_TIE) < _AGREEMENT:
        raise GateError(f"the gate that was found for {name} makes only {share:.0%} of vLLM's choices")
    return plain


class PredictorObserver(Observer):
    """Finds gates while the model loads, and builds the predictor from them.

    Each gate is checked when its layer first runs.
    """

    needs_inputs = True

    def __init__(self, options: Options, obstacle: str = "") -> None:
        self._obstacle = obstacle  # why no gate can be used; empty if they can
        self._policy = make_policy(options)
        # A trained predictor needs no gate; they are still checked for the trace.
        prefetch = self._policy.prefetch
        self._needs_gates = prefetch is not None and prefetch.needs_gates and options.predictor_file is None
        self._training = options.train_predictor is not None
        self._wanted = self._needs_gates or self._training or (options.trace is not None and options.trace.inputs)
        self._model: torch.nn.Module | None = None  # while it loads
        self._found: dict[int, tuple[str, Gate]] = {}
        self._unchecked: set[int] = set()
        self._turn_off: Callable[[], None] = lambda: None
        self.gates: list[Gate] = []  # by layer; empty if not needed, or once one chose otherwise than vLLM

    def model_made(self, model: torch.nn.Module) -> None:
        if self._wanted and not self._found:  # the model itself, not its draft
            self._model = model

    def layer_loaded(self, position: int, routed_experts: Any) -> None:
        if not self._wanted:
            return
        try:
            if self._obstacle:
                raise GateError(self._obstacle)
            if self._model is None:
                raise GateError("this vLLM loader makes models elsewhere")
            self._found[position] = (routed_experts.layer_name, find_gate(routed_experts, self._model))
        except GateError as error:
            self._give_up(f"the gate of {routed_experts.layer_name} cannot be used: {error}")

    @property
    def checked_gates(self) -> Sequence[Gate]:
        """Return the gates by layer, once every one has chosen as vLLM; empty before."""
        return () if self._unchecked else self.gates

    def model_loaded(self, num_layers: int) -> None:
        """Set ``gates`` to those that were found, if they are wanted.

        Called when all MoE layers are loaded.
        """
        if self._wanted:
            self._model = None
            self.gates = [self._found[position][1] for position in range(num_layers)]
            self._unchecked = set(self._found)

    def predictor(self, model: RoutedModel) -> Predictor | None:
        """Return the predictor of the loaded model, or None without one or its gates.

        ConfigError if a trained predictor cannot be used.
        """
        if self._wanted:
            model = replace(model, gates=self.gates)
        elif self._needs_gates:
            return None
        try:
            return self._policy.prefetch.make(model) if self._policy.prefetch else None
        except PredictorError as error:
            raise ConfigError(f"vllm-dymoe: {error}") from error

    def listen(self, observation: Observation, turn_off: Callable[[], None]) -> None:
        """Observe until every gate is checked.

        Args:
            turn_off: called if the predictor cannot be used.
        """
        self._observation, self._turn_off = observation, turn_off
        if self._unchecked:
            observation.join(self)

    def see(self, routing: Routing) -> None:
        layer = routing.layer
        if layer in self._unchecked:
            finite = routing.x.isfinite().all(1) & usable(routing.weights).all(1)
            if not finite.any():  # checked with a later step
                return
            self._unchecked.remove(layer)
            x, ids = routing.x[finite], routing.ids[finite]
            try:
                self.gates[layer] = checked(self.gates[layer], self._found[layer][0], x, ids)
            except GateError as error:
                self._give_up(str(error))
        if not self._unchecked:
            self._observation.leave(self)

    def _give_up(self, reason: str) -> None:
        if self._needs_gates:
            logger.warning(
                'vllm-dymoe: policy "%s" prefetches nothing, because %s; experts are fetched when their router '
                "chooses them.", self._policy.name, reason,
            )  # fmt: skip
            self._turn_off()
        elif not self._training:
            logger.warning("vllm-dymoe: the trace will lack the next gate's predictions, because %s.", reason)
        if self._training:
            logger.warning("vllm-dymoe: no predictor is trained, because %s.", reason)
        self._wanted, self._model, self._unchecked, self.gates = False, None, set(), []
