"""Fixed-size pieces of device memory, handed out and taken back in constant time."""

from dataclasses import dataclass, field
from typing import Any

import torch

from vllm_dymoe.cache.pages import drop_pages, map_bytes
from vllm_dymoe.experts.format import ExpertFormat, PackedExpert


@dataclass(eq=False)
class Slot:
    """One packed expert-sized piece of device memory."""

    index: int  # position in its pool
    packed: torch.Tensor  # uint8 [format.nbytes]
    expert: PackedExpert | None
    """The packed expert seen as packed matrices; views, made once. None for a residual slice, which is nothing by
    itself."""
    last_read: Any = None
    """Fence of the last computation that reads the slot, for which the next copy into it waits. None where computation
    is synchronous."""
    joined: "tuple[Slot, PackedExpert] | None" = None
    """The base slot that a residual slice was last seen with, and what they are together."""


@dataclass
class SlotPool:
    """Slots of one format in one allocation: most promised to layers, the others for whatever comes and goes.

    A slot that is promised is never lent: a layer that does not use all of its share finds it free when it does.
    """

    format: ExpertFormat  # what one slot holds
    count: int  # number of slots
    device: torch.device  # where they lie
    reserved: int = 0  # slots that layers may keep and do not use yet
    slots: list[Slot] = field(init=False, repr=False)
    _arena: torch.Tensor = field(init=False, repr=False)
    _free: list[Slot] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # Written once, so that the memory is really there: a machine short of it would end the process later.
        on_host = self.device.type == "cpu"
        nbytes = self.count * self.format.nbytes
        self._arena = map_bytes(nbytes) if on_host else torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        self._arena.fill_(0)
        slices = self._arena.view(self.count, self.format.nbytes)
        view = (lambda _: None) if self.format.nested else self.format.view
        self.slots = [Slot(i, packed, view(packed)) for i, packed in enumerate(slices)]
        self._free = self.slots[::-1]

    def fence(self, filled: Any) -> None:
        """Let the first copy into each slot wait for a fence behind the pool's making: the memory may have been another
        tensor's, which kernels still read, and the kernel that fills it may not have begun."""
        for slot in self.slots:
            slot.last_read = filled

    def close(self) -> None:
        """Give the memory back at once, though a cancelled transfer may hold a view of its slot a moment longer."""
        for slot in self.slots:
            slot.joined = None
        self.slots.clear()
        self._free.clear()
        if self.device.type == "cpu":  # whose storage torch does not resize once NumPy has seen it
            drop_pages(self._arena)
        else:
            self._arena.untyped_storage().resize_(0)

    @property
    def nbytes(self) -> int:
        return self.count * self.format.nbytes

    @property
    def free(self) -> int:
        """Slots that hold nothing, promised or not."""
        return len(self._free)

    def take(self, *, kept: bool) -> Slot | None:
        """A free slot, whatever its bytes, or None: to be kept one of those that were promised, else of the rest."""
        if not self._free if kept else len(self._free) <= self.reserved:
            return None
        self.reserved -= kept
        return self._free.pop()

    def keep(self) -> None:
        """A slot that was taken for the time being is kept from now on, and another one is free for that."""
        self.reserved -= 1

    def lend(self) -> None:
        """A slot that was taken to be kept will not be: its layer is promised another one."""
        self.reserved += 1

    def give_back(self, slot: Slot, *, kept: bool) -> None:
        self.reserved += kept
        self._free.append(slot)

    def check_integrity(self, in_use: list[int]) -> None:
        """AssertionError unless every slot is either free or in ``in_use``, once."""
        indices = sorted([slot.index for slot in self._free] + in_use)
        assert indices == list(range(self.count)), f"slots lost or doubled: {indices} of {self.count}"
