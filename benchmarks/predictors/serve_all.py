"""What each predictor is worth: the shipped model answers single requests over an emulated link, with each of them.

The link is as slow beside this machine's computation as PCIe 4 is beside an RTX 3090's (../hardware.py).
Settings of memory: a quarter, a half and three quarters of the experts, as a cache; and as many slots as one token uses
experts, where nothing stays, which is DuoServe-MoE's own setting.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))

LINK = "PCIe 4 x16"
NEW_TOKENS = 32
REQUESTS = 2  # of each domain
SLOTS = "one token's experts"
SCARCE, CACHES = "25%", ("25%", "50%", "75%")
SYSTEM = "compared alone"  # in vllm_dymoe/bench/systems.py


def _alone(ahead: str) -> dict[str, Any]:
    return {"expert_budget": "top-k", "system": SYSTEM, "system_options": {"ahead": ahead}}


def _kept(ahead: str) -> dict[str, Any]:
    return {"system": "compared", "system_options": {"ahead": ahead}}


EVERY_CACHE: dict[str, dict[str, Any]] = {
    "on-demand": {"system": "on-demand"},
    "none": {"system_options": {"look_ahead": 0}},
    "next-gate": {},
    "trained": {"predictor": "FILE"},
    "oracle": _kept("popularity"),
}
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    **dict.fromkeys(CACHES, EVERY_CACHE),
    SCARCE: {"layer": _kept("layer"), "popularity": _kept("popularity"), **EVERY_CACHE},
    SLOTS: {
        "on-demand": {"expert_budget": "top-k", "system": "on-demand"},
        "layer": _alone("layer"),
        "popularity": _alone("popularity"),
        "next-gate": _alone("next gate"),
        "duoserve": {"system": "duoserve", "predictor": "FILE"},
        "oracle": _alone("popularity"),
    },
}


def serve_all(model: Path, predictor: Path, work: Path) -> dict[str, Any]:
    """In a process of its own."""
    result = work / "engine.json"
    command = [sys.executable, HERE / "serve_all.py", "--model", model, "--predictor", predictor, "--result", result]
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    environment |= {"VLLM_LOGGING_LEVEL": "WARNING"}
    environment["DYMOE_STORE_DIR"] = str(work / "stores")
    subprocess.run(command, check=True, env=os.environ | environment)
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def summary(answers: Any, gbps: float) -> dict[str, Any]:
    """One row."""
    import engines

    new = NEW_TOKENS - 1
    requests = [answers.decode_seconds[i * new : (i + 1) * new] for i in range(len(answers.prefill_seconds))]
    latency = [prefill + sum(decode) for prefill, decode in zip(answers.prefill_seconds, requests, strict=True)]
    everything = engines.case(answers, gbps)
    steps = len(answers.decode_seconds)
    return everything | {
        "latency_ms": 1e3 * statistics.mean(latency),
        "tokens_per_second": sorted(1 / seconds for seconds in answers.decode_seconds),
        "prediction_ms": 1e3 * engines.total(answers.decode, "prediction_seconds") / steps,
        "predictor_bytes": answers.decode[-1]["predictor_bytes"],
        "budget_bytes": answers.decode[-1]["budget_bytes"],
    }


def run(llm: Any, name: str, plan: argparse.Namespace, gbps: float) -> tuple[dict[str, Any], Any]:
    """One variant; an oracle sees a run before it foresees it."""
    import engines

    from vllm_dymoe.predict import Measured
    from vllm_dymoe.predict.oracle import Oracle

    runtime, oracle = engines.runtime_of(llm), Oracle()
    if name == "oracle":
        runtime.serving.predictor = Measured(oracle)
        engines.Answers(llm, plan.prompts, plan)
        runtime.serving.predictor = Measured(Oracle())  # says nothing
    engines.Answers(llm, plan.prompts[-1:], plan)  # the cache has something to work with
    if name == "oracle":
        oracle.rewind()
        runtime.serving.predictor = Measured(oracle)
    answers = engines.Answers(llm, plan.prompts, plan)
    return summary(answers, gbps), answers.tokens


def main() -> None:
    """Every variant of both settings."""
    import engines
    from hardware import QWEN3_30B, Shape, ratio
    from record import pieces

    from vllm_dymoe.vllm_adapter.measure import fill

    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--predictor", type=Path, required=True)
    parser.add_argument("--result", type=Path, required=True)
    plan = parser.parse_args()
    plan.new_tokens, plan.temperature = NEW_TOKENS, 0
    # Not the pieces that were recorded: the predictor has not seen them.
    plan.prompts = [ids for _, ids in pieces(plan.model, REQUESTS, shift=0.47)]
    options = {"hi": 4, "lo": 0}
    with engines.engine(str(plan.model), options | {"expert_budget": "100%"}) as llm:
        runtime = engines.runtime_of(llm)
        fill(runtime)
        engines.Answers(llm, plan.prompts[:1], plan)
        answers = engines.Answers(llm, plan.prompts, plan)
        expected = answers.tokens
        layers, expert_bytes = len(runtime.experts.layers), runtime.experts.formats[4].nbytes
        layer_s = statistics.mean(answers.decode_seconds) / layers
        times_longer = ratio(Shape(**QWEN3_30B), LINK)
        gbps = expert_bytes / (times_longer * layer_s) / 1e9
        resident = summary(answers, gbps)
        del llm, runtime
        gc.collect()
    print(f"everything resident: {resident['tpot_ms']:.1f} ms a token; link {1e3 * gbps:.1f} MB/s", flush=True)
    results: dict[str, Any] = {"gbps": gbps, "ratio": times_longer, "link": LINK, "resident": resident, "cases": {}}
    results |= {"requests": len(plan.prompts), "new_tokens": NEW_TOKENS}
    for setting, variants in VARIANTS.items():
        results["cases"][setting] = {}
        for name, changes in variants.items():
            budget = {"expert_budget": setting} if setting in CACHES else {}
            chosen = options | budget | changes | {"link_gbps": gbps}
            if "predictor" in chosen:
                chosen["predictor"] = str(plan.predictor)
            with engines.engine(str(plan.model), chosen) as llm:
                row, tokens = run(llm, name, plan, gbps)
                del llm
            print(f"{setting}, {name}: {row['tpot_ms']:.1f} ms a token", flush=True)
            if tokens != expected:
                raise SystemExit(f"{name} with {setting} answered otherwise: the numbers mean nothing")
            results["cases"][setting][name] = row
            plan.result.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
