"""Which experts a recorded trace names as hot, for a system that begins with these."""

import numpy as np
from numpy.typing import NDArray

from vllm_dymoe.config import ConfigError
from vllm_dymoe.observe import statistics
from vllm_dymoe.observe.trace import Trace, TraceError
from vllm_dymoe.residency.format import ModelExperts
from vllm_dymoe.residency.hotness import even_shares
from vllm_dymoe.systems import System


def read_popularity(experts: ModelExperts, system: System) -> NDArray[np.float64] | None:
    """Float64 [layers, experts] in even shares, 0 in a draft's layers; None where the system names no trace.

    Raises:
        ConfigError: the trace cannot be read, or is of other layers or experts than this rank has.
    """
    migrating = system.residency.migrating
    if migrating is None or migrating.trace is None:
        return None
    try:
        trace = Trace.load(migrating.trace.expanduser())
    except TraceError as error:
        raise ConfigError(f"vllm-dymoe: popularity: {error}") from error
    own = len(experts.layers) - experts.draft_layers
    sizes = trace.header.num_layers, trace.header.num_experts
    if sizes != (own, experts.num_experts):
        raise ConfigError(
            f"vllm-dymoe: popularity: {migrating.trace} is a trace of {sizes[0]} layers with {sizes[1]} experts, but "
            f"this rank has {own} with {experts.num_experts}; record one of this model, and leave popularity out where "
            "ranks share the experts of a layer."
        )
    found = np.zeros((len(experts.layers), experts.num_experts))
    found[:own] = even_shares((statistics.gate_load if migrating.by_gates else statistics.load)(trace).numpy())
    return found
