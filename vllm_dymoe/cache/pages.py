"""Host memory: how much is available, and mapping exact sizes near a device.

torch's allocator of pinned memory rounds up to a power of two: 512 MiB for a layer whose experts take 324.
"""

import contextlib
import ctypes
import hashlib
import mmap
import os
from functools import cache
from pathlib import Path

import psutil
import torch

from vllm_dymoe.cgroups import groups

# Limit and use of a container's memory: version 2 of control groups, then version 1.
_LIMITS = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))

_MACHINE = (Path("/etc/machine-id"), Path("/sys/class/dmi/id/product_name"), Path("/sys/class/dmi/id/board_name"))
_PROCESSORS = Path("/proc/cpuinfo")

_NODES = Path("/sys/devices/system/node/online")
_MBIND = {"x86_64": 237, "aarch64": 235}  # libc has no function for it
_PREFERRED = 1  # MPOL_PREFERRED: other nodes serve when this one's memory is full


def available_host_memory() -> int:
    """Return the bytes that can be allocated without swapping.

    Both the machine's memory and a container's limit count.
    """
    available = int(psutil.virtual_memory().available)
    for group in groups():
        for limit, used in _LIMITS:
            try:
                left = int((group / limit).read_text()) - int((group / used).read_text())
            except (OSError, ValueError):  # no such file, or "max"
                continue
            available = min(available, max(0, left + _reclaimable(group / "memory.stat")))
    return available


@cache
def machine() -> str:
    """Return twelve hex digits that identify the machine.

    Its containers get the same, as far as they can see the machine. What was measured on another machine does not
    apply.
    """
    said = [str(os.cpu_count()), str(psutil.virtual_memory().total >> 30), os.uname().machine]
    for path in _MACHINE:
        with contextlib.suppress(OSError):
            said.append(path.read_text().strip())
    with contextlib.suppress(OSError):
        said += [line for line in _PROCESSORS.read_text().splitlines() if line.startswith("model name")][:1]
    return hashlib.sha256("\n".join(said).encode()).hexdigest()[:12]


def _reclaimable(statistics: Path) -> int:
    """Return the bytes of page cache that a container can give up.

    The system counts them as the container's memory, but frees them when memory is short.
    """
    try:
        fields = dict(line.split() for line in statistics.read_text().splitlines())
        return int(fields.get("inactive_file", 0)) + int(fields.get("active_file", 0))
    except (OSError, ValueError):
        return 0


def whole_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def map_bytes(nbytes: int) -> torch.Tensor:
    """Map uint8 [nbytes], page-aligned, with huge pages if possible.

    Raises OSError if there is no memory.
    """
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    mapping = mmap.mmap(-1, whole_pages(nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapping, dtype=torch.uint8, count=nbytes)


def drop_pages(memory: torch.Tensor) -> None:
    """Free the pages of ``map_bytes`` at once.

    Tensors that still refer to them read zeros.
    """
    if memory.numel() > 0:
        libc = ctypes.CDLL(None, use_errno=True)
        nbytes = ctypes.c_size_t(whole_pages(memory.numel()))
        libc.madvise(ctypes.c_void_p(memory.data_ptr()), nbytes, ctypes.c_int(mmap.MADV_DONTNEED))


def several_nodes() -> bool:
    try:
        return _NODES.read_text().strip() not in ("", "0")
    except OSError:
        return False


def prefer_node(memory: torch.Tensor, node: int) -> str | None:
    """Allocate the untouched pages of ``map_bytes`` on one NUMA node.

    Returns the reason if that is not possible, otherwise None.
    """
    number = _MBIND.get(os.uname().machine)
    if number is None:
        return f"unknown on {os.uname().machine}"
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (node // bits + 1))()
    mask[node // bits] = 1 << node % bits
    libc = ctypes.CDLL(None, use_errno=True)
    # The kernel uses one bit less than maxnode says.
    failed = libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(memory.data_ptr()),
        ctypes.c_ulong(whole_pages(memory.numel())),
        ctypes.c_long(_PREFERRED),
        mask,
        ctypes.c_ulong(len(mask) * bits + 1),
        ctypes.c_ulong(0),
    )
    return os.strerror(ctypes.get_errno()) if failed else None
