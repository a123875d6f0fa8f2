"""How much host memory packed experts get: enough for all, for a part, or none."""

from dataclasses import dataclass, replace

from vllm_dymoe.cache.pages import whole_pages
from vllm_dymoe.cache.store.base import HostMemoryError
from vllm_dymoe.experts.encoding import encoding_of
from vllm_dymoe.experts.format import ModelExperts
from vllm_dymoe.options import AUTO, ExpertBudget
from vllm_dymoe.units import size

# What stays free with host_store = "auto": pinned memory cannot be swapped, and other processes need some.
_SHARE_LEFT = 10
_LEAST_LEFT = 2 << 30


def smallest_host_cache(experts: ModelExperts) -> int:
    """Return the smallest budget of a host cache, in bytes.

    The cache needs two slices of each version of each kind of layers, one to read and one to fill.
    """
    return 2 * sum(whole_pages(fmt.nbytes) for formats in experts.of_kinds for fmt in formats.values())


def whole_host_cache(experts: ModelExperts) -> int:
    """Return the budget of a host cache that holds everything.

    Slices take whole pages, so that disks write directly to them.
    """
    each = (whole_pages(fmt.nbytes) for formats in experts.of_layers for fmt in formats.values())
    return experts.num_experts * sum(each)


@dataclass(frozen=True)
class HostPlace:
    """Where packed experts are stored, and why."""

    pinned: bool  # all in host memory, pinned where there is a CUDA device
    reason: str = ""  # a remark for users
    host_cache: int = 0  # bytes of host memory for experts; 0 if they stay in files


@dataclass(frozen=True)
class HostRoom:
    """Host memory that one rank may use."""

    available: int  # bytes of host memory that all ranks on this machine can get
    ranks: int = 1  # on this machine
    wanted: ExpertBudget = AUTO  # the option ``host_memory``
    taken: int = 0  # bytes of it for another model's experts on this rank
    separate: bool = True  # the device has its own memory, real or emulated, and host memory is a cache for it
    replicas: int = 1  # number of ranks that share one copy if it holds everything

    def limit(self, experts: ModelExperts) -> int | None:
        """Return the bytes that the user allows, None for "auto".

        HostMemoryError if they exceed the available memory: the machine would swap, or kill the process.
        """
        limit = host_memory_bytes(self.wanted, experts)
        each = self.available // self.ranks
        if limit is not None and limit >= whole_host_cache(experts):
            each = self.available * self.replicas // self.ranks
        if limit is not None and limit - self.taken > each:
            raise HostMemoryError(
                f"host_memory is {limit} bytes on each of {self.ranks} ranks, but {each} are "
                'available to each; lower host_memory, or leave it "auto"'
            )
        return None if limit is None else max(0, limit - self.taken)


def host_memory_bytes(wanted: ExpertBudget, experts: ModelExperts) -> int | None:
    """Return the option ``host_memory`` in bytes; None for "auto"."""
    return int(wanted.share * whole_host_cache(experts)) if wanted.share is not None else wanted.bytes


def choose_host_place(asked: str, device_type: str, experts: ModelExperts, room: HostRoom) -> HostPlace:
    """Choose where one rank's experts are stored, as ``host_store`` says.

    HostMemoryError if memory is required and does not suffice.
    """
    if asked == "file":
        return HostPlace(False)
    needed, available, limit = whole_host_cache(experts), room.available, room.limit(experts)
    each = f" on each of {room.ranks} ranks" if room.ranks > 1 else ""
    if asked == "pinned":
        mine = available * room.replicas // room.ranks if limit is None else limit
        if needed > mine:
            raise HostMemoryError(
                f'host_store = "pinned" needs {needed} bytes of host memory{each}, but {mine} are available'
                f'{" to each" if each else ""}; free {needed - mine} more, or use host_store = "file"'
                f"{_fewer_bits(experts, mine)}."
            )
        return HostPlace(True, host_cache=needed)
    if device_type != "cuda" and (limit is None or not room.separate):
        return HostPlace(False, "auto: there is no CUDA device" if limit is None else "host_memory is the budget")
    left = max(_LEAST_LEFT, available // _SHARE_LEFT)
    told = f"host_memory is {size(limit or 0)}"
    whole = limit or 0
    if limit is None:
        whole, limit = (max(0, available - left) * count // room.ranks for count in (room.replicas, 1))
        told = f"auto: {size(available)} of host memory are available, of which {size(left)} are left to others"
    if needed <= whole:
        return HostPlace(True, f"{told}; all take {size(needed)}{each}", needed)
    if limit < smallest_host_cache(experts):
        return HostPlace(False, f"{told}; not enough for a cache between device and files")
    return HostPlace(False, f"{told}; all would take {size(needed)}{each}", limit)


def _fewer_bits(experts: ModelExperts, room: int) -> str:
    """Return a remark on the largest single version that fits; empty if none does."""
    stored = max(experts.formats)
    for bits in (8, 4, 2):
        formats = {bits: replace(experts.formats[stored], encoding=encoding_of(bits))}
        if bits < stored and (taken := whole_host_cache(replace(experts, formats=formats, own={}))) <= room:
            return f", or high = {bits} and low = 0, which take {taken}"
    return ""
