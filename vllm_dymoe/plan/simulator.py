"""A simulator of schedules: the time to serve a recorded routing on a device.

The planner and the policies are the real ones: the table, the rule, precisions, predictors, paces and high sets are
those that serve. Only time is computed: copies, kernels, CPU execution, the host's work and predictions are charged to
five timelines,

    host    | plan a layer .. start its copies .. predict | ...
    disk    | experts that host memory has no room for | ...
    link    | demands, projection by projection | predicted experts | moves between versions | ...
    compute | attention | resident experts | others as they arrive | ...
    cpu     | experts that the CPU executes | ...

and a layer ends when its last expert does. The result is the same on every machine.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_dymoe.cache.budget import expert_worth, plan_slots, slot_bits
from vllm_dymoe.executor.rates import Rates
from vllm_dymoe.executor.rates import costs as sharing_costs
from vllm_dymoe.experts.format import EVERY_PROJECTION, ExpertFormat, ModelExperts
from vllm_dymoe.options import Options
from vllm_dymoe.plan.costs import Costs
from vllm_dymoe.plan.device import Device, ExpertRate
from vllm_dymoe.plan.model import HeldDense
from vllm_dymoe.planner.constants import SMALL_BATCH_ROWS, Cost
from vllm_dymoe.planner.hotness import Swap, averaged, hottest, layer_swaps, squared_gates, swaps
from vllm_dymoe.planner.importance import mark_heavy_hitters
from vllm_dymoe.planner.link_share import HostWaits, LinkShare
from vllm_dymoe.planner.precision import Precision
from vllm_dymoe.planner.routing import Phase, PromptTokens, Routing
from vllm_dymoe.planner.rule import ABSENT, CPU, HIGH, HIT, LOW, STREAM, Ints
from vllm_dymoe.planner.table import CODES, Table, set_pools
from vllm_dymoe.policies.base import Policy
from vllm_dymoe.prefetch import Predictor
from vllm_dymoe.prefetch.pace import Pace
from vllm_dymoe.trace.trace import Trace

_PARTS = len(EVERY_PROJECTION)
_NEXT_ROW, _ROUND_TRIP = 0.2, 20e-6  # of an expert's first row on a CPU; seconds to the CPU worker and back


def _sharing(formats: Mapping[int, ExpertFormat], options: Options, device: Device) -> Ints:
    """Return the costs of fetching and executing a miss, as ``Table.cpu_costs``."""
    first = {fmt.encoding.tag: fmt.whole_nbytes / device.host for fmt in formats.values()}
    rates = Rates(device.link, first, {tag: s * _NEXT_ROW for tag, s in first.items()}, _ROUND_TRIP, 0, "planned")
    return sharing_costs({HIGH: formats.get(options.high), LOW: formats.get(options.low)}, rates, options.misses_rows)


@dataclass(frozen=True)
class Step:
    """One step: tokens of a trace, in the order of their requests."""

    tokens: Ints  # int64 [tokens], numbers in the trace
    phase: Phase
    requests: tuple[int, ...]  # requests to which the tokens belong


def sessions(trace: Trace, batch: int = 1, requests: Sequence[int] | None = None) -> Iterator[Step]:
    """Yield steps that serve requests ``batch`` at a time.

    Each request's prompt is a step of its own; then each step has one token of each request.
    """
    by_request = [tokens.numpy() for tokens in trace.by_request()]
    chosen = [number for number in (requests or range(len(by_request))) if len(by_request[number])]
    prefill = trace.prefill.numpy()
    for first in range(0, len(chosen) - len(chosen) % batch, batch):
        group = chosen[first : first + batch]
        decoded = {}
        for number in group:
            tokens = by_request[number]
            prompt = tokens[prefill[tokens]]
            decoded[number] = tokens[~prefill[tokens]]
            if len(prompt):
                yield Step(prompt, Phase.PREFILL, (number,))
        for at in range(max(map(len, decoded.values()))):
            running = [number for number in group if at < len(decoded[number])]
            yield Step(np.array([decoded[number][at] for number in running]), Phase.DECODE, tuple(running))


@dataclass(frozen=True)
class Model:
    """Sizes that determine time.

    Routing comes from the trace, all of whose layers have experts.
    """

    experts: ModelExperts  # the trace's layers and experts, with the sizes of the simulated model
    attention: int  # bytes of each layer's weights outside of experts
    head: int = 0  # bytes of weights after the last layer
    bits: int = 16  # of each of those weights
    held: HeldDense | None = None  # weights of each layer that are not among them


@dataclass
class Result:
    """What happened, step by step."""

    seconds: list[float] = field(default_factory=list)  # of each step
    steps: list[Step] = field(default_factory=list)
    active: int = 0  # number of experts that steps needed
    hits: int = 0  # number of those that were resident
    moved: float = 0.0  # bytes over the link
    fetched: int = 0  # slices that steps fetched, in decode and in prompts
    asked: int = 0  # number of predictions
    needed: int = 0  # needed experts of layers with a prediction
    predicted: int = 0
    correct: int = 0
    whole: int = 0  # layers all of whose experts were predicted
    some: int = 0  # layers with at least one correct prediction
    decided: int = 0  # layers with a prediction
    high: int = 0  # routers' choices that were served high
    choices: int = 0
    peak: int = 0  # bytes of device memory: weights outside of experts, slots and predictor

    def of(self, phase: Phase) -> NDArray[np.float64]:
        """Return the seconds of a phase's steps.

        For prompts they are the time to the first token.
        """
        return np.array([s for s, step in zip(self.seconds, self.steps, strict=True) if step.phase is phase])

    def end_to_end(self) -> dict[int, float]:
        """Return the seconds of each request from its prompt to its last token.

        They include others' prompts in between.
        """
        found: dict[int, float] = {}
        for seconds, step in zip(self.seconds, self.steps, strict=True):
            for number in step.requests:
                found[number] = found.get(number, 0.0) + seconds
        return found

    def summary(self) -> dict[str, float]:
        """Return means and percentiles, in milliseconds."""
        decode, prompts = 1e3 * self.of(Phase.DECODE), 1e3 * self.of(Phase.PREFILL)
        tokens = sum(len(step.tokens) for step in self.steps if step.phase is Phase.DECODE)
        found = {"hits": self.hits / max(1, self.active), "moved": self.moved, "peak": float(self.peak)}
        if len(decode):
            found |= {"tpot": float(decode.mean())} | {f"p{q}": float(np.percentile(decode, q)) for q in (50, 95, 99)}
            found["tokens_per_s"] = 1e3 * tokens / float(decode.sum())
        if len(prompts):
            found |= {"ttft": float(prompts.mean()), "ttft_p99": float(np.percentile(prompts, 99))}
        found["end_to_end"] = 1e3 * float(np.mean(list(self.end_to_end().values())))
        return found


def run_ranks(simulators: Sequence["Simulator"], steps: Iterable[Step], *, measured: bool = True) -> list[Result]:
    """Serve steps on ranks that share out the experts, and return their results.

    All ranks wait for each other after every layer.

    Args:
        measured: False for warm-up steps, which the ranks' own results do not include.
    """
    before = [rank.result for rank in simulators]
    for rank in simulators:
        rank.result = Result(peak=rank.result.peak)
    for step in steps:
        begun = simulators[0].now
        for rank in simulators:
            rank._begin(step)
        for layer in range(len(simulators[0].model.experts.layers)):
            for rank in simulators:
                rank._layer(rank._routing(step, layer))
            slowest = max(rank.now for rank in simulators)
            for rank in simulators:
                rank.now = slowest
        for rank in simulators:
            rank._end(step)
            rank.result.steps.append(step)
            rank.result.seconds.append(rank.now - begun)
    found = [rank.result for rank in simulators]
    if not measured:
        for rank, result in zip(simulators, before, strict=True):
            rank.result = result
    return found


@dataclass
class _Copy:
    """Slices of one expert in transfer, counted in projections."""

    expert: int
    code: int  # LOW or HIGH, the slice or version
    nbytes: float
    left: int  # projections that have not begun
    arrivals: list[float] = field(default_factory=list)  # arrival of each projection
    issued: float = 0.0
    spent: float = 0.0  # seconds of the link


class Simulator:
    """Serves steps of a trace on a device.

    Args:
        fetches_all: do not cancel what was predicted in vain (MoESys).
        first_expert: number in the model of the first of this rank's experts, which are consecutive.
        attention: what each token of a prompt gets in each layer (Eq. 1 of DyMoE), float32 [tokens, layers]; without it
            all tokens are heavy hitters.
    """

    def __init__(
        self, trace: Trace, model: Model, options: Options, policy: Policy, device: Device, costs: Costs, limit: int,
        *, predictor: Predictor | None = None, fetches_all: bool = False, dtype: torch.dtype = torch.float32,
        first_expert: int = 0, attention: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        self.model, self.policy, self.device, self.costs = model, policy, device, costs
        self.options, self.predictor, self._fetches_all, self._dtype = options, predictor, fetches_all, dtype
        experts, layers, self._each = model.experts, len(model.experts.layers), model.experts.num_experts
        self._first_expert = first_expert
        overhead = 0 if predictor is None else predictor.nbytes
        plan = plan_slots(experts, options, policy, limit, overhead)
        self.plan, formats = plan, experts.formats
        bits = slot_bits(experts, options, policy.precision.precisions)
        self._nested = Precision.HIGH in bits and formats[bits[Precision.HIGH]].nested
        self.table = Table.allocate(layers, self._each, nested=self._nested)
        quotas = {CODES[precision]: plan.quotas.get(precision, [0] * layers) for precision in plan.slots}
        if not policy.residency.keeps:
            quotas = {code: [0] * layers for code in quotas}
        set_pools(self.table, {code: [(0, 0, plan.slots[p])] for p in plan.slots for code in [CODES[p]]}, quotas)
        if all(list(of) == [self._each] * layers for of in quotas.values()):  # filled at start
            self.table.precision[:] = HIGH if HIGH in quotas else LOW
        self.table.reuse_high[:] = policy.precision.reuses_high
        self.table.evicts[:], self.table.admits[:] = policy.residency.evicts, policy.residency.migrating is None
        self._nbytes = {CODES[precision]: formats[width].nbytes for precision, width in bits.items()}
        whole = {HIGH: options.high, LOW: options.low}
        self._whole = {code: formats[width].whole_nbytes if width else 0 for code, width in whole.items()}
        high = formats[options.high]
        self._weights = len(high.projections) * high.hidden * high.intermediate  # of an expert
        staging = plan.staging.get(Precision.HIGH, 0) or min(plan.staging.values(), default=0)
        self._staging = plan.slots.get(Precision.HIGH, 0) if not policy.residency.keeps else staging
        held = 0 if model.held is None else model.held.nbytes
        self.result = Result(peak=int(layers * (model.attention + held) + model.head + plan.limit))
        self._in_graph = device.decides
        if device.host and options.computes_misses:
            self.table.cpu_costs[:] = _sharing(formats, options, device)
        self._far = self._host_memory(formats)
        self._rates: dict[int, ExpertRate] = {}  # by tokens of a step
        self._paces = {phase: Pace(paid=policy.prefetch is not None and policy.prefetch.paced) for phase in Phase}
        self._ahead: list[_Copy] = []  # for the next layer
        self._ahead_part = policy.prefetch.projections if policy.prefetch else _PARTS
        self.now = self._link = self._host = self._cpu = self._disk = 0.0
        self._named: set[int] | None = None
        precision, self._waited = policy.precision, 0.0  # seconds that steps waited for the link
        self._dial: LinkShare | None = None
        if precision.link_share is not None:
            self._dial = LinkShare(
                precision.thresholds, precision.link_share, HostWaits(lambda: self._waited, lambda: self.now)
            )
        self._moves = _Moves(self) if policy.residency.migrating is not None else None
        self.tell(trace, attention)

    def tell(self, trace: Trace, attention: torch.Tensor | None = None) -> None:
        """Continue with another trace of the same model; slots and learnt state stay."""
        own = trace.experts.int() - self._first_expert
        self.trace, self._gates = trace, trace.weights.float()
        self._ids = torch.where((own >= 0) & (own < self._each), own, -1)
        self._inputs, self._attention = trace.router_inputs, attention

    # -- steps ------------------------------------------------------------------------------------

    def run(self, steps: Iterable[Step], *, measured: bool = True) -> Result:
        """Serve steps and return the result.

        Args:
            measured: False for warm-up steps, which the simulator's own result does not include.
        """
        return run_ranks([self], steps, measured=measured)[0]

    def _begin(self, step: Step) -> None:
        if self._moves is not None:
            self._moves.turn()
        if self._dial is not None:
            self._dial.begin_step(step.phase)
        if self.predictor is not None:
            self.predictor.begin_step(step.phase)
            prefetch = self.policy.prefetch
            if step.phase is Phase.PREFILL and prefetch is not None and prefetch.first_layer:
                self._ask(-1, step.phase, self.now, [])

    def _routing(self, step: Step, layer: int) -> Routing:
        tokens, prompt, layers = torch.from_numpy(step.tokens), None, len(self.model.experts.layers)
        if step.phase is Phase.PREFILL:
            rows, share = torch.ones(len(tokens), dtype=torch.bool), self.policy.precision.heavy_hitters
            heavy = rows
            if share is not None and self._attention is not None:
                heavy = torch.zeros_like(rows)
                mark_heavy_hitters(self._attention[tokens, layer], share, heavy)
            prompt = PromptTokens(rows, heavy, False)
        x = torch.empty(len(tokens), 0) if self._inputs is None else self._inputs[tokens, layer].to(self._dtype)
        weights = self._gates[tokens, layer]
        return Routing(layer, layers, x, self._ids[tokens, layer], weights, step.phase, prompt)

    def last(self, requests: int) -> float:
        """Return the seconds of a step's output head and of vLLM's own work."""
        head = self.device.dense_seconds(self.model.head, self.model.bits, requests)
        return head + self.costs.step + self.costs.request * requests

    def _end(self, step: Step) -> None:
        self.now += self.last(len(step.requests))

    def _layer(self, at: Routing) -> None:
        layer, table, device, costs = at.layer, self.table, self.device, self.costs
        tokens, result = len(at.ids), self.result
        self.now += device.dense_seconds(self.model.attention, self.model.bits, tokens)
        if (held := self.model.held) is not None:
            self.now += device.dense_seconds(held.nbytes, held.bits, tokens, held.format)
        if tokens not in self._rates:
            rate = device.expert_rate(self._weights, tokens, nested=self._nested)
            waits = device.rates and tokens <= SMALL_BATCH_ROWS  # for memory: what was measured says so by bytes alone
            self._rates[tokens] = replace(rate, compute=float("inf")) if waits else rate
        self._rate = self._rates[tokens]
        graph = self._in_graph
        begun = max(self.now, self._host)
        planning = costs.graph_layer if graph else costs.host_layer
        if graph and at.phase is Phase.PREFILL:
            planning += costs.launch
        decided = begun + planning
        wanted = self._wanted(at)
        active = np.fromiter(wanted, np.int64, len(wanted))
        codes = np.fromiter((CODES[p] for p in wanted.values()), np.int8, len(wanted))
        rows = np.fromiter((at.counts[e] for e in wanted), np.int64, len(wanted))
        if self._moves is not None:
            self._moves.count(at, active, rows)
        executes = bool(table.cpu_costs.any()) and not (
            graph and tokens > SMALL_BATCH_ROWS
        )  # such a step may fetch all
        places = table.begin_step(layer, active, codes, rows if executes else None)
        before = table.precision[layer].copy()
        if self._moves is None:
            table.keep(layer, active, codes, places)
        hit, on_cpu = (places == HIT).all(0), (places == CPU).any(0)
        serves = hit & (bool(table.reuse_high[0]) | self._nested)
        served = np.where(serves, np.maximum(before[active], codes), codes)
        result.active, result.hits = result.active + len(active), result.hits + int(hit.sum())
        result.high, result.choices = (
            result.high + int(rows[served == HIGH].sum()), result.choices + int(rows.sum())
        )  # fmt: skip
        self._judge(at, active)
        ahead = self._claim(layer, decided, set(active[~hit & ~on_cpu].tolist()), at.phase)
        # Computing and copying.
        streamed = {int(e) for e, place in zip(active, places.T, strict=True) if (place == STREAM).any()}
        copies = self._demands(active, codes, places, ahead, decided, graph=graph)
        self._read(layer, copies)
        work = {
            int(e): self._compute_seconds(int(code), int(count))
            for e, code, count in zip(active, served, rows, strict=True)
        }
        cpu_done = self._on_cpu(active[on_cpu], codes[on_cpu], rows[on_cpu], decided)
        done = decided + sum(work[int(e)] for e in active[hit].tolist())
        ends = self._compute(done, copies, work, streamed)
        host = decided + len(copies) * (costs.graph_miss if graph else costs.host_miss)
        self._host = begun if graph else host
        self.now = max(ends[-1] if ends else done, cpu_done)
        asks = self.predictor is not None and not (graph and at.phase is Phase.DECODE)
        if self.predictor is not None:
            self.predictor.observe(at)
        if asks:
            self._ask(layer, at.phase, host, ends)
        if self._moves is not None:
            self._moves.proceed(self.now)

    def _wanted(self, at: Routing) -> dict[int, Precision]:
        chosen = self.policy.precision.select(at)
        skipped = self.options.low == 0
        return {e: p for e, p in chosen.items() if p is Precision.HIGH or not skipped}

    def _compute_seconds(self, code: int, rows: int) -> float:
        return max(self._whole[code] / self._rate.read, 2 * self._weights * rows / self._rate.compute)

    # -- the link ---------------------------------------------------------------------------------

    def _demands(
        self, active: Ints, codes: NDArray[np.int8], places: Ints, ahead: dict[int, list[_Copy]], decided: float,
        *, graph: bool,
    ) -> list[_Copy]:  # fmt: skip
        """Return the copies that a layer waits for, prefetched ones first.

        Their projections are not enqueued yet.
        """
        found = [copy for copies in ahead.values() for copy in copies]
        have = {(copy.expert, copy.code) for copy in found}
        each = self.costs.graph_miss if graph else self.costs.host_miss
        for number, expert in enumerate(active.tolist()):
            place = places[:, number]
            if (place == HIT).all() or (place == CPU).any():
                continue
            parts = [LOW, HIGH] if self._nested else [int(codes[number])]
            for part, where in zip(parts, place.tolist(), strict=False):
                if where != HIT and (expert, part) not in have:
                    found.append(_Copy(expert, part, self._nbytes[part], _PARTS))
        for number, copy in enumerate(found):
            copy.issued = max(copy.issued, decided + (number + 1) * each)
        self.result.fetched += len(found)
        return found

    def _host_memory(self, formats: Mapping[int, ExpertFormat]) -> Table | None:
        """Return the table of what a host cache keeps.

        It keeps some of what the device asks it for; None if it has room for everything. Both together keep about what
        one memory of both sizes would.
        """
        experts, held = self.model.experts, self.device.host_memory
        if held is None or held >= experts.stored_nbytes:
            return None
        table = Table.allocate(len(experts.layers), self._each, nested=self._nested)
        quotas = [int(self._each * held / experts.stored_nbytes)] * len(experts.layers)
        pools = {code: [(0, 0, sum(quotas))] for code in self._nbytes}
        set_pools(table, pools, dict.fromkeys(self._nbytes, quotas))
        return table

    def _read(self, layer: int, copies: Sequence[_Copy]) -> None:
        """Delay copies of what host memory does not have until the disk has read it."""
        if self._far is None or not copies:
            return
        wanted = dict(sorted((copy.expert, copy.code) for copy in copies))  # of two slices the high one
        experts, codes = np.array(list(wanted)), np.array(list(wanted.values()), np.int8)
        places = self._far.begin_step(layer, experts, codes, None)
        self._far.keep(layer, experts, codes, places)
        there = {int(e) for e, place in zip(experts, places.T, strict=True) if (place == HIT).all()}
        for copy in copies:
            if copy.expert not in there:
                self._disk = max(self._disk, copy.issued) + copy.nbytes / self.device.disk
                copy.issued = self._disk

    def _compute(self, done: float, copies: list[_Copy], work: dict[int, float], streamed: set[int]) -> list[float]:
        """Fetch misses and compute them as they arrive.

        Returns:
            the end time of each expert, in seconds.
        """
        ends: list[float] = []
        residency, staged = self.policy.residency, deque[float]()
        slots = max(1, self._staging)
        by_expert: dict[int, list[_Copy]] = {}
        for copy in copies:
            by_expert.setdefault(copy.expert, []).append(copy)
        for expert, parts in by_expert.items():
            free = 0.0
            if expert in streamed and len(staged) >= slots:
                free = staged.popleft()  # when its slot was last read
            if not residency.overlaps:
                free = max(free, done)
            for copy in parts:
                self._carry(copy, copy.left, max(copy.issued, free))
            arrivals = np.max([copy.arrivals for copy in parts], axis=0).tolist()
            if residency.whole or not residency.overlaps:
                arrivals = [max(arrivals)] * _PARTS
            for arrival in arrivals:
                self._waited += max(0.0, arrival - done)
                done = max(done, arrival) + work[expert] / _PARTS
            ends.append(done)
            if expert in streamed:
                staged.append(done)
        return ends

    def _carry(self, copy: _Copy, projections: int, earliest: float, until: float = float("inf")) -> None:
        """Charge a copy's projections that begin before ``until`` to the link."""
        each = copy.nbytes / _PARTS / self.device.link
        for _ in range(projections):
            begin = max(self._link, earliest)
            if begin >= until:
                return
            self._link = begin + each
            copy.arrivals.append(self._link)
            copy.left -= 1
            copy.spent += each
            self.result.moved += copy.nbytes / _PARTS

    def _claim(self, layer: int, decided: float, missing: set[int], phase: Phase) -> dict[int, list[_Copy]]:
        """Return what was prefetched up to now for a layer's misses; the rest is given up."""
        found: dict[int, list[_Copy]] = {}
        pace, part = self._paces[phase], self._ahead_part
        for copy in self._ahead:
            until = float("inf") if self._fetches_all else decided
            self._carry(copy, part - (_PARTS - copy.left), copy.issued, until)
        for copy in self._ahead:
            pace.judge(copy.expert in missing, copy.spent)
            if copy.expert in missing:
                found.setdefault(copy.expert, []).append(copy)
        self._ahead = []
        return found

    def _on_cpu(self, experts: Ints, codes: NDArray[np.int8], rows: Ints, decided: float) -> float:
        if not len(experts):
            return 0.0
        cost = self.table.cpu_costs[codes]
        busy = int((cost[:, Cost.FIRST_ROW] + (rows - 1) * cost[:, Cost.NEXT_ROW]).sum())
        self._cpu = max(self._cpu, decided) + (busy + int(self.table.cpu_costs[ABSENT, Cost.LINK])) / 1e9
        return self._cpu

    # -- predictions ------------------------------------------------------------------------------

    def _judge(self, at: Routing, active: Ints) -> None:
        if self._named is None:
            return
        result, needed = self.result, set(at.active)
        correct = len(self._named & needed)
        result.decided, result.needed = result.decided + 1, result.needed + len(needed)
        result.predicted, result.correct = result.predicted + len(self._named), result.correct + correct
        result.whole, result.some = result.whole + (correct == len(needed)), result.some + (correct > 0)
        self._named = None

    def _ask(self, layer: int, phase: Phase, host: float, ends: list[float]) -> None:
        """Charge a prediction for the next layer, and start to fetch its experts."""
        assert self.predictor is not None
        prefetch, pace = self.policy.prefetch, self._paces[phase]
        assert prefetch is not None
        if layer + 1 >= len(self.model.experts.layers) or not pace.acts():
            return
        named = [c for c in self.predictor.predict(layer) if c.layer == layer + 1]
        seconds = self.costs.questions.get(prefetch.name, 0.0)
        self.result.asked += 1
        if phase is Phase.DECODE:
            self._named = {c.expert for c in named}
        self._host = max(self._host, host) + seconds
        pace.spend(seconds, answered=bool(named))
        versions = self.policy.precision.precisions_ahead(
            layer + 1, len(self.model.experts.layers), [c.expert for c in named]
        )
        held, frees = self.table.precision[layer + 1], ends if not self.policy.residency.keeps else []
        self._ahead, slots = [], max(0, self._staging)
        for candidate in named:
            code = CODES[versions[candidate.expert]] if candidate.expert in versions else ABSENT
            if code not in self._nbytes or len(self._ahead) >= slots:
                continue
            has = int(held[candidate.expert])
            parts = [part for part in ([LOW, HIGH][:code] if self._nested else [code]) if has < part]
            if not self._nested and has and (has >= code and bool(self.table.reuse_high[0])):
                continue
            for part in parts:
                slot_free = frees[min(len(self._ahead), len(frees) - 1)] if frees else 0.0
                copy = _Copy(candidate.expert, part, self._nbytes[part], _PARTS, issued=max(self._host, slot_free))
                self._ahead.append(copy)


class _Moves:
    """The high set of a policy that moves versions between steps.

    It works as in ``cache.migration``.
    """

    def __init__(self, simulator: Simulator) -> None:
        self._sim, table = simulator, simulator.table
        migrating = simulator.policy.residency.migrating
        assert migrating is not None
        self._migrating, self._places = migrating, table.quotas[:, HIGH].astype(np.int64)
        experts, shape = simulator.model.experts, table.precision.shape
        self.worth = expert_worth(experts, migrating, [1.0] * shape[0])
        self._counts, self._seen = np.zeros((2, *shape), np.int64), 0
        self.hotness, self._began, self._busy = np.zeros(shape), 0.0, 0.0
        table.precision[:] = LOW
        table.precision[hottest(self.worth, self._places)] = HIGH
        self._planned, self._flying = deque[Swap](), list[tuple[Swap, _Copy]]()
        self.moved, self._spent = 0, 0.0  # moves since the start, and the link's seconds for them

    def count(self, at: Routing, experts: Ints, rows: Ints) -> None:
        self._counts[0, at.layer, experts] += rows
        gates = squared_gates(at.weights).flatten()
        np.add.at(self._counts[1, at.layer], at.host_ids.flatten(), gates.numpy())
        self._seen += int(rows.sum())

    def proceed(self, now: float) -> None:
        """Use an idle link for moves until now, up to its share of the time."""
        sim, share = self._sim, self._migrating.link_share
        for _, copy in self._flying:
            if copy.left and self._busy <= share * (now - self._began):
                before = copy.spent
                sim._carry(copy, copy.left, copy.issued, now)
                self._busy += copy.spent - before

    def turn(self) -> None:
        """Publish moves that have arrived, end a window, and begin moves."""
        sim, table, migrating, now = self._sim, self._sim.table, self._migrating, self._sim.now
        share = migrating.link_share * (now - self._began)
        each = self._spent / self.moved if sim._nested and self.moved else 0.0
        most = 0 if self._busy > share else migrating.at_once(share - self._busy, each)
        for swap, copy in list(self._flying):
            if not copy.left and copy.arrivals[-1] <= now:
                self._spent += copy.spent
                table.precision[swap.up] = HIGH
                if swap.down is not None and not sim._nested:
                    table.precision[swap.down] = LOW
                self._flying.remove((swap, copy))
                self.moved += 1
        if self._seen >= migrating.window_uses * self._counts[0].size and now - self._began >= migrating.window_s:
            self.hotness = averaged(self.hotness, self._counts[int(migrating.by_gates)], migrating.alpha)
            self._counts[:], self._seen, self._began, self._busy = 0, 0, now, 0.0
            held = table.precision == HIGH
            for swap, _ in self._flying:
                held[swap.up] = True
                if swap.down is not None:
                    held[swap.down] = False
            score = self.hotness * self.worth
            if migrating.high_set == "model":
                found = swaps(score, held, int(self._places.sum()), migrating.margin)
            else:
                found = layer_swaps(score, held, self._places, migrating.margin)
            self._planned = deque(found)
        while self._planned and len(self._flying) < most:
            swap = self._planned.popleft()
            if table.precision[swap.up] == HIGH or (swap.down and table.precision[swap.down] != HIGH):
                continue  # outdated
            nbytes = float(sim._nbytes[HIGH]) + (0.0 if sim._nested else float(sim._nbytes[LOW]))
            if swap.down is not None and sim._nested:
                table.precision[swap.down] = LOW  # its slot is overwritten
            self._flying.append((swap, _Copy(swap.up[1], HIGH, nbytes, _PARTS, issued=now)))
