"""DyMoE: Tables 1 to 3."""

from collections.abc import Iterator, Mapping
from typing import Any

from vllm_dymoe.bench.cases import Subject
from vllm_dymoe.bench.papers.tables import TPOT, TTFT, At, Line, PaperTable, Quality, Speed, least, line

_TASKS = {"MMLU": "mmlu", "CMMLU": "cmmlu", "GSM8K": "gsm8k"}
_PLACES = {"16 GB": "25%", "24 GB": "75%"}  # of Mixtral's experts at 4 bits, beside what else is there
_HERE = "here with " + " and ".join(f"{share} of the experts for {memory}" for memory, share in _PLACES.items())
_COLUMNS = {f"{memory} {name}": (At(share), show) for memory, share in _PLACES.items() for name, show in
            (("TTFT s", TTFT), ("TPOT s", TPOT))}  # fmt: skip
# Rounded up, 63 of 64 choices of Mixtral's decode stay high at r = 0.75, and rows 4 to 6 could not differ from 2 and 3.
_NEAREST = {"high_by": "depth", "rounding": "nearest", "heavy_share": 0.2}  # of a prompt's tokens; the paper names none
_BOUND = {f"{memory} TPOT s": (At(share), least) for memory, share in _PLACES.items()}
_DYMOE: dict[str, Any] = {"system": "dymoe", "lo": 0, "system_options": _NEAREST}

# The paper does not name the precision of the first three rows; it is that of the others' high tier here, so that rows
# differ in one thing at a time.
_ABLATION: Mapping[str, tuple[Mapping[str, Any], tuple[float, float, float, float]]] = {
    "1. load on demand": ({"system": "on-demand"}, (1.0193, 0.2795, 1.0193, 0.2795)),
    "2. cache": ({"system": "exact", "system_options": {"look_ahead": 0}}, (0.5922, 0.1489, 0.4893, 0.1273)),
    "3. cache, prefetch": ({"system": "exact"}, (0.5159, 0.1315, 0.3954, 0.1108)),
    "4. cache, 4/2": (
        _DYMOE | {"lo": 2, "system_options": _NEAREST | {"look_ahead": 0}},
        (0.5431, 0.1307, 0.2423, 0.0796),
    ),
    "5. cache, 4/2, prefetch": (_DYMOE | {"lo": 2}, (0.4269, 0.1150, 0.2121, 0.0754)),
    "6. cache, 4/0, prefetch": (_DYMOE, (0.3921, 0.1048, 0.1877, 0.0656)),
}
_ORACLE = {"system": "compared", "system_options": {"ahead": "oracle"}}
_UNIFORM = {
    "Int2": ({"hi": 2}, (0.4979, 0.3048, 0.0781), (0.4950, 0.4300, 0.5292)),
    "Int4": ({"hi": 4}, (0.6795, 0.5044, 0.6467), (0.7705, 0.8044, 0.8908)),
    "BF16": ({"hi": 16}, (0.6889, 0.5108, 0.6467), (0.7800, 0.8063, 0.8954)),
}
_DYNAMIC = {
    ("4/0", 0.75): ((0.6714, 0.4822, 0.6209), (0.7698, 0.7960, 0.9151)),
    ("4/0", 0.9): ((0.6807, 0.4940, 0.6558), (0.7737, 0.8019, 0.9174)),
    ("4/0", 1.0): ((0.6795, 0.5044, 0.6467), (0.7705, 0.8044, 0.8908)),
    ("4/2", 0.75): ((0.6782, 0.4947, 0.6293), (0.7632, 0.7894, 0.9090)),
    ("4/2", 0.9): ((0.6821, 0.5053, 0.6475), (0.7704, 0.8015, 0.9052)),
    ("4/2", 1.0): ((0.6795, 0.5044, 0.6467), (0.7705, 0.8044, 0.8908)),
}


def tables() -> Iterator[PaperTable]:
    yield PaperTable("Table 1", "uniform quantization", tuple(_TASKS), [
        row for label, (options, *both) in _UNIFORM.items() for row in _of_both_models(label, options, both)
    ])  # fmt: skip
    yield PaperTable("Table 2", "4/0 and 4/2 at three retentions", tuple(_TASKS), [
        row for (tiers, r), both in _DYNAMIC.items()
        for row in _of_both_models(f"{tiers}, r = {r}", _dymoe(tiers, r), both)
    ])  # fmt: skip
    yield PaperTable("Table 3", f"Mixtral-8x7B on an RTX 3090 and PCIe 3; {_HERE}", tuple(_COLUMNS), [
        line(label, Speed(Subject(label, options), _COLUMNS), _COLUMNS, numbers)
        for label, (options, numbers) in _ABLATION.items()
    ] + [
        line("2, and an oracle", Speed(Subject("oracle", _ORACLE), _COLUMNS)),
        line("bound: all of 2 overlaps", Speed(Subject("2. cache", _ABLATION["2. cache"][0]), _BOUND)),
    ])  # fmt: skip


def _of_both_models(label: str, options: Mapping[str, Any], both: Any) -> Iterator[Line]:
    for model, numbers in zip(("Mixtral", "Qwen3"), both, strict=True):
        yield line(f"{label} ({model})", Quality(options, _TASKS), _TASKS, numbers)


def _dymoe(tiers: str, retention: float) -> dict[str, Any]:
    # Every expert fits on the device here, so that reuse would compute all of them high.
    chosen = {"retention": retention, **_NEAREST, "reuse_high": False}
    return {"hi": 4, "lo": int(tiers[2:]), "system": "dymoe", "system_options": chosen}
