"""The interface of stores of packed experts, and their errors."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from vllm_dymoe.experts.format import EVERY_PROJECTION, ModelExperts, SliceKey


class StoreError(RuntimeError):
    """A store cannot be read or written.

    The message names the file and what to do.
    """


class DamagedStoreError(StoreError):
    """Files provably differ from what was written.

    Writing the store again repairs it. Files that merely could not be opened or read raise a plain StoreError, which is
    no reason to replace them.
    """


class HostMemoryError(StoreError):
    """Host memory cannot be allocated or pinned.

    The message says why, and the caller adds what to do.
    """


class Lent(Protocol):
    """A slice in host memory, which stays there while it is lent."""

    packed: torch.Tensor  # uint8 [bytes of the slice]
    pinned: bool  # a device's copy engine can read it directly
    last_read: Any  # event after the last copy out of it; the code that enqueues a copy sets it


class HostStore(ABC):
    """Reads packed experts; safe to call from several threads."""

    experts: ModelExperts
    whole = False  # all slices are in memory permanently, and verified
    lost_before = 0  # pages of mapped files that this process had lost before the store was opened

    @property
    @abstractmethod
    def description(self) -> str:
        """Where the bytes are, in words."""

    @property
    def readable(self) -> bool:
        """Whether the experts' device can read every packed expert directly."""
        return False

    @property
    def depth(self) -> int:
        """Useful number of concurrent reads."""
        return 1

    @property
    def occupies_cores(self) -> bool:
        """Whether a read may be a copy by a core instead of a wait for a disk."""
        return True

    @abstractmethod
    def read_into(
        self, key: SliceKey, destination: torch.Tensor, projections: range = EVERY_PROJECTION, *, wait: bool = True
    ) -> None:
        """Copy one packed expert, or adjacent projections of it, into host memory.

        ``destination`` is uint8 [bytes], contiguous. StoreError if the bytes cannot be read, or differ from what was
        written. BlockingIOError if ``wait`` is not set and they are not in memory; ``destination`` may then be partly
        written.
        """

    def hold(
        self, key: SliceKey, projections: range = EVERY_PROJECTION, *, wait: bool = True
    ) -> AbstractContextManager[Lent | None]:
        """Lend a slice that is in host memory; yields None if it is not.

        Arguments and errors are as for ``read_into``.
        """
        return nullcontext()

    @property
    def mapped(self) -> bool:
        """Whether a CPU can compute slices in place, if they are ``in_memory``."""
        return self.whole

    def in_memory(self, key: SliceKey) -> bool:
        """Return whether a slice can be read without waiting for a disk, and is verified."""
        return self.whole

    def writes(self) -> list[int]:
        """Return how often each layer's mapped file was found to have been written to.

        Its slices then have to be verified again, which :meth:`in_memory` does.
        """
        return []

    def lost(self, keys: Iterable[SliceKey]) -> str:
        """Return why slices could not be read while they were in use, as a sentence.

        Only slices of mapped files can be lost; empty if none was.
        """
        return ""

    def packed(self, key: SliceKey) -> torch.Tensor:
        """Return the bytes of a slice of a ``mapped`` store: uint8 [bytes of the slice]."""
        raise NotImplementedError

    def take(self, other: "HostStore", experts: ModelExperts) -> None:
        """Append the layers of another store of this kind.

        ``experts`` describes both together.
        """
        raise NotImplementedError

    @abstractmethod
    def close(self) -> None: ...


def slice_name(store: HostStore, key: SliceKey) -> str:
    return f"expert {key.expert} of layer {store.experts.layers[key.layer]} at {key.bits} bits ({store.description})"
