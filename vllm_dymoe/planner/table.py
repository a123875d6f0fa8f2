"""The table: which expert is where, as integer columns.

A row names complete bytes, or nothing. If the host writes the table, its columns are NumPy arrays. If the device does,
they are tensors that a captured graph reads and writes, and the host has a copy. Between two steps only values in
columns change, so a captured graph stays valid.

Versions are numbered as in ``rule``: ABSENT, LOW and HIGH index dimensions of size 3. An expert has one *slice*, the
version that is held; or two, if versions are nested: then the LOW pool holds base slices and the HIGH pool residual
slices, and columns with a version's slot, source, address or offsets refer to that slice.
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
from vllm_dymoe.planner.constants import AGING, Cost, Eviction
from vllm_dymoe.planner.precision import Precision
from vllm_dymoe.planner.rule import ABSENT, FREE, HIGH, LOW, Ints, coldest, decide, record_uses
from vllm_dymoe.planner.threshold import NO_THRESHOLD

CODES = {Precision.SKIPPED: ABSENT, Precision.LOW: LOW, Precision.HIGH: HIGH}  # the table's numbers of precisions

PRECISIONS = {code: precision for precision, code in CODES.items()}
ID_BITS = (1 << 63) - 1
"""The part of an id that :attr:`Table.outside` keeps: a negative id becomes a very large one, and -1 means none."""


class Counter(IntEnum):
    """Columns of :attr:`Table.counters`; they count experts unless noted otherwise."""

    STEPS = 0  # steps with at least one real token
    NEEDED_HIGH = auto()
    NEEDED_LOW = auto()
    SKIPPED = auto()
    HITS = auto()
    REUSES = auto()  # hits of a high version where a low one was wanted
    FETCHED_HIGH = auto()  # versions, or residual slices
    FETCHED_LOW = auto()  # versions, or bases
    STREAMED = auto()  # of the fetched ones, those that are not kept
    PROMOTIONS = auto()  # fetches of a high version while the low one was held
    EVICTIONS = auto()  # experts, or residual slices, whose slot was taken by another
    AHEAD = auto()  # experts that were fetched, at least in part, before the layer was routed
    AHEAD_BYTES = auto()
    AHEAD_USED = auto()  # of these, those that the layer then needed
    AHEAD_USED_BYTES = auto()
    CPU_EXECUTED = auto()  # misses that the CPU executed
    LATE = auto()  # misses that were listed for prefetch, of which nothing had arrived
    CANCELLED = auto()  # other experts that were listed for prefetch, of which nothing had arrived


def _column(*shape: str | int, dtype: str = "int64", fill: int = 0) -> Any:
    return field(metadata={"shape": shape, "dtype": dtype, "fill": fill})


@dataclass(frozen=True, eq=False)
class Table:
    """The columns, for every layer: NumPy arrays, or tensors on the device that plans."""

    precision: Any = _column("layers", "experts", dtype="int8")  # the version that is held
    slot: Any = _column("slices", "layers", "experts", dtype="int32", fill=-1)
    """Index in the pool of the version, or of the slice; -1 for none."""
    score: Any = _column("slices", "layers", "experts")
    used_at: Any = _column("slices", "layers", "experts")
    """The layer's step that last used an expert, or its residual slice; with FIRST_IN the step in which it came."""
    step: Any = _column("layers")  # the layer's last step
    quotas: Any = _column("layers", 3, dtype="int32")  # slots that a layer may fill, by version
    reuse_high: Any = _column(1, dtype="int32", fill=1)
    """Whether a high version serves where a low one is wanted; then results depend on what is held. Otherwise a held
    high version is replaced if the low one is wanted, and vice versa.
    """
    evicts: Any = _column(1, dtype="int32", fill=Eviction.COLDEST)  # an Eviction: which expert leaves first
    admits: Any = _column(1, dtype="int32", fill=1)  # whether steps keep misses; if not, only moves change rows
    renormalizes: Any = _column(1, dtype="int32")  # whether weights of skipped experts go to the token's other experts
    counters: Any = _column("layers", len(Counter))  # incremented by the planner in C++ and on the device
    outside: Any = _column("layers", fill=-1)
    """The highest id of a step that is neither an expert's nor -1, without its sign bit (:data:`ID_BITS`); -1 for none.
    Written by the device, and read and cleared by the host after each step."""
    unread: Any = _column("layers", fill=-1)
    """The highest expert of a step whose bytes could not be read; -1 for none. As :attr:`outside`."""
    first_slot: Any = _column("layers", 3, dtype="int32")
    """First slot of the layer's own range in each pool. With device-side planning a free slot is the lowest of the
    range that no row names, so no list of free slots is needed."""
    staging: Any = _column("layers", 3, 2, dtype="int32")
    """First staging slot and number of staging slots, by version: the same for all layers of one kind."""
    staged: Any = _column(2, "slices", 3, "experts", dtype="int32")
    """What was fetched ahead, for an even and an odd layer: for each slice of an expert its slot, version, and number
    of projections, gate first. An entry is valid until the next prediction for a layer of the same parity."""
    staged_for: Any = _column(2, dtype="int32", fill=-1)  # the layers of ``staged``, -1 for none
    predicted: Any = _column(2, "layers", "experts", dtype="int32", fill=-1)
    """Experts that a layer will probably want, the best first and each once, and the version of each; the first
    negative expert ends the list. Written by the predictor: on the host between steps, or on the device within one.
    """
    fetched_ahead: Any = _column(2, "layers", "counts", dtype="int32")
    """By the number of predicted experts: how many of them, the best first, are fetched high, and how many at all."""
    prefetch_slots: Any = _column(3, dtype="int32")
    """How many staging slots, from the first on, predicted experts may fill in small-batch steps, by version."""
    planned: Any = _column(1, dtype="int32", fill=-1)
    """The layer that was planned last. Copies of predicted experts for a layer stop once it is planned."""
    critical: Any = _column("layers", "counts of all", dtype="int32")
    """Number of high experts, by the number of active experts in a step: this rank's, or those of all ranks."""
    chosen: Any = _column("chosen", dtype="int8")
    """LOW or HIGH for each of the rank's experts that the running layer uses, chosen among the experts of all ranks.
    Empty if this rank has all experts, or if precision does not depend on the others."""
    threshold: Any = _column(2)  # see :mod:`~.threshold`; if in use, ``critical`` is ignored
    prompt_threshold: Any = _column(2)  # the same for tokens that are marked as prompts'
    cpu_costs: Any = _column(3, len(Cost))
    """Cost in ns of fetching a version and of executing it on the CPU; 0 disables the latter. See ``Cost``."""
    bits: Any = _column("layers", 3, 3, dtype="int32")
    """Encoding tags of gate, up and down of the versions; 0 for a version that is skipped."""
    offsets: Any = _column("layers", 3, 3)  # offsets in bytes of gate, up and down in a packed expert
    pool: Any = _column("layers", 3)
    """Address that slot 0 would have, if all slots were as large as the layer's."""
    slot_bytes: Any = _column("layers", 3)  # size of a slot
    source: Any = _column("layers", "experts", 3)
    """Address of each version in the host store."""
    recording: Any = _column(1, dtype="int32")  # whether routing is recorded in the ring
    ring_ids: Any = _column("depth", "layers", "rows", "top_k", dtype="int32")  # those of step s are at s % depth
    ring_weights: Any = _column("depth", "layers", "rows", "top_k", dtype="float32")
    ring_rows: Any = _column("depth", "layers", dtype="int32")  # real tokens of each recorded step

    @classmethod
    def allocate(
        cls,
        layers: int,
        experts: int,
        *,
        nested: bool = False,  # whether versions are nested, which makes two slices
        rows: int = 0,  # most rows of a recorded step
        top_k: int = 0,
        depth: int = 0,  # steps that the ring holds
        all_experts: int = 0,  # of all ranks, among which precision is chosen; 0 to choose among this rank's
        device: torch.device | str | None = None,  # the device that writes the table; None for the host
    ) -> Self:
        """Allocate a table that holds nothing, has no quotas and wants every expert high."""
        sizes = {"layers": layers, "experts": experts, "counts": experts + 1, "slices": 2 if nested else 1}
        sizes |= {"rows": rows, "top_k": top_k, "depth": depth}
        sizes |= {"counts of all": 1 + (all_experts or experts), "chosen": experts if all_experts else 0}
        columns = {}
        for column in fields(cls):
            shape = tuple(sizes[size] if isinstance(size, str) else size for size in column.metadata["shape"])
            columns[column.name] = np.full(shape, column.metadata["fill"], column.metadata["dtype"])
        for name in ("critical", "fetched_ahead"):
            columns[name][:] = np.arange(columns[name].shape[-1])
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

    @property
    def all_experts(self) -> int:
        """Number of experts of all ranks, among which precision is chosen; 0 to choose among this rank's."""
        return int(self.critical.shape[1]) - 1 if len(self.chosen) else 0

    def at(self, layer: int) -> dict[str, Any]:
        """Return the columns of a layer's launch by name, as a GPU takes them.

        Of the columns that follow from formats this is the layer's row alone; the others are whole.
        """
        return vars(self) | {name: getattr(self, name)[layer] for name in _OF_FORMATS}

    def clear(self) -> None:
        """Empty all rows and forget all uses."""
        for name, empty in {"precision": 0, "slot": -1, "score": 0, "used_at": 0, "step": 0}.items():
            getattr(self, name)[:] = empty
        self.forget_ahead()

    def forget_ahead(self) -> None:
        self.staged_for[:] = -1

    def on_host(self) -> "Table":
        """Return the table as NumPy arrays.

        CPU tensors are viewed; others are copied, which waits for the device.
        """
        return Table(**{name: values.cpu().numpy() for name, values in vars(self).items()})

    def copy_rows(self, rows: "Table") -> None:
        """Copy rows, scores and uses from another table.

        A copy to the host waits for the device.
        """
        for name in ("precision", "slot", "score", "used_at", "step"):
            ours, theirs = getattr(self, name), getattr(rows, name)
            same = min(len(ours), len(theirs))  # slices: the host has one if nothing is served high
            if isinstance(ours, torch.Tensor):
                # A copy, because the source may change before the device has read it.
                ours[:same].copy_(torch.from_numpy(theirs.copy()), non_blocking=True)
            else:
                ours[:] = theirs[:same].cpu().numpy()

    # -- rows, on the host ------------------------------------------------------------------------

    def begin_step(
        self, layer: int, active: Ints, wanted: NDArray[np.int8], rows: Ints | None = None, *,
        counted: NDArray[np.bool_] | None = None, ahead: Ints | None = None,
    ) -> Ints:  # fmt: skip
        """Count the uses of a layer's step and decide, see :func:`~.rule.decide`.

        Returns int64 [slices, n].

        Args:
            counted: bool [n], experts whose use counts; None for all.
            ahead: as for :func:`~.rule.decide`.
        """
        self.step[layer] += 1
        score, used_at, evicts = self.score[:, layer], self.used_at[:, layer], int(self.evicts[0])
        if evicts == Eviction.FIRST_IN:  # equal scores are ordered by the step in which an expert came
            used_at[:, active[self.precision[layer, active] == ABSENT]] = self.step[layer]
        else:
            uses, aging = slice(None) if counted is None else counted, AGING if evicts == Eviction.COLDEST else 0
            record_uses(score, used_at, active[uses], wanted[uses], int(self.step[layer]), aging)
        quotas, reuse = self.quotas[layer].tolist(), bool(self.reuse_high[0])
        where: Any = {"reuse_high": reuse, "rows": rows, "costs": self.cpu_costs, "admits": bool(self.admits[0])}
        return decide(active, wanted, self.precision[layer], score, used_at, quotas, ahead=ahead, **where)

    def keep(self, layer: int, active: Ints, wanted: NDArray[np.int8], places: Ints) -> None:
        """Write the rows of admitted experts at once.

        Free slots of the layer's range are taken in ascending order.
        """
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
        """Return the slots of a layer's own range that no row names, ascending.

        For device-side planning only. A table that the host writes gets its slots from a
        :class:`~vllm_dymoe.cache.slots.SlotPool`, which says why.
        """
        first = int(self.first_slot[layer, code])
        own = np.arange(first, first + int(self.quotas[layer, code]))
        slot = self.slot[code - 1 if self.nested else 0, layer]
        return own[~np.isin(own, slot[self.holders(code)[layer]])].tolist()

    def publish(self, layer: int, expert: int, precision: Precision, slot: int) -> None:
        """Write the row of an expert whose bytes are complete.

        AssertionError if the row names other bytes already, or if the base of a residual slice is missing.
        """
        residual, held = self.nested and precision is Precision.HIGH, self.precision[layer, expert]
        assert not residual or held == LOW, f"the base of expert {expert} of layer {layer} is missing"
        assert residual or not held, f"expert {expert} of layer {layer} would be held twice"
        self.precision[layer, expert], self.slot[int(residual), layer, expert] = CODES[precision], slot

    def remove(self, layer: int, expert: int, *, residual: bool = False) -> list[tuple[Precision, int]]:
        """Empty a row, or only its ``residual`` slice.

        Returns precision and index of each slot that it named.
        """
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
        """Return which rows name a slot of a version's pool, bool [layers, experts]."""
        return self.precision >= code if self.nested else self.precision == code

    def residents(self, precision: Precision) -> set[tuple[int, int]]:
        """Return (layer, expert) of all experts that are held in one precision."""
        return {(int(layer), int(expert)) for layer, expert in np.argwhere(self.precision == CODES[precision])}

    def slots(self, precision: Precision) -> list[int]:
        return self.slot[int(self.nested and precision is Precision.HIGH)][self.holders(CODES[precision])].tolist()


_OF_FORMATS = ("staging", "bits", "offsets", "pool", "slot_bytes")


def coldest_of(table: Table, layer: int, precision: Precision, spared: set[int]) -> int | None:
    """Return the coldest expert that a layer holds in a precision.

    ``spared`` experts are left out. None if there is no other.
    """
    kept = table.holders(CODES[precision])[layer].nonzero()[0]
    among = np.array([expert for expert in kept.tolist() if expert not in spared], dtype=np.int64)
    number = int(table.nested and precision is Precision.HIGH)
    return coldest(table.score[number, layer], table.used_at[number, layer], among) if len(among) else None


def check_integrity(table: Table, *, ranges: bool = False, moving: bool = False) -> None:
    """Raise AssertionError if the table is inconsistent.

    Quotas must be kept, no slot may be named twice, and every prefetched expert must be in a staging slot.

    Args:
        ranges: also check that layers use slots of their own range only.
        moving: check only the sum of the quotas.
    """
    assert (table.slot[0][table.precision == ABSENT] == -1).all(), "an empty row names a slot"
    for residual in table.slot[1:]:
        assert ((residual >= 0) == (table.precision == HIGH)).all(), (
            "a residual slice and its base disagree about the version"
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
            staged, precisions, projections = table.staged[half].swapaxes(0, 1)
            first, count = table.staging[table.staged_for[half], code].tolist()
            predicted = staged[(projections > 0) & (precisions == code)]
            own = (predicted >= first) & (predicted < first + count)
            assert own.all(), "a prediction lies in a slot that a layer keeps"
            assert len(np.unique(predicted)) == len(predicted), "two predictions lie in one slot"


def set_precision(
    table: Table,
    formats: Sequence[Mapping[int, ExpertFormat | None]],
    critical: NDArray[np.int32],  # int32 [layers, experts + 1], by the number of active experts; see Table.critical
    thresholds: Sequence[NDArray[np.int64]] = (),
) -> None:
    """Write the columns that say what precisions mean, and how many experts are high.

    ValueError if formats are nested and the table is not, or the reverse.

    Args:
        formats: of each layer by LOW and HIGH, those in use; None for one that is skipped.
        thresholds: those of prompts' tokens and of decoded tokens, int64 [2] each, or none; one that is in use for the
            same retention keeps its value.
    """
    layers = len(formats)
    bits, offsets = (torch.zeros(layers, 3, 3, dtype=dtype) for dtype in (torch.int32, torch.int64))
    for layer, of_layer in enumerate(formats):
        high = of_layer[HIGH]
        if (high is not None and high.nested) != table.nested:
            raise ValueError("formats are nested where the table is not, or the other way round")
        for code, fmt in of_layer.items():
            if fmt is not None:
                bits[layer, code] = torch.tensor([matrix.encoding.tag for matrix in fmt.matrices])
        # A base slice has offsets even if nothing is computed from it alone.
        low = high.base if high is not None and high.nested else of_layer.get(LOW)
        for code, fmt in ((HIGH, high), (LOW, low)):
            if fmt is not None:
                offsets[layer, code] = torch.tensor([section.start for section in fmt.sections])
    for column, values in ((table.bits, bits), (table.offsets, offsets), (table.critical, torch.from_numpy(critical))):
        column[:] = values
    columns = table.prompt_threshold, table.threshold
    none = np.array(NO_THRESHOLD, np.int64)
    for column, threshold in zip(columns, thresholds or (none, none), strict=True):
        if int(column[1]) != int(threshold[1]):
            column[:] = torch.as_tensor(threshold)


def set_pools(
    table: Table,
    pools: Mapping[int, Sequence[tuple[int, int, int]]],
    quotas: Mapping[int, Sequence[int]],
    kinds: Sequence[int] | None = None,
) -> dict[int, int]:
    """Write the columns about slots, and empty all rows.

    Returns a layer's number of staging slots by LOW and HIGH. ValueError if the quotas exceed a pool, or a layer's
    quota its experts.

    Args:
        pools: by LOW and HIGH, for each kind of layers: address of its first slot, bytes of a slot and number of slots.
        quotas: slots that each layer may fill, by LOW and HIGH.
        kinds: of each layer, its number in ``pools``; None if all are of the first.
    """
    names = ("first_slot", "quotas", "staging", "pool", "slot_bytes")
    columns = {name: np.zeros(tuple(getattr(table, name).shape), np.int64) for name in names}
    of_layers = np.zeros(table.layers, np.int64) if kinds is None else np.array(kinds)
    for code, parts in pools.items():
        first, every = 0, np.array(quotas[code], np.int64)
        if every.max() > table.experts:
            raise ValueError(f"a layer would keep {every.max()} of its {table.experts} experts")
        for kind, (base, slot_bytes, count) in enumerate(parts):
            mine = of_layers == kind
            quota = every[mine]
            stops = quota.cumsum()
            if stops[-1] > count:
                raise ValueError(f"shares sum to {stops[-1]} slots of precision {code}, but the pool has {count}")
            columns["quotas"][mine, code], columns["first_slot"][mine, code] = quota, first + stops - quota
            columns["staging"][mine, code] = first + stops[-1], count - stops[-1]
            # The slots of all kinds have one numbering.
            columns["pool"][mine, code], columns["slot_bytes"][mine, code] = base - first * slot_bytes, slot_bytes
            first += count
    for name, values in columns.items():
        column = getattr(table, name)
        column[:] = torch.from_numpy(values) if isinstance(column, torch.Tensor) else values
    table.clear()
    return {code: int(columns["staging"][:, code, 1].min()) for code in pools}


def layer_quotas(slots: int, weights: Sequence[float], staging: int, most: int) -> list[int]:
    """Return each layer's quota, up to ``most``, in proportion to its weight.

    Among equals the first layers get the remainder. Layers of weight 0 get none, and ``staging`` of the slots belong to
    no layer.
    """
    quotas = [0] * len(weights)
    # D'Hondt: the next slot goes to the layer with the largest weight per slot.
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
