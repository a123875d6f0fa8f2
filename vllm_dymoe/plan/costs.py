"""Measured time of the host and of small kernels: costs.json."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any


@dataclass(frozen=True)
class Costs:
    """Seconds of the host and of small kernels.

    ``sources`` in costs.json says how they were measured.
    """

    host_layer: float  # host seconds for a host-planned layer
    host_miss: float  # host seconds for each fetched expert
    graph_layer: float  # seconds of small kernels for a device-planned layer
    graph_miss: float
    launch: float  # host seconds for a device-planned layer of a prompt
    # Host seconds of a prediction, by the predictor's name.
    questions: Mapping[str, float] = field(default_factory=dict)
    step: float = 0.0  # of vLLM's own work for a step, which no layer has
    request: float = 0.0  # of that for each request

    @classmethod
    def measured(cls) -> "Costs":
        found = _read()
        return cls(**{name: value for name, value in found.items() if name not in ("sources", "cpu")})

    @classmethod
    def on_cpu(cls, operation: float) -> "Costs":
        """Return the costs of a CPU on which a small operation takes so many seconds.

        It computes experts in place. vLLM's own work is counted in such operations, because it is mostly Python there.
        """
        counts = _read()["cpu"]
        layer, step, request = (counts[name] * operation for name in ("layer", "step", "request"))
        return cls(layer, 0.0, 0.0, 0.0, 0.0, step=step, request=request)

    @classmethod
    def nothing(cls) -> "Costs":
        """Return costs of zero, so that only data sheets count."""
        return cls(0.0, 0.0, 0.0, 0.0, 0.0)


def _read() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(resources.files("vllm_dymoe.plan").joinpath("costs.json").read_text())
    return found
