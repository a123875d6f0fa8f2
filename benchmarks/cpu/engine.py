"""A CPU's time per token in vLLM's engine, with the plugin and without it.

Engines of one process take turns: vLLM at 16 bits, and the plugin at 4 bits with a quarter of the experts in slots, and
with slots for one token's experts. They serve the model of this repository.

    python benchmarks/cpu/engine.py            # as vLLM serves by default, with compiled layers
    python benchmarks/cpu/engine.py --eager
"""

import argparse
import os
import statistics
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

MODEL = Path(__file__).resolve().parents[1] / "tiny_moe" / "model"
PROMPT, TOKENS, REPETITIONS = 64, 64, 9
BUDGETS = ("25%", "top-k")


def start(eager: bool) -> dict[str, Any]:
    """Return engines by name; the first one is plain vLLM."""
    from vllm import LLM

    common: dict[str, Any] = {"max_model_len": 512, "skip_tokenizer_init": True, "enforce_eager": eager}
    engines = {"vLLM": LLM(str(MODEL), **common)}
    for budget in BUDGETS:
        options = {"high": 4, "expert_budget": budget, "host_store": "pinned"}
        engines[f"vllm-dymoe, {budget}"] = LLM(
            str(MODEL), quantization="dymoe", additional_config={"dymoe": options}, **common
        )
    return engines


def seconds(engine: Any, requests: int, tokens: int) -> float:
    """Return the seconds in which an engine answers requests of ``tokens`` tokens."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0, detokenize=False)
    ids = [[5 + (7 * request + 13 * place) % 3000 for place in range(PROMPT)] for request in range(requests)]
    begin = time.perf_counter()
    engine.generate([{"prompt_token_ids": one} for one in ids], sampling, use_tqdm=False)
    return time.perf_counter() - begin


def main() -> None:
    """Measure, and print a table of milliseconds for each token of a request."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--eager", action="store_true", help="without compiled layers")
    given = parser.parse_args()
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    engines = start(given.eager)
    for engine in engines.values():
        seconds(engine, 1, TOKENS)
        seconds(engine, 16, 8)
    table = Table("requests", *engines, title="ms for each token, and as a share of vLLM's")
    for requests in (1, 16):
        found: dict[str, list[float]] = {name: [] for name in engines}
        for repetition in range(REPETITIONS):
            turn = list(engines.items())
            first = repetition % len(turn)  # one engine's work is still in the caches when the next one begins
            for name, engine in turn[first:] + turn[:first]:
                both = seconds(engine, requests, TOKENS + 1), seconds(engine, requests, 1)
                found[name].append(1e3 * (both[0] - both[1]) / TOKENS)
        medians = {name: statistics.median(times) for name, times in found.items()}
        table.add_row(str(requests), *(f"{ms:.2f} ({ms / medians['vLLM']:.2f})" for ms in medians.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
