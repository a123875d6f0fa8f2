"""What does looking for heavy hitters add to a prefill?

    python benchmarks/quality/tap_cost.py

Serves the shipped model with the system dymoe and gives it prompts one at a time, each with the look at queries and
keys (the tap) and with its answers of the time before in its place, so that the experts are the same. Reported are
medians of ratios of neighbours: how much longer the step with the tap took, and, since a busy machine blurs that, which
share of its step the tap itself took. The bound is printed first: multiplications of the tap among those of a layer,
for the shipped model and in the shapes of Qwen3-30B-A3B. The aim is 3 %.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

MODEL = Path(__file__).resolve().parents[1] / "tiny_moe" / "model"
WINDOW = 32
#         hidden, heads, key-value heads, dim, experts of a token, intermediate
SHAPES = {"shipped": (256, 4, 2, 64, 4, 64), "qwen3-30b-a3b": (2048, 32, 4, 128, 8, 768)}


def bound(tokens: int, hidden: int, heads: int, kv_heads: int, dim: int, top_k: int, intermediate: int) -> float:
    """Multiplications of the tap, as a share of a layer's."""
    projections = tokens * hidden * dim * (2 * heads + 2 * kv_heads)
    attention = tokens * tokens * heads * dim  # half of the scores, and as much for the values
    experts = 3 * tokens * top_k * hidden * intermediate
    return min(WINDOW, tokens) * tokens * heads * dim / (projections + attention + experts)


class Tapped:
    """The engine's tap and steps, with clocks.

    Args:
        llm: the engine.
    """

    def __init__(self, llm: Any) -> None:
        self._prompts = llm.llm_engine.vllm_config.quant_config.loaded_model().prompts
        self._runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
        self._attend, self._execute = self._prompts.attend, self._runner.execute_model
        self._heavy: list[Any] = []  # what the tap found, in the order of the layers
        self._layer = 0
        self.tap_seconds = self.step_seconds = 0.0
        self._runner.execute_model = self._timed_step

    def begin(self, listening: bool) -> None:
        """Before a prompt: look at queries and keys, or give the answers of the time before."""
        self.tap_seconds = self.step_seconds = 0.0
        self._layer = 0
        self._prompts.attend = self._timed_tap if listening else self._remembered

    def _timed_step(self, *arguments: Any, **options: Any) -> Any:
        begin = time.perf_counter()
        output = self._execute(*arguments, **options)
        self.step_seconds += time.perf_counter() - begin
        return output

    def _timed_tap(self, *arguments: Any) -> None:
        begin = time.perf_counter()
        self._attend(*arguments)
        self.tap_seconds += time.perf_counter() - begin
        if self._layer == 0:
            self._heavy.clear()
        self._heavy.append(self._prompts.running().heavy)
        self._layer += 1

    def _remembered(self, *_: Any) -> None:
        self._prompts.running().heavy = self._heavy[self._layer]
        self._layer += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 256, 900])
    parser.add_argument("--prompts", type=int, default=40)
    arguments = parser.parse_args()
    for name, shape in SHAPES.items():
        shares = ", ".join(f"{tokens} tokens {bound(tokens, *shape):.2%}" for tokens in (*arguments.lengths, 4096))
        print(f"bound, {name}: {shares}")

    from vllm import LLM, SamplingParams

    options = {"hi": 4, "lo": 2, "system": "dymoe", "system_options": {"look_ahead": 0}, "expert_budget": "100%"}
    llm = LLM(
        model=str(MODEL),
        quantization="dymoe",
        additional_config={"dymoe": options},
        enforce_eager=True,
        max_model_len=1024,
        enable_prefix_caching=False,
    )
    ids = llm.get_tokenizer().encode((MODEL / "heldout" / "docs.txt").read_text())
    once, tapped, rows = SamplingParams(temperature=0, max_tokens=1, detokenize=False), Tapped(llm), []
    for tokens in arguments.lengths:
        shares, ratios, with_tap, share = [], [], [], 0.0
        for number in range(arguments.prompts + 2):
            start = number * 37
            prompt = {"prompt_token_ids": ids[start : start + tokens]}
            seconds: dict[bool, float] = {}
            # First to have every expert in place and its answer remembered; then each in turn the first of two.
            for listening in (True, *((True, False) if number % 2 else (False, True))):
                tapped.begin(listening)
                llm.generate(prompt, once, use_tqdm=False)
                seconds[listening] = tapped.step_seconds
                share = tapped.tap_seconds / tapped.step_seconds if listening else share
            if number < 2:  # to warm up
                continue
            shares.append(share)
            ratios.append(seconds[True] / seconds[False])
            with_tap.append(seconds[True])
        row = {
            "tokens": tokens,
            "prefill_ms": round(1000 * statistics.median(with_tap), 2),
            "tap_share": round(statistics.median(shares), 4),
            "paired_ratio": round(statistics.median(ratios), 4),
            "bound": round(bound(tokens, *SHAPES["shipped"]), 4),
        }
        print(
            f"{tokens} tokens: {row['tap_share']:.2%} of {row['prefill_ms']} ms, {row['paired_ratio'] - 1:+.2%} paired"
        )
        rows.append(row)
    print(json.dumps({"model": "tiny_moe", "aim": 0.03, "rows": rows}))


if __name__ == "__main__":
    main()
