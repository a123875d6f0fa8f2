"""DuoServe-MoE: Tables 2 and 3, Figures 2, 5 and 6."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from vllm_dymoe.bench.cases import FULL, Subject
from vllm_dymoe.bench.papers.base import (
    TRAINED,
    At,
    Line,
    Missing,
    Number,
    PaperTable,
    Recorded,
    Routed,
    Speed,
    peak,
    rate,
    request,
    ttft,
)
from vllm_dymoe.bench.papers.routers import patterns
from vllm_dymoe.predict.expert_mlp import ARCHITECTURES
from vllm_dymoe.training import Recipe, train

_SYSTEMS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "MoESys": ("layer", {"system": "layer-prefetch"}),
    "ACC": ("top-k", {"system": "on-demand", "system_options": {"overlap": False}}),
    "DuoServe-MoE": ("top-k", {"system": "duoserve", "predictor": TRAINED}),
}
RECIPE = Recipe(epochs=60)
"""Of the networks: a run records few tokens, so that they are read often."""
_OTHER_MODEL = "serve this model, with prompts of this dataset, to repeat its row."
_GB = {"MoESys": (4.24, 9.13), "ACC": (3.63, 8.06), "DuoServe-MoE": (3.91, 8.44), "GPU only": (25.14, 138.0)}


def tables(_moe_layers: int) -> Iterator[PaperTable]:
    """All of them."""
    memory = [
        Line(name, Speed(_subject(name), {"ours, MB": (At(_SYSTEMS[name][0]), peak)}), _gigabytes(name))
        for name in _SYSTEMS
    ]
    full = Subject("GPU only", {"system": "exact", "system_options": {"look_ahead": 0}}, budgets=(FULL,))
    memory.append(Line("GPU only", Speed(full, {"ours, MB": (At(FULL), peak)}), _gigabytes("GPU only")))
    about = "peak memory: of everything in the paper, of experts here"
    yield PaperTable("Table 2", about, ("8x7B, GB", "8x22B, GB", "ours, MB"), memory)
    columns = ("all experts %", "at least one %")
    yield PaperTable("Table 3", "hit rate of the predictor, on requests that it has not seen", columns, [
        Line("8x7B, Orca", Missing(_OTHER_MODEL), {columns[0]: 66.85, columns[1]: 95.45}),
        Line("8x7B, SQuAD", Missing(_OTHER_MODEL), {columns[0]: 60.23, columns[1]: 92.31}),
        Line("8x22B, Orca", Missing(_OTHER_MODEL), {columns[0]: 56.21, columns[1]: 90.45}),
        Line("8x22B, SQuAD", Missing(_OTHER_MODEL), {columns[0]: 54.16, columns[1]: 90.31}),
        Line("this model, the paper's network", Routed(partial(_trained, "paper-shared"))),
        Line("this model, the default network", Routed(partial(_trained, "linear+input"))),
    ])  # fmt: skip
    yield PaperTable("Figure 2", "popularity and affinity, in multiples of chance", (
        "most popular expert", "strongest affinity"), [Line("routers", Routed(patterns))])  # fmt: skip
    latency = {"TTFT s": ttft, "end to end s": request}
    about = "the paper reports 1.78 to 3.8 times less TTFT and 1.42 to 7.54 times less latency"
    yield PaperTable("Figure 5", about, tuple(latency), [_speed(name, latency) for name in _SYSTEMS])
    yield PaperTable("Figure 6", "decoding; its distribution is drawn in cdf.png", ("tokens/s",), [
        _speed(name, {"tokens/s": rate}) for name in _SYSTEMS
    ])  # fmt: skip


def _subject(name: str) -> Subject:
    budget, options = _SYSTEMS[name]
    return Subject(name, options, budgets=(budget,))


def _speed(name: str, columns: Mapping[str, Any]) -> Line:
    budget = _SYSTEMS[name][0]
    return Line(name, Speed(_subject(name), {column: (At(budget), of) for column, of in columns.items()}))


def _gigabytes(name: str) -> dict[str, Number]:
    return dict(zip(("8x7B, GB", "8x22B, GB"), _GB[name], strict=True))


def _trained(architecture: str, recorded: Recorded) -> Mapping[str, Number]:
    """Hit rates of a network that is trained on the trace now."""
    found = train(recorded.trace, ARCHITECTURES[architecture], RECIPE).metrics["trained"]
    return {"all experts %": 100 * found["all_k"], "at least one %": 100 * found["at_least_one"]}
