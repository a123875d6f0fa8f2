"""A token's time inside vLLM, with a quarter of Qwen3-30B-A3B's layers, beside vLLM with everything at 16 bits.

Weights are random, and random gates route as if by dice, which is the worst that a cache can meet.
"""

import json
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from record import Recorder

from parts.engine import OURS, is_left_out, started

sys.path.append(str(Path(__file__).resolve().parents[2] / "budget"))
import model

CONFIG = model.config(12) | {"vocab_size": model.REAL_VOCABULARY}
BUDGETS = ("100%", "50%", "25%")
REQUESTS = (1, 16)
TOKENS = (16, 144)
"""Of two answers, whose difference is decode alone."""
PROMPT, LONG = 32, 2048
ENGINE: dict[str, Any] = {"max_model_len": 4096, "max_num_seqs": 16, "gpu_memory_utilization": 0.6}


def run(record: Recorder) -> None:
    """vLLM's engine first, whose times ours stand beside as a bound."""
    if is_left_out(record):
        return
    with record.check("tokens that vLLM serves could be timed") as wrong:
        found = {}
        for ours in (False, True):
            with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                found |= pool.submit(measure, ours, CONFIG, ENGINE).result()
        record.keep(serving=found)
        theirs = found.pop("vllm")
        for name, times in found.items():
            for what, ms in times.items():
                remark = f"bound: vLLM with everything at 16 bits; {times['hits']:.0%} hits"
                if what != "hits":
                    record.speed(f"vLLM, {name}, {what}", "ms", ms, theirs[what], theirs[what] / ms, remark)
        if found["25%"]["hits"] > 0.9:
            wrong.append("nearly nothing was fetched at 25 %, so that this says nothing")


def measure(ours: bool, config: Mapping[str, Any], settings: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Times in ms of one engine, by budget; of vLLM's own as "vllm"."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        more = settings | (OURS if ours else {})
        with started(model=folder, load_format="dummy", skip_tokenizer_init=True, **more) as llm:
            return _measured(llm, ours)


def _measured(llm: Any, ours: bool) -> dict[str, dict[str, float]]:
    found = {}
    for budget in BUDGETS if ours else ("vllm",):
        if ours:
            llm.collective_rpc("dymoe_resize", args=(budget,))
        _seconds(llm, 16, PROMPT, TOKENS[0])  # fills the slots
        _seconds(llm, 1, LONG, 1)
        if ours:
            llm.collective_rpc("dymoe_reset_stats")
        times = {}
        for requests in REQUESTS:
            short, long = (_seconds(llm, requests, PROMPT, tokens) for tokens in TOKENS)
            times[f"a token of {requests} requests"] = 1e3 * (long - short) / (TOKENS[1] - TOKENS[0])
        if ours:
            times["hits"] = llm.collective_rpc("dymoe_stats")[0]["hit_rate"]
        times[f"a prompt of {LONG} tokens"] = 1e3 * min(_seconds(llm, 1, LONG, 1) for _ in range(3))
        found[budget] = times
    return found


def _seconds(llm: Any, requests: int, prompt: int, tokens: int) -> float:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    prompts = [
        {"prompt_token_ids": [(7919 * (number + 1) * (place + 1)) % 1000 for place in range(prompt)]}
        for number in range(requests)
    ]
    begin = time.perf_counter()
    llm.generate(prompts, sampling, use_tqdm=False)
    return time.perf_counter() - begin
