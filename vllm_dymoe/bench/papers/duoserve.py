"""DuoServe-MoE: Tables 2 and 3, Figures 5 and 6."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from vllm_dymoe.bench.cases import FULL, Subject
from vllm_dymoe.bench.papers.tables import RATE, TRAINED, TTFT, At, Numbers, PaperTable, Speed, bound, line, of
from vllm_dymoe.observe.trace import Trace
from vllm_dymoe.predict.expert_mlp import ARCHITECTURES
from vllm_dymoe.training import Recipe, train

RECIPE = Recipe(epochs=60)  # of the networks: a run records few tokens, so that they are read often
_SYSTEMS: Mapping[str, tuple[str, Mapping[str, Any], tuple[float, float]]] = {
    "MoESys": ("layer", {"system": "layer-prefetch"}, (4.24, 9.13)),
    "ACC": ("top-k", {"system": "on-demand", "system_options": {"overlap": False}}, (3.63, 8.06)),
    "DuoServe-MoE": ("top-k", {"system": "duoserve", "predictor": TRAINED}, (3.91, 8.44)),
    "GPU only": (FULL, {"system": "exact", "system_options": {"look_ahead": 0}}, (25.14, 138.0)),
}
_COMPARED = ("MoESys", "ACC", "DuoServe-MoE", "an oracle")
_ORACLE = {"system": "compared", "system_options": {"ahead": "oracle", "keeps": False}}
_OTHER_MODEL = "serve this model, with prompts of this dataset, to repeat its row."
_HIT_RATES = {
    "8x7B, Orca": (66.85, 95.45),
    "8x7B, SQuAD": (60.23, 92.31),
    "8x22B, Orca": (56.21, 90.45),
    "8x22B, SQuAD": (54.16, 90.31),
}


def tables() -> Iterator[PaperTable]:
    peak = {"ours, MB": of("decode", "peak_expert_bytes", unit=1e-6)}
    sizes = ("8x7B, GB", "8x22B, GB")
    yield PaperTable(
        "Table 2", "peak memory: of everything in the paper, of experts here", (*sizes, *peak),
        [line(name, _speed(name, peak), sizes, numbers) for name, (_, _, numbers) in _SYSTEMS.items()],
    )  # fmt: skip
    columns = ("all experts %", "at least one %")
    yield PaperTable("Table 3", "hit rate of the predictor, on requests that it has not seen", columns, [
        *(line(name, _OTHER_MODEL, columns, numbers) for name, numbers in _HIT_RATES.items()),
        line("this model, the paper's network", partial(_trained, "paper-shared")),
        line("this model, the default network", partial(_trained, "linear+input")),
    ])  # fmt: skip
    least = Speed(Subject("ACC", _SYSTEMS["ACC"][1]), {"tokens/s": (At("top-k"), lambda row: 1 / bound(row)[0])})
    latency = {"TTFT s": TTFT, "end to end s": of("request_ms", "mean", unit=1e-3)}
    about = "the paper reports 1.78 to 3.8 times less TTFT and 1.42 to 7.54 times less latency"
    yield PaperTable("Figure 5", about, tuple(latency), [line(name, _speed(name, latency)) for name in _COMPARED])
    yield PaperTable("Figure 6", "decoding", ("tokens/s",), [
        *(line(name, _speed(name, {"tokens/s": RATE})) for name in _COMPARED),
        line("bound: all of ACC's overlaps", least),
    ])  # fmt: skip


def _speed(name: str, columns: Mapping[str, Callable[..., Any]]) -> Speed:
    budget, options, _ = _SYSTEMS.get(name, ("top-k", _ORACLE, ()))
    return Speed(Subject(name, options), {column: (At(budget), show) for column, show in columns.items()})


def _trained(architecture: str, trace: Trace) -> Numbers:
    found = train(trace, ARCHITECTURES[architecture], RECIPE).metrics["trained"]
    return {"all experts %": 100 * found["all_k"], "at least one %": 100 * found["at_least_one"]}
