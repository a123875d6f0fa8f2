"""What does it cost to check what is read from a disk? Reads random experts past the page cache, checked and unchecked.

    python benchmarks/memory_tiers/checks.py [FOLDER ON THE DISK]

Rounds of both take turns, and their medians are compared, by how many reads are under way at once. Takes a minute, and
1.3 GB of the disk for as long.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
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


class Unchecked(FileStore):
    """Takes what is read as it comes."""

    def check(self, key, read, projections=None):
        """Look at nothing."""


def rate(store: FileStore, seed: int) -> float:
    """Bytes a second, of random experts."""
    keys = random.Random(seed).sample(list(all_keys(store.experts)), READS)
    nbytes, depth = store.experts.formats[4].nbytes, store.depth
    slots = [map_bytes(nbytes) for _ in range(depth)]
    for slot in slots:
        slot.zero_()

    def read(worker: int) -> None:
        for key in keys[worker::depth]:
            store.read_into(key, slots[worker])

    with ThreadPoolExecutor(depth) as pool:
        begun = time.perf_counter()
        list(pool.map(read, range(depth)))
        return READS * nbytes / (time.perf_counter() - begun)


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
        results = []
        for depth in DEPTHS:
            for store in stores.values():
                store.reading = Reading(direct=True, depth=depth)
                if not store._direct:
                    raise SystemExit(f"{folder} cannot be read past the page cache; name a folder on a disk.")
            rates: dict[str, list[float]] = {name: [] for name in stores}
            for number in range(arguments.rounds):
                for name in list(stores)[:: 1 if number % 2 else -1]:
                    rates[name].append(rate(stores[name], number))
            both = list(zip(rates["checked"], rates["unchecked"], strict=True))
            lost = 1 - statistics.median(with_checks / without for with_checks, without in both)
            row = {f"{name}_GB_per_s": round(statistics.median(found) / 1e9, 2) for name, found in rates.items()}
            results.append({"reads_at_once": depth, **row, "lost_percent": round(100 * lost, 1)})
            print(results[-1], flush=True)
    print(json.dumps({"reads": results, "expert_bytes": formats[4].nbytes, "rounds": arguments.rounds}))


if __name__ == "__main__":
    main()
