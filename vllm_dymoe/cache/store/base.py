"""What every store of packed experts is asked for, and how it fails."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from vllm_dymoe.experts.format import EVERY_PROJECTION, ModelExperts, SliceKey


class StoreError(RuntimeError):
    """A store that cannot be read or written; the message names the file and what to do."""


class DamagedStoreError(StoreError):
    """Files that are proven not to be those that were written: to write the store again is the cure.

    What merely could not be opened or read, now or by this process, is a plain StoreError, and no reason to replace it.
    """


class HostMemoryError(StoreError):
    """Host memory that cannot be had or be locked; the message says why, and the caller adds what to do."""


class Lent(Protocol):
    """A slice in host memory that stays there while it is lent."""

    packed: torch.Tensor  # uint8 [bytes of the slice]
    pinned: bool  # a device's copy engine reads it by itself
    last_read: Any  # event behind the last copy out of it, for whatever enqueues one to set


class HostStore(ABC):
    """Reads packed experts; safe to call from several threads."""

    experts: ModelExperts
    whole = False  # all slices are in memory for good, and checked
    lost_before = 0  # pages of mapped files that this process had lost when the store was opened

    @property
    @abstractmethod
    def description(self) -> str:
        """Where the bytes lie, for people."""

    @property
    def readable(self) -> bool:
        """The experts' device can read every packed expert by itself."""
        return False

    @property
    def depth(self) -> int:
        """Reads at once that are worth it."""
        return 1

    @property
    def occupies_cores(self) -> bool:
        """Whether a read may be a copy by a core, and not a wait for a disk."""
        return True

    @abstractmethod
    def read_into(
        self, key: SliceKey, destination: torch.Tensor, projections: range = EVERY_PROJECTION, *, wait: bool = True
    ) -> None:
        """Copy one packed expert, or neighbouring projections of it, into host memory: uint8 [bytes], contiguous.

        StoreError if the bytes cannot be read, or are not what was written; BlockingIOError if, without ``wait`` for a
        disk, they are not in memory; ``destination`` may be half-written.
        """

    def hold(
        self, key: SliceKey, projections: range = EVERY_PROJECTION, *, wait: bool = True
    ) -> AbstractContextManager[Lent | None]:
        """A slice where it lies in host memory; None from a store that has none. Arguments and errors as above."""
        return nullcontext()

    @property
    def mapped(self) -> bool:
        """A CPU can compute slices where they lie, those that are ``in_memory``."""
        return self.whole

    def in_memory(self, key: SliceKey) -> bool:
        """Whether a slice can be read without waiting for a disk, and is what was written."""
        return self.whole

    def lost(self, keys: Iterable[SliceKey]) -> str:
        """A sentence if bytes of mapped slices could not be had when they were computed with; empty otherwise."""
        return ""

    def packed(self, key: SliceKey) -> torch.Tensor:
        """The bytes themselves, of a store that is ``mapped``: uint8 [bytes of the slice]."""
        raise NotImplementedError

    def take(self, other: "HostStore", experts: ModelExperts) -> None:
        """Have the layers of another store of this kind behind one's own; ``experts`` are those of both."""
        raise NotImplementedError

    @abstractmethod
    def close(self) -> None: ...


def slice_name(store: HostStore, key: SliceKey) -> str:
    return f"expert {key.expert} of layer {store.experts.layers[key.layer]} at {key.bits} bits ({store.description})"
