"""The table of device-side planning, and what the host writes into it between two steps.

Tables stay at fixed addresses, which captured graphs read (DynaExq 3.2: a stable handle); only their values change.
"""

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_dymoe.cache.counters import PrefetchStats, ResidencyCounts
from vllm_dymoe.cache.slots import SlotPool
from vllm_dymoe.cache.store import HostStore
from vllm_dymoe.cache.transfer import Reason, TransferStats
from vllm_dymoe.experts.format import SliceKey
from vllm_dymoe.planner.constants import SMALL_BATCH_ROWS
from vllm_dymoe.planner.hotness import squared_gates, usable
from vllm_dymoe.planner.precision import Precision
from vllm_dymoe.planner.routing import RoutingError
from vllm_dymoe.planner.rule import HIGH, LOW
from vllm_dymoe.planner.table import CODES, ID_BITS, Counter, Table, set_precision
from vllm_dymoe.policies import Policy

_RING = 1  # steps whose routing is recorded: the ring is read after every step


class DeviceTable:
    """The table of a device that can read the store; the DeviceCaches of a server share it, one after the other."""

    def __init__(self, store: HostStore, device: torch.device) -> None:
        experts = store.experts
        self._store = store
        self.table = Table.allocate(
            len(experts.layers),
            experts.num_experts,
            nested=any(fmt.nested for fmt in experts.all_formats),
            rows=SMALL_BATCH_ROWS,
            top_k=experts.top_k,
            depth=_RING,
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
        """Write how the device serves from now on: precisions, quotas' bits and source addresses.

        ``bits`` are those of each precision, 0 for one that is skipped; ``of_slices`` are those in the slots of each.
        """
        table, experts = self.table, self._store.experts
        served = Precision.HIGH, Precision.LOW
        formats = [
            {CODES[precision]: of_layer.get(bits[precision]) for precision in served} for of_layer in experts.of_layers
        ]
        critical = policy.precision.critical_counts(table.layers, table.experts)
        set_precision(table, formats, critical, policy.precision.thresholds)
        table.reuse_high.fill_(policy.precision.reuses_high)
        table.fetched_ahead.copy_(torch.from_numpy(policy.precision.counts_ahead(table.layers, table.experts)))
        sources = tuple((CODES[precision], bits[precision]) for precision in served if bits[precision])
        if table.nested:
            sources = tuple((CODES[precision], width) for precision, width in of_slices.items())
        addresses = np.zeros(table.source.shape, np.int64)  # a store that slept has new addresses
        for layer, expert in np.ndindex(table.layers, table.experts):
            for code, width in sources:
                addresses[layer, expert, code] = self._store.packed(SliceKey(layer, expert, width)).data_ptr()
        table.source.copy_(torch.from_numpy(addresses))
        self._sources = sources

    def take_counts(self, counts: ResidencyCounts, transfers: TransferStats, predictions: PrefetchStats) -> None:
        """Add what the device has counted since the last call; waits for it.

        An expert that is read again for every two tokens counts as one transfer, and so does one that partly came
        ahead.
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


class DeviceCounts:
    """Counts of routing in steps without the host: counted on the device, read by the host without waiting."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._bins = table.layers * table.experts + 1  # the last one is for experts of other ranks
        device = table.precision.device
        # Choices of low versions, choices of high versions, squared gates.
        self._uses = torch.zeros(3 * self._bins, dtype=torch.int64, device=device)
        self._first = (torch.arange(table.layers, device=device) * table.experts).view(-1, 1, 1)
        pinned = device.type == "cuda"
        self._on_host = torch.zeros(3 * self._bins, dtype=torch.int64, device="cpu", pin_memory=pinned)
        self._event = torch.cuda.Event() if pinned else None

    def add(self, tokens: int) -> None:
        """Count a small-batch step that has run, or will run, on the compute stream."""
        self._add(self._table.ring_ids[0, :, :tokens], self._table.ring_weights[0, :, :tokens], self._first)

    def add_layer(self, layer: int, ids: Tensor, weights: Tensor) -> None:
        """Count a layer of a large-batch step, given ids int32 and weights float32, [tokens, top_k]."""
        self._add(ids, weights, self._first[layer, 0])

    def _add(self, ids: Tensor, weights: Tensor, first: Tensor) -> None:
        ids = ids.long()
        place = torch.where(ids >= 0, ids + first, self._bins - 1)
        high = self._table.precision.flatten()[place.clamp(max=self._bins - 2)] == HIGH
        index = (place + self._bins * high).flatten()
        self._uses.scatter_add_(0, index, usable(weights).flatten().long())
        gates = squared_gates(weights)
        self._uses.scatter_add_(0, (place + 2 * self._bins).flatten(), gates.flatten())

    def clear(self) -> None:
        self._uses.zero_()

    def ask(self) -> None:
        """Start to copy the counts to the host, and count from zero from the next step on."""
        self._on_host.copy_(self._uses, non_blocking=True)
        self._uses.zero_()
        if self._event is not None:
            self._event.record()

    def ready(self) -> bool:
        return self._event is None or self._event.query()

    def take(self) -> NDArray[np.int64]:
        """Return the counts up to the last ``ask``: int64 [3, layers, experts].

        These are choices of low, choices of high, and squared gates.
        """
        counts = self._on_host.numpy().copy().reshape(3, self._bins)[:, :-1]
        return counts.reshape(3, self._table.layers, self._table.experts)


class OutsideIds:
    """Expert ids outside of the model that device-planned steps met; copied to the host after each step."""

    def __init__(self, table: Table) -> None:
        self._table, self._pinned = table, table.outside.device.type == "cuda"
        self._sent: deque[tuple[int, Tensor, torch.cuda.Event | None]] = deque()

    def send(self, step: int) -> None:
        """Start to copy what an enqueued step has met, under its number, and clear it on the device."""
        event = torch.cuda.Event() if self._pinned else None
        on_host = torch.empty(self._table.layers, dtype=torch.int64, device="cpu", pin_memory=self._pinned)
        on_host.copy_(self._table.outside, non_blocking=True)
        self._table.outside.fill_(-1)
        if event is not None:
            event.record()
        self._sent.append((step, on_host, event))

    def take(self, step: int) -> RoutingError | None:
        """Return the first error of finished steps up to this number that were not reported yet, or None."""
        found = None
        while self._sent and self._sent[0][0] <= step and (self._sent[0][2] is None or self._sent[0][2].query()):
            on_host = self._sent.popleft()[1]
            if layers := (on_host >= 0).nonzero().flatten().tolist():
                kept = int(on_host[layers[0]])
                one = kept if kept <= ID_BITS >> 1 else kept - ID_BITS - 1
                found = RoutingError(layers[0], one, self._table.experts)
        return found
