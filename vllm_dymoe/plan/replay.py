"""The residency rule replayed over what routers chose: how many experts a step finds, and how many it moves."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from vllm_dymoe.residency.rule import HIGH, HIT, LOW, NOWHERE
from vllm_dymoe.residency.table import CODES, Table, set_pools
from vllm_dymoe.residency.tier import Tier
from vllm_dymoe.traces import Trace, TraceHeader, synthetic_trace
from vllm_dymoe.traces.statistics import next_gate_accuracy, popularity

_LAYERS, _STEPS = 4, 160  # of a trace that are replayed: enough for two digits in a few hundredths of a second
_COLD = 4  # one of so many steps fills the cache and is not counted


@dataclass(frozen=True)
class LayerDemand:
    """What one layer of one step needs, on average.

    Attributes:
        active: experts in each tier.
        missing: what has to be moved for them: versions, or fine slices and bases where one lies inside the other.
        skipped: experts that are not computed.
        misses: experts for which something has to be moved.
    """

    active: Mapping[Tier, float]
    missing: Mapping[Tier, float]
    skipped: float = 0.0
    misses: float = 0.0


class Routings:
    """What routers chose, step by step, for some layers of a model.

    Args:
        trace: recorded or made up.
        batch: tokens of a decode step, of different requests.
    """

    def __init__(self, trace: Trace, batch: int = 1) -> None:
        decoded = trace.select(~trace.prefill)
        decoded = decoded if decoded.num_tokens >= 2 * batch else trace
        self.header = trace.header
        self.batch = batch
        count = trace.header.num_layers
        self.layers = sorted({round(place * (count - 1) / max(1, min(_LAYERS, count) - 1)) for place in range(_LAYERS)})
        self.layers = [layer for layer in self.layers if layer < count]
        order = _in_steps(decoded, batch)[:_STEPS]
        experts, weights = decoded.experts[order].numpy(), decoded.weights[order].float().numpy()
        self.steps = {
            layer: [_uses(experts[step, :, layer], weights[step, :, layer]) for step in range(len(order))]
            for layer in self.layers
        }
        accuracy = next_gate_accuracy(decoded)
        self.next_gate = None if accuracy is None else float(accuracy.mean())
        self._shares = popularity(decoded).numpy()
        best = np.sort(self._shares, axis=1)[:, -trace.header.top_k :]
        self.popularity = float(best.sum(1).mean())

    @property
    def active(self) -> float:
        """Experts that a step uses in a layer, on average."""
        counts = [len(uses) for steps in self.steps.values() for uses, _ in steps]
        return sum(counts) / len(counts)

    def distinct(self, tokens: int) -> float:
        """Experts of a layer that a prompt uses, if its tokens choose by popularity alone."""
        chosen = np.minimum(1.0, self._shares * self.header.top_k)
        return float((1 - (1 - chosen) ** tokens).sum(1).mean())


@lru_cache(8)
def stated_skew(header: TraceHeader, batch: int, skew: float, locality: float) -> Routings:
    """Made-up choices where no trace was recorded: popularity falls with rank ** -skew, and tokens repeat some."""
    sizes = TraceHeader(header.model, header.fingerprint, min(_LAYERS, header.num_layers), *_sizes(header))
    trace = synthetic_trace(
        sizes, requests=max(2, batch), prompt=1, decode=_STEPS, skew=skew, locality=locality, correlation=0.0
    )
    return Routings(trace, batch)


def _sizes(header: TraceHeader) -> tuple[int, int, int]:
    return header.num_experts, header.top_k, header.hidden


def replay(
    routings: Routings,
    quotas: Mapping[Tier, Sequence[int]],
    critical: Callable[[int, int], int] | None,
    low: bool,
    nested: bool = False,
) -> LayerDemand:
    """Let layers keep what the rule says.

    Args:
        routings: what is asked for.
        quotas: experts of each tier that each layer of the model may keep.
        critical: (layer, active experts) to how many of them are high, the most important first; all of them if None.
        low: whether the others have a version, or are skipped.
        nested: whether the low version lies inside the high one; quotas are then of fine slices and of bases.
    """
    total = {code: 0 for code in (HIGH, LOW, NOWHERE)}
    moved = {HIGH: 0, LOW: 0}
    counted = misses = 0
    for layer, steps in routings.steps.items():
        table = Table.allocate(1, routings.header.num_experts, nested=nested)
        shares = {CODES[tier]: [_share(quotas.get(tier), layer, routings)] for tier in (Tier.LO, Tier.HI)}
        set_pools(table, {code: (0, 0, share[0]) for code, share in shares.items()}, shares)
        for step, (uses, importance) in enumerate(steps, start=1):
            wanted = _wanted(uses, importance, critical and critical(layer, len(uses)), low)
            active, codes = uses[wanted != NOWHERE], wanted[wanted != NOWHERE]
            places = table.begin_step(0, active, codes)
            table.keep(0, active, codes, places)
            missing = {code: (places[0] != HIT) & (codes == code) for code in (LOW, HIGH)}
            if nested:
                missing = {LOW: places[0] != HIT, HIGH: places[1] != HIT}
            if step > len(steps) // _COLD:
                counted += 1
                for code in total:
                    total[code] += int(np.count_nonzero(wanted == code))
                for code in moved:
                    moved[code] += int(np.count_nonzero(missing[code]))
                misses += int(np.count_nonzero(missing[HIGH] | missing[LOW]))
    return LayerDemand(
        {Tier.HI: total[HIGH] / counted, Tier.LO: total[LOW] / counted},
        {Tier.HI: moved[HIGH] / counted, Tier.LO: moved[LOW] / counted},
        total[NOWHERE] / counted,
        misses / counted,
    )


def _share(quotas: Sequence[int] | None, layer: int, routings: Routings) -> int:
    """What a layer of the model at this depth may keep; a trace may have fewer layers."""
    if not quotas:
        return 0
    return quotas[round(layer * (len(quotas) - 1) / max(1, routings.header.num_layers - 1))]


def _wanted(
    uses: NDArray[np.int64], importance: NDArray[np.float64], critical: int | None, low: bool
) -> NDArray[np.int8]:
    wanted = np.full(len(uses), HIGH, np.int8)
    if critical is not None and critical < len(uses):
        wanted[np.argsort(-importance, kind="stable")[critical:]] = LOW if low else NOWHERE
    return wanted


def _uses(experts: NDArray[np.int64], weights: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Distinct experts of a step [tokens, top_k], ascending, and the sum of each one's weights."""
    uses, inverse = np.unique(experts.astype(np.int64), return_inverse=True)
    return uses, np.bincount(inverse.ravel(), weights.ravel(), len(uses)).astype(np.float64)


def _in_steps(trace: Trace, batch: int) -> NDArray[np.int64]:
    """Tokens of each step: [steps, batch], the same place of different requests; request after request for one."""
    requests = [tokens.numpy() for tokens in trace.by_request() if len(tokens)]
    if batch == 1:
        return np.concatenate(requests)[:, None]
    steps: list[NDArray[np.int64]] = []
    for first in range(0, len(requests) - batch + 1, batch):
        together = requests[first : first + batch]
        length = min(map(len, together))
        steps.append(np.stack([tokens[:length] for tokens in together], axis=1))
    if not steps:  # fewer requests than the batch: neighbours stand in for others
        tokens = np.concatenate(requests)
        return tokens[: len(tokens) // batch * batch].reshape(-1, batch)
    return np.concatenate(steps)
