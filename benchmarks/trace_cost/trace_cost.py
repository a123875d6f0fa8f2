"""What does recording a trace add to decode?

    python benchmarks/trace_cost/trace_cost.py

Serves the shipped model and decodes with the recorder on in every second step, so that neighbouring steps of one run
are compared: the median of their differences over the median step. The shipped model's layers are as short as any, so
nearly all of a step is the host's work and the share is the largest that one will see. The bound is nothing: what is
copied are a few bytes for each choice. The aim is 2 %.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

WARM_UP, PAIRS = 3, 200
MODEL = Path(__file__).resolve().parents[1] / "tiny_moe" / "model"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16], help="requests side by side")
    parser.add_argument("--rounds", type=int, default=2, help="for each, with 200 pairs of steps")
    parser.add_argument("--inputs", action="store_true", help="record the routers' inputs, too")
    arguments = parser.parse_args()
    print("bound: 0 %; the aim is 2 %")

    from vllm import LLM

    from vllm_dymoe.traces import Trace

    with tempfile.TemporaryDirectory() as folder:
        options = {"hi": 4, "expert_budget": "50%", "trace": {"folder": folder, "inputs": arguments.inputs}}
        llm = LLM(
            model=str(MODEL),
            quantization="dymoe",
            additional_config={"dymoe": options},
            enforce_eager=True,
            max_model_len=1024,
            enable_prefix_caching=False,
        )
        rows, expected = [], 0
        for batch in arguments.batches:
            row = measure(llm, batch, arguments.rounds)
            expected += batch * arguments.rounds * (WARM_UP + PAIRS)
            llm.collective_rpc("dymoe_trace")
            decoded = int((~Trace.load(folder).prefill).sum())
            if decoded != expected:
                raise SystemExit(f"{decoded} tokens were recorded where {expected} should be: nothing is reported.")
            rows.append(row)
            print(
                f"{batch} requests: a step takes {row['step_ms']:.3f} ms, recording adds {row['added_us']:.0f} us, "
                f"{row['share']:.2%}"
            )
    print(json.dumps({"model": "tiny_moe", "inputs": arguments.inputs, "aim": 0.02, "rows": rows}))


def measure(llm: Any, batch: int, rounds: int) -> dict[str, Any]:
    """Steps of one batch, with and without recording in turn."""
    from vllm import SamplingParams

    model = llm.llm_engine.vllm_config.quant_config.loaded_model()
    observation, engine = model.observation, llm.llm_engine
    trace = observation.trace
    differences: list[float] = []
    steps: list[float] = []
    prompts = [entry["prompt"] for entry in json.loads((MODEL / "prompts.json").read_text())]
    for number in range(rounds):
        for place in range(batch):
            tokens = 1 + WARM_UP + 2 * PAIRS
            sampling = SamplingParams(temperature=1, seed=number, max_tokens=tokens, ignore_eos=True, detokenize=False)
            engine.add_request(f"{batch} {number} {place}", prompts[place % len(prompts)], sampling)
        for _ in range(1 + WARM_UP):
            engine.step()
        for pair in range(PAIRS):
            times = {}
            for on in (pair % 2 == 0, pair % 2 == 1):  # which of the two comes first changes, too
                observation.observers = (trace,) if on else ()
                begin = time.perf_counter()
                engine.step()
                times[on] = time.perf_counter() - begin
            differences.append(times[True] - times[False])
            steps.append(times[False])
        observation.observers = (trace,)
        while engine.has_unfinished_requests():
            engine.step()
    step, added = statistics.median(steps), statistics.median(differences)
    return {
        "requests": batch,
        "pairs": len(steps),
        "step_ms": round(1000 * step, 4),
        "added_us": round(1e6 * added, 1),
        "share": round(added / step, 5),
    }


if __name__ == "__main__":
    main()
