"""DynaExq: Tables 1, 2 and 4, Figures 1, 3 and 6 to 8."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from vllm_dymoe.bench.cases import Subject
from vllm_dymoe.bench.papers.tables import At, Line, Number, Numbers, PaperTable, Quality, Speed, line, of
from vllm_dymoe.bench.rows import Row
from vllm_dymoe.observe.trace import Trace

_BATCHES = tuple(map(str, (1, 2, 4, 8, 16, 32)))
_DECODE = {
    "Qwen3-30B-A3B": (6.3, 11.6, 20.1, 31.9, 46.5, 62.0),
    "Qwen3-Next-80B": (1.9, 3.7, 6.7, 14.9, 25.4, 39.2),
    "DeepSeek-V2-Lite": (9.0, 14.9, 23.2, 35.9, 51.7, 67.6),
}
_PREFILL = {
    "Qwen3-30B-A3B": (46.9, 60.0, 73.4, 84.4, 92.8, 96.6),
    "Qwen3-Next-80B": (24.6, 35.3, 48.8, 67.1, 78.9, 86.2),
    "DeepSeek-V2-Lite": (72.9, 86.9, 94.3, 96.0, 96.3, 96.3),
}
_TASKS = {"MMLU-Pro": "mmlu_pro", "GPQA": "gpqa_diamond_zeroshot", "GSM8K": "gsm8k", "HumanEval": "humaneval"}
_BUDGET = "50%"  # of all experts at 16 bits: the low versions take half of it, high ones the rest
_DYNAEXQ: Mapping[str, Any] = {"hi": 16, "lo": 4, "system": "dynaexq", "system_options": {"hotness": "uses"}}
_QUALITY: Mapping[str, tuple[Mapping[str, Any], tuple[float, ...]]] = {
    "FP16": ({"hi": 16}, (73.37, 54.55, 90.45, 84.76)),
    "Int4": ({"hi": 4}, (72.84, 53.54, 89.39, 84.15)),
    "DynaExq": ({**_DYNAEXQ, "expert_budget": _BUDGET}, (73.09, 54.14, 89.91, 84.76)),
}
_OTHER_MODEL = "serve this model to repeat its row."
_FETCHED = "fetched as predicted, in ExpertFlow's place"
_SYSTEMS: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "static Int4": ({"hi": 4, "system": "exact", "system_options": {"look_ahead": 0}}, "100%"),
    "DynaExq": (_DYNAEXQ, _BUDGET),
    _FETCHED: ({"hi": 16, "system": "exact"}, _BUDGET),
}
_TOKENS = 48  # of prompts where batches are compared: two dozen prompts make no batch of 32
_LENGTHS = ("32", "64", "128", "256")


def tables() -> Iterator[PaperTable]:
    for name, what, prefill in (("Table 1", _DECODE, False), ("Table 2", _PREFILL, True)):
        about = f"percent of a layer's experts in a step of {'prefill' if prefill else 'decode'}, by batch"
        yield PaperTable(name, about, _BATCHES, [
            line("this model", partial(_ratios, prefill)),
            *(line(model, _OTHER_MODEL, _BATCHES, numbers) for model, numbers in what.items()),
        ])  # fmt: skip
    about = f"quality of Qwen3-MoE-30B; DynaExq with {_BUDGET} of FP16's bytes; AIME25 is no task of lm-eval"
    yield PaperTable("Table 4", about, tuple(_TASKS), [
        line(label, Quality(options, _TASKS), _TASKS, numbers) for label, (options, numbers) in _QUALITY.items()
    ])  # fmt: skip
    yield PaperTable("Figure 1", "ms of a prompt that wait for the link, over its tokens", _LENGTHS, [
        _line(_FETCHED, _FETCHED, _LENGTHS, _stalled)
    ])  # fmt: skip
    yield PaperTable("Figure 3", "perplexity over the budget of high versions", ("WikiText-2",), [
        line(f"{budget} of all experts' bytes at 16 bits",
             Quality({**_DYNAEXQ, "expert_budget": budget}, {"WikiText-2": "wikitext"}))
        for budget in ("30%", "50%", "75%", "100%")
    ])  # fmt: skip
    yield PaperTable("Figure 6", "TTFT in s over batch sizes", _BATCHES, _times("ttft_ms"))
    yield PaperTable("Figure 7", "TPOT in s over batch sizes", _BATCHES, _times("tpot_ms"))
    yield PaperTable("Figure 8", "tokens per second over batch sizes", _BATCHES, [
        _line(system, system, _BATCHES, of("tokens_per_second")) for system in _SYSTEMS
    ])  # fmt: skip


def _ratios(prefill: bool, trace: Trace) -> Numbers:
    return {batch: activated(trace, int(batch), prefill=prefill) for batch in _BATCHES}


def activated(trace: Trace, batch: int, *, prefill: bool) -> float | None:
    """Percent of a layer's experts that a step of so many requests uses; None for too few of them."""
    part = trace.select(trace.prefill == prefill)
    steps = list(part.steps(batch))
    if prefill:
        requests = list(part.by_request())
        steps = [torch.cat(requests[i : i + batch]) for i in range(0, len(requests) - batch + 1, batch)]
    shares = [
        len(part.experts[step, layer].unique()) / trace.header.num_experts
        for step in steps[:256]
        for layer in range(trace.header.num_layers)
    ]
    return 100 * sum(shares) / len(shares) if shares else None


def _line(system: str, label: str, columns: tuple[str, ...], show: Callable[[Row], Number]) -> Line:
    options, budget = _SYSTEMS[system]
    batches = columns == _BATCHES
    places = {name: At(budget, int(name), _TOKENS) if batches else At(budget, 1, int(name)) for name in columns}
    return line(label, Speed(Subject(system, options), {name: (at, show) for name, at in places.items()}))


def _times(measured: str) -> list[Line]:
    return [
        _line(system, f"{system}, {kind}", _BATCHES, of(measured, kind, unit=1e-3))
        for system in _SYSTEMS
        for kind in ("mean", "p99")
    ]


def _stalled(row: Row) -> float:
    found = row["measured"]
    return 1e3 * float(found["prefill"]["exposed_wait_seconds"]) / len(found["prompt_tokens"])
