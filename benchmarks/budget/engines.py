"""One system in one process: loads the model, answers the same prompts, writes what happened as JSON."""

import argparse
import itertools
import json
import os
import random
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import model

NEW_TOKENS, BATCH, PROMPT_LENGTH, SINGLES = 24, 16, 32, 3


class MemoryWatch:
    """The most memory of this process that the system could not take back: anonymous and shared pages."""

    def __init__(self) -> None:
        self.peak = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(0.1):
            lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
            self.peak = max(self.peak, sum(int(lines[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem")))

    def stop(self) -> int:
        """End watching. Returns bytes."""
        self._stop.set()
        self._thread.join()
        return self.peak


def make_llm(folder: Path, **settings: Any) -> Any:
    """An engine in this process."""
    from vllm import LLM

    return LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        max_model_len=512,
        max_num_seqs=BATCH,
        enable_prefix_caching=False,
        **settings,
    )


def answer(llm: Any, prompts: list[list[int]], label: str) -> dict[str, Any]:
    """Answer prompts together, step by step.

    Returns:
        Seconds to each request's first token, seconds of each step in which every request decoded, and their rate.
    """
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    engine = llm.llm_engine
    begin = time.perf_counter()
    for number, prompt in enumerate(prompts):
        engine.add_request(f"{label}-{number}", {"prompt_token_ids": prompt}, sampling)
    first: dict[str, float] = {}
    steps = []
    while engine.has_unfinished_requests():
        before, decoding = time.perf_counter(), len(first) == len(prompts)
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            first.setdefault(output.request_id, now - begin)
        if decoding and len(outputs) == len(prompts):
            steps.append(now - before)
    return {"ttft": list(first.values()), "steps": steps, "tokens_per_second": len(prompts) / statistics.median(steps)}


def serve(llm: Any, layers: int, label: str, *, batch: bool = True) -> dict[str, Any]:
    """The measurement itself, the same for every engine."""
    prompts = model.prompts(layers, BATCH, PROMPT_LENGTH)
    singles = [answer(llm, [prompt], f"{label}-single-{n}") for n, prompt in enumerate(prompts[:SINGLES])]
    together = answer(llm, prompts, f"{label}-batch") if batch else {"tokens_per_second": None}
    steps = sorted(step for single in singles for step in single["steps"])
    return {
        "ttft_ms": 1e3 * statistics.median(single["ttft"][0] for single in singles),
        "tpot_ms": 1e3 * statistics.median(steps),
        "tpot_p99_ms": 1e3 * steps[min(len(steps) - 1, int(0.99 * len(steps)))],
        "batch_1_tokens_per_second": 1 / statistics.median(steps),
        "batch_16_tokens_per_second": together["tokens_per_second"],
    }


def run_vllm(arguments: argparse.Namespace) -> dict[str, Any]:
    """vLLM with its own unquantized experts."""
    begin = time.perf_counter()
    llm = make_llm(arguments.bf16)
    ready = time.perf_counter() - begin
    answer(llm, model.prompts(arguments.layers, 1, 8), "warm-up")
    return {"ready_s": ready, "cases": {"all in memory": serve(llm, arguments.layers, "vllm")}}


def run_accelerate(arguments: argparse.Namespace) -> dict[str, Any]:
    """transformers with accelerate's disk offload: every layer's weights are read again for every token."""
    import tempfile

    import torch
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory(dir=arguments.bf16.parent) as offload, torch.inference_mode():
        begin = time.perf_counter()
        network = AutoModelForCausalLM.from_pretrained(
            arguments.bf16,
            dtype=torch.bfloat16,
            device_map={"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
            | {f"model.layers.{layer}": "disk" for layer in range(arguments.layers)},
            offload_folder=offload,
        )
        ready = time.perf_counter() - begin
        prompt = torch.tensor(model.prompts(arguments.layers, 1, PROMPT_LENGTH))
        stamps = []
        past, tokens = None, prompt
        begin = time.perf_counter()
        for _ in range(1 + arguments.accelerate_tokens):
            result = network(input_ids=tokens, past_key_values=past, use_cache=True)
            past, tokens = result.past_key_values, result.logits[:, -1:].argmax(-1)
            stamps.append(time.perf_counter() - begin)
    steps = [after - before for before, after in itertools.pairwise(stamps)]
    case = {
        "ttft_ms": 1e3 * stamps[0],
        "tpot_ms": 1e3 * statistics.median(steps),
        "tpot_p99_ms": 1e3 * max(steps),
        "batch_1_tokens_per_second": 1 / statistics.median(steps),
        "batch_16_tokens_per_second": None,
    }
    return {"ready_s": ready, "cases": {"layers on disk": case}}


def run_dymoe(arguments: argparse.Namespace) -> dict[str, Any]:
    """This plugin: one start, then every budget by resizing while it runs."""
    bare = {name: bare_read(arguments.packed, cold=name == "disk") for name in ("page cache", "disk")}
    loading = loading_bandwidth(arguments.packed)
    begin = time.perf_counter()
    options = {"expert_budget": arguments.budgets[-1]}
    llm = make_llm(arguments.packed, additional_config={"dymoe": options})
    ready = time.perf_counter() - begin
    runtime = llm.llm_engine.vllm_config.quant_config.loaded_model().runtime
    cases = {}
    for budget in arguments.budgets:
        cases[budget] = dymoe_case(llm, runtime, arguments.layers, budget)
        print(budget, json.dumps(cases[budget]), flush=True)
    tight = arguments.budgets[1]
    with reads_from_disk(runtime.store):
        cases[f"{tight}, store on disk"] = dymoe_case(llm, runtime, arguments.layers, tight, batch=False)
    return {"ready_s": ready, "cases": cases, "bare_read": bare, "loading": loading}


def dymoe_case(llm: Any, runtime: Any, layers: int, budget: str, *, batch: bool = True) -> dict[str, Any]:
    """Resize, warm up, measure."""
    runtime.resize(runtime.minimum_budget if budget == "minimum" else budget)
    label = f"dymoe-{budget}-{random.random()}"
    for number, prompt in enumerate(model.prompts(layers, 4, PROMPT_LENGTH)):
        answer(llm, [prompt], f"{label}-warm-up-{number}")
    if budget == "100%":  # every expert is there before anything is timed
        answer(llm, model.prompts(layers, BATCH, PROMPT_LENGTH), f"{label}-fill")
    runtime.reset_stats()
    case = serve(llm, layers, label, batch=batch)
    stats = runtime.stats()
    # Decode of one request at a time, for the link: prefill and batches have other proportions.
    runtime.reset_stats()
    begin = time.perf_counter()
    single = answer(llm, model.prompts(layers, 5, PROMPT_LENGTH)[-1:], f"{label}-link")
    link = runtime.stats()
    seconds = time.perf_counter() - begin
    runtime.check_integrity()
    moved = sum(link.bytes_moved.values())
    return case | {
        "hit_rate": stats.hit_rate,
        "bytes_moved": sum(stats.bytes_moved.values()),
        "budget_bytes": stats.budget_bytes,
        "peak_expert_bytes": stats.peak_expert_bytes,
        "decode": {
            "seconds": seconds,
            "tpot_ms": 1e3 * statistics.median(single["steps"]),
            "bytes_moved": moved,
            "exposed_wait_s": link.exposed_wait_seconds,
            "hit_rate": link.hit_rate,
        },
    }


def shuffled_keys(store: Any) -> Iterator[Any]:
    """Blobs in a random order, as decode asks for them."""
    from vllm_dymoe.experts.layout import all_keys

    keys = list(all_keys(store.experts))
    random.Random(0).shuffle(keys)
    yield from keys


class reads_from_disk:  # noqa: N801 - a context manager
    """Drop what is about to be read from the page cache, so that each read is the disk's."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __enter__(self) -> None:
        read_into = self._store.read_into

        def cold(key: Any, destination: Any, **settings: Any) -> None:
            extent = self._store._extents[key.layer][key.bits]
            offset = extent.offset + key.expert * extent.nbytes
            os.posix_fadvise(self._store._files[key.layer], offset, extent.nbytes, os.POSIX_FADV_DONTNEED)
            read_into(key, destination, **settings)

        self._store.read_into = cold

    def __exit__(self, *_: Any) -> None:
        del self._store.read_into


def bare_read(folder: Path, *, cold: bool) -> float:
    """Bytes per second of reading blobs of this store and doing nothing else, by the faster of one and two threads."""
    import contextlib

    import torch

    from vllm_dymoe.store import FileStore

    store = FileStore(folder, verify=False)
    keys = list(shuffled_keys(store))[: 300 if cold else 1000]
    nbytes = max(fmt.nbytes for fmt in store.experts.formats.values())
    arena = torch.zeros(128, nbytes, dtype=torch.uint8)  # slots, as the cache has them, and not one warm buffer
    rates = []
    with reads_from_disk(store) if cold else contextlib.nullcontext():
        for threads in (1, 2):
            with ThreadPoolExecutor(threads) as pool:
                if not cold:
                    list(
                        pool.map(
                            lambda numbered: store.read_into(numbered[1], arena[numbered[0] % 128]), enumerate(keys)
                        )
                    )
                begin = time.perf_counter()
                list(pool.map(lambda numbered: store.read_into(numbered[1], arena[numbered[0] % 128]), enumerate(keys)))
                rates.append(len(keys) * nbytes / (time.perf_counter() - begin))
    store.close()
    return max(rates)


def loading_bandwidth(folder: Path) -> dict[str, float]:
    """Bytes per second of loading our format into host memory, and of a bare copy of the same files."""
    import torch

    from vllm_dymoe.store import FileStore, MemoryStore

    files = sorted(folder.glob("dymoe-*.safetensors")) or sorted(folder.glob("*experts*.safetensors"))
    total = sum(file.stat().st_size for file in files)

    def bare() -> float:
        begin = time.perf_counter()
        kept = []
        for file in files:
            buffer = torch.empty(file.stat().st_size, dtype=torch.uint8)
            with file.open("rb", buffering=0) as source:
                view, done = buffer.numpy().data, 0
                while done < len(view):
                    done += source.readinto(view[done : done + (64 << 20)])
            kept.append(buffer)
        return total / (time.perf_counter() - begin)

    def ours() -> float:
        begin = time.perf_counter()
        store = FileStore(folder)
        memory = MemoryStore.from_files(store)
        seconds = time.perf_counter() - begin
        store.close()
        memory.close()
        return total / seconds

    bare()  # from here on the page cache has the files
    pairs = [(bare(), ours()) for _ in range(3)]
    return {
        "bare_copy": statistics.median(b for b, _ in pairs),
        "ours": statistics.median(o for _, o in pairs),
        "ratio": statistics.median(o / b for b, o in pairs),
    }


SYSTEMS = {"vLLM": run_vllm, "accelerate": run_accelerate, "dymoe": run_dymoe}


def main() -> None:
    """Run the named system."""
    parser = argparse.ArgumentParser()
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("--bf16", type=Path, required=True)
    parser.add_argument("--packed", type=Path, required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--budgets", nargs="+", required=True)
    parser.add_argument("--accelerate-tokens", type=int, default=3)
    parser.add_argument("--result", type=Path, required=True)
    arguments = parser.parse_args()
    watch = MemoryWatch()
    result = SYSTEMS[arguments.system](arguments)
    result["peak_memory_bytes"] = watch.stop()
    arguments.result.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
