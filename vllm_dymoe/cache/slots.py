"""Slots: fixed places for slices in the memory of one tier.

Taking a slot and giving it back take constant time.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_dymoe.cache.pages import drop_pages, map_bytes, prefer_node, whole_pages
from vllm_dymoe.cache.store.pinning import CudaPinner
from vllm_dymoe.cache.store.shared import SharedMemory
from vllm_dymoe.experts.format import ExpertFormat, PackedExpert

_NO_MEMORY = torch.empty(0, dtype=torch.uint8)  # made before memory is short


class Arena:
    """One allocation of slots' memory.

    It is on a ``device`` with its own memory, or in host memory, near the device that it may be pinned for unless
    ``unbound`` says why not. OSError or RuntimeError if the allocation fails.

    Attributes:
        memory: uint8 [nbytes]; host memory has whole pages, those of ``shared`` if other processes map the same.
    """

    def __init__(
        self,
        nbytes: int,
        pinner: CudaPinner | None = None,
        shared: SharedMemory | None = None,
        *,
        device: torch.device | None = None,
    ) -> None:
        self._pinner, self._shared, self._device = pinner, shared, device
        self._unpin: weakref.finalize[[int], Arena] | None = None
        self.unbound: str | None = None
        if device is not None:
            self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        elif shared is not None:
            self.memory = shared.map(nbytes, pinned=pinner is not None)
        else:
            self.memory = map_bytes(nbytes)
        if pinner is not None and pinner.node is not None:
            self.unbound = prefer_node(self.memory, pinner.node)

    @property
    def pinned(self) -> bool:
        """Whether a device's copy engine can read it directly."""
        return self._unpin is not None

    def pin(self) -> str | None:
        """Pin the memory, once its pages exist.

        Returns the reason why that failed, or None.
        """
        if self._pinner is None or self.memory.numel() == 0:
            return None
        address = self.memory.data_ptr()
        reason = self._pinner.pin(address, whole_pages(self.memory.numel()))
        if reason is None:
            self._unpin = weakref.finalize(self, self._pinner.unpin, address)
            self._unpin.atexit = False  # at exit, the operating system does this
        return reason

    def close(self) -> None:
        """Free the memory at once.

        An abandoned transfer may hold a view of it for a moment. Memory shared with other processes is freed with its
        last view.
        """
        if self._unpin is not None:
            self._unpin()
            self._unpin = None
        if self._device is not None:
            self.memory.untyped_storage().resize_(0)
        elif self._shared is None:  # torch does not resize a storage that NumPy has seen
            drop_pages(self.memory)
        self.memory = _NO_MEMORY


@dataclass(eq=False, slots=True)
class Slot:
    """A place for one slice."""

    index: int  # position in its pool
    kind: int  # of the layers whose slices it holds, see ``ModelExperts.of_kinds``
    format: ExpertFormat  # format of the slice
    packed: torch.Tensor  # uint8 [format.nbytes]
    pinned: bool = False  # a device's copy engine can read it directly
    readers: int = 0  # copies out of it that have not been enqueued yet
    last_read: Any = None
    """Event after the last computation or copy that reads the slot; the next copy into it waits for it. None if
    these are synchronous.
    """
    viewed: "tuple[Slot | None, PackedExpert] | None" = None
    """The base slot with which a residual slice was last viewed, and that view."""

    def expert(self, base: "Slot | None" = None) -> PackedExpert:
        """Return the packed expert in this slot as views, which are cached.

        For a residual slice, ``base`` is the slot of its base slice.
        """
        if self.viewed is None or self.viewed[0] is not base:
            self.viewed = base, self.format.view(self.packed, None if base is None else base.expert())
        return self.viewed[1]


class SlotPool:
    """Slots for slices of one format: some are reserved, the others for staging.

    Slots are reserved for what layers keep. Staging does not use a reserved slot, so a layer that has not filled its
    quota yet finds a slot when it does. A pool that lends gives reserved slots to staged slices all the same: these can
    be dropped at any time, and may be kept there.

    If the host writes the table, any slot can become any layer's. A correct prediction is kept in the staging slot that
    it came into, without a copy; a slot that an orphaned transfer still writes is missing for a while; and migration
    moves quotas between layers. So a pool counts free and reserved slots. With device-side planning none of these
    happens, and a kernel in a graph cannot keep a list: each layer has a fixed range of slots, and the lowest that no
    row names is free (:meth:`~vllm_dymoe.planner.table.Table.free_slots`). Ranges on the host would cost a copy for
    each prediction that is kept; counts on the device would cost a launch.
    """

    def __init__(
        self,
        fmt: ExpertFormat,  # format of a slot's slice
        arenas: Sequence[Arena],
        reserved: int = 0,  # slots that layers may keep and do not use yet
        *,
        slot_bytes: int | None = None,  # distance of slots in bytes; the slice's size if None
        lends: bool = False,
    ) -> None:
        self.format, self.arenas, self._lends = fmt, list(arenas), lends
        rows = ((row, arena) for arena in arenas for row in arena.memory.view(-1, slot_bytes or fmt.nbytes))
        self.slots = [Slot(i, 0, fmt, row[: fmt.nbytes], arena.pinned) for i, (row, arena) in enumerate(rows)]
        self._free, self._reserved = [self.slots[::-1]], [reserved]  # by kind of layers

    @classmethod
    def of_kinds(cls, fmt: ExpertFormat, pools: Sequence["SlotPool"]) -> "SlotPool":
        """Return one pool with the slots of several, one for each kind of layers.

        ``fmt`` is the format of most of them.
        """
        if len(pools) == 1:
            return pools[0]
        whole = cls(fmt, (), lends=pools[0]._lends)
        whole._free, whole._reserved = [[] for _ in pools], [0] * len(pools)
        for kind, pool in enumerate(pools):
            whole.merge(pool, [kind])
        return whole

    @property
    def count(self) -> int:
        return len(self.slots)

    @property
    def nbytes(self) -> int:
        return sum(arena.memory.numel() for arena in self.arenas)

    @property
    def pinned(self) -> int:
        """Number of pinned bytes."""
        return sum(arena.memory.numel() for arena in self.arenas if arena.pinned)

    @property
    def free(self) -> int:
        """Number of free slots, reserved or not."""
        return sum(map(len, self._free))

    @property
    def reserved(self) -> int:
        """Slots that layers may keep and do not use yet."""
        return sum(self._reserved)

    def take(self, *, kept: bool, kind: int = 0) -> Slot | None:
        """Return a free slot for a kind of layers, or None.

        A slot that is to be kept uses up a reservation. Otherwise reserved slots are left alone, unless the pool lends.
        """
        held_back = 0 if kept or self._lends else self._reserved[kind]
        if len(self._free[kind]) <= held_back:
            return None
        self._reserved[kind] -= kept
        return self._free[kind].pop()

    def keep(self, slot: Slot) -> None:
        """Record that a slot taken for staging is kept, and uses up a reservation."""
        self._reserved[slot.kind] -= 1

    def lend(self, slot: Slot) -> None:
        """Record that a slot taken to be kept will not be, and return its reservation."""
        self._reserved[slot.kind] += 1

    def give_back(self, slot: Slot, *, kept: bool) -> None:
        self._reserved[slot.kind] += kept
        self._free[slot.kind].append(slot)

    def merge(self, other: "SlotPool", kinds: Sequence[int]) -> None:
        """Append the slots of another pool.

        ``kinds`` are the numbers that its kinds of layers have in this pool.
        """
        missing = max(kinds) + 1 - len(self._free)
        self._free += [[] for _ in range(missing)]
        self._reserved += [0] * missing
        for slot in other.slots:
            slot.index += self.count
            slot.kind = kinds[slot.kind]
        for kind, free, reserved in zip(kinds, other._free, other._reserved, strict=True):
            self._free[kind] += free
            self._reserved[kind] += reserved
        self.slots, self.arenas = self.slots + other.slots, self.arenas + other.arenas

    def parts(self) -> list[tuple[int, int, int]]:
        """Return where the slots of each kind of layers are.

        Slots of a kind are adjacent: the result is the address of the first one, the bytes of a slot, and the number of
        slots.
        """
        found: list[list[Slot]] = [[] for _ in self._free]
        for slot in self.slots:
            found[slot.kind].append(slot)
        return [(slots[0].packed.data_ptr(), slots[0].format.nbytes, len(slots)) for slots in found]

    def close(self) -> None:
        """Free the memory."""
        for slot in self.slots:
            slot.viewed = None
        self.slots.clear()
        self._free = [[] for _ in self._free]
        while self.arenas:
            self.arenas.pop().close()

    def check_integrity(self, in_use: Sequence[int]) -> None:
        """Raise AssertionError unless every slot is either free or in ``in_use``, once."""
        indices = sorted([*(slot.index for free in self._free for slot in free), *in_use])
        assert indices == list(range(self.count)), f"slots lost or doubled: {indices} of {self.count}"
