"""How fast is a model 2.5 times as large as memory, and how much does it read?

llama.cpp's mmap is compared with vllm-dymoe's two ways. The model is the shipped one with wide experts, so its routers
are real. Each server answers the same prompts in its own process: one request at a time with pauses, then eight at
once. All get the same memory for experts; ``limits`` bounds the page cache. Results go into results.json and into the
table of this folder's README.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
from limits import Limit, anonymous_bytes  # noqa: E402
from readme import markdown, put  # noqa: E402

TIMES = 2.5
TOKENS, PROMPT, REQUESTS, TOGETHER = 32, 160, 8, 16  # tokens of an answer; characters of a prompt
PAUSE_SECONDS = 0.2
POLICIES = {"llama.cpp, mmap": "llama", "dymoe, page cache": "cache", "dymoe, host_memory": "level"}
RESULTS = HERE / "results.json"
Ask = Callable[[Sequence[str]], Sequence[list[int] | str]]


def prompts() -> list[str]:
    """Return pieces of the held-out texts, on which the small model was not trained."""
    import model

    texts = [(model.SHIPPED / "heldout" / f"{name}.txt").read_text() for name in ("docs", "code", "arithmetic")]
    return [texts[n % 3][(first := 4000 * (n // 3)) : first + PROMPT] for n in range(1 + REQUESTS + TOGETHER)]


def read_bytes() -> int:
    """Return the bytes that this process has caused to be read from disks."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"])


def measure(
    ask: Ask, limit: Limit, begin: Callable[[], None], counts: Callable[[], dict[str, float]]
) -> dict[str, Any]:
    """Answer one request at a time with pauses, then eight at once."""
    texts, cached = prompts(), 0
    ask(texts[:8])  # allocates as much memory as it will need
    limit.hold()
    ask(texts[:1])
    found: dict[str, Any] = {}
    for name, batch, asked in (("one", 1, texts[1 : 1 + REQUESTS]), ("eight", 8, texts[1 + REQUESTS :])):
        begin()
        seconds, before, said = [], read_bytes(), []
        for first in range(0, len(asked), batch):
            time.sleep(PAUSE_SECONDS)
            started = time.perf_counter()
            said += ask(asked[first : first + batch])
            seconds.append(time.perf_counter() - started)
            cached = max(cached, limit.cached())
        tokens = TOKENS * len(asked)
        found[name] = {
            "tokens_per_second": TOKENS * batch / statistics.median(seconds),
            "read_bytes_per_token": (read_bytes() - before) / tokens,
            "answers": said,
            **counts(),
        }
    return found | {"anonymous_bytes": anonymous_bytes(), "experts_bytes": cached}


def llama(gguf: Path, memory: int) -> dict[str, Any]:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(gguf)
    # Otherwise it copies.
    params.load_mode, params.no_extra_bufts = xllamacpp.llama_load_mode.LLAMA_LOAD_MODE_MMAP, True
    params.n_ctx, params.n_parallel, params.warmup = 8 * 512, 8, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.n_gpu_layers, params.cache_ram_mib, params.verbosity = 0, 0, 0
    limit = Limit([gguf], memory)
    server = xllamacpp.Server(params)
    fixed = {"n_predict": TOKENS, "temperature": 0, "ignore_eos": True, "cache_prompt": False}

    def ask(texts: Sequence[str]) -> list[str]:
        with ThreadPoolExecutor(8) as pool:
            answers = pool.map(lambda text: server.handle_completions({"prompt": text, **fixed}), texts)
            return [answer["choices"][0]["text"] for answer in answers]

    return measure(ask, limit, lambda: None, dict)


def dymoe(packed: Path, options: dict[str, Any], cache: int | None) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    limit = Limit(sorted(packed.glob("dymoe-experts-*.safetensors")), cache)
    llm = LLM(
        str(packed), enforce_eager=True, max_model_len=512, max_num_seqs=8, enable_prefix_caching=False,
        additional_config={"dymoe": options},
    )  # fmt: skip
    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)

    def ask(texts: Sequence[str]) -> list[list[int]]:
        answers = llm.generate(list(texts), sampling, use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in answers]

    def begin() -> None:
        llm.collective_rpc("dymoe_reset_stats")

    def counts() -> dict[str, float]:
        (stats,) = llm.collective_rpc("dymoe_stats")
        return {
            "hits": stats["hits"] / (stats["hits"] + stats["misses"]),
            "disk_bytes_per_second": stats["disk_bytes"] / max(stats["disk_seconds"], 1e-9),
        }

    found = measure(ask, limit, begin, counts)
    (stats,) = llm.collective_rpc("dymoe_stats")
    return found | {"experts_bytes": found["experts_bytes"] + stats["peak_expert_bytes"]}


def child(policy: str, packed: Path, gguf: Path, memory: int) -> dict[str, Any]:
    if policy == "llama":
        return llama(gguf, memory)
    if policy == "cache":  # a quarter for slots, the rest for the page cache
        return dymoe(packed, {"host_store": "file", "expert_budget": memory // 4}, memory - memory // 4)
    return dymoe(packed, {"host_memory": memory}, None)


def rates(packed: Path) -> Any:
    """Measure the disk's rates, with reads of the same size, now."""
    from vllm_dymoe.cache.store import FileStore
    from vllm_dymoe.cache.store.disk import RATES

    (packed / RATES).unlink(missing_ok=True)
    store = FileStore(packed)
    try:
        return store.rates()
    finally:
        store.close()


def main() -> None:
    """Prepare, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=3072, help="of an expert; 3072 are 340 MB in all")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "dymoe-levels", help="for models")
    parser.add_argument("--only", nargs="*", choices=POLICIES.values(), default=list(POLICIES.values()))
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--report", action="store_true", help="measure nothing; write the table from results.json")
    arguments = parser.parse_args()
    if arguments.report:
        put(HERE / "README.md", "results", report(json.loads(RESULTS.read_text())))
        return
    import model  # needs gguf

    packed, gguf = model.write(arguments.work, arguments.width)
    if arguments.child:
        policy, memory, out = arguments.child
        Path(out).write_text(json.dumps(child(policy, packed, gguf, int(memory))))
        return
    experts = sum(path.stat().st_size for path in packed.glob("dymoe-experts-*.safetensors"))
    memory = int(experts / TIMES)
    disk = rates(packed)
    past = disk.direct.get(disk.depth, 0.0)
    print(
        f"experts {experts / 1e6:.0f} MB, memory for them {memory / 1e6:.0f} MB; the disk reads {past / 1e9:.2f} GB/s "
        f"past the page cache, {disk.depth} at once, {disk.cached / 1e9:.2f} through it"
    )
    found: dict[str, Any] = {}
    alone = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    alone |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # like llama.cpp
    for label, policy in POLICIES.items():
        out, log = arguments.work / f"{policy}-{arguments.width}.json", arguments.work / f"{policy}.log"
        if policy in arguments.only:
            command = [sys.executable, __file__, "--width", arguments.width, "--work", arguments.work]
            command += ["--child", policy, memory, out]
            with log.open("w") as file:
                done = subprocess.run([*map(str, command)], stdout=file, stderr=file, env=os.environ | alone)
            if done.returncode:
                raise SystemExit(f"{label} failed; see {log}")
        if out.is_file():  # of this call, or of an earlier one
            found[label] = json.loads(out.read_text())
    answers = {json.dumps(run["one"].pop("answers")) for label, run in found.items() if label.startswith("dymoe")}
    if len(answers) > 1:
        raise SystemExit("two policies of this plugin gave different answers; no report was written")
    for run in found.values():
        for part in (run["one"], run["eight"]):
            part.pop("answers", None)
    results = {
        "machine": f"{platform.machine()} CPU, {os.cpu_count()} cores",
        "source": f"benchmarks/memory_tiers/memory_tiers.py, {date.today()}",
        "experts_bytes": experts,
        "memory_bytes": memory,
        "disk_bytes_per_second": past,
        "runs": found,
    }
    text = report(results)
    print(text)
    if len(found) == len(POLICIES):
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        put(HERE / "README.md", "results", text)
    print(json.dumps(results))


def report(found: dict[str, Any]) -> str:
    """Return the table, in Markdown."""
    columns = ["one request, tokens/s", "read MB/token", "eight, tokens/s", "read MB/token"]
    columns += ["experts in memory, MB", "process, MB"]
    lines, disk = [], []
    for label, run in found["runs"].items():
        row = [label]
        for name in ("one", "eight"):
            part = run[name]
            row += [f"{part['tokens_per_second']:.1f}", f"{part['read_bytes_per_token'] / 1e6:.1f}"]
            if "hits" in part:
                rate = part["disk_bytes_per_second"]
                share = rate / found["disk_bytes_per_second"]
                requests = f"{name} request{'s' if name == 'eight' else ''}"
                disk.append([label, requests, f"{part['hits']:.1%}", f"{rate / 1e9:.2f}", f"{share:.0%}"])
        lines.append([*row, f"{run['experts_bytes'] / 1e6:.0f}", f"{run['anonymous_bytes'] / 1e6:.0f}"])
    said = (
        f"{found['experts_bytes'] / 1e6:.0f} MB of experts, {found['memory_bytes'] / 1e6:.0f} MB of memory for them; "
        f"{found['machine']}; the disk reads {found['disk_bytes_per_second'] / 1e9:.2f} GB/s ({found['source']})."
    )
    reads = ["", "load", "hits", "GB/s while reads are under way", "of the disk's rate"]
    return f"{markdown(['', *columns], lines)}\n\n{said}\n\n{markdown(reads, disk)}"


if __name__ == "__main__":
    main()
