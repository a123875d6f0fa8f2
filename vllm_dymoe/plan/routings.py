"""What routers chose, cut down to what a plan replays of it.

That is a few layers, and some steps of one batch.
"""

from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from vllm_dymoe.experts.identity import ModelIdentity
from vllm_dymoe.plan.simulator import Step
from vllm_dymoe.planner.routing import Phase
from vllm_dymoe.trace.synthetic import synthetic_trace
from vllm_dymoe.trace.trace import Trace

SKEW, LOCALITY = 0.5, 0.3
"""Of made-up routers: popularity falls with the root of the rank, and a third of the choices repeat."""
_LAYERS, _STEPS = 4, 96  # of a trace that are replayed: enough for two digits
_COLD = 4  # one of so many steps fills the cache and is not counted


class Routings:
    """What routers chose in some layers of a model, step by step.

    A step has a token of each of ``batch`` requests.
    """

    def __init__(self, trace: Trace, batch: int = 1, ranks: int = 1) -> None:
        self.header, self.batch, self.ranks = trace.header, batch, ranks
        layers = np.unique(np.linspace(0, trace.header.num_layers - 1, _LAYERS).round().astype(int))
        header = replace(trace.header, num_layers=len(layers))
        own: dict[str, Any] = {
            "header": header,
            "experts": trace.experts[:, layers],
            "weights": trace.weights[:, layers],
        }
        self.trace = replace(trace, **own, router_inputs=None, next_gate=None, gates=None, fates=None)

    def spread(self, ranks: int) -> "Routings":
        """Return the same choices for so many ranks that share out the experts."""
        return Routings(self.trace, self.batch, ranks)

    @cached_property
    def steps(self) -> tuple[list[Step], list[Step]]:
        """Decode steps that fill the cache, and those that count."""
        decoded = (~self.trace.prefill).nonzero()[:, 0]
        decoded = decoded if len(decoded) >= 2 * self.batch else torch.arange(self.trace.num_tokens)
        some = self.trace.select(decoded)
        order = some.steps(self.batch)
        if not len(order):  # fewer requests than the batch: neighbours stand in for others
            tokens = some.in_order()
            order = tokens[: len(tokens) // self.batch * self.batch].view(-1, self.batch)
        found = [
            Step(decoded[step].numpy(), Phase.DECODE, tuple(range(self.batch)))
            for step in order[: _STEPS + _STEPS // 3]
        ]
        first = len(found) // _COLD
        return found[:first], found[first:]

    def prompt(self, tokens: int) -> Step:
        """Return a chunk of a prompt, made of any tokens that the trace has."""
        return Step(np.arange(tokens) % self.trace.num_tokens, Phase.PREFILL, (0,))


def made_up(header: ModelIdentity, batch: int) -> Routings:
    """Return choices for a model without a recorded trace.

    Popularity falls with rank ** -SKEW, and tokens repeat some of the choices before them.
    """
    sizes = replace(header, num_layers=min(_LAYERS, header.num_layers))
    trace = synthetic_trace(sizes, requests=max(2, batch), prompt=1, decode=_STEPS, skew=SKEW, locality=LOCALITY)
    return Routings(trace, batch)
