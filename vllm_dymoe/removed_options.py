"""Options of earlier versions, each with what to write in its place. The table goes with the next version."""

import json
from typing import Any

_NEXT_GATE = '"system": "exact", or "dymoe", which ask the next layer\'s gate by themselves'
_NO_PREFETCH = '"system_options": {"look_ahead": 0} of the systems "exact" and "dymoe"'

_POLICIES = {
    "exact": '"system": "exact"',
    "uniform-lo": '"system": "dymoe", "system_options": {"retention": 0}',
    "on-demand": '"system": "on-demand"',
    "layer-prefetch": '"system": "layer-prefetch"',
    "duoserve": '"system": "duoserve"',
    "dymoe": '"system": "dymoe"',
    "firm": '"system": "firm"',
}
_PREFETCHES = {
    "none": _NO_PREFETCH,
    "layer": '"system": "layer-prefetch"',
    "popularity": '"system": "duoserve"',
    "next-gate": _NEXT_GATE,
    "meeting-of-layers": '"system": "firm"',
    "trained": '"predictor": "FILE", which suffices',
}
_PRESETS = {
    "load-on-demand": '"system": "on-demand"',
    "cache": '"system": "exact", "system_options": {"look_ahead": 0}',
    "cache+prefetch": '"system": "exact"',
    "cache+dyquant-4/2": '"lo": 2, "system": "dymoe", "system_options": {"look_ahead": 0}',
    "cache+dyquant-4/2+prefetch": '"lo": 2, "system": "dymoe"',
    "cache+dyquant-4/0+prefetch": '"system": "dymoe"',
}

REMOVED: dict[str, str | dict[str, str]] = {
    "policy": _POLICIES,
    "policy_options": '"system_options"',
    "prefetch": _PREFETCHES,
    "prefetch_options": '"system_options": "look_ahead" of "exact" and "dymoe", "projections" of "firm"; the other '
    "parameters are the papers' values now",
    "preset": _PRESETS,
    "keep_experts": '"system": "on-demand" or "duoserve", which keep nothing; the others keep experts',
    "prefetch_projections": '"system": "firm", "system_options": {"projections": 1}; other systems fetch all three',
    "skipped_weights": '"system": "dymoe", "system_options": {"skipped_weights": "renormalize"}',
    "reuse_high": '"system": "dymoe", "system_options": {"reuse_high": false}',
    "staging_slots": "nothing: how many slots are for streaming follows from how many there are",
    "io_threads": "nothing: one thread reads ahead of the computation",
    "seed": "vLLM's own --seed, from which dummy weights follow now",
    "trace_dir": '"trace": "FOLDER"',
    "trace_limit": '"trace": {"folder": "FOLDER", "limit": "1GiB"}',
    "trace_inputs": '"trace": {"folder": "FOLDER", "inputs": true}',
}
"""By option: what to write instead, or that for each value it had."""


def instead_of(option: str, value: Any) -> str | None:
    """The sentence's end for an option that is gone; None for one that never was."""
    told = REMOVED.get(option)
    if isinstance(told, dict):
        known = told.get(value) if isinstance(value, str) else None
        told = known or f'"system", one of {json.dumps(sorted(_POLICIES.keys() - {"uniform-lo"}))[1:-1]}'
    return told and f"is not an option any more; write {told}"
