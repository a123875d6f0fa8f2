"""Is what ``vllm-dymoe serve`` chooses the fastest here, as fast as it says, and how long do starts take?

    python benchmarks/serve/serve.py [MODEL] [--rounds 3]     # 15 minutes of two quiet cores for the shipped model

Every combination of what is open on a CPU is served and measured in turns, by `vllm-dymoe bench`. Starts are measured
with an empty cache, and again. Writes results.json and the tables of README.md here.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / "benchmarks")]

from readme import markdown, put  # noqa: E402

from vllm_dymoe.bench.cases import Case, Subject, Workload  # noqa: E402
from vllm_dymoe.bench.prompts import read_prompts  # noqa: E402
from vllm_dymoe.bench.run import measure  # noqa: E402
from vllm_dymoe.options import store_root  # noqa: E402
from vllm_dymoe.plan.machine import Machine, Probe, machine_here  # noqa: E402
from vllm_dymoe.plan.start import Asked, Model, Planner, choose, read_model  # noqa: E402

LENGTH, TOKENS, REQUESTS, WARM_UP = 512, 64, 12, 4
OPEN = [
    {"high": high, "dense": dense, **where}
    for high in (4, 8)
    for dense in (16, 8)
    for where in (
        {"expert_budget": "top-k", "host_store": "pinned"},
        {"expert_budget": "auto", "host_store": "auto"},
    )
]  # what is good enough, see GOOD_ENOUGH of plan.choice


def here(model: Model, work: Path) -> Machine:
    """This machine, measured now."""
    shape = model.shape
    probe = Probe(str(store_root(None)), shape.hidden, shape.intermediate, shape.moe_layers * shape.experts)
    return machine_here(probe, work / "machines.json", retune=True)


def planned(machine: Machine, model: Model, options: dict[str, object]) -> float:
    """Tokens per second that are planned for some options."""
    asked = {key: value for key, value in options.items() if key != "expert_budget"}
    planner = Planner(machine, model, Asked(asked, max_model_len=LENGTH))
    return 1 / planner.chosen()[2].choice.tpot


def speeds(model: Model, rounds: int, work: Path) -> dict[str, object]:
    """Return what is planned and measured for each combination.

    The best of some rounds counts, because others use the machine.
    """
    machine, prompts, found = here(model, work), read_prompts("shipped"), []
    chosen = dict(choose(machine, model, Asked(max_model_len=LENGTH)).options)
    settled = {"high": 4, "dense": 16, "host_store": "auto", **chosen}
    workload = Workload(prompts.digest, prompts.name, False, REQUESTS, WARM_UP, TOKENS)
    for number in range(rounds):
        cases = []
        for options in OPEN:
            given = {key: value for key, value in options.items() if key != "expert_budget"}
            subject = Subject(json.dumps(options), given)
            cases.append(Case(model.name, subject, options["expert_budget"], 1, workload, {"max_model_len": LENGTH}))
        rows = measure(cases, prompts, work / f"round-{number}")
        found.append([1e3 / row["measured"]["tpot_ms"]["median"] for row in rows])
    measured = [max(of) for of in zip(*found, strict=True)]
    rows = [
        {"options": options, "planned": planned(machine, model, options), "measured": speed,
         "chosen": all(settled.get(key) == value for key, value in options.items())}
        for options, speed in zip(OPEN, measured, strict=True)
    ]  # fmt: skip
    (mine,) = [row for row in rows if row["chosen"]]
    best = max(measured)
    return {"machine": machine.model_dump(), "chosen": chosen, "rows": rows, "share_of_best": mine["measured"] / best,
            "planned_to_measured": mine["planned"] / mine["measured"]}  # fmt: skip


def starts(model: Model) -> list[dict[str, float]]:
    """Return the seconds of a first and a second start.

    They are the seconds until experts are ready, and until an engine answers.
    """
    program = (
        "import sys; from vllm import LLM, SamplingParams; llm = LLM(sys.argv[1], quantization='dymoe', "
        f"max_model_len={LENGTH}, enforce_eager=True); llm.generate(['a'], SamplingParams(max_tokens=1))"
    )
    found = []
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "DYMOE_STORE_DIR": folder, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"
        }  # fmt: skip
        for _ in range(2):
            begin = time.perf_counter()
            command = [sys.executable, "-c", program, model.name]
            done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
            said = re.search(r"Experts were ready after ([\d.]+) s", done.stdout + done.stderr)
            assert said is not None
            found.append({"experts": float(said[1]), "engine": time.perf_counter() - begin})
    return found


def report(results: dict[str, object]) -> None:
    """Write the tables."""
    of = results["speeds"]
    lines = [
        [f"`{json.dumps(row['options'])}`" + " **chosen**" * row["chosen"], f"{row['planned']:.0f}",
         f"{row['measured']:.0f}"]
        for row in of["rows"]
    ]  # fmt: skip
    text = markdown(["options", "planned", "measured"], lines)
    text += (
        f"\n\nTokens per second of one request. What was chosen has {of['share_of_best']:.0%} of the best measured "
        f"speed; planned is {of['planned_to_measured']:.2f} of measured."
    )
    put(HERE / "README.md", "speeds", text)
    first, second = results["starts"]
    rows = [["first start", f"{first['experts']:.1f}", f"{first['engine']:.0f}"],
            ["second start", f"{second['experts']:.1f}", f"{second['engine']:.0f}"]]  # fmt: skip
    cores = f"{results['cores']} cores of {platform.machine()}"
    put(HERE / "README.md", "starts", markdown([cores, "experts ready, s", "first answer, s"], rows))


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="benchmarks/tiny_moe/model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", type=Path, help="folder of rows; the same one to go on")
    given = parser.parse_args()
    model = read_model(given.model)
    with tempfile.TemporaryDirectory() as temporary:
        work = given.work or Path(temporary)
        results = {"model": given.model, "cores": os.cpu_count(), "speeds": speeds(model, given.rounds, work),
                   "starts": starts(model)}  # fmt: skip
    (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    report(results)


if __name__ == "__main__":
    main()
