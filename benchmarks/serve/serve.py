"""Is what ``vllm-dymoe serve`` chooses the fastest, and as fast as it says?

    python benchmarks/serve/serve.py speeds [MODEL ...]    # a minute for each engine, on two quiet cores
    python benchmarks/serve/serve.py costs                 # five minutes; writes plan/costs.json
    python benchmarks/serve/serve.py starts                # five minutes, 15 GB of disk, 10 GiB of memory
    python benchmarks/serve/serve.py prefixes              # five minutes
    python benchmarks/serve/serve.py page                  # the tables of README.md

``speeds`` measures every combination of the options that are open on a CPU, with `vllm-dymoe bench`, and the machine
before each. What is chosen for a number of requests is what ``serve --max-num-seqs`` chooses for them. Medians of
--rounds count. A run ends after --minutes, and the next one continues it. ``costs`` measures vLLM's own work in a step.
``starts`` and ``prefixes`` measure how long starts and prompts take. Results are kept in results.json.
"""

import argparse
import itertools
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(HERE)]

from models import LAYERS, NAMES, SHALLOW, WIDE, folder_of  # noqa: E402
from readme import markdown, put  # noqa: E402

from vllm_dymoe.bench.cases import Case, Subject, Workload  # noqa: E402
from vllm_dymoe.bench.prefixes import CASES, DECODING, measure_prefixes, wrong  # noqa: E402
from vllm_dymoe.bench.prompts import PromptSet, read_prompts  # noqa: E402
from vllm_dymoe.bench.run import measure  # noqa: E402
from vllm_dymoe.cache.host_cache import HostCache  # noqa: E402
from vllm_dymoe.cache.store import FileStore, Manifest, whole_host_cache  # noqa: E402
from vllm_dymoe.cache.store.writer import StoreWriter  # noqa: E402
from vllm_dymoe.plan.machine import Machine, Probe, machine_here  # noqa: E402
from vllm_dymoe.plan.start import Asked, Model, Planner, choose, read_model  # noqa: E402
from vllm_dymoe.quantize.dummy import random_store  # noqa: E402

RESULTS = HERE / "results.json"
COSTS = ROOT / "vllm_dymoe" / "plan" / "costs.json"
LENGTH, PROMPT, TOKENS = 512, 64, 32  # of a request at most, of a random prompt, of an answer
BATCHES, REQUESTS, WARM_UP = (1, 4, 16), 16, 8  # the shipped set has 24 prompts
PLACES: tuple[dict[str, Any], ...] = (
    {"expert_budget": "top-k", "host_store": "pinned"},
    {"expert_budget": "auto", "host_store": "auto"},
)
QUOTED = 24  # layers of Qwen3-30B-A3B's sizes whose second start is measured: what fits into memory here
PAUSE = 6.0  # seconds in which the system takes back free memory
MOST = 1.2  # filling memory may take this many times as long as reading the bytes once


class Results:
    """results.json, by part."""

    def __init__(self) -> None:
        self.of: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}

    def keep(self, part: str, value: Any) -> None:
        """Replace a part, and write the file."""
        self.of[part] = value
        RESULTS.write_text(json.dumps(self.of, indent=1) + "\n")


def open_options(model: Model) -> list[dict[str, Any]]:
    """Return every combination of the options that are open on a CPU."""
    precisions: list[dict[str, Any]] = [{}] if "high" in model.fixed else [{"high": 4}, {"high": 8}]
    dense: list[dict[str, Any]] = [{}] if model.quantized else [{"dense": 16}, {"dense": 8}]
    return [{**high, **of, **place} for high in precisions for of in dense for place in PLACES]


def workload(name: str) -> tuple[PromptSet, Workload]:
    """Return real prompts, or random ones for a model without a tokenizer."""
    prompts = read_prompts(f"random:{PROMPT}" if name == WIDE else "shipped")
    return prompts, Workload(prompts.digest, prompts.name, prompts.is_random, REQUESTS, WARM_UP, TOKENS)


def speeds(name: str, work: Path, results: Results, rounds: int, end: float) -> bool:
    """Measure a model's combinations until ``end``; return whether all are measured.

    The machine is measured before each engine, and the plan that an engine is compared with is for that machine: what
    others leave of a virtual machine changes from minute to minute.
    """
    folder = folder_of(name, work)
    model, (prompts, asked) = read_model(str(folder)), workload(name)
    options = open_options(model)
    engines: dict[str, list[dict[str, Any]]] = {}  # budgets change while an engine runs
    for of in options:
        engines.setdefault(json.dumps({key: of[key] for key in of if key != "expert_budget"}), []).append(of)
    runs: dict[str, list[Mapping[str, Mapping[str, float]]]] = {json.dumps(of): [] for of in options}
    complete, machines = True, list[Machine]()
    for number, (place, (given, of_engine)) in itertools.product(range(rounds), enumerate(engines.items())):
        known = work / "rows" / name / f"{number}-{place}"
        if time.time() > end and not (known / "rows.jsonl").is_file():
            complete = False
            continue
        machines.append(machine_here(Probe.of(work, model.shape), known / "machine.json"))
        engine = {"max_model_len": LENGTH}
        cases = [Case(str(folder), Subject(given, json.loads(given)), of["expert_budget"], batch, asked, engine)
                 for of in of_engine for batch in BATCHES]  # fmt: skip
        found = [1e3 / row["measured"]["tpot_ms"]["median"] for row in measure(cases, prompts, known)]
        for at, of in enumerate(of_engine):
            mine = found[at * len(BATCHES) : (at + 1) * len(BATCHES)]
            measured = dict(zip(map(str, BATCHES), mine, strict=True))
            runs[json.dumps(of)].append({"measured": measured, "planned": planned(machines[-1], model, of)})
    if not machines:
        return False
    chosen = {batch: chosen_options(machines[0], model, batch) for batch in BATCHES}
    kept = [
        {"options": of, "runs": runs[json.dumps(of)],
         "chosen_for": [batch for batch in BATCHES if all(chosen[batch][key] == value for key, value in of.items())]}
        for of in options if runs[json.dumps(of)]
    ]  # fmt: skip
    told = {"machine": machines[0].model_dump(), "rows": kept}
    results.keep("speeds", {**results.of.get("speeds", {}), name: told})
    return complete


def chosen_options(machine: Machine, model: Model, requests: int) -> dict[str, Any]:
    """Return all options of ``vllm-dymoe serve MODEL --max-num-seqs REQUESTS``."""
    start = choose(machine, model, Asked(max_model_len=LENGTH, max_num_seqs=requests))
    return {"high": 4, "dense": 16, "expert_budget": "auto", "host_store": "auto", **start.options}


def planned(machine: Machine, model: Model, options: Mapping[str, Any]) -> dict[str, float]:
    """Return the planned tokens per second of a request, by concurrent requests."""
    given = {key: value for key, value in options.items() if key != "expert_budget"}
    planner = Planner(machine, model, Asked(given, max_model_len=LENGTH))
    setup, length, _ = planner.chosen()
    found = {}
    for batch in BATCHES:
        plan = planner.tried(setup, length, batch, PROMPT + TOKENS // 2)
        assert plan is not None
        found[str(batch)] = 1 / plan.choice.tpot
    return found


def costs(work: Path, results: Results, rounds: int) -> None:
    """Measure vLLM's own work in a step, and write it into the plan's costs.json.

    It is counted in small operations. A model and its first layers are measured in turns. What a step takes in addition
    to the planned products grows with layers and requests, and has a part that is always there: the three are fitted,
    relative to the step's seconds.
    """
    prompts, asked = workload("shipped")
    given = {"high": 4, "dense": 16, "host_store": "pinned"}
    lines, wanted, rows = [], [], []
    for number, name in itertools.product(range(rounds), ("shipped", SHALLOW)):
        folder, known = folder_of(name, work), work / "rows" / "costs" / f"{name}-{number}"
        model = read_model(str(folder))
        machine = machine_here(Probe.of(work, model.shape), known / "machine.json")
        subject, engine = Subject(name, given), {"max_model_len": LENGTH}
        cases = [Case(str(folder), subject, "top-k", batch, asked, engine) for batch in BATCHES]
        free = planned(machine.model_copy(update={"operation": 1e-15}), model, {**given, "expert_budget": "top-k"})
        for batch, row in zip(BATCHES, measure(cases, prompts, known), strict=True):
            seconds, products = 1e-3 * row["measured"]["tpot_ms"]["median"], 1 / free[str(batch)]
            lines.append([share * machine.operation / seconds for share in (model.shape.moe_layers, 1, batch)])
            wanted.append((seconds - products) / seconds)
            rows.append({"model": name, "layers": model.shape.moe_layers, "batch": batch, "seconds": seconds,
                         "products": products, "operation": machine.operation})  # fmt: skip
    found = dict(zip(("layer", "step", "request"), np.linalg.lstsq(np.array(lines), np.array(wanted))[0], strict=True))
    counts = {name: max(0, round(float(value))) for name, value in found.items()}
    said = json.loads(COSTS.read_text())
    said["cpu"], said["sources"]["cpu"] = (
        counts,
        "python benchmarks/serve/serve.py costs, in operations of plan.machine",
    )
    COSTS.write_text(json.dumps(said, indent=1) + "\n")
    results.keep("costs", {"counts": counts, "rows": rows})


def starts(work: Path, results: Results) -> None:
    """Measure first and second starts of two models."""
    found = {}
    for name in ("shipped", WIDE):
        store = work / "store" / name
        subprocess.run(["rm", "-rf", str(store)], check=True)
        skip = ", skip_tokenizer_init=True" if name == WIDE else ""
        program = (
            "import sys; from vllm import LLM, SamplingParams; llm = LLM(sys.argv[1], quantization='dymoe', "
            f"max_model_len={LENGTH}, enforce_eager=True{skip}, additional_config={{'dymoe': {{'high': 4, "
            "'expert_budget': 'top-k', 'host_store': 'pinned'}}); llm.generate([{'prompt_token_ids': [5, 6, 7]}], "
            "SamplingParams(max_tokens=1, detokenize=False))"
        )
        environment = os.environ | {
            "DYMOE_STORE_DIR": str(store), "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"
        }  # fmt: skip
        found[name] = []
        for _ in range(2):
            begin = time.perf_counter()
            command = [sys.executable, "-c", program, str(folder_of(name, work))]
            done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
            said = re.search(r"Experts were ready after ([\d.]+) s", done.stdout + done.stderr)
            if said is None:
                raise SystemExit(done.stderr[-3000:])
            found[name].append({"experts": float(said[1]), "engine": time.perf_counter() - begin})
            forget(store)
    results.keep("starts", {"cores": os.cpu_count(), "models": found, "weights": _weights(work)})


def _weights(work: Path) -> dict[str, int]:
    """Return the number of the experts' weights, by model."""
    shapes = {name: read_model(str(folder_of(name, work))).shape for name in ("shipped", WIDE)}
    return {name: shape.moe_layers * shape.experts * shape.expert_weights for name, shape in shapes.items()}


def forget(folder: Path) -> None:
    """Drop a folder's files from the page cache."""
    for path in folder.rglob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def fills(work: Path, results: Results) -> None:
    """Measure filling host memory in a second start, and reading its bytes once.

    Filled is once memory that the process has already, and once memory that it takes from the system meanwhile, as a
    start does. The three take turns, with a pause in which the system can take back what the one before has freed.
    """
    folder = work / "store" / "sizes"
    model = read_model(str(folder_of(WIDE, work)))
    experts = model.shape.packed((4,))
    experts = type(experts)(tuple(range(QUOTED)), experts.num_experts, experts.top_k, experts.formats)
    if not (folder / "dymoe_experts.json").is_file():
        random_store(experts, StoreWriter(folder, Manifest(experts, "dummy", "sizes")), 0).close()
    parts = {"reads": read_once, "fills_touched": partial(fill, touched=True), "fills": partial(fill, touched=False)}
    rows = []
    for _ in range(3):
        seconds = {}
        for name, part in parts.items():
            forget(folder)
            time.sleep(PAUSE)
            seconds[name] = part(folder)
        rows.append(seconds)
    results.keep("fills", {"layers": QUOTED, "nbytes": experts.stored_nbytes, "cores": os.cpu_count(), "rows": rows})


def _seconds(action: Callable[[], object]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def read_once(folder: Path) -> float:
    """Return the seconds of reading a store past the page cache, in large pieces."""
    from concurrent.futures import ThreadPoolExecutor

    from vllm_dymoe.cache.pages import map_bytes
    from vllm_dymoe.cache.store.disk import read_direct, set_direct

    piece, files = 4 << 20, []
    for path in sorted(folder.glob("*.safetensors")):
        file = os.open(path, os.O_RDONLY)
        set_direct(file, direct=True)
        files.append((file, os.fstat(file).st_size))
    buffers = [map_bytes(piece) for _ in range(8)]

    def read(number: int) -> None:
        for file, size in files:
            for begin in range(number * piece, size, 8 * piece):
                read_direct(file, buffers[number], begin)

    with ThreadPoolExecutor(8) as pool:
        seconds = _seconds(lambda: list(pool.map(read, range(8))))
    for file, _ in files:
        os.close(file)
    return seconds


def fill(folder: Path, *, touched: bool) -> float:
    """Return the seconds of filling host memory, as ``host_store`` "pinned" does.

    Args:
        touched: whether the process has the memory before; otherwise filling takes it from the system, as a start does.
    """
    store = FileStore(folder)
    cache = HostCache(store, whole_host_cache(store.experts), fills=not touched)
    seconds = _seconds(cache.fill)
    cache.close()
    return seconds


def prefixes(work: Path, results: Results) -> None:
    """Measure first tokens at three budgets, in memory and behind an emulated link."""
    prompts, found = read_prompts("shipped"), {}
    for name, options in (("in memory", {}), ("behind a link of 2 GB/s", {"link_gbps": 2.0})):
        engine = {"max_model_len": 768, "max_num_batched_tokens": 256}
        rows = measure_prefixes(
            str(folder_of("shipped", work)), prompts, ("25%", "50%", "100%"), options, engine, 640,
            work / "prefixes" / str(len(found)),
        )  # fmt: skip
        kept = "budget", "length", "chunk", "decoding", "measured"
        found[name] = [{key: row[key] for key in kept} for row in rows]
    results.keep("prefixes", found)


def page(results: Results) -> None:
    """Write the tables."""
    of = results.of
    cores = f"{os.cpu_count()} cores of {platform.machine()}"
    if "speeds" in of:
        put(HERE / "README.md", "speeds", _speeds(of["speeds"]))
    if "costs" in of:
        put(HERE / "README.md", "costs", _costs(of["costs"]))
    if "starts" in of and "fills" in of:
        put(HERE / "README.md", "starts", _starts(of["starts"], of["fills"], cores))
    if "fills" in of:
        put(HERE / "README.md", "fills", _fills(of["fills"]))
    if "prefixes" in of:
        put(HERE / "README.md", "prefixes", _prefixes(of["prefixes"]))


def _median(row: Mapping[str, Any], batch: int, value: Callable[[float, float], float]) -> float:
    """Return the median over a row's runs of a function of two speeds.

    They are the planned and the measured tokens per second.
    """
    return statistics.median(value(run["planned"][str(batch)], run["measured"][str(batch)]) for run in row["runs"])


def _speeds(of: Mapping[str, Any]) -> str:
    summary, plans, texts = [], [], []
    heads = [f"{batch} at once" for batch in BATCHES]
    for name in (name for name in NAMES if name in of):
        rows = of[name]["rows"]
        if {batch for row in rows for batch in row["chosen_for"]} != set(BATCHES):
            continue  # an incomplete run

        def speed(row: Mapping[str, Any], batch: int) -> float:
            return _median(row, batch, lambda _, measured: measured)

        def both(row: Mapping[str, Any], batch: int) -> str:
            return f"{_median(row, batch, lambda planned, _: planned):.0f}, {speed(row, batch):.0f}"

        chosen = [next(row for row in rows if batch in row["chosen_for"]) for batch in BATCHES]
        pairs = list(zip(chosen, BATCHES, strict=True))
        shares = [f"{speed(mine, batch) / max(speed(row, batch) for row in rows):.0%}" for mine, batch in pairs]
        summary.append([name, str(len(rows)), *shares])
        ratios = [_median(mine, batch, lambda planned, measured: planned / measured) for mine, batch in pairs]
        plans.append([name, *(f"{both(*pair)} ({ratio:.2f})" for pair, ratio in zip(pairs, ratios, strict=True))])
        lines = [
            [f"`{json.dumps(row['options'])}`"]
            + [both(row, batch) + " **chosen**" * (batch in row["chosen_for"]) for batch in BATCHES]
            for row in rows
        ]
        texts.append(f"{name}: planned, measured tokens/s of each request\n\n{markdown(['options', *heads], lines)}")
    first = markdown(["model", "combinations", *heads], summary)
    second = markdown(["model", *heads], plans)
    return (
        f"The measured speed of what is chosen, as a share of the best combination's:\n\n{first}\n\n"
        f"Planned and measured tokens/s of each request with what is chosen, and their ratio:\n\n{second}\n\n"
        "<details><summary>Every combination</summary>\n\n" + "\n\n".join(texts) + "\n\n</details>"
    )


def _costs(of: Mapping[str, Any]) -> str:
    counts, rows = of["counts"], of["rows"]
    lines = []
    for name, batch in sorted(
        {(row["model"], row["batch"]) for row in rows}, key=lambda one: (one[0] == SHALLOW, one[1])
    ):
        mine = [row for row in rows if (row["model"], row["batch"]) == (name, batch)]
        own = counts["layer"] * mine[0]["layers"] + counts["step"] + counts["request"] * batch
        fitted = statistics.median(row["products"] + own * row["operation"] for row in mine)
        measured = statistics.median(row["seconds"] for row in mine)
        products = statistics.median(row["products"] for row in mine)
        lines.append(
            [f"{mine[0]['layers']}", str(batch), *(f"{1e3 * value:.2f}" for value in (products, fitted, measured))]
        )
    said = ", ".join(f"{count} for each {name}" for name, count in counts.items())
    heads = ["MoE layers", "requests", "products, ms", "with vLLM's own work, ms", "measured, ms"]
    return f"Operations: {said}.\n\n{markdown(heads, lines)}"


def _starts(of: Mapping[str, Any], fills: Mapping[str, Any], cores: str) -> str:
    weights = fills["layers"] * of["weights"][WIDE] / LAYERS
    read = weights / statistics.median(row["reads"] for row in fills["rows"])  # weights per second
    lines = []
    for name, (first, second) in of["models"].items():
        rate = of["weights"][name] / first["experts"] / of["cores"]
        label = f"{LAYERS} layers of Qwen3-30B-A3B's sizes" if name == WIDE else name
        lines.append([label, f"{first['experts']:.1f}", f"{second['experts']:.1f}", f"{first['engine']:.0f}",
                      f"{second['engine']:.0f}", f"{of['weights'][name] / 16 / rate:.1f}",
                      f"{of['weights'][name] / read:.1g}"])  # fmt: skip
    heads = [cores, "experts ready, first start, s", "second", "first answer, first start, s", "second",
             "experts ready with 16 cores, by count, first start, s", "second"]  # fmt: skip
    return markdown(heads, lines)


def _fills(of: Mapping[str, Any]) -> str:
    names = "reads", "fills_touched", "fills"
    lines = [[f"{row[name]:.2f}" for name in names] for row in of["rows"]]
    heads = [
        "read once past the page cache, s",
        "second start, memory taken before, s",
        "second start, memory taken meanwhile, s",
    ]
    touched, whole = (statistics.median(row[name] / row["reads"] for row in of["rows"]) for name in names[1:])
    return (
        f"{of['layers']} layers, {of['nbytes'] / 1e9:.1f} GB:\n\n{markdown(heads, lines)}\n\n"
        f"Reading and verifying take {touched:.2f} times as long as reading once (median); the aim is {MOST}. With the "
        f"memory that a start takes from the system meanwhile, it is {whole:.2f} times: this virtual machine returns "
        "free memory to its host, and what comes back costs more than reading "
        "([LOG.md](../LOG.md#filling-memory-at-start-without-touching-it-before))."
    )


def _prefixes(of: Mapping[str, Any]) -> str:
    lines = [
        [f"{where}, {row['budget']}", *(f"{1e3 * row['measured'][name]:.1f}" for name in (*CASES, *DECODING)),
         ", ".join(wrong(row)) or "nothing"]
        for where, rows in of.items() for row in rows
    ]  # fmt: skip
    heads = ["experts, budget", *(f"{name}, ms" for name in (*CASES, *DECODING)), "slower than it should be"]
    (some, *_) = [row for rows in of.values() for row in rows]
    return f"Prompts of {some['length']} tokens in chunks of {some['chunk']}:\n\n{markdown(heads, lines)}"


def main() -> None:
    """Measure a part, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("speeds", "costs", "starts", "fills", "prefixes", "page", "models"))
    parser.add_argument("models", nargs="*", default=NAMES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=1e3)
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "serve")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    results, end = Results(), time.time() + 60 * given.minutes
    if given.part == "models":
        print([str(folder_of(name, given.work)) for name in given.models])
    elif given.part == "speeds":
        left = [name for name in given.models if not speeds(name, given.work, results, given.rounds, end)]
        print("complete" if not left else f"left: {', '.join(left)}")
    elif given.part == "costs":
        costs(given.work, results, given.rounds)
    elif given.part != "page":
        {"starts": starts, "fills": fills, "prefixes": prefixes}[given.part](given.work, results)
    page(results)


if __name__ == "__main__":
    main()
