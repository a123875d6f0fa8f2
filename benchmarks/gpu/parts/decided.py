"""Device-planned steps of a stack: small or large, launched or as a graph."""

import time
from collections.abc import Sequence
from typing import Any

import torch
from experts import captured
from layers import Machine, work_of
from torch import Tensor

from parts.stack import Seen, Stack, normalized
from vllm_dymoe.kernels import Activation
from vllm_dymoe.policies.exact import Exact
from vllm_dymoe.server import ExpertServer
from vllm_dymoe.server.stats import ServerStats


def server_of(
    stack: Stack, store: Any, bits: int, budget: str, kind: type[Exact] = Exact, **options: Any
) -> ExpertServer:
    """Return a server with device-side planning."""
    return stack.server(store, bits, budget=budget, policy=kind(look_ahead=0), planning="device", **options)


class DevicePlannedSteps:
    """Steps with a fixed number of tokens, captured once or launched each time.

    Args:
        stack: model with gates.
        server: a server with device-side planning.
        tokens: number of tokens of a step.
        launched: launch each step, instead of replaying a graph.
        large: run large-batch steps.
    """

    def __init__(
        self, stack: Stack, server: ExpertServer, tokens: int, *, launched: bool = False, large: bool = False
    ) -> None:
        assert server.small_batches is not None
        self._large, self._captured = large, not launched
        self._stack, self._server, self._path = stack, server, server.small_batches
        self._x = stack.inputs(tokens, 0)
        self._seen: list[Seen] = []
        self._path.tell(0)  # the step before a capture must not change anything; on a host, nor must the capture
        self._replay = self._launch if launched else captured(self._launch).replay
        self._path.tell(tokens)

    def step(self, x: Tensor) -> list[Seen]:
        """Replay a step; the next one overwrites the results in place."""
        self._x.copy_(x)
        self._replay()
        return self._seen

    def _launch(self) -> None:
        x, self._seen = self._x, []
        for layer in range(self._stack.model.layers):
            weights, ids = self._stack.route(layer, x)
            if self._large:
                out = self._path.large.forward(layer, x, weights, ids, Activation.SILU, captured=self._captured)
            else:
                out = self._path.forward(layer, x, weights, ids, Activation.SILU)
            self._seen.append(Seen(layer, x, weights, ids, out))
            x = normalized(x + out)

    def measure(
        self, machine: Machine, inputs: Sequence[Tensor], bits: int, *, ahead: bool = False
    ) -> tuple[float, float, ServerStats]:  # fmt: skip
        """Run steps and measure them.

        The bound is that of memory, and of the link for misses; with ``ahead`` also for what prefetch brought in time.

        Returns:
            the seconds of a layer, their bound, and the server's statistics of these steps.
        """
        torch.cuda.synchronize()
        self._server.reset_stats()
        begin = time.perf_counter()
        for x in inputs:
            seen = self.step(x)
        torch.cuda.synchronize()
        layers = len(inputs) * self._stack.model.layers
        measured, stats = (time.perf_counter() - begin) / layers, self._server.stats()
        fetched = stats.misses + (stats.prefetches["useful"] if ahead else 0)
        link = fetched * self._server.experts.formats[bits].nbytes / layers / machine.host_bytes_per_second
        on_card = work_of(self._stack.model, seen[0].ids.tolist(), (bits,)).seconds(machine)
        return measured, max(on_card, link), stats
