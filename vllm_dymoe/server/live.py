"""Data of the live page for one rank.

Residency and score of every expert take one byte each; counters come in addition.
"""

import base64
import os
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_dymoe.cache.transfer import Reason
from vllm_dymoe.planner.precision import Precision
from vllm_dymoe.planner.routing import Phase
from vllm_dymoe.planner.table import CODES
from vllm_dymoe.server.expert_server import ExpertServer, precision_of

SCORE_BITS = 6
"""Low bits of a cell: the expert's score as a share of its layer's largest. The two bits above: ABSENT, LOW or HIGH."""


def pack_cells(precision: NDArray[np.int8], score: NDArray[Any]) -> NDArray[np.uint8]:
    """Return the cells of a map, uint8 like both arguments [layers, experts]."""
    most = (1 << SCORE_BITS) - 1
    largest = np.maximum(score.max(1, keepdims=True), 1e-12)
    share = np.ceil(np.clip(score / largest, 0, 1) * most).astype(np.uint8)
    return (precision.astype(np.uint8) << SCORE_BITS) | share


def live_state(server: ExpertServer, tokens: Mapping[Phase, int]) -> dict[str, Any]:
    """Return one rank's state as JSON-serialisable data.

    Counters are totals; the page shows the difference between two answers.

    Args:
        tokens: number of tokens that the rank has computed, in prompts and in decode.
    """
    stats, experts, table = server.stats(), server.experts, server.cache.table
    migration, link = server.host_planned.migration, server.options.link_gbps
    score = table.score.max(0) if migration is None else migration.hotness
    precision = np.zeros_like(table.precision) if server.no_slots else table.precision
    schema = type(server.policy).model_json_schema().get("properties", {})
    parameters = {
        name: {"value": getattr(server.policy, name)}
        | {key: schema[name][key] for key in ("description", "enum", "minimum", "maximum") if key in schema[name]}
        for name in type(server.policy).precision_parameters
    }
    return {
        "seconds": time.monotonic(),
        "layers": list(experts.layers),
        "experts": experts.num_experts,
        "cells": base64.b64encode(pack_cells(precision, score).tobytes()).decode("ascii"),
        "asleep": bool(server.asleep),
        "counts": {
            "hits": stats.hits,
            "misses": stats.misses,
            "cpu_executed": stats.cpu_executed,
            "prompt_tokens": tokens[Phase.PREFILL],
            "decoded_tokens": tokens[Phase.DECODE],
            "link_bytes": sum(stats.bytes_moved[reason.name.lower()] for reason in Reason),
            "disk_bytes": stats.disk_bytes,
            "disk_seconds": stats.disk_seconds,
            "cpu_seconds": time.process_time(),
        },
        "cores": len(os.sched_getaffinity(0)),
        "link_limit": None if link is None else link * 1e9,
        "budget_bytes": stats.budget_bytes,
        "all_bytes": experts.nbytes(server.options.high),
        "slots": stats.slots,
        "resident": {name: int((precision == CODES[Precision(name)]).sum()) for name in stats.slots},
        "precision": dict(precision_of(server)) | {"parameters": parameters},
    }
