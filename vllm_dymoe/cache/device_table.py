"""The table of device-side planning, and what the host writes into it.

The host writes between two steps. Tables stay at fixed addresses, which captured graphs read (DynaExq 3.2: a stable
handle); only their values change.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_dymoe.cache.counters import PrefetchStats, ResidencyCounts
from vllm_dymoe.cache.host_copy import HostCopy
from vllm_dymoe.cache.slots import SlotPool
from vllm_dymoe.cache.store import HostStore
from vllm_dymoe.cache.transfer import Reason, TransferStats
from vllm_dymoe.experts.format import SliceKey
from vllm_dymoe.planner.constants import SMALL_BATCH_ROWS
from vllm_dymoe.planner.hotness import squared_gates, usable
from vllm_dymoe.planner.link_share import StepTime
from vllm_dymoe.planner.precision import Precision
from vllm_dymoe.planner.routing import Phase, RoutingError
from vllm_dymoe.planner.rule import HIGH, LOW
from vllm_dymoe.planner.table import CODES, ID_BITS, Counter, Table, set_precision
from vllm_dymoe.policies import Policy

_RING = 1  # steps whose routing is recorded: the ring is read after every step


class DeviceTable:
    """The table of a device that can read the store.

    The DeviceCaches of a server share it, one after the other.

    Args:
        all_experts: see :meth:`Table.allocate`.
    """

    def __init__(self, store: HostStore, device: torch.device, all_experts: int = 0) -> None:
        experts = store.experts
        self._store = store
        self.table = Table.allocate(
            len(experts.layers),
            experts.num_experts,
            nested=any(fmt.nested for fmt in experts.all_formats),
            rows=SMALL_BATCH_ROWS,
            top_k=experts.top_k,
            depth=_RING,
            all_experts=all_experts,
            device=device,
        )
        self._sources: tuple[tuple[int, int], ...] = ()

    def fill(
        self, pools: Mapping[Precision, SlotPool], bits: Mapping[Precision, int],
        quotas: Mapping[Precision, Sequence[int]],
    ) -> None:  # fmt: skip
        """Fetch every expert, if each has a slot; then no step ever has a miss."""
        table = self.table
        everything = table.layers * table.experts
        whole = [precision for precision in pools if sum(quotas[precision]) == everything]
        if table.nested:
            whole = [
                precision
                for precision in (Precision.LOW, Precision.HIGH)
                if precision in whole and Precision.LOW in whole
            ]
        if not self._store.readable:  # steps bring them
            return
        for precision in whole if table.nested else whole[:1]:
            slots, width = pools[precision].slots, bits[precision]
            first = table.first_slot[:, CODES[precision]].cpu()
            named = first[:, None] + torch.arange(table.experts, dtype=torch.int32)
            for layer, expert in np.ndindex(table.layers, table.experts):
                slot = slots[int(named[layer, expert])].packed
                slot.copy_(self._store.packed(SliceKey(layer, expert, width)), non_blocking=True)
            # After the bytes, on the same stream.
            table.slot[int(table.nested and precision is Precision.HIGH)].copy_(named)
            table.precision.fill_(CODES[precision])

    def serve(self, policy: Policy, bits: Mapping[Precision, int], of_slices: Mapping[Precision, int]) -> None:
        """Write into the table how later steps serve.

        These are precisions and their encodings, the order of eviction, and source addresses.

        Args:
            bits: bits of each precision, 0 for one that is skipped.
            of_slices: bits in the slots of each precision.
        """
        table, experts = self.table, self._store.experts
        served, precision = (Precision.HIGH, Precision.LOW), policy.precision
        formats = [{CODES[one]: of_layer.get(bits[one]) for one in served} for of_layer in experts.of_layers]
        critical = precision.all_critical_counts(experts, table.all_experts)
        set_precision(table, formats, critical, precision.thresholds)
        table.reuse_high.fill_(precision.reuses_high)
        table.renormalizes.fill_(precision.renormalizes)
        table.evicts.fill_(policy.residency.evicts)
        table.admits.fill_(policy.residency.migrating is None)
        table.fetched_ahead.copy_(torch.from_numpy(precision.counts_ahead(table.layers, table.experts)))
        sources = tuple((CODES[one], bits[one]) for one in served if bits[one])
        if table.nested:
            sources = tuple((CODES[precision], width) for precision, width in of_slices.items())
        addresses = np.zeros(table.source.shape, np.int64)  # a store that slept has new addresses
        everything = np.ndindex(table.layers, table.experts) if self._store.readable else ()
        for layer, expert in everything:
            for code, width in sources:
                addresses[layer, expert, code] = self._store.packed(SliceKey(layer, expert, width)).data_ptr()
        table.source.copy_(torch.from_numpy(addresses))
        self._sources = sources

    def take_counts(self, counts: ResidencyCounts, transfers: TransferStats, predictions: PrefetchStats) -> None:
        """Add what the device has counted since the last call; waits for the device.

        An expert that is read again for every two tokens counts as one transfer, and so does one that was partly
        fetched ahead.
        """
        of_layers = counts.take(self.table.counters)
        values = of_layers.sum(0).tolist()
        which = {HIGH: Counter.FETCHED_HIGH, LOW: Counter.FETCHED_LOW}
        transfers.transfers[Reason.DEMAND] += sum(values[counter] for counter in which.values())
        for code, bits in self._sources:
            sizes = [formats[bits].nbytes for formats in self._store.experts.of_layers]
            transfers.bytes_moved[Reason.DEMAND] += int(of_layers[:, which[code]] @ np.array(sizes))
        transfers.bytes_moved[Reason.DEMAND] -= values[Counter.AHEAD_USED_BYTES]
        transfers.bytes_moved[Reason.PREFETCH] += values[Counter.AHEAD_BYTES]
        transfers.transfers[Reason.PREFETCH] += values[Counter.AHEAD]
        predictions.useful += values[Counter.AHEAD_USED]
        predictions.wasted += values[Counter.AHEAD] - values[Counter.AHEAD_USED]
        predictions.late += values[Counter.LATE]
        predictions.cancelled += values[Counter.CANCELLED]


class DeviceCounts:
    """Counts of routing in steps without the host.

    The device counts, and the host reads the counts without waiting.
    """

    def __init__(self, table: Table) -> None:
        self._table = table
        self._bins = table.layers * table.experts + 1  # the last one is for experts of other ranks
        device = table.precision.device
        # Choices of low versions, choices of high versions, squared gates.
        self._uses = torch.zeros(3 * self._bins, dtype=torch.int64, device=device)
        self._first = (torch.arange(table.layers, device=device) * table.experts).view(-1, 1, 1)
        self._row = torch.arange(table.ring_ids.shape[2], device=device).view(1, -1, 1)
        self._on_host = HostCopy(self._uses)
        self._count_layer = _count_uses_on(device)

    def add(self) -> None:
        """Count the layers that small batches ran since the last call.

        Layers that are enqueued on the computing stream count as well.
        """
        table = self._table
        ids = torch.where(self._row < table.ring_rows[0, :, None, None], table.ring_ids[0], -1)
        count_uses(self._uses, table.precision, self._first, ids, table.ring_weights[0])
        table.ring_rows.zero_()

    def add_layer(self, layer: int, ids: Tensor, weights: Tensor) -> None:
        """Count a layer of a large-batch step.

        ``ids`` are int32 and ``weights`` float32, both [tokens, top_k].
        """
        self._count_layer(self._uses, self._table.precision, layer, ids, weights)

    def clear(self) -> None:
        self._uses.zero_()

    def ask(self) -> None:
        """Start to copy the counts to the host, and count from zero from the next step on."""
        self._on_host.ask(self._uses)
        self._uses.zero_()

    def ready(self) -> bool:
        return self._on_host.ready

    def take(self) -> NDArray[np.int64]:
        """Return the counts up to the last ``ask``: int64 [3, layers, experts].

        The first dimension is choices of low, choices of high, and squared gates.
        """
        counts = self._on_host.take().reshape(3, self._bins)[:, :-1]
        return counts.reshape(3, self._table.layers, self._table.experts)


def count_uses(uses: Tensor, precision: Tensor, first: Tensor | int, ids: Tensor, weights: Tensor) -> None:
    """Count choices of low versions, choices of high versions, and squared gates.

    Args:
        uses: int64 [3 * (layers * experts + 1)], one part for each count; its last bin is for experts of other ranks.
        precision: int8 [layers, experts], the version that serves now.
        first: the bin of a layer's first expert.
        ids: int [..., tokens, top_k], negative where another rank has the expert.
        weights: float32, shape of ids.
    """
    ids, bins = ids.long(), len(uses) // 3
    place = torch.where(ids >= 0, ids + first, bins - 1)
    high = precision.flatten()[place.clamp(max=bins - 2)] == HIGH
    uses.scatter_add_(0, (place + bins * high).flatten(), usable(weights).flatten().long())
    uses.scatter_add_(0, (place + 2 * bins).flatten(), squared_gates(weights).flatten())


def _count_uses_on(device: torch.device) -> Callable[[Tensor, Tensor, int, Tensor, Tensor], None]:
    if device.type == "cpu":
        return lambda uses, precision, layer, *routed: count_uses(uses, precision, layer * precision.shape[1], *routed)
    # Importing triton takes a second, and only a GPU needs it.
    from vllm_dymoe.kernels.triton.uses import CountUses

    return CountUses()


class DeviceWaits:
    """How long steps without the host wait for the link.

    It follows from what they have fetched and the rate of the link: a step of few rows waits for all that it fetches.
    The host learns of it some steps later, without waiting. Steps between two readings are counted if they are of one
    phase.

    Args:
        seconds: seconds of fetching a version, or its residual slice, by LOW and HIGH.
        clock: in seconds.
    """

    def __init__(
        self, table: Table, seconds: Mapping[int, float], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._table, self._clock = table, clock
        self._seconds = [seconds.get(code, 0.0) for code in (HIGH, LOW)]
        self._seen, self._told = [0, 0], [-1, -1]
        self._on_host = HostCopy(self._fetched)
        self._phases, self._begun = set[Phase](), 0.0  # of the steps since the last reading began, and when it did
        self._read: tuple[set[Phase], float] = set(), 0.0  # phases and seconds that the running reading is about

    @property
    def _fetched(self) -> Tensor:
        """Versions and slices that steps have fetched, high and low: int64 [2]."""
        return self._table.counters[:, Counter.FETCHED_HIGH : Counter.FETCHED_LOW + 1].sum(0)

    def begin_step(self, phase: Phase) -> StepTime | None:
        """Begin a step; return what is known of earlier ones, see ``Waits``."""
        found = None
        if self._on_host.ready:
            before, self._seen = self._seen, self._on_host.take().tolist()
            # If statistics were taken meanwhile, counters started again from zero.
            news = [now - last if now >= last else now for now, last in zip(self._seen, before, strict=True)]
            phases, seconds = self._read
            if len(phases) == 1:
                waited = sum(count * each for count, each in zip(news, self._seconds, strict=True))
                found = StepTime(next(iter(phases)), seconds, waited)
            now = self._clock()
            self._read, self._phases, self._begun = (self._phases, now - self._begun), set(), now
            self._on_host.ask(self._fetched)
        self._phases.add(phase)
        return found

    def follow(self, thresholds: Sequence[NDArray[np.int64]]) -> None:
        """Write thresholds that have changed into the table.

        ``thresholds`` are those of prompts' tokens and of others.
        """
        columns = self._table.prompt_threshold, self._table.threshold
        for number, (column, threshold) in enumerate(zip(columns, thresholds, strict=True)):
            if self._told[number] != int(threshold[0]):
                self._told[number] = int(threshold[0])
                column[:1].fill_(self._told[number])


class DeviceFailures:
    """What went wrong on the device in steps without the host.

    The device sends it to the host after each step.

    Args:
        why: takes a layer with an expert that could not be read, and returns why; None if nothing has to be read.
    """

    def __init__(self, table: Table, why: Callable[[int], str] | None = None) -> None:
        self._table, self._why, self._pinned = table, why, table.outside.device.type == "cuda"
        self._columns = (table.outside,) if why is None else (table.outside, table.unread)
        self._sent: deque[tuple[int, Tensor, torch.cuda.Event | None]] = deque()

    def send(self, step: int) -> None:
        """Start to copy what an enqueued step has met, and clear it on the device.

        The copy is filed under the number ``step``.
        """
        event = torch.cuda.Event() if self._pinned else None
        sizes = len(self._columns), self._table.layers
        on_host = torch.empty(sizes, dtype=torch.int64, device="cpu", pin_memory=self._pinned)
        for column, copy in zip(self._columns, on_host, strict=True):
            copy.copy_(column, non_blocking=True)
            column.fill_(-1)
        if event is not None:
            event.record()
        self._sent.append((step, on_host, event))

    def take(self, step: int, experts: int | None = None) -> str:
        """Return why a step failed; empty if none did.

        Covers all steps up to this number that were not asked about yet, and waits until they have ended.

        Args:
            experts: experts of all ranks, if ids have been bounded by that number; None if the table has all of them.
        """
        found = ""
        while self._sent and self._sent[0][0] <= step:
            _, on_host, event = self._sent.popleft()
            if event is not None:
                event.synchronize()
            outside, *unread = on_host.unbind()
            if layers := [layer for one in unread for layer in (one >= 0).nonzero().flatten().tolist()]:
                assert self._why is not None
                found = self._why(layers[0])
            if layers := (outside >= 0).nonzero().flatten().tolist():
                kept = int(outside[layers[0]])
                one = kept if kept <= ID_BITS >> 1 else kept - ID_BITS - 1
                found = str(RoutingError(layers[0], one, experts or self._table.experts, bounded=experts is not None))
        return found
