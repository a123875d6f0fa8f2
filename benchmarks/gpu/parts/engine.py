"""Compares vLLM's answers with and without CUDA graphs, if vLLM is installed.

Answers have to be the same with graphs and without, and at both budgets. All engines compile the same code, and the
first batches have exactly the sizes for which graphs are captured, so there is no padding, and no reason for a single
bit to differ. Later a batch fills a graph only partly, and a prompt arrives while others decode; these are compared
between budgets.
"""

import importlib.util
import json
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from record import Recorder

MODEL = Path(__file__).resolve().parents[2] / "tiny_moe" / "model"
BUDGETS = ("100%", "25%")
DRAFTS = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}}
GRAPHS: dict[str, tuple[str, dict[str, Any]]] = {
    "off": ("NONE", {}),
    "on": ("PIECEWISE", {}),
    "over whole steps": ("FULL_DECODE_ONLY", {}),
    "over whole steps, with drafts": ("FULL_DECODE_ONLY", DRAFTS),
}
OURS = {"quantization": "dymoe", "additional_config": {"dymoe": {"expert_budget": BUDGETS[0]}}}
BATCH = 4
"""Requests that are answered together, after some alone."""
ALONE, PADDED = 2, 3
NEW_TOKENS = 24
SETTINGS: dict[str, Any] = {"gpu_memory_utilization": 0.2, "kv_cache_memory_bytes": 1 << 28}
"""Engine arguments, in addition to what makes answers comparable. Engines run concurrently on the card, and measure
nothing.
"""


def run(record: Recorder) -> None:
    """Run every engine in its own process, concurrently, because they mostly compile."""
    if importlib.util.find_spec("vllm") is None:
        record.say("Left out: vLLM is not installed here; name a Python that has it, as in make gpu PYTHON=python3.12.")
        return
    answers: dict[str, dict[str, Any]] = {}
    modes = {}
    with ProcessPoolExecutor(len(GRAPHS), get_context("spawn")) as pool:
        asked = {graphs: pool.submit(ask, mode, SETTINGS | more) for graphs, (mode, more) in GRAPHS.items()}
        for graphs, future in asked.items():
            with record.check(f"vLLM's engine answers with graphs {graphs}, at {' and '.join(BUDGETS)}") as wrong:
                found = future.result()
                answers[graphs], modes[graphs] = found["answers"], found["mode"]
                wrong += _differences(
                    answers[graphs][BUDGETS[1]], answers[graphs][BUDGETS[0]], f"graphs {graphs}, 25 %"
                )
                if found["misses"] == 0:
                    wrong.append("no expert was fetched at 25 %, so this check proves nothing")
    with record.check("the same answers with graphs as without") as wrong:
        for graphs in [name for name, (_, more) in GRAPHS.items() if name != "off" and not more]:
            for budget in BUDGETS:
                ours, theirs = (answers[one][budget][: ALONE + BATCH] for one in (graphs, "off"))
                wrong += _differences(ours, theirs, f"{budget}, graphs {graphs}")
    record.say(f"cudagraph_mode in force was {', '.join(modes.values())}.")


@contextmanager
def started(**settings: Any) -> Iterator[Any]:
    """Run vLLM's engine in this process.

    It finds the package of a checkout; its stores last as long as the context.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    with tempfile.TemporaryDirectory() as stores:
        os.environ["DYMOE_STORE_DIR"] = stores
        from vllm import LLM

        import vllm_dymoe

        vllm_dymoe.register()
        llm = LLM(enable_prefix_caching=False, **settings)
        yield llm
        llm.llm_engine.engine_core.shutdown()


def ask(mode: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return an engine's greedy tokens and their log-probabilities, at both budgets."""
    from vllm import SamplingParams

    graphs = {"cudagraph_mode": mode, "cudagraph_capture_sizes": [1, BATCH]}
    with started(
        model=str(MODEL), max_model_len=512, max_num_seqs=BATCH, compilation_config=graphs, **OURS, **settings
    ) as llm:
        prompts = [entry["prompt"] for entry in json.loads((MODEL / "prompts.json").read_text())][: ALONE + BATCH]
        sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=1)
        answers, misses = {}, 0
        for budget in BUDGETS:
            llm.collective_rpc("dymoe_resize", args=(budget,))
            llm.collective_rpc("dymoe_reset_stats")
            groups = [[prompt] for prompt in prompts[:ALONE]] + [prompts[ALONE:], prompts[:PADDED]]
            outputs = [output for group in groups for output in llm.generate(group, sampling, use_tqdm=False)]
            outputs += _one_comes_late(llm.llm_engine, prompts[:PADDED], sampling)
            answers[budget] = [
                [(token, tops[token].logprob) for token, tops in zip(one.token_ids, one.logprobs, strict=True)]
                for one in (output.outputs[0] for output in outputs)
            ]
            misses = llm.collective_rpc("dymoe_stats")[0]["misses"]
        resolved = llm.llm_engine.vllm_config.compilation_config.cudagraph_mode
        return {"answers": answers, "misses": misses, "mode": getattr(resolved, "name", str(resolved))}


def _one_comes_late(engine: Any, prompts: list[str], sampling: Any) -> list[Any]:
    """Return answers to requests, the last of which arrives late.

    Its prompt is read while the others decode.
    """
    done: dict[str, Any] = {}
    for number, prompt in enumerate(prompts):
        if number == len(prompts) - 1:
            for _ in range(NEW_TOKENS // 6):
                engine.step()
        engine.add_request(f"in turn {number}", prompt, sampling)
    while engine.has_unfinished_requests():
        done |= {output.request_id: output for output in engine.step() if output.finished}
    return [done[name] for name in sorted(done)]


def _differences(ours: list[Any], theirs: list[Any], name: str) -> list[str]:
    """Return as sentences where tokens or log-probabilities first differ."""
    wrong = []
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        for position, (a, b) in enumerate(zip(one, other, strict=True)):
            if a != b:
                what = f"token {a[0]} and not {b[0]}" if a[0] != b[0] else f"log-probability {a[1]} and not {b[1]}"
                wrong.append(f"{name}: prompt {number} has at position {position} {what}")
                break
    return wrong
