"""What a transfer engine counts."""

from dataclasses import dataclass, field

from vllm_dymoe.transfer.ticket import Reason


@dataclass
class TransferStats:
    """What was moved, and how long the host waited for it.

    Attributes:
        bytes_moved: bytes that arrived, by reason.
        transfers: whole blobs that arrived, by the reason they had in the end.
        failed: reads that failed, and transfers that were given up.
        exposed_wait_seconds: host time spent in ``wait``.
    """

    bytes_moved: dict[Reason, int] = field(default_factory=lambda: dict.fromkeys(Reason, 0))
    transfers: dict[Reason, int] = field(default_factory=lambda: dict.fromkeys(Reason, 0))
    failed: int = 0
    exposed_wait_seconds: float = 0.0
