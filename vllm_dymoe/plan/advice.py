"""Which options fit a model on a device, what each of them does, and which to take."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from vllm_dymoe.config import ConfigError, ExpertBudget, Options
from vllm_dymoe.plan.device import Device
from vllm_dymoe.plan.model import ModelShape
from vllm_dymoe.plan.predict import Prediction, predict
from vllm_dymoe.plan.replay import Routings
from vllm_dymoe.resolve import resolve_options
from vllm_dymoe.runtime.device_share import StepShape, automatic_share
from vllm_dymoe.runtime.sizing import limit_in_bytes, minimum_budget, plan_slots, workspace_bytes
from vllm_dymoe.systems import make_system

GOOD_ENOUGH = 0.95
"""Of the likeliest tokens, those that have to be the ones of 16 bits for options to be recommended."""

CANDIDATES: tuple[Mapping[str, Any], ...] = (
    {"system": "exact", "hi": 16},
    {"system": "exact", "hi": 8},
    {"system": "exact", "hi": 4},
    {"system": "dymoe", "hi": 4, "lo": 2},
    {"system": "dymoe", "hi": 4},
    {"system": "firm", "hi": 4},
    {"system": "duoserve", "hi": 4},
    {"system": "on-demand", "hi": 4},
)
_SHARES = (0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Serving:
    """How the model is to be served, as far as memory goes: vLLM's options of these names."""

    max_model_len: int = 8192
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 2048
    gpu_memory_utilization: float = 0.9


@dataclass(frozen=True)
class Choice:
    """One row of a plan.

    Attributes:
        options: of the plugin, but for the budget.
        part: of the memory that is left for experts, up to which the budget may go.
        limit: bytes of device memory for experts.
        share: of all experts at the high tier.
        prediction: what they do.
        agreement: of the likeliest tokens with those of 16 bits, as measured on the small model; None if it was not.
    """

    options: Mapping[str, Any]
    part: float
    limit: int
    share: float
    prediction: Prediction
    agreement: float | None


def room_for_experts(shape: ModelShape, device: Device, serving: Serving, least: int) -> int:
    """Bytes that ``expert_budget`` "auto" would take: the same function decides at start.

    Raises:
        ConfigError: nothing fits.
    """
    free = int(device.memory * serving.gpu_memory_utilization) - shape.dense_bytes
    step = StepShape(
        tokens=serving.max_num_batched_tokens, sequences=serving.max_num_seqs, hidden=shape.hidden,
        attention=shape.attention_width, intermediate=shape.intermediate, top_k=shape.top_k,
        vocabulary=shape.vocabulary,
    )  # fmt: skip
    length = min(serving.max_model_len, shape.longest)
    return automatic_share(free, shape.kv_bytes * length, step.nbytes, least, length)


def choices(shape: ModelShape, device: Device, routings: Routings, serving: Serving, prompt: int) -> Iterator[Choice]:
    """Every candidate at a quarter, half, three quarters and all of the room for experts."""
    for candidate in CANDIDATES:
        options = resolve_options(candidate, environment={})
        experts = shape.packed(tuple(options.stored_bits), options.group_size)
        system, workspace = make_system(options), workspace_bytes(experts, "cuda")
        least = minimum_budget(experts, options, system, workspace)
        room = room_for_experts(shape, device, serving, least)
        seen = set()
        for part in _SHARES:
            budget = options.expert_budget if options.expert_budget.slots is not None else None
            if not system.residency.keeps:
                budget = ExpertBudget(slots="top-k")
            most = limit_in_bytes(budget or ExpertBudget(share=1.0), experts, options, workspace, room)
            limit = min(most, int(part * room))
            if limit < least or limit in seen:
                continue
            seen.add(limit)
            shares = system.precision.shares(shape.moe_layers, shape.top_k)
            plan = plan_slots(experts, options, system, limit, workspace, shares)
            found = predict(shape, options, plan, device, routings, prompt)
            share = min(1.0, (limit - workspace) / experts.nbytes(options.hi))
            yield Choice(candidate, part, limit, share, found, agreement(options))


def shown(rows: Sequence[Choice], systems: Sequence[str]) -> list[Choice]:
    """Rows of these systems; without any, at each part of the room the one that would be recommended there."""
    if systems:
        return [row for row in rows if row.options["system"] in systems]
    found: list[Choice] = []
    for part in _SHARES:
        at = [row for row in rows if row.part == part and (row.agreement or 0) >= GOOD_ENOUGH]
        found += [recommended(at)] if at else []
    return found


def agreement(options: Options) -> float | None:
    """Of the table that was measured on this repository's small model (benchmarks/quality)."""
    table = json.loads(resources.files("vllm_dymoe.plan").joinpath("quality.json").read_text())
    tiers = f"{options.hi}/{options.lo}" if options.system == "dymoe" else f"{options.hi}"
    found = table.get(tiers, {}).get(options.quantizer)
    return None if found is None else float(found)


def recommended(rows: Sequence[Choice]) -> Choice:
    """The fastest whose answers are good enough; of those within a twentieth of it, the best answers.

    Raises:
        ConfigError: there is none.
    """
    good = [row for row in rows if (row.agreement or 0) >= GOOD_ENOUGH]
    if not good:
        raise ConfigError("nothing fits on this device; lower --max-model-len or --max-num-seqs.")
    fastest = min(row.prediction.tpot for row in good)
    near = [row for row in good if row.prediction.tpot <= 1.05 * fastest]
    return max(near, key=lambda row: (row.agreement or 0, -row.prediction.tpot))


def command(model: str, row: Choice, shape: ModelShape, serving: Serving) -> str:
    """What serves the model so."""
    options = {**row.options, "expert_budget": row.limit}
    length = min(serving.max_model_len, shape.longest)
    return (
        f"vllm serve {model} --quantization dymoe --max-model-len {length} --max-num-seqs {serving.max_num_seqs} "
        f"--gpu-memory-utilization {serving.gpu_memory_utilization:g} "
        f"--additional-config '{json.dumps({'dymoe': options})}'"
    )
