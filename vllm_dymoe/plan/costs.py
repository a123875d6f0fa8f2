"""What the host and small kernels take, as it was measured: costs.json."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any


@dataclass(frozen=True)
class Costs:
    """Seconds of the host and of small kernels, as they were measured: see ``sources`` of costs.json."""

    host_layer: float  # of the host for a layer that it plans
    host_miss: float  # of the host for each expert that it has fetched
    graph_layer: float  # of small kernels for a layer that the device plans
    graph_miss: float
    launch: float  # of the host for a layer of a prompt that the device plans
    questions: Mapping[str, float] = field(default_factory=dict)  # of the host to ask a predictor, by its name
    step: float = 0.0  # of vLLM's own work for a step, which no layer has

    @classmethod
    def measured(cls) -> "Costs":
        found = _read()
        return cls(**{name: value for name, value in found.items() if name not in ("sources", "cpu")})

    @classmethod
    def on_cpu(cls) -> "Costs":
        """Those of a CPU that computes experts in place."""
        return cls(**_read()["cpu"])

    @classmethod
    def nothing(cls) -> "Costs":
        """A host that takes no time: what the data sheets alone say."""
        return cls(0.0, 0.0, 0.0, 0.0, 0.0)


def _read() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(resources.files("vllm_dymoe.plan").joinpath("costs.json").read_text())
    return found
