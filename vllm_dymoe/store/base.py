"""What every store of packed experts is asked for, and how it fails."""

from typing import Protocol, runtime_checkable

import torch

from vllm_dymoe.residency.format import EVERY_PROJECTION, BlobKey, ModelExperts


class StoreError(RuntimeError):
    """A store that cannot be read or written; the message names the file and what to do."""


class HostMemoryError(StoreError):
    """Host memory that cannot be had or be locked; the message says why, and the caller adds what to do."""


class HostStore(Protocol):
    """Reads blobs; safe to call from several threads."""

    experts: ModelExperts

    @property
    def description(self) -> str:
        """Where the bytes lie, for people."""

    @property
    def depth(self) -> int:
        """Reads at once that are worth it."""

    @property
    def occupies_cores(self) -> bool:
        """Whether a read may be a copy by a core, and not a wait for a disk."""

    def read_into(
        self, key: BlobKey, destination: torch.Tensor, projections: range = EVERY_PROJECTION, *, wait: bool = True
    ) -> None:
        """Copy one blob, or neighbouring projections of it, into host memory.

        Args:
            destination: uint8 [bytes of the projections], contiguous.
            wait: for a disk, if need be.

        Raises:
            StoreError: the bytes cannot be read, or are not what was written.
            BlockingIOError: without ``wait``, they are not in memory; ``destination`` may be half-written.
        """

    def close(self) -> None: ...


@runtime_checkable
class ReadableStore(HostStore, Protocol):
    """A store in memory that the experts' device can read by itself, complete and checked from the start on."""

    def blob(self, key: BlobKey, projections: range = EVERY_PROJECTION) -> torch.Tensor:
        """The bytes themselves: uint8 [bytes of the projections]."""


def blob_name(store: HostStore, key: BlobKey) -> str:
    return f"expert {key.expert} of layer {store.experts.layers[key.layer]} at {key.bits} bits ({store.description})"
