"""What does the first start of a published checkpoint cost: bytes read, memory, seconds?

    python benchmarks/start/start.py --format nvfp4 --gigabytes 20

Writes a checkpoint with experts in the shapes of Qwen3-30B-A3B, random and of as many layers as asked for, drops it
from the page cache, and serves it twice with the real engine: the first start packs the experts, the second finds them
packed. A process of its own is watched: bytes that it really fetched from the disk (read_bytes of /proc/PID/io), and
memory that is not a file's (RssAnon and RssShmem). The bounds: the first start reads the checkpoint once; memory stays
below the packed experts + 2 GiB.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from checkpoint import FORMATS, write

RESULTS = Path(__file__).with_name("results.json")
GIB = 2**30


def forget(folder: Path) -> None:
    """Drop files from the page cache, so that whoever reads them reads the disk."""
    for path in folder.rglob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def numbers(path: str, keys: tuple[str, ...]) -> int:
    """The sum of some lines ``key: number`` of a file in /proc."""
    lines = (line.split() for line in Path(path).read_text().splitlines())
    return sum(int(words[1]) for words in lines if words and words[0].rstrip(":") in keys)


def serve(folder: str, budget: str) -> None:
    """In a process of its own: start, answer one token, and say what it took."""
    peak, running = 0, True

    def watch() -> None:
        nonlocal peak
        while running:
            peak = max(peak, 1024 * numbers("/proc/self/status", ("RssAnon", "RssShmem")))
            time.sleep(0.02)

    from vllm import LLM, SamplingParams

    before_load = numbers("/proc/self/io", ("read_bytes",))
    imported = 1024 * numbers("/proc/self/status", ("RssAnon", "RssShmem"))
    watcher = threading.Thread(target=watch)
    watcher.start()
    started = time.monotonic()
    options = {"quantization": "dymoe", "additional_config": {"dymoe": {"expert_budget": budget, "host_store": "file"}}}
    llm = LLM(folder, skip_tokenizer_init=True, enforce_eager=True, max_model_len=128, max_num_seqs=1, **options)
    seconds = time.monotonic() - started
    read = numbers("/proc/self/io", ("read_bytes",)) - before_load
    sampling = SamplingParams(max_tokens=1, detokenize=False)
    assert llm.generate([{"prompt_token_ids": [5, 6, 7]}], sampling, use_tqdm=False)[0].outputs[0].token_ids
    running = False
    watcher.join()
    print(
        "MEASURED",
        json.dumps({"seconds": round(seconds, 1), "read_bytes": read, "peak_bytes": peak, "imported_bytes": imported}),
    )


def measure(folder: Path, stores: Path, budget: str) -> dict:
    """One start; its measurements and the last line of its progress."""
    ours = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "DYMOE_STORE_DIR": str(stores)}
    environment = os.environ | ours
    command = [sys.executable, __file__, "--serve", str(folder), "--budget", budget]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    measured = [line.split(" ", 1)[1] for line in done.stdout.splitlines() if line.startswith("MEASURED ")]
    if not measured:
        raise SystemExit(done.stdout[-3000:] + done.stderr[-3000:])
    progress = [line for line in done.stderr.replace("\r", "\n").splitlines() if "Quantizing experts" in line]
    return json.loads(measured[0]) | {"progress": progress[-1].strip() if progress else ""}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", choices=FORMATS, default="nvfp4")
    parser.add_argument("--gigabytes", type=float, default=2, help="of experts; as much again is packed beside them")
    parser.add_argument("--budget", default="5%", help="expert_budget")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve, arguments.budget)
        return
    with tempfile.TemporaryDirectory(prefix="dymoe-start-") as temporary:
        folder, stores = Path(temporary) / "checkpoint", Path(temporary) / "stores"
        folder.mkdir()
        stores.mkdir()
        size = write(folder, arguments.format, arguments.gigabytes)
        row = {"format": arguments.format, "checkpoint_bytes": size}
        for start in ("first", "second"):
            forget(Path(temporary))
            row[start] = measure(folder, stores, arguments.budget)
            print(f"{start} start: {json.dumps(row[start])}", flush=True)
            row["store_bytes"] = sum(path.stat().st_size for path in stores.rglob("*") if path.is_file())
    print(f"bound: {size} bytes read once; memory {row['store_bytes'] / GIB + 2:.2f} GiB")
    first = row["first"]
    print(f"measured: {first['read_bytes'] / size:.2f} times the checkpoint; {first['peak_bytes'] / GIB:.2f} GiB")
    if first["peak_bytes"] > row["store_bytes"] + 2 * GIB:
        raise SystemExit("the peak is above its bound")
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps(dict(sorted((results | {arguments.format: row}).items())), indent=1) + "\n")
    print(json.dumps(row))


if __name__ == "__main__":
    main()
