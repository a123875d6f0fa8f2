"""DynaExq: Tables 1 to 4, Figures 1 to 3 and 6 to 10."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from vllm_dymoe.bench.cases import Subject
from vllm_dymoe.bench.papers.base import At, Line, Missing, Number, PaperTable, Quality, Recorded, Routed, Speed
from vllm_dymoe.bench.papers.routers import activated, hot_sets
from vllm_dymoe.bench.rows import Row

_BATCHES = (1, 2, 4, 8, 16, 32)
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
_DYNAEXQ: Mapping[str, Any] = {"hi": 16, "lo": 4, "system": "dynaexq"}
_QUALITY: Mapping[str, tuple[Mapping[str, Any], tuple[float, ...]]] = {
    "FP16": ({"hi": 16}, (73.37, 54.55, 90.45, 84.76)),
    "Int4": ({"hi": 4}, (72.84, 53.54, 89.39, 84.15)),
    "DynaExq": ({**_DYNAEXQ, "expert_budget": _BUDGET}, (73.09, 54.14, 89.91, 84.76)),
}
_SIZES = ("layers", "experts", "top-k")
_OTHER_MODEL = "serve this model to repeat its row."
_FETCHED = "fetched as predicted, in ExpertFlow's place"
_SYSTEMS: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "static Int4": ({"hi": 4, "system": "exact", "system_options": {"look_ahead": 0}}, "100%"),
    "DynaExq": (_DYNAEXQ, _BUDGET),
    _FETCHED: ({"hi": 16, "system": "exact"}, _BUDGET),
}
_TOKENS = 48  # of prompts where batches are compared: two dozen prompts make no batch of 32
_LENGTHS = (32, 64, 128, 256)


def tables(_moe_layers: int) -> Iterator[PaperTable]:
    """All of them."""
    batches = tuple(str(batch) for batch in _BATCHES)
    for name, what, prefill in (("Table 1", _DECODE, False), ("Table 2", _PREFILL, True)):
        about = f"percent of a layer's experts in a step of {'prefill' if prefill else 'decode'}, by batch"
        lines = [Line("this model", Routed(partial(_ratios, prefill)))]
        lines += [Line(model, Missing(_OTHER_MODEL), dict(zip(batches, numbers, strict=True)))
                  for model, numbers in what.items()]  # fmt: skip
        yield PaperTable(name, about, batches, lines)
    yield PaperTable("Table 3", "sizes", _SIZES, [
        Line("this model", Routed(lambda recorded: recorded.shape)),
        Line("Qwen3-30B", Missing(_OTHER_MODEL), dict(zip(_SIZES, (48, 128, 8), strict=True))),
        Line("Qwen3-80B", Missing(_OTHER_MODEL), dict(zip(_SIZES, (48, 512, 10), strict=True))),
        Line("Phi-MoE", Missing(_OTHER_MODEL), dict(zip(_SIZES, (32, 16, 2), strict=True))),
    ])  # fmt: skip
    about = f"quality of Qwen3-MoE-30B; DynaExq with {_BUDGET} of FP16's bytes; AIME25 is no task of lm-eval"
    yield PaperTable("Table 4", about, tuple(_TASKS), [
        Line(label, Quality(options, _TASKS), dict(zip(_TASKS, numbers, strict=True)))
        for label, (options, numbers) in _QUALITY.items()
    ])  # fmt: skip
    lengths = tuple(map(str, _LENGTHS))
    yield PaperTable("Figure 1", "ms of a prompt that wait for the link, over its tokens", lengths, [
        _line(_FETCHED, _FETCHED, _by_length, _stalled)
    ])  # fmt: skip
    yield PaperTable("Figure 2", "which experts are hot; domains are those of the prompts", (
        "traffic of a layer's ten hottest %", "shared by two domains, mean %", "least %"), [
        Line("routers", Routed(hot_sets))
    ])  # fmt: skip
    yield PaperTable("Figure 3", "perplexity over the budget of high versions", ("WikiText-2",), [
        Line(f"{budget} of all experts' bytes at 16 bits",
             Quality({**_DYNAEXQ, "expert_budget": budget}, {"WikiText-2": "wikitext"}))
        for budget in ("30%", "50%", "75%", "100%")
    ])  # fmt: skip
    yield PaperTable("Figure 6", "TTFT in s over batch sizes", batches, _times(_by_batch, "ttft_ms"))
    yield PaperTable("Figure 7", "TPOT in s over batch sizes", batches, _times(_by_batch, "tpot_ms"))
    yield PaperTable("Figure 8", "tokens per second over batch sizes", batches, [
        _line(system, system, _by_batch, _throughput) for system in _SYSTEMS
    ])  # fmt: skip
    yield PaperTable("Figure 9", "end to end in s over batch sizes", batches, _times(_by_batch, "request_ms"))
    yield PaperTable("Figure 10", "TTFT in s over tokens of a prompt", lengths, _times(_by_length, "ttft_ms"))


def _ratios(prefill: bool, recorded: Recorded) -> Mapping[str, Number]:
    return {str(batch): activated(recorded, batch, prefill=prefill) for batch in _BATCHES}


_Places = Callable[[str], Mapping[str, At]]
"""From a budget to where each column is measured."""


def _by_batch(budget: str) -> Mapping[str, At]:
    return {str(batch): At(budget, batch, _TOKENS) for batch in _BATCHES}


def _by_length(budget: str) -> Mapping[str, At]:
    return {str(tokens): At(budget, 1, tokens) for tokens in _LENGTHS}


def _line(system: str, label: str, places: _Places, of: Callable[[Row], Number]) -> Line:
    options, budget = _SYSTEMS[system]
    columns = {name: (at, of) for name, at in places(budget).items()}
    return Line(label, Speed(Subject(system, options, budgets=(budget,)), columns))


def _times(places: _Places, measured: str) -> list[Line]:
    return [
        _line(system, f"{system}, {kind}", places, partial(_seconds, measured, kind))
        for system in _SYSTEMS
        for kind in ("mean", "p99")
    ]


def _seconds(measured: str, kind: str, row: Row) -> float:
    return float(row["measured"][measured][kind]) / 1e3


def _throughput(row: Row) -> float:
    return float(row["measured"]["tokens_per_second"])


def _stalled(row: Row) -> float:
    found = row["measured"]
    return 1e3 * float(found["prefill"]["exposed_wait_seconds"]) / len(found["prompt_tokens"])
