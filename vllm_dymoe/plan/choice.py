"""Options and a budget on a device: how fast they are, and which of them to take.

With every expert resident a step takes

    t = (bytes of weights / bandwidth of memory) + layers * (time of a layer beside its products)

which is the host's, or that of small kernels where a GPU decides. Each miss adds its bytes / the link, and what it
costs beside them; a GPU that decides fetches nothing ahead in decode. Each chunk of a prompt streams what is not there
while it computes, so that it takes the longer of the two, and one expert more (DuoServe-MoE 5.2).

Where host memory holds a part of the experts, what is in neither memory is read from the disk in front of the link. The
host's rule sees the device's misses, so that both together keep about what one memory of both sizes would.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from statistics import fmean
from typing import Any

from vllm_dymoe.config import ConfigError, ExpertBudget, Options
from vllm_dymoe.plan.device import Device
from vllm_dymoe.plan.model import ITEM, ModelShape
from vllm_dymoe.plan.replay import Routings, replay
from vllm_dymoe.residency.format import Format, ModelExperts
from vllm_dymoe.residency.rule import HIGH, LOW, Ints
from vllm_dymoe.residency.tier import Tier
from vllm_dymoe.resolve import resolve_options
from vllm_dymoe.runtime.decode_path import DECODE_ROWS
from vllm_dymoe.runtime.device_share import StepShape, automatic_share
from vllm_dymoe.runtime.rates import Rates, costs
from vllm_dymoe.runtime.sizing import (
    limit_in_bytes,
    minimum_budget,
    plan_slots,
    slot_bits,
    tier_bits,
    workspace_bytes,
)  # fmt: skip
from vllm_dymoe.systems import make_system
from vllm_dymoe.systems.dymoe import CriticalHigh

GOOD_ENOUGH = 0.95  # of the likeliest tokens, those that have to be the ones of 16 bits for options to be recommended
CANDIDATES: tuple[Mapping[str, Any], ...] = (
    {"system": "exact", "hi": 16},
    {"system": "exact", "hi": 8},
    {"system": "exact", "hi": 4},
    {"system": "dymoe", "hi": 4, "lo": 2},
    {"system": "firm", "hi": 4},
    {"system": "duoserve", "hi": 4},
    {"system": "on-demand", "hi": 4},
)
_PARTS = (0.25, 0.5, 0.75, 1.0)  # of the room for experts
_NEXT_ROW, _ROUND_TRIP = 0.2, 20e-6  # of an expert's first row on a host; seconds there and back


@dataclass(frozen=True)
class Serving:
    """How the model is to be served, as far as memory goes: vLLM's options of these names."""

    max_model_len: int = 8192
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 2048
    gpu_memory_utilization: float = 0.9


@dataclass(frozen=True)
class Choice:
    """Options of the plugin and what they do on a device."""

    given: Mapping[str, Any]  # options as a user writes them, without the budget
    limit: int  # bytes of device memory for experts
    part: float  # of the room for experts, up to which the budget may go
    tiers: str  # bits of them
    share: float  # experts at the high tier that fit, of all
    agreement: float | None  # of the likeliest tokens with those of 16 bits; None if it was not measured
    hit_rate: float  # of the experts that a decode step needs
    moved: float  # bytes of experts that a decode step moves
    tpot: float  # seconds of a decode step
    ttft: float  # seconds to the first token of a prompt


def predict(
    given: Mapping[str, Any],
    limit: int,
    part: float,
    shape: ModelShape,
    device: Device,
    routings: Routings,
    prompt: int,
    chunk: int,
) -> Choice:
    """What options do on a device, for a batch as the routings have it, and a prompt of so many tokens in chunks."""
    options = resolve_options(given, environment={})
    system, experts = make_system(options), shape.packed(tuple(options.stored_bits), options.group_size)
    formats, workspace, layers = experts.formats, workspace_bytes(experts, "cuda"), shape.moe_layers
    slots, precision = plan_slots(experts, options, system, limit, workspace), system.precision
    slot_bytes = {tier: formats[bits].nbytes for tier, bits in slot_bits(experts, options, precision.tiers).items()}
    nested = Tier.HI in slots.slots and any(fmt.nested for fmt in formats.values())
    choose = precision.chooser(routings.header.num_layers) if isinstance(precision, CriticalHigh) else None
    kept = slots.quotas if system.residency.keeps else {}
    wide = device.decides and options.decisions != "host" and routings.batch > DECODE_ROWS  # such a step may fetch them
    shared = _shared(formats, options, device) if device.host and not wide else None
    demand = replay(routings, kept, choose, low=options.lo > 0, nested=nested, costs=shared)
    layer_moved = sum(demand.missing[tier] * nbytes for tier, nbytes in slot_bytes.items())
    needed = sum(demand.active.values())
    beside, layer_read = _in_host_memory(device, experts), 0.0  # experts of each layer
    if beside is not None:
        both = {tier: [min(shape.experts, own + beside) for own in shares] for tier, shares in slots.quotas.items()}
        far = replay(routings, both, choose, low=options.lo > 0, nested=nested)
        layer_read = sum(far.missing[tier] * nbytes for tier, nbytes in slot_bytes.items())
    alone = system.residency.on_device and options.decisions != "host" and beside is None
    deciding = device.in_a_graph() if alone else device
    bits = {tier: tier_bits(options, tier) for tier in demand.active}
    weights = sum(count * formats[bits[tier]].whole_nbytes for tier, count in demand.active.items() if bits[tier])
    step = (shape.token_weights * ITEM + layers * weights) / device.bandwidth + layers * deciding.layer_seconds
    waiting = layer_moved / device.link if shared is None else demand.shared

    chunks = -(-prompt // chunk)
    active = routings.distinct(prompt // chunks)
    shares = {Tier.HI: [1.0]} if choose is None else precision.shares(layers, max(1, round(active)))
    high = fmean(shares.get(Tier.HI, [0.0]))
    wanted = {Tier.HI: high, Tier.LO: 1.0 if nested else 1 - high}
    streamed = read = 0.0  # bytes that a chunk moves, and reads from a disk: of its active experts what is not kept
    for tier in slots.slots:
        of_tier = layers * max(0.0, wanted[tier]) * active * slot_bytes[tier]
        kept_of_layer = sum(slots.quotas[tier]) / layers
        streamed += of_tier * max(0.0, 1 - kept_of_layer / shape.experts)
        read += 0.0 if beside is None else of_tier * max(0.0, 1 - (kept_of_layer + beside) / shape.experts)
    blob = formats[options.hi].whole_nbytes
    computing = _prompt_seconds(blob, active, shape, deciding, prompt / chunks)
    tiers = f"{options.hi}/{options.lo}" if options.system == "dymoe" else f"{options.hi}"
    return Choice(
        given, limit, part, tiers,
        share=min(1.0, (limit - workspace) / experts.nbytes(options.hi)),
        agreement=_agreement(tiers, options),
        hit_rate=1 - demand.misses / needed if needed else 1.0,
        moved=layers * layer_moved,
        tpot=step + layers * (waiting + demand.misses * deciding.miss + layer_read / device.disk),
        ttft=chunks * max(computing, streamed / device.link, read / device.disk) + bool(streamed) * blob / device.link,
    )  # fmt: skip


def _in_host_memory(device: Device, experts: ModelExperts) -> int | None:
    """Experts of a layer that a level in host memory keeps; None where all experts have room there."""
    if device.host_memory is None or device.host_memory >= experts.stored_nbytes:
        return None
    return int(experts.num_experts * device.host_memory / experts.stored_nbytes)


def _shared(formats: Mapping[int, Format], options: Options, device: Device) -> Ints:
    """What fetching and computing a miss cost."""
    first = {fmt.code.tag: fmt.whole_nbytes / device.host for fmt in formats.values()}
    rates = Rates(device.link, first, {tag: s * _NEXT_ROW for tag, s in first.items()}, _ROUND_TRIP, 0, "planned")
    return costs({HIGH: formats.get(options.hi), LOW: formats.get(options.lo)}, rates, options.misses_rows)


def _agreement(tiers: str, options: Options) -> float | None:
    """As benchmarks/quality has measured it."""
    table = json.loads(resources.files("vllm_dymoe.plan").joinpath("quality.json").read_text())
    found = table.get(tiers, {}).get(options.quantizer)
    return None if found is None else float(found)


def _prompt_seconds(blob: int, active: float, shape: ModelShape, device: Device, prompt: float) -> float:
    weights = shape.token_weights + shape.moe_layers * shape.top_k * 3 * shape.hidden * shape.intermediate
    reading = (shape.token_weights * ITEM + shape.moe_layers * active * blob) / device.bandwidth
    launching, deciding = shape.moe_layers * device.launch_seconds, shape.moe_layers * device.layer_seconds
    return max(2 * weights * prompt / device.compute + deciding, reading + deciding, launching)


def room_for_experts(shape: ModelShape, device: Device, serving: Serving, least: int) -> int:
    """Bytes that ``expert_budget`` "auto" would take, by the function that decides at start; ConfigError if none
    fit."""
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
        given = {**candidate, "misses": "share"} if device.host else candidate
        options = resolve_options(given, environment={})
        experts = shape.packed(tuple(options.stored_bits), options.group_size)
        system, workspace = make_system(options), workspace_bytes(experts, "cuda")
        least = minimum_budget(experts, options, system, workspace)
        room = room_for_experts(shape, device, serving, least)
        most = options.expert_budget if options.expert_budget.slots is not None else ExpertBudget(share=1.0)
        most = most if system.residency.keeps else ExpertBudget(slots="top-k")
        limit = limit_in_bytes(most, experts, options, workspace, room)
        parts = {min(limit, int(part * room)): part for part in reversed(_PARTS)}
        for nbytes, part in sorted(parts.items()):
            if nbytes >= least:
                yield predict(given, nbytes, part, shape, device, routings, prompt, serving.max_num_batched_tokens)


def shown(rows: Sequence[Choice], systems: Sequence[str]) -> list[Choice]:
    """Rows of these systems; without any, at each part of the room the one that would be recommended there."""
    if systems:
        return [row for row in rows if row.given["system"] in systems]
    good = [row for row in rows if (row.agreement or 0) >= GOOD_ENOUGH]
    return [recommended(at) for part in _PARTS if (at := [row for row in good if row.part == part])]


def recommended(rows: Sequence[Choice]) -> Choice:
    """The fastest whose answers are good enough; of those within a twentieth the best answers. ConfigError if none."""
    good = [row for row in rows if (row.agreement or 0) >= GOOD_ENOUGH]
    if not good:
        raise ConfigError("nothing fits on this device; lower --max-model-len or --max-num-seqs.")
    fastest = min(row.tpot for row in good)
    return max((row for row in good if row.tpot <= 1.05 * fastest), key=lambda row: (row.agreement or 0, -row.tpot))
