"""What the host and small kernels take, as it was measured: costs.json."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources


@dataclass(frozen=True)
class Costs:
    """Seconds of the host and of small kernels, as they were measured: see ``sources`` of costs.json."""

    host_layer: float  # of the host for a layer that it plans
    host_miss: float  # of the host for each expert that it has fetched
    graph_layer: float  # of small kernels for a layer that the device plans
    graph_miss: float
    launch: float  # of the host for a layer of a prompt that the device plans
    cpu_step: float = 0.0  # of vLLM's own work for a step on a CPU
    cpu_layer: float = 0.0  # of a layer on a CPU, beside its products
    questions: Mapping[str, float] = field(default_factory=dict)  # of the host to ask a predictor, by its name

    @classmethod
    def measured(cls) -> "Costs":
        found = json.loads(resources.files("vllm_dymoe.plan").joinpath("costs.json").read_text())
        return cls(**{name: value for name, value in found.items() if name != "sources"})

    @classmethod
    def nothing(cls) -> "Costs":
        """A host that takes no time: what the data sheets alone say."""
        return cls(0.0, 0.0, 0.0, 0.0, 0.0)
