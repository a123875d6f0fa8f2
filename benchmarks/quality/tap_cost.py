"""What does looking for heavy hitters add to a prefill?

    python benchmarks/quality/tap_cost.py

Serves the shipped model with the policy dymoe, gives it one prompt at a time, and adds up the time inside the tap and
the time of the whole steps that it happens in: their ratio is the cost. A share of one run, so that a slow moment of
the machine changes both. The bound is printed first: multiplications of the tap among those of a layer, for the shipped
model and in the shapes of Qwen3-30B-A3B. The aim is 3 %.
"""

import argparse
import json
import os
import time
from importlib import resources
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

MODEL = Path(str(resources.files("vllm_dymoe.data") / "tiny_moe"))
WINDOW = 32
#         hidden, heads, key-value heads, dim, experts of a token, intermediate
SHAPES = {"shipped": (256, 4, 2, 64, 4, 64), "qwen3-30b-a3b": (2048, 32, 4, 128, 8, 768)}


def bound(tokens: int, hidden: int, heads: int, kv_heads: int, dim: int, top_k: int, intermediate: int) -> float:
    """Multiplications of the tap, as a share of a layer's."""
    projections = tokens * hidden * dim * (2 * heads + 2 * kv_heads)
    attention = tokens * tokens * heads * dim  # half of the scores, and as much for the values
    experts = 3 * tokens * top_k * hidden * intermediate
    return min(WINDOW, tokens) * tokens * heads * dim / (projections + attention + experts)


class Clock:
    """Seconds inside of calls."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, function: Any) -> Any:
        """The function, with a look at the clock around it."""

        def call(*arguments: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                self.seconds += time.perf_counter() - begin

        return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 256, 900])
    parser.add_argument("--prompts", type=int, default=20)
    arguments = parser.parse_args()
    for name, shape in SHAPES.items():
        shares = ", ".join(f"{tokens} tokens {bound(tokens, *shape):.2%}" for tokens in (*arguments.lengths, 4096))
        print(f"bound, {name}: {shares}")

    from vllm import LLM, SamplingParams

    options = {"hi": 4, "lo": 2, "policy": "dymoe", "expert_budget": "100%"}
    llm = LLM(
        model=str(MODEL),
        quantization="dymoe",
        additional_config={"dymoe": options},
        enforce_eager=True,
        max_model_len=1024,
        enable_prefix_caching=False,
    )
    worker = llm.llm_engine.model_executor.driver_worker.worker
    prompts = llm.llm_engine.vllm_config.quant_config.loaded_model().prompts
    tap, steps = Clock(), Clock()
    prompts.attend = tap.timed(prompts.attend)
    worker.model_runner.execute_model = steps.timed(worker.model_runner.execute_model)
    text = (MODEL / "heldout" / "docs.txt").read_text()
    ids = llm.get_tokenizer().encode(text)
    rows = []
    for tokens in arguments.lengths:
        for number in range(arguments.prompts + 2):
            if number == 2:  # two to warm up
                tap.seconds = steps.seconds = 0.0
            start = number * 37
            llm.generate(
                {"prompt_token_ids": ids[start : start + tokens]},
                SamplingParams(temperature=0, max_tokens=1, detokenize=False),
                use_tqdm=False,
            )
        row = {
            "tokens": tokens,
            "prefill_ms": round(1000 * steps.seconds / arguments.prompts, 2),
            "tap_ms": round(1000 * tap.seconds / arguments.prompts, 3),
            "share": round(tap.seconds / steps.seconds, 4),
            "bound": round(bound(tokens, *SHAPES["shipped"]), 4),
        }
        print(f"{tokens} tokens: {row['tap_ms']} of {row['prefill_ms']} ms, {row['share']:.1%}")
        rows.append(row)
    print(json.dumps({"model": "tiny_moe", "aim": 0.03, "rows": rows}))


if __name__ == "__main__":
    main()
