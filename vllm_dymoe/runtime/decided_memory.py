"""The memory of a rank whose device decides what decode steps keep, and the host's snapshot of it.

Each layer has slots of its own, behind which lie those that no layer keeps. The former are the device's alone; the
latter are used by whichever kind of step runs: see :meth:`DecidedMemory.enter_stream`.
"""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_dymoe.residency.decode_rule import PROJECTIONS
from vllm_dymoe.residency.decode_table import Counter, DecodeTable
from vllm_dymoe.residency.format import BlobKey, Format
from vllm_dymoe.residency.rule import HIGH, HIT, LOW, NOWHERE, STREAM
from vllm_dymoe.residency.slots import Slot, SlotPool
from vllm_dymoe.residency.table import CODES, ResidencyTable
from vllm_dymoe.residency.tier import Tier
from vllm_dymoe.runtime.counters import ResidencyCounts
from vllm_dymoe.runtime.decode_path import DECODE_ROWS
from vllm_dymoe.runtime.device_memory import DeviceMemory
from vllm_dymoe.runtime.memory import ExpertMemory
from vllm_dymoe.runtime.prefetch import PrefetchStats
from vllm_dymoe.runtime.sizing import SlotPlan
from vllm_dymoe.store import ReadableStore
from vllm_dymoe.systems import System
from vllm_dymoe.transfer import Reason, TransferStats

_RING = 1  # steps whose routing is kept: it is read between two steps


class Snapshot(ResidencyTable):
    """What layers keep, as the device's table said between two steps: it is used, and never changed, by the host."""

    def begin_step(self, layer: int, active: NDArray[np.int64], wanted: NDArray[np.int8]) -> NDArray[np.int64]:
        """What is there is used; everything else comes and goes."""
        held = self.tier[layer, active]
        if self.nested:
            there = np.stack((held != NOWHERE, (held == HIGH) | (wanted == LOW)))
            return np.where(there, HIT, STREAM)
        return np.where(held >= wanted if self.reuse_high else held == wanted, HIT, STREAM)

    def coldest(self, layer: int, tier: Tier, spared: set[int]) -> int | None:
        """None: nobody has to go."""
        return None


class DecidedMemory(ExpertMemory):
    """Slots whose tenants a device decides about.

    Args:
        store: of the experts.
        device: that decides.
        device_memory: says what it has left.

    Attributes:
        decisions: the device's table. It stays where it is; what changes between two steps are its values.
        streaming: the last step that ran was the host's, whose snapshot holds until a step of the device.
        most_ahead: projections that a step of the device fetches ahead for a layer.
    """

    make_table: type[ResidencyTable] = Snapshot

    def __init__(self, store: ReadableStore, device: torch.device, device_memory: DeviceMemory) -> None:
        super().__init__(store.experts, device, device_memory)
        self._store = store
        layers, experts, top_k = len(store.experts.layers), store.experts.num_experts, store.experts.top_k
        nested = any(fmt.nested for fmt in store.experts.formats.values())
        self.decisions = DecodeTable.allocate(
            layers, experts, rows=DECODE_ROWS, top_k=top_k, depth=_RING, device=device, nested=nested
        )
        self._sources: tuple[tuple[int, int], ...] = ()
        self.streaming = False
        self.most_ahead = 0

    def allocate(self, plan: SlotPlan, bits: Mapping[Tier, int], *, reuse_high: bool) -> None:
        """See ExpertMemory; nobody is kept, except where all experts have a slot and are in it from now on."""
        super().allocate(plan, bits, reuse_high=reuse_high)
        table, codes = self.decisions, {CODES[tier]: pool for tier, pool in self.pools.items()}
        table.clear()
        pools = {code: (pool.slots[0].blob.data_ptr(), pool.format.nbytes, pool.count) for code, pool in codes.items()}
        shares = {CODES[tier]: plan.quotas[tier] for tier in self.pools}
        table.set_pools(pools, shares, foreseen=-(-self.most_ahead // PROJECTIONS))
        self.streaming = False
        self._fill_if_complete()

    def make_pool(self, fmt: Format, count: int, promised: int) -> SlotPool:
        """A pool of which the host has what no layer keeps."""
        pool = super().make_pool(fmt, count, 0)
        pool.withhold(promised)
        return pool

    def fetch_ahead(self, projections: int) -> None:
        """Have steps of the device fetch so many projections ahead for a layer; slots for them come with the next plan.

        None are fetched at once, since that is a value.
        """
        self.most_ahead = projections
        self.decisions.most_ahead.fill_(projections)

    def serve(self, system: System, bits: Mapping[Tier, int]) -> None:
        """What the device goes by in the steps from now on.

        Args:
            system: chooses tiers.
            bits: of each tier, 0 for one that is skipped.
        """
        table, experts = self.decisions, self.experts
        layers, count = len(experts.layers), experts.num_experts
        formats = {CODES[tier]: experts.formats.get(bits[tier]) for tier in (Tier.HI, Tier.LO)}
        table.set_precision(formats, system.precision.critical_counts(layers, count))
        table.reuse_high.fill_(system.precision.reuses_high)
        sources = tuple((code, fmt.bits) for code, fmt in formats.items() if fmt is not None)
        if table.nested:
            sources = tuple((CODES[tier], of_slice) for tier, of_slice in self.bits.items())
        if sources != self._sources:
            self._point(sources)
        self.table.reuse_high = system.precision.reuses_high

    def _point(self, sources: tuple[tuple[int, int], ...]) -> None:
        """Tell the device where each version of each expert lies in the store, by code and bit-width."""
        addresses = torch.zeros(self.decisions.source.shape, dtype=torch.int64)
        for layer in range(addresses.shape[0]):
            for expert in range(addresses.shape[1]):
                for code, bits in sources:
                    addresses[layer, expert, code] = self._store.blob(BlobKey(layer, expert, bits)).data_ptr()
        self.decisions.source.copy_(addresses)
        self._sources = sources

    def _fill_if_complete(self) -> None:
        """Where every expert has a slot, bring them all: then no step ever misses one."""
        layers, experts = len(self.experts.layers), self.experts.num_experts
        whole = [tier for tier in self.pools if sum(self.plan.quotas[tier]) == layers * experts]
        if self.nested:
            whole = [tier for tier in (Tier.LO, Tier.HI) if tier in whole and Tier.LO in whole]
        else:
            whole = whole[:1]
        for tier in whole:
            pool = self.pools[tier]
            keys = itertools.product(range(layers), range(experts))
            for slot, key in zip(pool.slots[: layers * experts], keys, strict=True):
                slot.blob.copy_(self._store.blob(BlobKey(*key, self.bits[tier])), non_blocking=True)
            table = self.decisions
            named = table.fine if self.nested and tier is Tier.HI else table.slot
            # Behind the bytes, on the same stream.
            named.copy_(torch.arange(layers * experts).view(layers, experts))
            table.tier.fill_(CODES[tier])

    def clear(self) -> None:
        """See ExpertMemory."""
        self.decisions.clear()
        self._fill_if_complete()
        self.decisions.give(self.table)

    def check_integrity(self, in_flight: Iterable[tuple[Tier, Slot, bool]]) -> None:
        """See ExpertMemory; waits for the device."""
        self.decisions.check_integrity()
        self.decisions.give(self.table)
        self.table.check_integrity()
        there = list(in_flight)
        for tier, pool in self.pools.items():
            pool.check_integrity([slot.index for other, slot, _ in there if other is tier])
        assert not any(kept for _, _, kept in there), "the host keeps an expert where the device decides"
        assert self.budget.peak <= self.budget.limit

    def take_counts(self, counts: ResidencyCounts, transfers: TransferStats, guesses: PrefetchStats) -> None:
        """Add what the device has counted since the last time, and see who is there now; waits for it.

        Args:
            counts: of experts.
            transfers: of blobs and bytes. Who is read through for more than two tokens at once is read again for each
                two of them; that is one transfer here, and so is one that came in part ahead.
            guesses: that were fetched ahead.
        """
        self.decisions.give(self.table)
        values = self.decisions.counters.sum(0).tolist()
        self.decisions.counters.zero_()
        planned = counts.planned
        planned[Tier.HI] += values[Counter.WANTED_HIGH]
        planned[Tier.LO] += values[Counter.WANTED_LOW] - values[Counter.SKIPPED]
        planned[Tier.SKIP] += values[Counter.SKIPPED]
        counts.hits += values[Counter.HITS]
        counts.reuses += values[Counter.REUSES]
        counts.promotions += values[Counter.PROMOTIONS]
        counts.evictions += values[Counter.EVICTIONS]
        wanted = values[Counter.WANTED_HIGH] + values[Counter.WANTED_LOW] - values[Counter.SKIPPED]
        counts.misses += wanted - values[Counter.HITS]
        fetched = {HIGH: values[Counter.FETCHED_HIGH], LOW: values[Counter.FETCHED_LOW]}
        transfers.transfers[Reason.DEMAND] += sum(fetched.values())
        for code, bits in self._sources:
            transfers.bytes_moved[Reason.DEMAND] += fetched[code] * self.experts.formats[bits].nbytes
        transfers.bytes_moved[Reason.DEMAND] -= values[Counter.AHEAD_USED_BYTES]
        transfers.bytes_moved[Reason.PREFETCH] += values[Counter.AHEAD_BYTES]
        transfers.transfers[Reason.PREFETCH] += values[Counter.AHEAD]
        guesses.useful += values[Counter.AHEAD_USED]
        guesses.wasted += values[Counter.AHEAD] - values[Counter.AHEAD_USED]

    # -- between steps ----------------------------------------------------------------------------

    def enter_stream(self, last_read: Any) -> None:
        """Steps of the host begin: learn what layers keep; waits for the device.

        Args:
            last_read: fence behind that step, for whoever fills a slot that no layer keeps.
        """
        self.decisions.give(self.table)
        self.fence(last_read)
        self.streaming = True

    def enter_decode(self) -> bool:
        """Steps of the device begin; true if one of the host's came before, whose copies must have ended by now."""
        before, self.streaming = self.streaming, False
        if before:
            self.decisions.forget_ahead()  # the host had those slots
        return before
