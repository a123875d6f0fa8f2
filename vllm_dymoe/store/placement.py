"""Where the packed experts live on the host: page-locked memory if there is room for it, otherwise files."""

from dataclasses import dataclass, replace

from vllm_dymoe.residency.code import code_of
from vllm_dymoe.residency.format import ModelExperts
from vllm_dymoe.store.base import HostMemoryError
from vllm_dymoe.store.memory import memory_bytes
from vllm_dymoe.units import size

# What stays free under host_store = "auto": page-locked memory cannot be swapped, and other processes need some.
_SHARE_LEFT = 10
_LEAST_LEFT = 2 << 30


@dataclass(frozen=True)
class HostPlace:
    """What was chosen.

    Attributes:
        pinned: memory, page-locked where there is a CUDA device; otherwise files.
        reason: why, for people; empty where it was asked for.
    """

    pinned: bool
    reason: str = ""


def choose_host_place(asked: str, device_type: str, experts: ModelExperts, available: int, ranks: int) -> HostPlace:
    """Choose for one rank.

    Args:
        asked: the option ``host_store``: "auto", "file" or "pinned".
        device_type: "cuda", or another one that has no use for page-locked memory.
        available: bytes of host memory that all ranks on this machine can get.

    Raises:
        HostMemoryError: memory was asked for, and has no room for the experts.
    """
    if asked == "file":
        return HostPlace(False)
    needed = memory_bytes(experts)
    each = f" on each of {ranks} ranks" if ranks > 1 else ""
    if asked == "pinned":
        room = available // ranks
        if needed > room:
            raise HostMemoryError(
                f'host_store = "pinned" needs {needed} bytes of host memory{each}, but {room} are available'
                f'{" to each" if each else ""}; free {needed - room} more, or use host_store = "file"'
                f"{_fewer_bits(experts, room)}."
            )
        return HostPlace(True)
    if device_type != "cuda":
        return HostPlace(False, "auto: there is no CUDA device")
    left = max(_LEAST_LEFT, available // _SHARE_LEFT)
    room = max(0, available - left) // ranks
    told = f"{size(available)} of host memory are available, of which {size(left)} are left to others"
    if needed > room:
        return HostPlace(False, f"auto: page-locked memory would take {size(needed)}{each}, {told}")
    return HostPlace(True, f"auto: {size(needed)}{each}, {told}")


def _fewer_bits(experts: ModelExperts, room: int) -> str:
    """The largest single version that fits, as a remark; nothing if none does."""
    stored = max(experts.formats)
    for bits in (8, 4, 2):
        formats = {bits: replace(experts.formats[stored], code=code_of(bits))}
        if bits < stored and (taken := memory_bytes(replace(experts, formats=formats))) <= room:
            return f", or hi = {bits} and lo = 0, which take {taken}"
    return ""
