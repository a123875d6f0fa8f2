"""The rows of the papers' tables, as options of this plugin."""

from dataclasses import dataclass, field
from typing import Any

from vllm_dymoe.policy.systems import PRESETS

CACHE = "cache"


@dataclass(frozen=True)
class Variant:
    """One row.

    Attributes:
        rows: which rows of which tables it is.
        options: of the plugin.
        everywhere: measured on every link, and for a large model at every budget; the others on the last link alone.
        oracle: how many layers ahead an oracle looks, in place of the scheme's predictor; 0 for no oracle.
        exact: answers as every other row does. Those that lower precision do not.
        wrong: the share of the oracle's names that are replaced by experts that are not wanted.
        whole: experts move in one piece that nothing overtakes, and are computed when all of it is there.
    """

    rows: str
    options: dict[str, Any] = field(default_factory=dict)
    everywhere: bool = False
    oracle: int = 0
    exact: bool = True
    wrong: float = 0.0
    whole: bool = False


def _meeting(projections: int, *, tune: bool) -> dict[str, Any]:
    return {
        "prefetch": "meeting-of-layers",
        # The paper's K is three quarters of the experts per token: 3 of Qwen1.5-MoE's 4.
        "prefetch_options": {"p": 3, "tune": tune, "update_every": 4, "rounds": 16},
        "prefetch_projections": projections,
    }


def _next_gate(projections: int) -> dict[str, Any]:
    return {"prefetch": "next-gate", "prefetch_projections": projections}


_ANY = {"prefetch": "popularity"}  # an oracle takes its predictor's place


def _dyquant(preset: str) -> dict[str, Any]:
    return dict(PRESETS[preset])


VARIANTS = {
    "on-demand": Variant("DyMoE 3, row 1; Accelerate", {"policy": "on-demand"}, everywhere=True),
    CACHE: Variant("DyMoE 3, row 2", {"prefetch": "none"}, everywhere=True),
    "next-gate": Variant("DyMoE 3, row 3; FIRM 1, baseline", _next_gate(3), everywhere=True),
    "4/2": Variant("DyMoE 3, row 4", _dyquant("cache+dyquant-4/2"), exact=False),
    "4/2, next-gate": Variant("DyMoE 3, row 5", _dyquant("cache+dyquant-4/2+prefetch"), exact=False),
    "4/0, next-gate": Variant("DyMoE 3, row 6", _dyquant("cache+dyquant-4/0+prefetch"), exact=False),
    "next-gate, n = 1": Variant("FIRM 1, + FG", _next_gate(1)),
    "meeting of layers": Variant("FIRM 1, + MoL", _meeting(3, tune=False)),
    "meeting of layers, n = 1": Variant("FIRM 1, + FG + MoL", _meeting(1, tune=False)),
    "firm, n = 1": Variant("FIRM 1, all; FIRM 2, n = 1", _meeting(1, tune=True)),
    "firm, n = 2": Variant("FIRM 2, n = 2", _meeting(2, tune=True), everywhere=True),
    "popularity": Variant("DuoServe-MoE, without its predictor", {"prefetch": "popularity"}),
    "layer": Variant("MoESys", {"prefetch": "layer"}),
    "half wrong, whole": Variant("FIRM 1, mispredictions, whole experts", _ANY, True, oracle=1, wrong=0.5, whole=True),
    "half wrong": Variant("the same, n = 3", _ANY, True, oracle=1, wrong=0.5),
    "half wrong, n = 1": Variant("the same, n = 1", _ANY | {"prefetch_projections": 1}, True, oracle=1, wrong=0.5),
    "oracle": Variant("bound of every predictor of the next layer", _ANY, everywhere=True, oracle=1),
}
