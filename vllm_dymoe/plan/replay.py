"""Replays the planner over recorded routing: how many experts a step finds, and how many bytes it moves."""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_dymoe.experts.identity import ModelIdentity
from vllm_dymoe.planner.constants import Cost
from vllm_dymoe.planner.importance import importance
from vllm_dymoe.planner.precision import Precision
from vllm_dymoe.planner.rule import ABSENT, CPU, HIGH, HIT, LOW, Ints
from vllm_dymoe.planner.table import CODES, Table, set_pools
from vllm_dymoe.trace.statistics import popularity
from vllm_dymoe.trace.synthetic import synthetic_trace
from vllm_dymoe.trace.trace import Trace

SKEW, LOCALITY = 0.5, 0.3
"""Parameters of synthetic routing: popularity falls with the root of the rank, and a third of the choices repeat."""
# Layers and steps of a trace that are replayed: enough for two digits in a few hundredths of a second.
_LAYERS, _STEPS = 4, 160
_COLD = 4  # one of this many steps fills the cache and is not counted


@dataclass(frozen=True)
class LayerDemand:
    """The average demand of a layer's step; among ranks that share the experts, that of the rank with most misses."""

    active: Mapping[Precision, float]  # number of experts by precision
    missing: Mapping[Precision, float]
    """Slices that have to be moved: versions, or residual slices and bases if versions are nested."""
    misses: float = 0.0  # number of experts that are not resident
    shared: float = 0.0  # seconds until link and CPU have finished their misses, if misses are shared


class Routings:
    """Recorded routing of some layers of a model, step by step; a step has one token of each of `batch` requests."""

    def __init__(self, trace: Trace, batch: int = 1) -> None:
        decoded = trace.select(~trace.prefill)
        decoded = decoded if decoded.num_tokens >= 2 * batch else trace
        self.header, self.batch, self.ranks = trace.header, batch, 1
        order = decoded.steps(batch)
        if not len(order):  # if there are fewer requests than the batch, neighbours replace the missing ones
            tokens = decoded.in_order()
            order = tokens[: len(tokens) // batch * batch].view(-1, batch)
        order = order[:_STEPS]
        experts, weights = decoded.experts[order].numpy(), decoded.weights[order].float().numpy()
        layers = np.unique(np.linspace(0, trace.header.num_layers - 1, _LAYERS).round().astype(int))
        self.steps = {
            int(layer): [_uses(experts[step, :, layer], weights[step, :, layer]) for step in range(len(order))]
            for layer in layers
        }
        self._shares = popularity(decoded).numpy()

    def spread(self, ranks: int) -> "Routings":
        """Return the same for one of ``ranks`` ranks that share the experts."""
        spread = copy(self)
        spread.ranks = ranks
        return spread

    def distinct(self, tokens: int) -> float:
        """Return how many experts of a layer a prompt uses on a rank, if its tokens choose by popularity alone."""
        chosen = np.minimum(1.0, self._shares * self.header.top_k)
        return float((1 - (1 - chosen) ** tokens).sum(1).mean()) / self.ranks


def made_up(header: ModelIdentity, batch: int) -> Routings:
    """Return synthetic routing for a model without a trace.

    Popularity falls with rank ** -SKEW, and some choices repeat.
    """
    sizes = replace(header, num_layers=min(_LAYERS, header.num_layers))
    requests = max(2, batch)
    trace = synthetic_trace(sizes, requests=requests, prompt=1, decode=_STEPS, skew=SKEW, locality=LOCALITY)
    return Routings(trace, batch)


def _uses(experts: NDArray[np.int64], weights: NDArray[np.float32]) -> tuple[Ints, Ints, Ints]:
    """Return the distinct experts of a step [tokens, top_k] ascending, their weights and rows.

    Weights are sums in 1 / WEIGHT_UNIT.
    """
    _, decoded = importance(torch.from_numpy(experts), torch.from_numpy(weights), int(experts.max()) + 1)
    return decoded.used, decoded.sums, np.unique(experts, return_counts=True)[1]


def replay(
    routings: Routings,
    quotas: Mapping[Precision, Sequence[int]],  # experts of each precision that each layer of the model may keep
    choose: Callable[[int, Ints], NDArray[np.bool_]] | None,
    low: bool,  # whether the other experts have a version, or are skipped
    nested: bool = False,
    costs: Ints | None = None,
) -> LayerDemand:
    """Return the average demand of a layer under the planner's rule.

    ``choose`` returns which active experts are high, given a layer and the sums of their weights. With nested versions,
    quotas are those of residual slices and of bases. ``costs`` divides misses between link and CPU, see
    ``Table.cpu_costs``.
    """
    found = list[LayerDemand]()
    own = -(-routings.header.num_experts // routings.ranks)
    for layer, steps in routings.steps.items():
        depth = layer / max(1, routings.header.num_layers - 1)  # a trace may have fewer layers than the model
        own_quotas = {
            CODES[precision]: [of[round(depth * (len(of) - 1))] if of else 0]
            for precision in (Precision.LOW, Precision.HIGH)
            for of in [quotas.get(precision)]
        }
        tables = [Table.allocate(1, own, nested=nested) for _ in range(routings.ranks)]
        for table in tables:
            set_pools(table, {code: (0, 0, quota[0]) for code, quota in own_quotas.items()}, own_quotas)
            if costs is not None:
                table.cpu_costs[:] = costs
        for step, (uses, sums, rows) in enumerate(steps, start=1):
            wanted = np.full(len(uses), HIGH, np.int8)
            if choose is not None:
                wanted[~choose(layer, sums)] = LOW if low else ABSENT
            of_ranks = []
            for rank, table in enumerate(tables):
                here = (wanted != ABSENT) & (uses // own == rank)
                of_ranks.append(_ask(table, uses[here] - rank * own, wanted[here], rows[here], nested, costs))
            if step > len(steps) // _COLD:
                found.append(max(of_ranks, key=lambda one: (one.misses, sum(one.active.values()))))
    active, missing = ([getattr(one, of) for one in found] for of in ("active", "missing"))
    means = (
        {precision: fmean(one[precision] for one in of) for precision in (Precision.HIGH, Precision.LOW)}
        for of in (active, missing)
    )
    return LayerDemand(next(means), next(means), fmean(one.misses for one in found), fmean(one.shared for one in found))


def _ask(
    table: Table, uses: Ints, codes: NDArray[np.int8], rows: Ints, nested: bool, costs: Ints | None
) -> LayerDemand:
    """Plan one layer of one step, for the experts of one rank."""
    places = table.begin_step(0, uses, codes, rows)
    table.keep(0, uses, codes, places)
    missing = {code: (places[0] != HIT) & (codes == code) for code in (LOW, HIGH)}
    if nested:
        missing = {LOW: places[0] != HIT, HIGH: places[1] != HIT}
    on_cpu = (places == CPU).any(0)
    missing = {code: those & ~on_cpu for code, those in missing.items()}
    return LayerDemand(
        {precision: int(np.count_nonzero(codes == CODES[precision])) for precision in (Precision.HIGH, Precision.LOW)},
        {precision: int(np.count_nonzero(missing[CODES[precision]])) for precision in (Precision.HIGH, Precision.LOW)},
        int(np.count_nonzero(missing[HIGH] | missing[LOW] | on_cpu)),
        0.0 if costs is None else _longer(missing, on_cpu, rows, codes, costs),
    )


def _longer(
    missing: Mapping[int, NDArray[np.bool_]],
    on_cpu: NDArray[np.bool_],
    rows: Ints,
    codes: NDArray[np.int8],
    costs: Ints,
) -> float:
    """Return the longer of the link's time for fetched misses and the CPU's time for the experts that it computes."""
    link = sum(int(np.count_nonzero(those)) * int(costs[code, Cost.LINK]) for code, those in missing.items())
    each = costs[codes, Cost.FIRST_ROW] + (rows - 1) * costs[codes, Cost.NEXT_ROW]
    host = int(each[on_cpu].sum()) + int(costs[ABSENT, Cost.LINK]) * bool(on_cpu.any())
    return max(link, host) / 1e9
