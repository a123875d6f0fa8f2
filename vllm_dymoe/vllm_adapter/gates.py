"""Where the gate of each MoE layer is, found without knowing the architecture, and checked against vLLM's own choices.

A block of a model owns its experts and, next to them, the linear layer that routes to them; the names differ, and so
does how deep the linear layer lies. While vLLM builds the model, torch tells which module becomes part of which. So the
way leads from the experts up to the first module that holds a linear layer from the hidden size to the number of
experts. How its scores become a choice is known to the experts' own module, as data. Whether all of this is right is
seen when the layer runs for the first request: what the gate would choose has to be what vLLM chose.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook

from vllm_dymoe.predict import Gate

# Near ties count as equal within this share of a token's largest score; a wrong gate agrees by chance only, which for
# 2 of 8 experts is a quarter. Two logits that bfloat16 rounds (by 2^-9 of their size) once for vLLM and once for us may
# come 2^-7 of their size closer or farther apart, and scores by that share for each unit of the logits: this is enough
# for logits up to 4. Such ties are seen where the processor sums in another order, and in Llama-4, whose experts' input
# has been multiplied with the router's weight and rounded.
NEAR_TIE = 2**-5
_AGREEMENT = 0.95


class GateError(ValueError):
    """A gate that cannot be found or used; the message is the reason, for a sentence to the user."""


class ModuleTree:
    """Which module was first made part of which, for modules built while it lives."""

    def __init__(self) -> None:
        self._parents: dict[torch.nn.Module, torch.nn.Module] = {}
        tree = weakref.ref(self)

        def note(parent: torch.nn.Module, name: str, child: torch.nn.Module | None) -> None:
            alive = tree()
            if alive is not None and child is not None:
                alive._parents.setdefault(child, parent)

        self._end = weakref.finalize(self, register_module_module_registration_hook(note).remove)

    def parent(self, module: torch.nn.Module) -> torch.nn.Module | None:
        """The module that ``module`` is part of; None for the root, or one that was built before."""
        return self._parents.get(module)

    def close(self) -> None:
        """Take no more notes, and let go of the model."""
        self._end()
        self._parents.clear()


@dataclass
class _Linear:
    """A gate module as a function; it stays vLLM's, with whatever kernels and adapters vLLM gives it."""

    module: Any

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        dtype = self.module.params_dtype if hasattr(self.module, "params_dtype") else self.module.weight.dtype
        out = self.module(x if x.dtype == dtype else x.to(dtype))
        return out[0] if isinstance(out, tuple) else out


def find_gate(experts: Any, tree: ModuleTree) -> Gate:
    """The gate of one MoE layer.

    Args:
        experts: vLLM's RoutedExperts.
        tree: of the model that they are in.

    Raises:
        GateError: there is no linear layer that could be it, or several, or its scores are used in an unknown way.
    """
    config = experts.moe_config
    hidden, num_experts = experts.hidden_size, config.num_experts
    within = set(experts.modules())
    place = tree.parent(experts)
    while place is not None:
        found = [m for m in place.modules() if m not in within and _sizes(m) == (hidden, num_experts)]
        if len(found) > 1:
            raise GateError(f"{len(found)} linear layers next to it lead from {hidden} to {num_experts} features")
        if found:
            return _gate(experts, found[0])
        place = tree.parent(place)
    raise GateError(f"no linear layer next to it leads from {hidden} to {num_experts} features")


def _sizes(module: torch.nn.Module) -> tuple[Any, Any]:
    """Input and output features of a linear layer, vLLM's or torch's."""
    return (
        getattr(module, "input_size", getattr(module, "in_features", None)),
        getattr(module, "output_size", getattr(module, "out_features", None)),
    )


def _gate(experts: Any, linear: torch.nn.Module) -> Gate:
    scoring = experts.scoring_func
    if scoring not in ("softmax", "sigmoid"):
        raise GateError(f"its scores are {scoring}, which is not supported yet")
    grouped = experts.use_grouped_topk
    return Gate(
        logits=_Linear(linear),
        scoring=scoring,
        correction=experts.e_score_correction_bias,
        groups=(experts.num_expert_group or 0) if grouped else 0,
        top_groups=(experts.topk_group or 0) if grouped else 0,
        local=None if experts.expert_map is None else tuple(experts.expert_map.tolist()),
    )


class GateCheck:
    """Compares each layer's gate with what vLLM chose, once.

    Args:
        names: of the layers, by position.
        gates: of the layers, by position; one that differs from vLLM's choices only by a correction that vLLM does not
            apply is replaced by itself without it (vLLM's CPU build routes Ernie-4.5 like that).
    """

    def __init__(self, names: Sequence[str], gates: list[Gate]) -> None:
        self._names = names
        self._gates = gates
        self._unchecked = set(range(len(gates)))

    def __bool__(self) -> bool:
        return bool(self._unchecked)

    def check(self, layer: int, x: torch.Tensor, ids: torch.Tensor) -> None:
        """Compare one layer.

        Args:
            layer: its position.
            x: [tokens, hidden], the experts' input.
            ids: [tokens, top_k], what vLLM chose, as this rank's experts; negative for another rank's.

        Raises:
            GateError: the gate would have chosen otherwise.
        """
        if layer not in self._unchecked:
            return
        self._unchecked.remove(layer)
        gate = self._gates[layer]
        share = gate.agreement(x, ids, NEAR_TIE)
        if share < _AGREEMENT and gate.correction is not None:
            plain = replace(gate, correction=None)
            if plain.agreement(x, ids, NEAR_TIE) >= _AGREEMENT:
                self._gates[layer] = plain
                return
        if share < _AGREEMENT:
            raise GateError(
                f"the gate that was found for {self._names[layer]} makes only {share:.0%} of vLLM's choices"
            )
