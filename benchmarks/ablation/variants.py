"""The rows of the papers' tables, as options of this plugin."""

from dataclasses import dataclass, field
from typing import Any

from vllm_dymoe.bench.systems import make_known

CACHE = "cache"
make_known()


@dataclass(frozen=True)
class Variant:
    """One row.

    Attributes:
        rows: which rows of which tables it is.
        options: of the plugin.
        everywhere: measured on every link, and for a large model at every budget; the others on the last link alone.
        oracle: how many layers ahead an oracle looks, in place of the system's predictor; 0 for no oracle.
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


def _compared(ahead: str = "next gate", projections: int = 3, *, tune: bool = False) -> dict[str, Any]:
    parameters = {"ahead": ahead, "projections": projections, "tune": tune}
    return {"system": "compared", "system_options": parameters}


# The rows of DyMoE's Table 3. The paper does not name the precision of the first three; it is that of the others' high
# tier here, so that the rows differ in one thing at a time. Retention is 0.75 in the paper and by default.
_NOTHING_AHEAD = {"system_options": {"look_ahead": 0}}
TABLE_3: dict[str, dict[str, Any]] = {
    "load on demand": {"hi": 4, "lo": 0, "system": "on-demand"},
    "cache": {"hi": 4, "lo": 0, "system": "exact", **_NOTHING_AHEAD},
    "cache, prefetch": {"hi": 4, "lo": 0, "system": "exact"},
    "cache, 4/2": {"hi": 4, "lo": 2, "system": "dymoe", **_NOTHING_AHEAD},
    "cache, 4/2, prefetch": {"hi": 4, "lo": 2, "system": "dymoe"},
    "cache, 4/0, prefetch": {"hi": 4, "lo": 0, "system": "dymoe"},
}

_ANY = _compared("popularity")  # an oracle takes its predictor's place


VARIANTS = {
    "on-demand": Variant("DyMoE 3, row 1; Accelerate", TABLE_3["load on demand"], everywhere=True),
    CACHE: Variant("DyMoE 3, row 2", TABLE_3["cache"], everywhere=True),
    "next-gate": Variant("DyMoE 3, row 3; FIRM 1, baseline", TABLE_3["cache, prefetch"], everywhere=True),
    "4/2": Variant("DyMoE 3, row 4", TABLE_3["cache, 4/2"], exact=False),
    "4/2, next-gate": Variant("DyMoE 3, row 5", TABLE_3["cache, 4/2, prefetch"], exact=False),
    "4/0, next-gate": Variant("DyMoE 3, row 6", TABLE_3["cache, 4/0, prefetch"], exact=False),
    "next-gate, n = 1": Variant("FIRM 1, + FG", _compared(projections=1)),
    "meeting of layers": Variant("FIRM 1, + MoL", _compared("meeting of layers")),
    "meeting of layers, n = 1": Variant("FIRM 1, + FG + MoL", _compared("meeting of layers", 1)),
    "firm, n = 1": Variant("FIRM 1, all; FIRM 2, n = 1", _compared("meeting of layers", 1, tune=True)),
    "firm, n = 2": Variant("FIRM 2, n = 2", _compared("meeting of layers", 2, tune=True), everywhere=True),
    "popularity": Variant("DuoServe-MoE, without its predictor", _compared("popularity")),
    "layer": Variant("MoESys", {"system": "layer-prefetch"}),
    "half wrong, whole": Variant("FIRM 1, mispredictions, whole experts", _ANY, True, oracle=1, wrong=0.5, whole=True),
    "half wrong": Variant("the same, n = 3", _ANY, True, oracle=1, wrong=0.5),
    "half wrong, n = 1": Variant("the same, n = 1", _compared("popularity", 1), True, oracle=1, wrong=0.5),
    "oracle": Variant("bound of every predictor of the next layer", _ANY, everywhere=True, oracle=1),
}
