"""An engine in this process, and what single requests to it cost."""

import argparse
import contextlib
import gc
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from hardware import Shape


@contextlib.contextmanager
def engine(folder: str, options: dict[str, Any]) -> Iterator[Any]:
    """An engine in this process."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    llm = LLM(
        model=folder,
        quantization="dymoe",
        additional_config={"dymoe": options},
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_seqs=4,
        enable_prefix_caching=False,
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()
        gc.collect()


def runtime_of(llm: Any) -> Any:
    """The plugin's runtime."""
    return llm.llm_engine.vllm_config.quant_config.loaded_model().runtime


class Answers:
    """What single requests cost, one after the other: the first token apart from the others."""

    def __init__(self, llm: Any, prompts: list[list[int]], plan: argparse.Namespace) -> None:
        from vllm import SamplingParams

        runtime, core = runtime_of(llm), llm.llm_engine
        sampling = SamplingParams(
            temperature=plan.temperature, seed=0, max_tokens=plan.new_tokens, ignore_eos=True, detokenize=False
        )
        self.tokens: list[list[int]] = []
        self.prefill_seconds: list[float] = []
        self.decode_seconds: list[float] = []
        self.prefill: list[dict[str, Any]] = []
        self.decode: list[dict[str, Any]] = []
        for number, prompt in enumerate(prompts):
            core.add_request(f"{id(self)}-{number}", {"prompt_token_ids": prompt}, sampling)
            for place in range(plan.new_tokens):
                if place < 2:
                    runtime.reset_stats()
                begin = time.perf_counter()
                (output,) = core.step()
                seconds = time.perf_counter() - begin
                if place == 0:
                    self.prefill_seconds.append(seconds)
                    self.prefill.append(runtime.stats().to_dict())
                else:
                    self.decode_seconds.append(seconds)
            self.decode.append(runtime.stats().to_dict())
            self.tokens.append(list(output.outputs[0].token_ids))
        runtime.check_integrity()


def total(answers: list[dict[str, Any]], name: str, key: str | None = None) -> float:
    """A count over several answers."""
    return sum(stats[name] if key is None else stats[name].get(key, 0) for stats in answers)


def case(answers: Answers, gbps: float) -> dict[str, Any]:
    """One cell of the results."""
    steps, seconds = len(answers.decode_seconds), sum(answers.decode_seconds)
    moved = {reason: total(answers.decode, "bytes_moved", reason) for reason in answers.decode[0]["bytes_moved"]}
    hits, misses = total(answers.decode, "hits"), total(answers.decode, "misses")
    return {
        "ttft_ms": 1e3 * statistics.median(answers.prefill_seconds),
        "prefill_link_ms": 1e3
        * statistics.median(sum(s["bytes_moved"].values()) for s in answers.prefill)
        / gbps
        / 1e9,
        "tpot_ms": 1e3 * seconds / steps,
        "tpot_median_ms": 1e3 * statistics.median(answers.decode_seconds),
        "hit_rate": hits / (hits + misses),
        "bytes_per_token": {reason: count / steps for reason, count in moved.items()},
        "exposed_wait_ms": 1e3 * total(answers.decode, "exposed_wait_seconds") / steps,
        "link_utilisation": sum(moved.values()) / (gbps * 1e9) / seconds,
        "peak_expert_bytes": max(stats["peak_expert_bytes"] for stats in answers.decode),
        "predictions": {key: total(answers.decode, "predictions", key) for key in answers.decode[0]["predictions"]},
        "prefetches": {key: total(answers.decode, "prefetches", key) for key in answers.decode[0]["prefetches"]},
        "prefetch_interval": answers.decode[-1]["prefetch_interval"],
    }


def everything_resident(folder: str, prompts: list[list[int]], plan: argparse.Namespace) -> dict[str, Any]:
    """What a token costs where nothing is ever moved, and the shape that it was."""
    from vllm_dymoe.vllm_adapter.measure import fill

    with engine(folder, {"expert_budget": "100%"}) as llm:
        runtime, config = runtime_of(llm), llm.llm_engine.model_config.hf_text_config
        layers = len(runtime.experts.layers)
        fill(runtime)
        Answers(llm, prompts[:1], plan)
        answers = Answers(llm, prompts, plan)
        expert_bytes = next(iter(runtime.experts.formats.values())).nbytes
        heads = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        return {
            "shape": asdict(Shape(config.hidden_size, *heads, config.num_experts_per_tok, expert_bytes)),
            "layer_ms": 1e3 * statistics.mean(answers.decode_seconds) / layers,
        }
