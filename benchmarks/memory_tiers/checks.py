"""What does it cost to verify what is read from a disk?

    python benchmarks/memory_tiers/checks.py [FOLDER ON THE DISK]

Random experts are read past the page cache, with and without verification, in alternating rounds for each number of
concurrent reads. A server measures its disk and uses the best number, so it loses the difference between the two best
ones. Every read goes to memory of its own, as in a server: a slot that is read into again stays in the processor's
cache, and a virtual disk that copies is a third faster into it.

Two more columns show reads without verification next to another process. One process spins for as much of a core as
verifying takes, and one reads as many bytes of memory. Where these cost as much, the disk itself needs the core or the
memory's bandwidth, as a virtual machine's may, and another way of verifying would not help. It takes a minute and 1.3
GB of the disk.
"""

import argparse
import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from vllm_dymoe.cache.pages import map_bytes
from vllm_dymoe.cache.store import FileStore, Manifest
from vllm_dymoe.cache.store.disk import Reading
from vllm_dymoe.cache.store.writer import StoreWriter
from vllm_dymoe.experts.encoding import encoding_of
from vllm_dymoe.experts.format import ExpertFormat, ModelExperts, all_keys
from vllm_dymoe.quantize.dummy import random_store

SIZES, LAYERS, EXPERTS = (2048, 768), 4, 128  # Qwen3-30B-A3B's
DEPTHS, READS = (1, 2, 4, 8), 96
SPIN = """
import sys, time
busy, idle = 2e-3 * float(sys.argv[1]), 2e-3 * (1 - float(sys.argv[1]))
print(flush=True)
while True:
    until = time.perf_counter() + busy
    while time.perf_counter() < until:
        pass
    time.sleep(idle)
"""
READ_MEMORY = """
import sys, time, numpy, xxhash
share, nbytes = float(sys.argv[1]), int(sys.argv[2])
memory = numpy.ones(256 << 20, numpy.uint8).data
print(flush=True)
while True:
    for begin in range(0, len(memory) - nbytes, nbytes):
        begun = time.perf_counter()
        xxhash.xxh3_64_intdigest(memory[begin : begin + nbytes])
        time.sleep((time.perf_counter() - begun) * (1 / share - 1))
"""
BESIDE = {"unchecked_beside_a_busy_core": SPIN, "unchecked_beside_memory_reads": READ_MEMORY}


class Unchecked(FileStore):
    """A store that does not verify what it reads.

    It therefore needs no more threads than the disk does.
    """

    @property
    def depth(self) -> int:
        """Return the number of threads that the disk needs."""
        return self.reading.depth

    def check(self, key, read, projections=None):
        """Verify nothing."""


def rate(store: FileStore, slots: list[torch.Tensor], seed: int) -> float:
    """Return bytes per second, reading random experts into slots of their own."""
    keys, depth = random.Random(seed).sample(list(all_keys(store.experts)), READS), store.depth

    def read(worker: int) -> None:
        for number in range(worker, READS, depth):
            store.read_into(keys[number], slots[number])

    with ThreadPoolExecutor(depth) as pool:
        begun = time.perf_counter()
        list(pool.map(read, range(depth)))
        return sum(slot.numel() for slot in slots) / (time.perf_counter() - begun)


@contextlib.contextmanager
def beside(program: str, *arguments: float) -> Iterator[None]:
    """Run a program that never ends, during the ``with`` block."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.readline()
        try:
            yield
        finally:
            process.kill()


def check_seconds(store: FileStore) -> float:
    """Return the seconds of a core to verify one expert.

    This is the median over experts that no cache holds.
    """
    keys = list(all_keys(store.experts))[:64]
    held = [torch.empty(store.experts.formats[4].nbytes, dtype=torch.uint8) for _ in keys]
    for key, slot in zip(keys, held, strict=True):
        store.read_into(key, slot)
    seconds = []
    for key, slot in zip(keys, held, strict=True):
        begun = time.thread_time()
        store.check(key, slot)
        seconds.append(time.thread_time() - begun)
    return statistics.median(seconds)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    formats = {4: ExpertFormat(*SIZES, encoding_of(4), 64, torch.bfloat16)}
    experts = ModelExperts(tuple(range(LAYERS)), EXPERTS, 8, formats)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as work:
        folder = Path(work) / "store"
        random_store(experts, StoreWriter(folder, Manifest(experts, "dummy", "checks")), seed=0).close()
        stores = {"checked": FileStore(folder), "unchecked": Unchecked(folder)}
        nbytes, check = formats[4].nbytes, check_seconds(stores["checked"])
        print(f"A check takes {1e3 * check:.2f} ms of a core for {nbytes} bytes, {nbytes / check / 1e9:.1f} GB/s.")
        results = []
        slots = [map_bytes(nbytes) for _ in range(READS)]
        for slot in slots:
            slot.zero_()
        for depth in DEPTHS:
            for store in stores.values():
                store.reading = Reading(direct=True, depth=depth)
                if not store._direct:
                    raise SystemExit(f"{folder} cannot be read past the page cache; name a folder on a disk.")
            rates: dict[str, list[float]] = {name: [] for name in (*stores, *BESIDE)}
            for number in range(arguments.rounds):
                for name in list(stores)[:: 1 if number % 2 else -1]:
                    rates[name].append(rate(stores[name], slots, number))
                share = min(1.0, check * rates["checked"][-1] / nbytes)
                for name, program in BESIDE.items():
                    with beside(program, share, nbytes):
                        rates[name].append(rate(stores["unchecked"], slots, number))
            both = list(zip(rates["checked"], rates["unchecked"], strict=True))
            lost = 1 - statistics.median(with_checks / without for with_checks, without in both)
            row = {f"{name}_GB_per_s": round(statistics.median(found) / 1e9, 2) for name, found in rates.items()}
            results.append({"reads_at_once": depth, **row, "lost_percent": round(100 * lost, 1)})
            print(results[-1], flush=True)
    best = {name: max(row[f"{name}_GB_per_s"] for row in results) for name in rates}
    lost = {name: f"{100 * (1 - best[name] / best['unchecked']):.1f} %" for name in ("checked", *BESIDE)}
    core, memory = (lost[name] for name in BESIDE)
    print(
        f"At the best number of reads checks cost {lost['checked']}, a core as busy {core}, as many reads of memory "
        f"{memory}."
    )
    found = {"reads": results, "expert_bytes": nbytes, "check_ms": round(1e3 * check, 3), "rounds": arguments.rounds}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
