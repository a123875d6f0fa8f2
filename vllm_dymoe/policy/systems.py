"""The papers' systems by name: what they set besides the precision, unless the user says otherwise.

A system is composed of parts that can be had one by one, and is no code path of its own.
"""

from collections.abc import Mapping
from typing import Any

SYSTEMS: Mapping[str, Mapping[str, Any]] = {
    # Hugging Face Accelerate: an expert comes when its router has named it, and nothing stays.
    "on-demand": {"keep_experts": False},
    # MoESys: all experts of the next layer, while this one computes.
    "layer-prefetch": {"prefetch": "layer"},
    # DuoServe-MoE, whose trained predictor is still to come; popularity is one of that predictor's inputs.
    "duoserve": {"prefetch": "popularity"},
    # DyMoE, with its precision from the policy of that name.
    "dymoe": {"prefetch": "next-gate"},
    # FIRM-MoE. The paper's granularity is 1 for small models and 2 for larger ones.
    "firm": {"prefetch": "meeting-of-layers", "prefetch_projections": 2},
}
