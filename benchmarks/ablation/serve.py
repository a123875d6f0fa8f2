"""One model in one process: every variant through a real vLLM engine, over links of several rates."""

import argparse
import contextlib
import gc
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hardware import LINKS, Shape, ratio
from mistaken import Mistaken
from variants import CACHE, VARIANTS

OPTIONS = {"hi": 4, "lo": 0}


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


def measure(llm: Any, variant: str, budget: str, gbps: float, plan: argparse.Namespace) -> tuple[dict[str, Any], Any]:
    """One variant at one budget; an oracle sees a run before it foresees it.

    What fetches ahead is measured beside the same engine without it: two engines differ by some per cent by themselves.
    """
    from vllm_dymoe.predict import Measured

    runtime, row, oracle = runtime_of(llm), VARIANTS[variant], None
    if row.whole:
        move_whole_experts(runtime.engine)
    if row.oracle:
        oracle = Mistaken(row.oracle, row.wrong, runtime.experts.num_experts)
        runtime.serving.predictor = Measured(oracle)
        Answers(llm, plan.prompts, plan)
        runtime.serving.predictor = Measured(Mistaken(1, 0, runtime.experts.num_experts))  # says nothing
    runtime.resize(budget)
    Answers(llm, plan.prompts[-1:], plan)  # the cache has something to work with
    if oracle is not None:
        oracle.rewind()
        runtime.serving.predictor = Measured(oracle)
    answers = Answers(llm, plan.prompts, plan)
    cell = case(answers, gbps)
    if runtime.predictor is not None and row.exact:
        predictor, runtime.serving.predictor = runtime.predictor, None
        runtime.resize(budget)
        Answers(llm, plan.prompts[-1:], plan)
        cell["without"] = case(Answers(llm, plan.prompts, plan), gbps)
        runtime.serving.predictor = predictor
    return cell, answers.tokens


def move_whole_experts(engine: Any) -> None:
    """Let transfers go in one piece, as in the systems that FIRM-MoE compares itself with."""
    queue = engine._queue
    begin = type(queue)._begin

    def begin_whole(ticket: Any) -> Any:
        return begin(queue, ticket)._replace(projections=range(ticket.arrived, ticket.wanted))

    queue._begin = begin_whole


def everything_resident(plan: argparse.Namespace) -> dict[str, Any]:
    """What computing costs where nothing is ever moved, and the shape that it was."""
    with engine(plan.models[str(OPTIONS["lo"])], OPTIONS | {"expert_budget": "100%"}) as llm:
        runtime, config = runtime_of(llm), llm.llm_engine.model_config.hf_text_config
        for layer in range(len(runtime.experts.layers)):
            fill(runtime, layer)
        Answers(llm, plan.prompts[:1], plan)
        answers = Answers(llm, plan.prompts, plan)
        assert total(answers.decode + answers.prefill, "misses") == 0
        shape = Shape(
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            config.num_experts_per_tok,
            next(iter(runtime.experts.formats.values())).nbytes,
        )
        tpot = statistics.mean(answers.decode_seconds)
        return {
            "shape": asdict(shape),
            "layers": len(runtime.experts.layers),
            "experts": runtime.experts.num_experts,
            "tpot_ms": 1e3 * tpot,
            "ttft_ms": 1e3 * statistics.median(answers.prefill_seconds),
            "layer_ms": 1e3 * tpot / len(runtime.experts.layers),
            "tokens": answers.tokens,
        }


def fill(runtime: Any, layer: int) -> None:
    """Bring every expert of a layer to the device."""
    import torch

    from vllm_dymoe.experts.routing import Routing

    experts, top_k = runtime.experts.num_experts, runtime.experts.top_k
    hidden = next(iter(runtime.experts.formats.values())).hidden
    x = torch.zeros(experts, hidden, dtype=torch.bfloat16)
    ids = (torch.arange(experts)[:, None] + torch.arange(top_k)) % experts
    runtime.serving.forward(Routing(layer, len(runtime.experts.layers), x, ids.int(), torch.full(ids.shape, 1 / top_k)))


def main() -> None:
    """Measure one model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", type=json.loads, required=True, help="a folder for each low tier")
    parser.add_argument("--prompts", type=json.loads, required=True)
    parser.add_argument("--new-tokens", type=int, required=True)
    parser.add_argument("--temperature", type=float, required=True)
    parser.add_argument("--budgets", nargs="+", required=True)
    parser.add_argument("--every-budget", action="store_true", help="for every variant")
    parser.add_argument("--links", nargs="+", default=list(LINKS))
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS))
    parser.add_argument(
        "--ratio-of", type=json.loads, help="the shape that the link is set for; this model's own if not given"
    )
    parser.add_argument("--result", type=Path, required=True)
    plan = parser.parse_args()
    resident = everything_resident(plan)
    expected = resident.pop("tokens")
    shape = Shape(**(plan.ratio_of or resident["shape"]))
    results: dict[str, Any] = {"resident": resident, "links": {}}
    for link in plan.links:
        ours = ratio(shape, link)
        gbps = resident["shape"]["expert_bytes"] / (ours * resident["layer_ms"] / 1e3) / 1e9
        # The slowest link, which is the busiest, at the smallest budget; the last one at all.
        budgets = plan.budgets if link == plan.links[-1] else plan.budgets[:1]
        cells: dict[str, Any] = {budget: {} for budget in budgets}
        results["links"][link] = {"ratio": ours, "gbps": gbps, "cases": cells}
        for name in plan.variants:
            if link != plan.links[-1] and not VARIANTS[name].everywhere:
                continue
            budgets_here = budgets if plan.every_budget or VARIANTS[name].everywhere else budgets[:1]
            options = OPTIONS | VARIANTS[name].options | {"expert_budget": plan.budgets[0], "link_gbps": gbps}
            with engine(plan.models[str(options["lo"])], options) as llm:
                for budget in budgets_here:
                    cells[budget][name], tokens = measure(llm, name, budget, gbps, plan)
                    print(link, budget, name, json.dumps(cells[budget][name]), flush=True)
                    if VARIANTS[name].exact and tokens != expected:
                        raise SystemExit(f"{name} at {budget} over {link} answered otherwise: the numbers mean nothing")
        plan.result.write_text(json.dumps(results, indent=2))
    assert CACHE in plan.variants


if __name__ == "__main__":
    main()
