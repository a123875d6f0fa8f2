"""The residency table where a device decides: tensors that a captured graph reads and writes, and what it decided.

A layer's step is decided by one program on the device, or by its plain twin on a CPU (``decode_rule``). Budgets,
shares, tiers, retention and pools are values here, so that a graph stays when they change between two steps.

Each layer has a range of slots of its own in each tier's pool: a free slot is the lowest of the range that no row
names, and no list has to be kept. Tiers are written as in ``rule``: NOWHERE, LOW and HIGH index what has size 3.

Where the low version lies inside the high one the pool of LOW has bases and that of HIGH fine slices; what is said of a
version's address, slot, source and offsets is then said of that slice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, auto
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_dymoe.residency.format import Format
from vllm_dymoe.residency.rule import HIGH, LOW, NOWHERE
from vllm_dymoe.residency.table import ResidencyTable


class Counter(IntEnum):
    """Columns of :attr:`DecodeTable.counters`; experts unless said otherwise."""

    STEPS = 0
    """Steps with at least one row."""
    WANTED_HIGH = auto()
    WANTED_LOW = auto()
    SKIPPED = auto()
    HITS = auto()
    REUSES = auto()
    """Hits of a high version where a low one was wanted."""
    FETCHED_HIGH = auto()
    """Versions, or fine slices."""
    FETCHED_LOW = auto()
    """Versions, or bases."""
    PASSED = auto()
    """Those among the fetched that are not kept."""
    PROMOTIONS = auto()
    """Fetches of a high version where the low one was there."""
    EVICTIONS = auto()
    """Experts, or fine slices, whose place another one took."""
    AHEAD = auto()
    """Experts of which something was fetched before the layer was routed."""
    AHEAD_BYTES = auto()
    AHEAD_USED = auto()
    """Those among the fetched that were found there, whole or in part."""
    AHEAD_USED_BYTES = auto()


@dataclass(frozen=True, eq=False)
class DecodeTable:
    """What is where, for every layer; integers, all on the device that decides.

    Attributes:
        tier: int8 [layers, experts], which version a row names.
        slot: int32 [layers, experts], index in the tier's pool, or in that of bases; -1 for none.
        heat: int64 [layers, experts].
        used_at: int64 [layers, experts].
        fine: int32 [layers, experts], index in the pool of fine slices, -1 for none; [0, experts] if not nested.
        fine_heat: int64 like fine, of uses of the high version.
        fine_used_at: int64 like fine, the same.
        step: int64 [layers], the layer's last step.
        shares: int32 [layers, 3], experts that a layer may keep.
        first_slot: int32 [layers, 3], where the layer's range in the tier's pool begins.
        staging: int32 [3, 2], first and number of the slots that no layer keeps, for what passes.
        ahead: int32 [3, 2], first and number of those for guesses about even layers; as many about odd ones follow.
        most_ahead: int32 [1], projections that are fetched ahead for a layer at most.
        staged: int32 [2, 3, experts], what was fetched ahead for an even and an odd layer: of each expert its slot, its
            tier, and how many of its projections, gate first. It counts until the next guess about a layer of its kind.
        staged_for: int32 [2], which layers these are, -1 for none.
        critical: int32 [layers, experts + 1], how many of a step's active experts are high.
        bits: int32 [3], of each tier, or its codebook's tag; 0 for one that is skipped.
        offsets: int64 [3, 3], bytes from a blob's beginning to gate, up and down.
        pool: int64 [3], address of slot 0.
        slot_bytes: int64 [3], from one slot to the next.
        source: int64 [layers, experts, 3], address of each version in the host store, which the device can read.
        reuse_high: int32 [1], whether a high version serves where a low one is wanted.
        counters: int64 [layers, Counter], counted up.
        recording: int32 [1], whether routing decisions go into the ring.
        ring_ids: int32 [depth, layers, rows, top_k], the decisions of step s at s % depth.
        ring_weights: float32 [depth, layers, rows, top_k].
        ring_rows: int32 [depth, layers], how many of the rows are real.
    """

    tier: Tensor
    slot: Tensor
    heat: Tensor
    used_at: Tensor
    fine: Tensor
    fine_heat: Tensor
    fine_used_at: Tensor
    step: Tensor
    shares: Tensor
    first_slot: Tensor
    staging: Tensor
    ahead: Tensor
    most_ahead: Tensor
    staged: Tensor
    staged_for: Tensor
    critical: Tensor
    bits: Tensor
    offsets: Tensor
    pool: Tensor
    slot_bytes: Tensor
    source: Tensor
    reuse_high: Tensor
    counters: Tensor
    recording: Tensor
    ring_ids: Tensor
    ring_weights: Tensor
    ring_rows: Tensor

    @classmethod
    def allocate(
        cls,
        layers: int,
        experts: int,
        *,
        rows: int,
        top_k: int,
        depth: int,
        device: torch.device | str,
        nested: bool = False,
    ) -> Self:
        """A table that names nothing, keeps nothing and wants every expert high.

        Args:
            layers: of the model.
            experts: of each layer.
            rows: that a step may have at most.
            top_k: experts of a row.
            depth: steps that the ring holds.
            device: where it is.
            nested: whether the low version lies inside the high one.
        """

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        halves = layers if nested else 0
        table = cls(
            tier=zeros(layers, experts, dtype=torch.int8),
            slot=zeros(layers, experts, dtype=torch.int32).fill_(-1),
            heat=zeros(layers, experts),
            used_at=zeros(layers, experts),
            fine=zeros(halves, experts, dtype=torch.int32).fill_(-1),
            fine_heat=zeros(halves, experts),
            fine_used_at=zeros(halves, experts),
            step=zeros(layers),
            shares=zeros(layers, 3, dtype=torch.int32),
            first_slot=zeros(layers, 3, dtype=torch.int32),
            staging=zeros(3, 2, dtype=torch.int32),
            ahead=zeros(3, 2, dtype=torch.int32),
            most_ahead=zeros(1, dtype=torch.int32),
            staged=zeros(2, 3, experts, dtype=torch.int32),
            staged_for=zeros(2, dtype=torch.int32).fill_(-1),
            critical=zeros(layers, experts + 1, dtype=torch.int32),
            bits=zeros(3, dtype=torch.int32),
            offsets=zeros(3, 3),
            pool=zeros(3),
            slot_bytes=zeros(3),
            source=zeros(layers, experts, 3),
            reuse_high=zeros(1, dtype=torch.int32).fill_(1),
            counters=zeros(layers, len(Counter)),
            recording=zeros(1, dtype=torch.int32),
            ring_ids=zeros(depth, layers, rows, top_k, dtype=torch.int32),
            ring_weights=zeros(depth, layers, rows, top_k, dtype=torch.float32),
            ring_rows=zeros(depth, layers, dtype=torch.int32),
        )
        table.critical.copy_(torch.arange(experts + 1))
        return table

    @property
    def nested(self) -> bool:
        """Whether the low version lies inside the high one."""
        return len(self.fine) > 0

    @property
    def layers(self) -> int:
        """Of the model."""
        return self.tier.shape[0]

    @property
    def experts(self) -> int:
        """Of each layer."""
        return self.tier.shape[1]

    # -- values that the host sets between two steps ----------------------------------------------

    def set_precision(self, formats: Mapping[int, Format | None], critical: NDArray[np.int32]) -> None:
        """What tiers mean, and how many experts of a step are high.

        Args:
            formats: by LOW and HIGH, those in use; None for one that is skipped.
            critical: int32 [layers, experts + 1], by the number of active experts.

        Raises:
            ValueError: the low version was to lie inside the high one and does not, or the other way round.
        """
        bits, offsets = torch.zeros(3, dtype=torch.int32), torch.zeros(3, 3, dtype=torch.int64)
        high = formats[HIGH]
        if (high is not None and high.nested) != self.nested:
            raise ValueError("formats are nested where the table is not, or the other way round")
        for code, fmt in formats.items():
            bits[code] = 0 if fmt is None else fmt.matrices[2].tag
        # A base has its place, too, where nothing is computed from it alone.
        low = high.base if high is not None and high.nested else formats.get(LOW)
        for code, fmt in ((HIGH, high), (LOW, low)):
            if fmt is not None:
                offsets[code] = torch.tensor([section.start for section in fmt.sections])
        self.bits.copy_(bits)
        self.offsets.copy_(offsets)
        self.critical.copy_(torch.from_numpy(critical))

    def set_pools(
        self,
        pools: Mapping[int, tuple[int, int, int]],
        shares: Mapping[int, Sequence[int]],
        *,
        foreseen: int = 0,
    ) -> None:
        """Where slots are and how layers share them; rows whose slot is no longer their layer's own are emptied.

        Args:
            pools: address of slot 0, bytes of a slot and number of slots, by LOW and HIGH.
            shares: experts that each layer may keep, by LOW and HIGH.
            foreseen: experts that are fetched ahead for a layer at most. While one layer's are read the next one's
                are fetched; two thirds of the slots that no layer keeps are for that at most.

        Raises:
            ValueError: layers would keep more than a pool has, or one more than it has experts.
        """
        first, counts = np.zeros((self.layers, 3), np.int32), np.zeros((self.layers, 3), np.int32)
        staging, ahead = np.zeros((3, 2), np.int32), np.zeros((3, 2), np.int32)
        address, nbytes = np.zeros(3, np.int64), np.zeros(3, np.int64)
        for code, (base, slot_bytes, count) in pools.items():
            counts[:, code] = shares[code]
            stops = counts[:, code].cumsum()
            if counts[:, code].max() > self.experts:
                raise ValueError(f"a layer would keep {counts[:, code].max()} of its {self.experts} experts")
            if stops[-1] > count:
                raise ValueError(f"shares sum to {stops[-1]} slots of tier {code}, but the pool has {count}")
            first[:, code] = stops - counts[:, code]
            half = min(foreseen, (count - stops[-1]) // 3)
            ahead[code] = stops[-1], half
            staging[code] = stops[-1] + 2 * half, count - stops[-1] - 2 * half
            address[code], nbytes[code] = base, slot_bytes
        for tensor, values in (
            (self.first_slot, first),
            (self.shares, counts),
            (self.staging, staging),
            (self.ahead, ahead),
            (self.pool, address),
            (self.slot_bytes, nbytes),
        ):
            tensor.copy_(torch.from_numpy(values))
        self.forget_ahead()
        self._leave_out_others()

    def _leave_out_others(self) -> None:
        """Empty rows whose slot is not their layer's own."""
        if self.nested:
            demoted = self._outside(self.fine, HIGH) & (self.tier == HIGH)
            self.tier.masked_fill_(demoted, LOW)
            outside = self._outside(self.slot, LOW)
            self.fine.masked_fill_(demoted | outside, -1)
        else:
            low, high = (self._outside(self.slot, code) for code in (LOW, HIGH))
            outside = torch.where(self.tier == HIGH, high, low)
        self.tier.masked_fill_(outside, NOWHERE)
        self.slot.masked_fill_(outside, -1)

    def _outside(self, slot: Tensor, code: int) -> Tensor:
        """bool [layers, experts]: slots that are not in their layer's range of a tier's pool."""
        begin = self.first_slot[:, code, None]
        return (slot < begin) | (slot >= begin + self.shares[:, code, None])

    def forget_ahead(self) -> None:
        """What was fetched ahead is not there any more."""
        self.staged_for.fill_(-1)

    def clear(self) -> None:
        """Nobody is there, and nobody was ever used."""
        self.forget_ahead()
        self.tier.zero_()
        self.slot.fill_(-1)
        self.fine.fill_(-1)
        for tensor in (self.heat, self.used_at, self.fine_heat, self.fine_used_at, self.step):
            tensor.zero_()

    # -- to the host ------------------------------------------------------------------------------

    def give(self, table: ResidencyTable) -> None:
        """Write a snapshot into the host's table; waits for the device."""
        fine = ("fine", "fine_heat", "fine_used_at") if self.nested else ()
        for name in ("tier", "slot", "heat", "used_at", *fine):
            getattr(table, name)[:] = getattr(self, name).cpu().numpy()
        table.steps[:] = self.step.tolist()

    def check_integrity(self) -> None:
        """No layer keeps more than its share, every slot is its layer's own and is named once; waits for the device.

        Raises:
            AssertionError: it is not so.
        """
        tier, slot = self.tier.cpu().numpy(), self.slot.cpu().numpy()
        first, shares = self.first_slot.cpu().numpy(), self.shares.cpu().numpy()
        assert (slot[tier == NOWHERE] == -1).all(), "an empty row names a slot"
        holders = {code: (slot, tier == code) for code in (LOW, HIGH)}
        if self.nested:
            fine = self.fine.cpu().numpy()
            assert ((fine >= 0) == (tier == HIGH)).all(), "a fine slice without its base, or the other way round"
            holders = {LOW: (slot, tier != NOWHERE), HIGH: (fine, tier == HIGH)}
        for code, (slots, there) in holders.items():
            for layer in range(self.layers):
                named = slots[layer][there[layer]] - first[layer, code]
                share = shares[layer, code]
                assert len(named) <= share, f"layer {layer} keeps {len(named)} experts, more than {share}"
                assert ((named >= 0) & (named < share)).all(), f"layer {layer} names a slot of another layer"
                assert len(np.unique(named)) == len(named), f"two rows of layer {layer} name one slot"
        for half in (self.staged_for >= 0).nonzero().flatten().tolist():
            slots, tiers, projections = self.staged[half].cpu().numpy()
            for code in (LOW, HIGH):
                begin, count = self.ahead[code].tolist()
                named = slots[(projections > 0) & (tiers == code)] - begin - half * count
                assert ((named >= 0) & (named < count)).all(), "a guess lies in a slot that is not for guesses"
                assert len(np.unique(named)) == len(named), "two guesses lie in one slot"
