"""Measured time of the host and of small kernels: costs.json."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources


@dataclass(frozen=True)
class Costs:
    """Seconds of the host and of small kernels; ``sources`` in costs.json says how they were measured."""

    host_layer: float  # host seconds for a host-planned layer
    host_miss: float  # host seconds for each fetched expert
    graph_layer: float  # seconds of small kernels for a device-planned layer
    graph_miss: float
    launch: float  # host seconds for a device-planned layer of a prompt
    # Host seconds of a prediction, by the predictor's name.
    questions: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def measured(cls) -> "Costs":
        found = json.loads(resources.files("vllm_dymoe.plan").joinpath("costs.json").read_text())
        return cls(**{name: value for name, value in found.items() if name != "sources"})

    @classmethod
    def nothing(cls) -> "Costs":
        """Return costs of zero, so that only data sheets count."""
        return cls(0.0, 0.0, 0.0, 0.0, 0.0)
