"""DynaExq: Tables 1 to 4, Figures 1 to 3 and 6 to 10."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from vllm_dymoe.bench.cases import Subject
from vllm_dymoe.bench.papers.base import Line, Missing, Number, PaperTable, Quality, Recorded, Routed, Speed, tpot, ttft
from vllm_dymoe.bench.papers.routers import activated

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
_QUALITY: Mapping[str, tuple[Mapping[str, Any], tuple[float, ...]]] = {
    "FP16": ({"hi": 16}, (73.37, 54.55, 90.45, 84.76)),
    "Int4": ({"hi": 4}, (72.84, 53.54, 89.39, 84.15)),
    "DynaExq": ({"hi": 16, "lo": 4, "system": "dynaexq"}, (73.09, 54.14, 89.91, 84.76)),
}
_SIZES = ("layers", "experts", "top-k")
_OTHER_MODEL = "serve this model to repeat its row."
_BUDGET = "50%"  # of all experts at 16 bits: the low versions take half of it, high ones the rest
_FIGURES = {
    "Figure 6": "TTFT over batch sizes", "Figure 7": "TPOT over batch sizes", "Figure 8": "throughput over batch sizes",
    "Figure 9": "end to end over batch sizes", "Figure 10": "TTFT over lengths of prompts",
}  # fmt: skip


def tables() -> Iterator[PaperTable]:
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
    yield PaperTable("Table 4", "quality of Qwen3-MoE-30B; AIME25 is no task of lm-eval", tuple(_TASKS), [
        Line(label, Quality(options, _TASKS), dict(zip(_TASKS, numbers, strict=True)))
        for label, (options, numbers) in _QUALITY.items()
    ])  # fmt: skip
    for name in ("Figure 1", "Figure 2", "Figure 3"):
        yield PaperTable(name, "which experts are hot, and when", ("ours",), [
            Line("routers", Missing("`vllm-dymoe report TRACE` draws it from the trace of this run."))
        ])  # fmt: skip
    for name, about in _FIGURES.items():
        yield PaperTable(name, about, ("TTFT s", "TPOT s"), [*_speeds()])


def _ratios(prefill: bool, recorded: Recorded) -> Mapping[str, Number]:
    return {str(batch): activated(recorded, batch, prefill=prefill) for batch in _BATCHES}


def _speeds() -> Iterator[Line]:
    systems: dict[str, Mapping[str, Any]] = {
        "static Int4": {"system": "exact", "system_options": {"look_ahead": 0}},
        "DynaExq": {"hi": 16, "lo": 4, "system": "dynaexq"},
    }
    for label, options in systems.items():
        budget = _BUDGET if "lo" in options else "100%"
        columns = {"TTFT s": (budget, ttft), "TPOT s": (budget, tpot)}
        yield Line(label, Speed(Subject(label, options, budgets=(budget,)), columns))
    yield Line("ExpertFlow", Missing("a system of its own; measure its server with --peer http://..."))
