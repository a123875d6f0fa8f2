"""A plan against what was measured: rows of a run, predicted from those that a plan begins with.

It begins with the full loads, each system's own step with every expert resident, and loading on demand, which says what
a miss costs the host.
"""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_dymoe.bench.rows import Row
from vllm_dymoe.config import ExpertBudget
from vllm_dymoe.plan.device import Device, is_beginning
from vllm_dymoe.plan.model import ModelShape
from vllm_dymoe.plan.predict import predict
from vllm_dymoe.plan.replay import Routings
from vllm_dymoe.resolve import resolve_options
from vllm_dymoe.runtime.sizing import limit_in_bytes, plan_slots, workspace_bytes
from vllm_dymoe.systems import make_system

CLEARLY_FASTER = 1.2
"""A plan must not reverse two systems of which one is by this factor the faster."""


@dataclass(frozen=True)
class Compared:
    """One row.

    Attributes:
        label: of the system.
        budget: as the option.
        batch: requests at once.
        link: bytes per second.
        predicted: seconds of a decode step.
        measured: likewise.
    """

    label: str
    budget: str
    batch: int
    link: float
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Relative, with its sign."""
        return self.predicted / self.measured - 1


def compare(rows: Sequence[Row], shape: ModelShape, device: Device, routings: Mapping[int, Routings]) -> list[Compared]:
    """Predict every row of the plugin but those that predictions begin with.

    Args:
        rows: of one model.
        shape: of it.
        device: what the others say.
        routings: by batch.
    """
    return [
        _compare(row, shape, device, routings[row["batch"]])
        for row in rows
        if row["kind"] == "speed" and row["options"] is not None and not is_beginning(row)
    ]


def _compare(row: Row, shape: ModelShape, device: Device, routings: Routings) -> Compared:
    options = resolve_options(dict(row["options"]), environment={})
    experts = shape.packed(tuple(options.stored_bits), options.group_size)
    system, workspace = make_system(options), workspace_bytes(experts)
    limit = limit_in_bytes(ExpertBudget.parse(row["budget"]), experts, options, workspace, 0)
    shares = system.precision.shares(shape.moe_layers, shape.top_k)
    plan = plan_slots(experts, options, system, limit, workspace, shares)
    measured: dict[str, Any] = row["measured"]
    lengths = measured["prompt_tokens"]
    found = predict(shape, options, plan, device, routings, round(row["batch"] * sum(lengths) / len(lengths)))
    link = device.link if options.link_gbps is None else options.link_gbps * 1e9
    return Compared(row["label"], row["budget"], row["batch"], link, found.tpot, measured["tpot_ms"]["mean"] / 1e3)


def median_error(rows: Sequence[Compared]) -> float:
    """Of the errors' amounts."""
    return statistics.median(abs(row.error) for row in rows)


def reversed_rankings(rows: Sequence[Compared]) -> list[tuple[Compared, Compared]]:
    """Pairs at one budget, batch and link of which the first is clearly the faster and is predicted to be slower."""
    return [
        (one, other)
        for one, other in itertools.permutations(rows, 2)
        if (one.budget, one.batch, one.link) == (other.budget, other.batch, other.link)
        and one.measured * CLEARLY_FASTER < other.measured
        and one.predicted > other.predicted
    ]
