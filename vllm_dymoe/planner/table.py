"""The table: (layer, expert) -> where. Integers only; a row names complete bytes, or nothing.

Its columns are NumPy arrays where the host writes, and where the device does tensors that a captured graph reads and
writes, of which the host has a copy. What changes between two steps is values in columns, so that a graph stays.

Precisions are numbered as in ``rule``: ABSENT, LOW and HIGH index what has size 3. An expert has one *slice*, the
version that is held, or two where the low version lies inside the high one: the pool of LOW has bases and that of HIGH
fine slices, and what is said of a version's address, slot, source and offsets is then said of that slice.
"""

# ruff: noqa: RUF009
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum, auto
from heapq import heapify, heappop, heapreplace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_dymoe.experts.format import ExpertFormat
from vllm_dymoe.planner.constants import Cost
from vllm_dymoe.planner.precision import Precision
from vllm_dymoe.planner.rule import ABSENT, FREE, HIGH, LOW, Ints, coldest, decide, record_uses
from vllm_dymoe.planner.threshold import NO_THRESHOLD

CODES = {Precision.SKIPPED: ABSENT, Precision.LOW: LOW, Precision.HIGH: HIGH}  # how the table writes a precision


class Counter(IntEnum):
    """Columns of :attr:`Table.counters`; experts unless said otherwise."""

    STEPS = 0  # steps with at least one row
    NEEDED_HIGH = auto()
    NEEDED_LOW = auto()
    SKIPPED = auto()
    HITS = auto()
    REUSES = auto()  # hits of a high version where a low one was wanted
    FETCHED_HIGH = auto()  # versions, or residual slices
    FETCHED_LOW = auto()  # versions, or bases
    STREAMED = auto()  # those among the fetched that are not kept
    PROMOTIONS = auto()  # fetches of a high version where the low one was there
    EVICTIONS = auto()  # experts, or residual slices, whose place another one took
    AHEAD = auto()  # experts of which something was fetched before the layer was routed
    AHEAD_BYTES = auto()
    AHEAD_USED = auto()  # those among the fetched that were found there, whole or in part
    AHEAD_USED_BYTES = auto()
    CPU_EXECUTED = auto()  # computed by the CPU in host memory


def _column(*shape: str | int, dtype: str = "int64", fill: int = 0) -> Any:
    return field(metadata={"shape": shape, "dtype": dtype, "fill": fill})


@dataclass(frozen=True, eq=False)
class Table:
    """What is where, for every layer: NumPy arrays, or tensors on the device that plans."""

    precision: Any = _column("layers", "experts", dtype="int8")  # which version a row names
    slot: Any = _column("slices", "layers", "experts", dtype="int32", fill=-1)
    """Index in the precision's pool, or in that of the slice; -1 for none."""
    score: Any = _column("slices", "layers", "experts")
    used_at: Any = _column("slices", "layers", "experts")
    """The layer's step in which an expert, or its residual slice, was last used."""
    step: Any = _column("layers")  # the layer's last step
    quotas: Any = _column("layers", 3, dtype="int32")  # experts, or slices, that a layer may keep
    reuse_high: Any = _column(1, dtype="int32", fill=1)
    """Whether a high version serves where a low one is wanted. It makes what is computed depend on what is held;
    without it the high version is replaced like a low one where a high one is wanted."""
    counters: Any = _column("layers", len(Counter))  # counted up by steps of the device
    first_slot: Any = _column("layers", 3, dtype="int32")
    """Where the layer's own range in a pool begins. Where the device plans a free slot is the lowest of the range
    that no row names, and no list has to be kept."""
    staging: Any = _column(3, 2, dtype="int32")  # first and number of the slots that no layer keeps, for what passes
    staged: Any = _column(2, 3, "experts", dtype="int32")
    """What was fetched ahead for an even and an odd layer: of each expert its slot, its precision, and how many of its
    projections, gate first. It counts until the next prediction about a layer of its kind."""
    staged_for: Any = _column(2, dtype="int32", fill=-1)  # which layers these are, -1 for none
    critical: Any = _column("layers", "counts", dtype="int32")
    """How many of a step's active experts are high, by their number, 0 to that of a layer's experts."""
    threshold: Any = _column(2)  # above which an expert is high, see :mod:`~.threshold`; then ``critical`` is not asked
    prompt_threshold: Any = _column(2)  # the same for tokens of prompts in a step that says which these are
    cpu_costs: Any = _column(3, len(Cost))
    """What fetching a version costs, and computing it where it lies; zeros where nothing ever is."""
    bits: Any = _column(3, dtype="int32")  # tags of the precisions' codes; 0 for one that is skipped
    offsets: Any = _column(3, 3)  # bytes from a packed expert's beginning to gate, up and down
    pool: Any = _column(3)  # address of slot 0
    slot_bytes: Any = _column(3)  # from one slot to the next
    source: Any = _column("layers", "experts", 3)
    """Address of each version in the host store, which the device can read."""
    recording: Any = _column(1, dtype="int32")  # whether routing decisions go into the ring
    ring_ids: Any = _column("depth", "layers", "rows", "top_k", dtype="int32")  # the decisions of step s at s % depth
    ring_weights: Any = _column("depth", "layers", "rows", "top_k", dtype="float32")
    ring_rows: Any = _column("depth", "layers", dtype="int32")  # how many of the ring's rows are real

    @classmethod
    def allocate(
        cls,
        layers: int,
        experts: int,
        *,
        nested: bool = False,  # whether the low version lies inside the high one
        rows: int = 0,  # that a step of the device may have at most
        top_k: int = 0,
        depth: int = 0,  # steps that the ring holds
        device: torch.device | str | None = None,  # that writes it; None for the host
    ) -> Self:
        """A table that names nothing, keeps nothing and wants every expert high."""
        sizes = {"layers": layers, "experts": experts, "counts": experts + 1, "slices": 2 if nested else 1}
        sizes |= {"rows": rows, "top_k": top_k, "depth": depth}
        columns = {}
        for column in fields(cls):
            shape = tuple(sizes[size] if isinstance(size, str) else size for size in column.metadata["shape"])
            columns[column.name] = np.full(shape, column.metadata["fill"], column.metadata["dtype"])
        columns["critical"][:] = np.arange(experts + 1)
        columns["threshold"][:] = columns["prompt_threshold"][:] = NO_THRESHOLD
        if device is not None:
            return cls(**{name: torch.from_numpy(values).to(device) for name, values in columns.items()})
        return cls(**columns)

    @property
    def nested(self) -> bool:
        return len(self.slot) > 1

    @property
    def layers(self) -> int:
        return int(self.precision.shape[0])

    @property
    def experts(self) -> int:
        return int(self.precision.shape[1])

    def clear(self) -> None:
        """No expert is there, and none was ever used."""
        for name, empty in {"precision": 0, "slot": -1, "score": 0, "used_at": 0, "step": 0}.items():
            getattr(self, name)[:] = empty
        self.forget_ahead()

    def forget_ahead(self) -> None:
        self.staged_for[:] = -1

    def on_host(self) -> "Table":
        """The same as NumPy arrays: a view of tensors in host memory, a copy of others, for which it waits."""
        return Table(**{name: values.cpu().numpy() for name, values in vars(self).items()})

    def copy_rows(self, rows: "Table") -> None:
        """What is where, and was used when, is as in another table; a copy to the host waits for the device."""
        for name in ("precision", "slot", "score", "used_at", "step"):
            ours, theirs = getattr(self, name), getattr(rows, name)
            same = min(len(ours), len(theirs))  # slices: the host has one where nothing is served at the high version
            if isinstance(ours, torch.Tensor):
                ours[:same].copy_(torch.from_numpy(theirs.copy()), non_blocking=True)  # which may change meanwhile
            else:
                ours[:] = theirs[:same].cpu().numpy()

    # -- rows, on the host ------------------------------------------------------------------------

    def begin_step(
        self, layer: int, active: Ints, wanted: NDArray[np.int8], rows: Ints | None = None, *, ages: bool = True,
        counted: NDArray[np.bool_] | None = None,
    ) -> Ints:  # fmt: skip
        """Count what a layer's step uses, and decide what it keeps: int64 [slices, n], see :func:`~.rule.decide`.

        Without ageing what came first goes first: score is the step in which an expert came. Uses are those of the
        experts that are ``counted``, bool [n]; None for all.
        """
        self.step[layer] += 1
        score, used_at = self.score[:, layer], self.used_at[:, layer]
        if ages:
            uses = slice(None) if counted is None else counted
            record_uses(score, used_at, active[uses], wanted[uses], int(self.step[layer]))
        else:
            score[:, active[self.precision[layer, active] == ABSENT]] = self.step[layer]
        quotas, reuse = self.quotas[layer].tolist(), bool(self.reuse_high[0])
        where = {"reuse_high": reuse, "rows": rows, "costs": self.cpu_costs}
        return decide(active, wanted, self.precision[layer], score, used_at, quotas, **where)

    def keep(self, layer: int, active: Ints, wanted: NDArray[np.int8], places: Ints) -> None:
        """Write the rows of what is kept at once, in slots of the layer's own range, free ones in ascending order."""
        precision = self.precision[layer]
        for code in (LOW, HIGH) if self.nested else (HIGH, LOW):  # an expert that loses its base loses both slices
            given = places[code - 1] if self.nested else np.where(wanted == code, places[0], FREE - 1)
            slot = self.slot[code - 1 if self.nested else 0, layer]
            free = iter(self.free_slots(layer, code))
            for number in (given >= FREE).nonzero()[0].tolist():
                expert, victim = active[number], given[number]
                taken = next(free) if victim == FREE else slot[victim]
                if victim != FREE:
                    precision[victim], slot[victim] = code - 1 if self.nested else ABSENT, -1
                precision[expert], slot[expert] = code, taken
            self.slot[1:, layer, precision == ABSENT] = -1

    def free_slots(self, layer: int, code: int) -> list[int]:
        """Slots of a layer's own range in a precision's pool that no row names, ascending."""
        first = int(self.first_slot[layer, code])
        own = np.arange(first, first + int(self.quotas[layer, code]))
        slot = self.slot[code - 1 if self.nested else 0, layer]
        return own[~np.isin(own, slot[self.holders(code)[layer]])].tolist()

    def publish(self, layer: int, expert: int, precision: Precision, slot: int) -> None:
        """The bytes of an expert are complete: from now on its row names them. AssertionError if it names others, or a
        residual slice comes without its base."""
        residual, held = self.nested and precision is Precision.HIGH, self.precision[layer, expert]
        assert not residual or held == LOW, f"the base of expert {expert} of layer {layer} is not there"
        assert residual or not held, f"expert {expert} of layer {layer} would be there twice"
        self.precision[layer, expert], self.slot[int(residual), layer, expert] = CODES[precision], slot

    def remove(self, layer: int, expert: int, *, residual: bool = False) -> list[tuple[Precision, int]]:
        """Empty a row, or give up its ``residual`` slice alone; precision and index of each slot that it named."""
        code = int(self.precision[layer, expert])
        slots: list[tuple[Precision, int]] = []
        if self.nested and code == HIGH:
            slots.append((Precision.HIGH, int(self.slot[1, layer, expert])))
            self.precision[layer, expert], self.slot[1, layer, expert] = LOW, -1
        if code != ABSENT and not residual:
            slots.append(
                (
                    Precision.HIGH if code == HIGH and not self.nested else Precision.LOW,
                    int(self.slot[0, layer, expert]),
                )
            )
            self.precision[layer, expert], self.slot[0, layer, expert] = ABSENT, -1
        return slots

    def holders(self, code: int) -> NDArray[np.bool_]:
        """bool [layers, experts]: whose row names a slot of a precision's pool."""
        return self.precision >= code if self.nested else self.precision == code

    def residents(self, precision: Precision) -> set[tuple[int, int]]:
        """(layer, expert) of all that are held in one precision."""
        return {(int(layer), int(expert)) for layer, expert in np.argwhere(self.precision == CODES[precision])}

    def slots(self, precision: Precision) -> list[int]:
        return self.slot[int(self.nested and precision is Precision.HIGH)][self.holders(CODES[precision])].tolist()


def coldest_of(table: Table, layer: int, precision: Precision, spared: set[int]) -> int | None:
    """The expert, of those that a layer keeps in a precision and that are not spared, that is missed least; or None."""
    kept = table.holders(CODES[precision])[layer].nonzero()[0]
    among = np.array([expert for expert in kept.tolist() if expert not in spared], dtype=np.int64)
    number = int(table.nested and precision is Precision.HIGH)
    return coldest(table.score[number, layer], table.used_at[number, layer], among) if len(among) else None


def check_integrity(table: Table, *, ranges: bool = False, moving: bool = False) -> None:
    """AssertionError unless no layer keeps more than its share (all together, if shares are moving), no slot is named
    twice, slots are of their layer's own range, if there are ranges, and what was fetched ahead lies apart."""
    assert (table.slot[0][table.precision == ABSENT] == -1).all(), "an empty row names a slot"
    for residual in table.slot[1:]:
        assert ((residual >= 0) == (table.precision == HIGH)).all(), (
            "a residual slice without its base, or the other way round"
        )
    for precision, code in ((Precision.LOW, LOW), (Precision.HIGH, HIGH)):
        held, quota = table.holders(code), table.quotas[:, code]
        kept = np.count_nonzero(held, axis=1)
        within = kept.sum() <= quota.sum() if moving else (kept <= quota).all()
        assert within, f"layers keep {kept}, more than {quota}"
        slots = table.slots(precision)
        assert len(set(slots)) == len(slots), "two rows name one slot"
        if ranges:
            own = np.array(slots, np.int64) - table.first_slot[held.nonzero()[0], code]
            assert ((own >= 0) & (own < quota[held.nonzero()[0]])).all(), "a layer names a slot of another layer"
        for half in (table.staged_for >= 0).nonzero()[0].tolist():
            staged, precisions, projections = table.staged[half]
            first, count = table.staging[code].tolist()
            guessed = staged[(projections > 0) & (precisions == code)]
            own = (guessed >= first) & (guessed < first + count)
            assert own.all(), "a prediction lies in a slot that a layer keeps"
            assert len(np.unique(guessed)) == len(guessed), "two predictions lie in one slot"


def set_precision(
    table: Table,
    formats: Mapping[int, ExpertFormat | None],  # by LOW and HIGH, those in use; None for one that is skipped
    critical: NDArray[np.int32],  # int32 [layers, experts + 1], by the number of active experts
    thresholds: Sequence[NDArray[np.int64]] = (),
) -> None:
    """What precisions mean in planned steps, and how many experts of a step are high; ValueError if versions are
    nested where the table is not, or the other way round. Thresholds are of prompts' tokens and of others, int64 [2]
    each, or none; one that is in use for the same retention stays where it has settled."""
    bits, offsets = torch.zeros(3, dtype=torch.int32), torch.zeros(3, 3, dtype=torch.int64)
    high = formats[HIGH]
    if (high is not None and high.nested) != table.nested:
        raise ValueError("formats are nested where the table is not, or the other way round")
    for code, fmt in formats.items():
        bits[code] = 0 if fmt is None else fmt.encoding.tag
    # A base has its place, too, where nothing is computed from it alone.
    low = high.base if high is not None and high.nested else formats.get(LOW)
    for code, fmt in ((HIGH, high), (LOW, low)):
        if fmt is not None:
            offsets[code] = torch.tensor([section.start for section in fmt.sections])
    for column, values in ((table.bits, bits), (table.offsets, offsets), (table.critical, torch.from_numpy(critical))):
        column[:] = values
    columns = table.prompt_threshold, table.threshold
    none = np.array(NO_THRESHOLD, np.int64)
    for column, threshold in zip(columns, thresholds or (none, none), strict=True):
        if int(column[1]) != int(threshold[1]):
            column[:] = torch.as_tensor(threshold)


def set_pools(
    table: Table, pools: Mapping[int, tuple[int, int, int]], quotas: Mapping[int, Sequence[int]]
) -> dict[int, int]:
    """Where slots are and how layers share them; no expert is there from now on. Returns the number of staging slots.
    ValueError if layers would keep more than a pool has, or one more than it has experts.

    Args:
        pools: address of slot 0, bytes of a slot and number of slots, by LOW and HIGH.
        shares: experts that each layer may keep, by LOW and HIGH.
    """
    names = ("first_slot", "quotas", "staging", "pool", "slot_bytes")
    columns = {name: np.zeros(tuple(getattr(table, name).shape), np.int64) for name in names}
    for code, (base, slot_bytes, count) in pools.items():
        quota = np.array(quotas[code], np.int64)
        stops = quota.cumsum()
        if quota.max() > table.experts:
            raise ValueError(f"a layer would keep {quota.max()} of its {table.experts} experts")
        if stops[-1] > count:
            raise ValueError(f"shares sum to {stops[-1]} slots of precision {code}, but the pool has {count}")
        columns["quotas"][:, code], columns["first_slot"][:, code] = quota, stops - quota
        columns["staging"][code] = stops[-1], count - stops[-1]
        columns["pool"][code], columns["slot_bytes"][code] = base, slot_bytes
    for name, values in columns.items():
        column = getattr(table, name)
        column[:] = torch.from_numpy(values) if isinstance(column, torch.Tensor) else values
    table.clear()
    return {code: int(columns["staging"][code, 1]) for code in pools}


def layer_quotas(slots: int, weights: Sequence[float], staging: int, most: int) -> list[int]:
    """Slots that each layer may keep, up to ``most``, in proportion to its weight (none at 0); among equals the first
    layers get the remainder. No layer keeps ``staging`` of them."""
    quotas = [0] * len(weights)
    # The next slot goes where it is worth most (d'Hondt): ordered by what one more means to a layer.
    claims = [(-weight, layer) for layer, weight in enumerate(weights) if weight > 0 and most > 0]
    heapify(claims)
    for _ in range(slots - staging):
        if not claims:
            break
        _, layer = claims[0]
        quotas[layer] += 1
        if quotas[layer] == most:
            heappop(claims)
        else:
            heapreplace(claims, (-weights[layer] / (quotas[layer] + 1), layer))
    return quotas
