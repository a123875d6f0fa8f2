"""How a store's files are read: past the page cache or not, and how fast.

The first starts measure the rates with several reads at once, and ``disk.json`` next to the store keeps the best result
for each machine and disk, because a disk that others use looks slow. Which way is faster also depends on memory: pages
in the page cache are copied as fast as memory, but reading others from disk through it takes a core, and may happen in
small pieces.
"""

import contextlib
import ctypes
import fcntl
import mmap
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from vllm_dymoe.cache.pages import machine
from vllm_dymoe.cache.store.manifest import BLOCK
from vllm_dymoe.durable import keep_beside, kept_beside

RATES = "disk.json"
MEASURED_STARTS = 3
_DEPTHS = (1, 2, 4, 8, 16)
_MEASURED_BYTES = 32 << 20  # for each depth: at most 0.2 s on a disk worth serving from
_ENOUGH = 0.9  # share of the best rate; deeper queues only lengthen each read
_DIRECT = getattr(os, "O_DIRECT", 0)  # absent on other systems
_MOUNTS = Path("/proc/self/mountinfo")
_BLOCK_DEVICES = Path("/sys/dev/block")
_buffers = threading.local()
_PR_SET_TIMERSLACK = 29  # linux/prctl.h
_prctl = ctypes.CDLL(None).prctl


@dataclass(frozen=True)
class DiskRates:
    """Measured rates of a disk, in bytes per second."""

    direct: dict[int, float]  # past the page cache, by concurrent reads; empty if the file system does not support it
    cached: float  # through the page cache, by one reader, for bytes not in it
    warm: float  # for bytes in it
    measured: int = 1  # number of measurements, of which this is the best

    def best(self, other: "DiskRates") -> "DiskRates":
        direct = {depth: max(rate, self.direct.get(depth, 0.0)) for depth, rate in other.direct.items()}
        cached, warm = max(self.cached, other.cached), max(self.warm, other.warm)
        return DiskRates(direct, cached, warm, self.measured + other.measured)

    @property
    def depth(self) -> int:
        """Return the smallest number of concurrent reads that reaches about the best rate."""
        best = max(self.direct.values(), default=0.0)
        return min((depth for depth, rate in self.direct.items() if rate >= _ENOUGH * best), default=_DEPTHS[2])

    def read_past_cache(self, held: float) -> bool:
        """Return whether reading past the page cache is faster.

        ``held`` is the share of the bytes that the page cache holds.
        """
        through = held / self.warm + (1 - held) / self.cached
        return bool(self.direct) and 1 / self.direct[self.depth] < through


@dataclass(frozen=True)
class Reading:
    """How a store's files are read."""

    direct: bool = False  # past the page cache
    depth: int = 1  # concurrent reads
    drops: bool = False  # drop bytes from the page cache after reading through it
    check: Literal["first", "always"] = "first"
    """When sections are compared with their checksums: when a disk is read ("first"), or also in memory ("always")."""
    bytes_per_second: float | None = None  # of an emulated disk

    @property
    def description(self) -> str:
        way = "past the page cache" if self.direct else "leaving nothing in the page cache" if self.drops else ""
        return f", read {way}, {self.depth} at once" if way else ""


@dataclass
class DiskCounts:
    """Counts of what was read from files, by any number of threads."""

    reads: int = 0  # number of finished reads
    nbytes: int = 0  # bytes that they read
    under_way: int = 0  # number of running reads
    seconds: float = 0.0  # seconds in which at least one read ran
    _since: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @contextlib.contextmanager
    def reading(self, nbytes: int) -> Iterator[None]:
        with self._lock:
            if not self.under_way:
                self._since = time.perf_counter()
            self.under_way += 1
        try:
            yield
        except BaseException:
            nbytes = 0
            raise
        finally:
            with self._lock:
                self.under_way -= 1
                if not self.under_way:
                    self.seconds += time.perf_counter() - self._since
                self.reads += nbytes > 0
                self.nbytes += nbytes

    def reset(self, counted: tuple[int, int, float] = (0, 0, 0.0)) -> None:
        """Continue from zero, or from earlier reads, bytes and seconds."""
        with self._lock:
            self.reads, self.nbytes, self.seconds = counted
            self._since = time.perf_counter()


def read_direct(file: int, destination: torch.Tensor, offset: int) -> int:
    """Read with ``preadv`` and O_DIRECT; return the number of bytes read.

    The read is direct if both sides are aligned, and otherwise goes through a buffer of the thread. At the file's end
    it returns fewer bytes than requested.
    """
    nbytes = destination.numel()
    begin = offset // BLOCK * BLOCK
    ahead = offset - begin
    straight = not (ahead or nbytes % BLOCK or destination.data_ptr() % BLOCK)
    view = destination.numpy().data if straight else _buffer(-(-(ahead + nbytes) // BLOCK) * BLOCK)
    done = 0
    while done < ahead + nbytes:
        count = os.preadv(file, [view[done:]], begin + done)
        done += count
        if count == 0 or done % BLOCK:  # the end of the file
            break
    found = max(0, min(nbytes, done - ahead))
    if not straight:
        destination[:found].copy_(torch.frombuffer(view, dtype=torch.uint8)[ahead : ahead + found])
    return found


def _buffer(nbytes: int) -> memoryview:
    """Return this thread's page-aligned buffer of at least ``nbytes`` bytes."""
    held: memoryview | None = getattr(_buffers, "view", None)
    if held is None or len(held) < nbytes:
        _buffers.view = held = memoryview(mmap.mmap(-1, nbytes))
    return held[:nbytes]


def set_direct(file: int, *, direct: bool) -> bool:
    """Switch an open file to reading past the page cache, or through it.

    Returns whether reads now go past it; not every file system supports that.
    """
    try:
        flags = fcntl.fcntl(file, fcntl.F_GETFL)
        if bool(flags & _DIRECT) == direct:
            return direct
        fcntl.fcntl(file, fcntl.F_SETFL, flags ^ _DIRECT)
    except OSError:
        return False
    if direct:
        try:
            read_direct(file, torch.empty(BLOCK, dtype=torch.uint8), 0)  # some file systems refuse only now
        except OSError:
            set_direct(file, direct=False)
            return False
    return direct and bool(_DIRECT)


def known_rates(folder: Path) -> DiskRates | None:
    """Return the rates that earlier starts measured for a folder's disk.

    None if this machine has measured none, or if they cannot be read.
    """
    rates = kept_beside(folder / RATES, storage_of(folder), DiskRates)
    return rates if rates and min(rates.cached, rates.warm, *rates.direct.values()) > 0 else None


def keep_rates(folder: Path, rates: DiskRates) -> None:
    """Store rates for the next start.

    If the folder cannot be written, the next start measures again.
    """
    keep_beside(folder / RATES, storage_of(folder), rates)


def storage_of(folder: Path) -> str:
    """Return a description of a folder's disk on this machine.

    Rates of another disk do not apply.
    """
    return f"{machine()}, {_mounted(folder)}"


def _mounted(folder: Path) -> str:
    """Return file system, source and, for a local disk, model and size."""
    found, longest = "an unknown disk", -1
    folder = folder.resolve()
    try:
        for line in _MOUNTS.read_text().splitlines():
            place, _, source = line.partition(" - ")
            number, _, point = place.split()[2:5]
            mounted = Path(point.encode().decode("unicode_escape"))
            # Of two mounts in one place the later one counts.
            if len(mounted.parts) >= longest and folder.is_relative_to(mounted):
                longest, found = len(mounted.parts), f"{' '.join(source.split()[:2])}{_block_device(number)}"
    except (OSError, ValueError):
        pass
    return found


def _block_device(number: str) -> str:
    """Return model, serial number and size of a local disk.

    Parts that the system does not report are left out.
    """
    device = _BLOCK_DEVICES / number
    said = []
    for name in ("device/model", "device/serial", "size"):
        for place in (device, device.resolve().parent):  # a partition's directory is inside its disk's
            with contextlib.suppress(OSError):
                said.append((place / name).read_text().strip())
                break
    return "".join(f" {word}" for word in said)


def measure_rates(
    use: Callable[[Reading], bool],
    read: Callable[[int], int],
    forget: Callable[[int], None],
    slices: Sequence[int],
    nbytes: int,
) -> DiskRates:
    """Measure the rates of random slices of a store, in every way of reading.

    Reads 32 MiB of slices of ``nbytes`` bytes, but at least 16 of them. ``use`` selects a way and returns
    whether it is possible, ``read`` returns the bytes of a slice, and ``forget`` removes a slice from the page cache.
    StoreError if the store cannot be read.
    """
    chosen = random.Random(0).sample(slices, min(len(slices), max(_DEPTHS[-1], _MEASURED_BYTES // nbytes)))
    for number in chosen:
        forget(number)

    def rate(depth: int) -> float:
        with ThreadPoolExecutor(depth) as pool:
            begin = time.perf_counter()
            total = sum(pool.map(read, chosen))
            return total / max(time.perf_counter() - begin, 1e-9)

    past = {depth: rate(depth) for depth in _DEPTHS if use(Reading(direct=True, depth=depth))}
    use(Reading())
    return DiskRates(past, rate(1), rate(1))


class Pacer:
    """Delays bytes to one queue of a given rate, in wall-clock time."""

    def __init__(self) -> None:
        self._lock, self._free = threading.Lock(), 0.0  # when the last byte promised so far arrives

    def wait(self, nbytes: int, ready: float, bytes_per_second: float) -> None:
        """Sleep until the last of these bytes would have arrived."""
        with self._lock:
            # The transfer begins when the queue is free, not when this thread was woken: a late thread loses no time.
            self._free = due = max(self._free, ready) + nbytes / bytes_per_second
        sleep_until(due)


def sleep_until(due: float) -> None:
    """Sleep until a time of ``time.perf_counter``, accurate to some microseconds."""
    if (left := due - time.perf_counter()) > 0:
        _prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)  # for this thread; the kernel may oversleep by 50 us otherwise
        time.sleep(left)
