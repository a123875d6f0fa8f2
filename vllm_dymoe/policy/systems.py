"""The papers' systems by name, and DyMoE's Table 3: what they set, unless the user says otherwise.

A system is composed of parts that can be had one by one, and is no code path of its own.
"""

from collections.abc import Mapping
from typing import Any

SYSTEMS: Mapping[str, Mapping[str, Any]] = {
    # Hugging Face Accelerate: an expert comes when its router has named it, and nothing stays.
    "on-demand": {"keep_experts": False, "prefetch": "none"},
    # MoESys: all experts of the next layer, while this one computes.
    "layer-prefetch": {"prefetch": "layer"},
    # DuoServe-MoE: as many slots as a token uses experts, and nothing stays (5.1). With the option predictor prefetch
    # is "trained"; popularity, which stands in until there is one, is one of its inputs.
    "duoserve": {"expert_budget": "top-k", "keep_experts": False, "prefetch": "popularity"},
    # DyMoE, with its precision from the policy of that name.
    "dymoe": {"prefetch": "next-gate"},
    # FIRM-MoE. The paper's granularity is 1 for small models and 2 for larger ones.
    "firm": {"prefetch": "meeting-of-layers", "prefetch_projections": 2},
}

# The rows of DyMoE's Table 3. The paper does not name the precision of the first three; it is that of the others' high
# tier here, so that the rows differ in one thing at a time.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "load-on-demand": {"hi": 4, "lo": 0, "policy": "on-demand"},
    "cache": {"hi": 4, "lo": 0, "policy": "exact", "prefetch": "none"},
    "cache+prefetch": {"hi": 4, "lo": 0, "policy": "exact", "prefetch": "next-gate"},
    "cache+dyquant-4/2": {"hi": 4, "lo": 2, "policy": "dymoe", "prefetch": "none"},
    "cache+dyquant-4/2+prefetch": {"hi": 4, "lo": 2, "policy": "dymoe", "prefetch": "next-gate"},
    "cache+dyquant-4/0+prefetch": {"hi": 4, "lo": 0, "policy": "dymoe", "prefetch": "next-gate"},
}
