"""Rates of the link and of CPU execution, each measured while the other works.

Both use host memory, so a rate measured alone says little about the two together. The first starts measure, and the
best result is stored next to the packed experts: a busy machine looks slow.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_dymoe.cache.device_cache import view_in_store
from vllm_dymoe.cache.pages import machine
from vllm_dymoe.cache.store import HostStore
from vllm_dymoe.cache.store.disk import MEASURED_STARTS
from vllm_dymoe.cache.transfer import Reason, TransferEngine
from vllm_dymoe.durable import keep_beside, kept_beside
from vllm_dymoe.executor.cpu_worker import CpuQueue
from vllm_dymoe.experts.format import ExpertFormat, ModelExperts, SliceKey, all_keys
from vllm_dymoe.kernels import Activation, CpuKernel, Curve
from vllm_dymoe.planner.constants import NEVER_FETCHED, Cost
from vllm_dymoe.planner.plan import LayerPlan
from vllm_dymoe.planner.routing import group_by_expert
from vllm_dymoe.planner.rule import ABSENT, HIGH, LOW

RATES = "rates.json"  # file name, next to a store
_ROWS = 8  # the difference between the times of this many rows and of one gives the cost of a row
_SECONDS = 1.0
_AT_ONCE = 8  # experts per call, and transfers in flight


@dataclass(frozen=True)
class Rates:
    """Measured rates of link and CPU."""

    link: float  # bytes per second over the link while the CPU computes
    first_row: Mapping[int, float]
    """CPU seconds for an expert with one row while the link works, by tag of the encoding."""
    next_row: Mapping[int, float]  # seconds for each further row
    round_trip: float  # seconds of an empty round trip to the CPU worker
    threads: int
    measured_for: str  # the configuration for which this is valid
    measured: int = 1  # number of measurements, of which this is the best

    def host(self, fmt: ExpertFormat) -> float:
        """Return the CPU's bytes per second with one row."""
        return fmt.whole_nbytes / self.first_row[fmt.encoding.tag]

    def describe(self, experts: ModelExperts) -> str:
        """Describe the rates in words."""
        host = ", ".join(f"{self.host(f) / 1e9:.1f} at {f.encoding.bits} bits" for f in experts.all_formats)
        return f"{self.link / 1e9:.1f} GB/s of the link and {host} of {self.threads} CPU threads"


def measure_or_load(path: Path | None, measured_for: str, fmt: ExpertFormat, measured: Callable[[], Rates]) -> Rates:
    """Return the best rates of the first starts.

    The best are those by which link and CPU together handle the most bytes per second.

    Args:
        path: file that stores them between starts, or None. Its content counts only on the machine and for the
            configuration that it was measured on.
        measured_for: the configuration.
        fmt: the format whose bytes are compared.
        measured: function that measures now.
    """
    key = f"{machine()}, {measured_for}"
    kept = None if path is None else kept_beside(path, key, Rates)
    kept = kept if kept is not None and kept.measured_for == measured_for else None
    if kept is not None and kept.measured >= MEASURED_STARTS:
        return kept
    found = [rates for rates in (measured(), kept) if rates is not None]
    best = max(found, key=lambda rates: rates.link + rates.host(fmt))
    best = replace(best, measured=sum(rates.measured for rates in found))
    if path is not None:
        keep_beside(path, key, best)
    return best


def measure(
    store: HostStore,
    engine: TransferEngine,
    device: torch.device,
    worker: CpuQueue,
    measured_for: str = "",
    seconds: float = _SECONDS,
) -> Rates:
    """Measure link and CPU together for about a second.

    The link transfers experts of a store in memory, while as many threads as the worker has compute; the worker itself
    must not have started. On CUDA plain copies stand in for the kernels' own reads, because the transfer engine costs
    the host more: with it an H100's link brought 10 of 55 GB/s.
    """
    trip, kernel = worker.round_trip(), CpuKernel(threads=worker.threads, activations=worker.activations)
    formats = store.experts.all_formats
    largest = max(formats, key=lambda fmt: fmt.nbytes)
    keys = _keys(store.experts, largest)
    slots = [torch.empty(largest.nbytes, dtype=torch.uint8, device=device) for _ in range(_AT_ONCE)]
    ended, moved = threading.Event(), [0, 0.0]

    def ask() -> None:
        tickets = [engine.submit(next(keys), slot, Reason.DEMAND) for slot in slots]
        for ticket in tickets:
            engine.wait(ticket)
            engine.settle(ticket)

    def copy() -> None:
        assert stream is not None
        with torch.cuda.stream(stream):
            for slot in slots:
                packed = store.packed(next(keys))
                slot[: len(packed)].copy_(packed, non_blocking=True)
        stream.synchronize()

    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    transfer = copy if stream is not None and store.readable else ask

    def bring() -> None:
        begun = time.perf_counter()
        while not ended.is_set():
            transfer()
            moved[0] += _AT_ONCE * largest.nbytes
            moved[1] = time.perf_counter() - begun

    first: dict[int, float] = {}
    following: dict[int, float] = {}
    part = seconds / (2 * len(formats))
    with engine.uncounted():
        link = threading.Thread(target=bring, name="dymoe measures", daemon=True)
        link.start()
        for fmt in formats:
            one, several = (host_seconds(store, fmt, kernel, rows, part) for rows in (1, _ROWS))
            first[fmt.encoding.tag], following[fmt.encoding.tag] = one, max(0.0, several - one) / (_ROWS - 1)
        ended.set()
        link.join()
    return Rates(moved[0] / moved[1], first, following, trip, worker.threads, measured_for)


def link_rate(store: HostStore, device: torch.device, seconds: float = 0.05) -> float:
    """Return bytes per second of plain copies from a store to a CUDA device.

    The device must be able to read the store.
    """
    largest = max(store.experts.all_formats, key=lambda fmt: fmt.nbytes)
    keys, moved = _keys(store.experts, largest), 0
    slots = [torch.empty(largest.nbytes, dtype=torch.uint8, device=device) for _ in range(_AT_ONCE)]
    torch.cuda.synchronize(device)
    begun = time.perf_counter()
    while time.perf_counter() - begun < seconds:
        for slot in slots:
            slot.copy_(store.packed(next(keys)), non_blocking=True)
        torch.cuda.synchronize(device)
        moved += len(slots) * largest.nbytes
    return moved / (time.perf_counter() - begun)


def _keys(experts: ModelExperts, fmt: ExpertFormat) -> Iterator[SliceKey]:
    """Yield every expert of a format in turn, for ever.

    No CPU cache can hold them all.
    """
    return cycle([key for key in all_keys(experts) if experts.format(key) == fmt])


def host_seconds(store: HostStore, fmt: ExpertFormat, kernel: CpuKernel, rows: int, seconds: float) -> float:
    """Return the median CPU seconds for one expert with ``rows`` rows."""
    keys = _keys(store.experts, fmt)
    activation = Activation.SILU if fmt.has_gate else Activation(Curve.RELU2, has_gate=False)
    x, ids = torch.randn(rows, fmt.hidden, dtype=fmt.dtype), torch.arange(_AT_ONCE).expand(rows, _AT_ONCE)
    grouped, out = group_by_expert(ids.numpy()), x.new_empty(ids.numel(), fmt.hidden)
    times, until = list[float](), time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < until:
        some = list(islice(keys, _AT_ONCE))
        # A nested version is its base and its residual slice.
        parts = [(key.bits // 2,) * fmt.nested + (key.bits,) for key in some]
        views = [view_in_store(store, key.layer, key.expert, bits) for key, bits in zip(some, parts, strict=True)]
        plan = LayerPlan.of_experts(grouped, views)
        begun = time.perf_counter()
        kernel.begin(x, plan, out, activation)
        kernel.compute(range(len(views)))
        times.append((time.perf_counter() - begun) / _AT_ONCE)
    return float(np.median(times))


def costs(formats: Mapping[int, ExpertFormat | None], rates: Rates | None, most_rows: int) -> NDArray[np.int64]:
    """Return ``Table.cpu_costs``, int64 [3, 4].

    Args:
        formats: those in use, by LOW and HIGH; None for one that is skipped.
        rates: None to execute every miss on the CPU.
        most_rows: experts with more rows are fetched.
    """
    table = np.zeros((3, len(Cost)), np.int64)
    for code, fmt in formats.items():
        if fmt is None:
            continue
        if rates is None:
            table[code] = NEVER_FETCHED, 1, 0, most_rows
            continue
        link, one, more = fmt.nbytes / rates.link, rates.first_row[fmt.encoding.tag], rates.next_row[fmt.encoding.tag]
        table[code] = max(1, round(1e9 * link)), max(1, round(1e9 * one)), round(1e9 * more), most_rows
    high = formats.get(HIGH)
    if high is not None and high.nested and rates is not None:  # a base is fetched even if no expert is wanted low
        table[LOW, Cost.LINK] = round(1e9 * high.base.nbytes / rates.link)
    if rates is not None:
        table[ABSENT, Cost.LINK] = round(1e9 * rates.round_trip)
    return table
