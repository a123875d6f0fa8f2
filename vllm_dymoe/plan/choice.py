"""Predicts the speed of options and budgets on a device, and recommends some.

With every expert resident a step takes

    t = bytes of dense layers / bandwidth + bytes of experts / rate of our kernels + layers * overhead

The overhead is the host's time per layer, or that of small kernels with device-side planning. Each miss adds its bytes
/ the link's rate, and host time; with device-side planning nothing is prefetched in decode. Each chunk of a prompt
streams misses while it computes, so it takes the longer of the two, plus the time of one expert (DuoServe-MoE 5.2).

If host memory holds only a part of the experts, the others are read from disk before they cross the link. The host
cache sees the device's misses, so both together keep about as many experts as one memory of both sizes would.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from statistics import fmean
from typing import Any

from vllm_dymoe.cache.budget import (
    limit_in_bytes,
    minimum_budget,
    plan_slots,
    precision_bits,
    slot_bits,
    workspace_bytes,
)  # fmt: skip
from vllm_dymoe.executor.device_share import StepShape, automatic_share
from vllm_dymoe.executor.rates import Rates, costs
from vllm_dymoe.experts.format import ExpertFormat, ModelExperts
from vllm_dymoe.options import ConfigError, ExpertBudget, Options
from vllm_dymoe.plan.device import Device, ExpertRate
from vllm_dymoe.plan.model import ITEM, ModelShape
from vllm_dymoe.plan.replay import Routings, replay
from vllm_dymoe.planner.constants import SMALL_BATCH_ROWS
from vllm_dymoe.planner.precision import Precision
from vllm_dymoe.planner.rule import HIGH, LOW, Ints
from vllm_dymoe.policies import make_policy
from vllm_dymoe.policies.dymoe import CriticalHigh
from vllm_dymoe.resolve import resolve_options

GOOD_ENOUGH = 0.95  # minimum share of most likely tokens that agree with 16 bits, for recommended options
CANDIDATES: tuple[Mapping[str, Any], ...] = (
    {"policy": "exact", "high": 16},
    {"policy": "exact", "high": 8},
    {"policy": "exact", "high": 4},
    {"policy": "dymoe", "high": 4, "low": 2},
    {"policy": "firm", "high": 4},
    {"policy": "duoserve", "high": 4},
    {"policy": "on-demand", "high": 4},
)
_PARTS = (0.25, 0.5, 0.75, 1.0)  # shares of the memory available for experts
# Cost of a further row relative to an expert's first row on a host; seconds of a round trip.
_NEXT_ROW, _ROUND_TRIP = 0.2, 20e-6


@dataclass(frozen=True)
class ServeSettings:
    """The settings of ``vllm serve`` that determine the memory left for experts, under their names there."""

    max_model_len: int = 8192
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 2048
    gpu_memory_utilization: float = 0.9


@dataclass(frozen=True)
class Choice:
    """Options of the plugin, and their predicted performance on a device."""

    given: Mapping[str, Any]  # options as a user writes them, without the budget
    limit: int  # device memory for experts, in bytes
    part: float  # maximum budget as a share of the memory available for experts
    precisions: str  # bits of the precisions
    share: float  # share of all experts that fit at the high precision
    agreement: float | None  # share of most likely tokens that agree with 16 bits; None if not measured
    hit_rate: float  # share of the experts that a decode step needs
    moved: float  # bytes of experts that a decode step transfers
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
    """Return the predicted performance of options.

    The batch is that of the routings; the prompt has ``prompt`` tokens and is computed in chunks of ``chunk``.
    """
    options = resolve_options(given, environment={})
    policy, experts = make_policy(options), shape.packed(tuple(options.stored_bits), options.group_size)
    formats, workspace, layers = experts.formats, workspace_bytes(experts, "cuda"), shape.moe_layers
    slots, precision_policy = plan_slots(experts, options, policy, limit, workspace), policy.precision
    slot_bytes = {
        precision: formats[bits].nbytes
        for precision, bits in slot_bits(experts, options, precision_policy.precisions).items()
    }
    nested = Precision.HIGH in slots.slots and any(fmt.nested for fmt in formats.values())
    choose = (
        precision_policy.chooser(routings.header.num_layers) if isinstance(precision_policy, CriticalHigh) else None
    )
    kept = slots.quotas if policy.residency.keeps else {}
    large = (
        device.decides and options.planning != "host" and routings.batch > SMALL_BATCH_ROWS
    )  # such a step may fetch them
    shared = _shared(formats, options, device) if device.host and not large else None
    demand = replay(routings, kept, choose, low=options.low > 0, nested=nested, costs=shared)
    layer_moved = sum(demand.missing[precision] * nbytes for precision, nbytes in slot_bytes.items())
    needed = sum(demand.active.values())
    in_host_cache, layer_read = _in_host_memory(device, experts), 0.0  # experts of each layer
    if in_host_cache is not None:
        both = {
            precision: [min(shape.experts, own + in_host_cache) for own in shares]
            for precision, shares in slots.quotas.items()
        }
        far = replay(routings, both, choose, low=options.low > 0, nested=nested)
        layer_read = sum(far.missing[precision] * nbytes for precision, nbytes in slot_bytes.items())
    alone = not policy.needs_host and options.planning != "host" and in_host_cache is None
    deciding = device.in_a_graph() if alone else device
    bits = {precision: precision_bits(options, precision) for precision in demand.active}
    weights = sum(
        count * formats[bits[precision]].whole_nbytes for precision, count in demand.active.items() if bits[precision]
    )
    of_expert = 3 * shape.hidden * shape.intermediate
    rate = device.expert_rate(of_expert, routings.batch, nested=nested)
    step = shape.token_weights * ITEM / device.bandwidth + layers * (weights / rate.read + deciding.layer_seconds)
    waiting = layer_moved / device.link if shared is None else demand.shared

    chunks = -(-prompt // chunk)
    active = routings.distinct(prompt // chunks)
    shares = {Precision.HIGH: [1.0]} if choose is None else precision_policy.shares(layers, max(1, round(active)))
    high = fmean(shares.get(Precision.HIGH, [0.0]))
    wanted = {Precision.HIGH: high, Precision.LOW: 1.0 if nested else 1 - high}
    # Bytes that a chunk transfers, and reads from disk: of its active experts, those that are not resident.
    streamed = read = 0.0
    for precision in slots.slots:
        of_precision = layers * max(0.0, wanted[precision]) * active * slot_bytes[precision]
        kept_of_layer = sum(slots.quotas[precision]) / layers
        streamed += of_precision * max(0.0, 1 - kept_of_layer / shape.experts)
        read += (
            0.0
            if in_host_cache is None
            else of_precision * max(0.0, 1 - (kept_of_layer + in_host_cache) / shape.experts)
        )
    high_nbytes = formats[options.high].whole_nbytes
    rate = device.expert_rate(of_expert, prompt / chunks, nested=nested)
    computing = _prompt_seconds(high_nbytes, active, shape, deciding, prompt / chunks, rate)
    precisions = f"{options.high}/{options.low}" if options.policy == "dymoe" else f"{options.high}"
    return Choice(
        given,
        limit,
        part,
        precisions,
        share=min(1.0, (limit - workspace) / experts.nbytes(options.high)),
        agreement=_agreement(precisions, options),
        hit_rate=1 - demand.misses / needed if needed else 1.0,
        moved=layers * layer_moved,
        tpot=step + layers * (waiting + demand.misses * deciding.miss + layer_read / device.disk),
        ttft=chunks * max(computing, streamed / device.link, read / device.disk)
        + bool(streamed) * high_nbytes / device.link,
    )


def _in_host_memory(device: Device, experts: ModelExperts) -> int | None:
    """Return how many experts of a layer a host cache holds; None if all experts fit."""
    if device.host_memory is None or device.host_memory >= experts.stored_nbytes:
        return None
    return int(experts.num_experts * device.host_memory / experts.stored_nbytes)


def _shared(formats: Mapping[int, ExpertFormat], options: Options, device: Device) -> Ints:
    """Return the costs of fetching and of computing a miss."""
    first = {fmt.encoding.tag: fmt.whole_nbytes / device.host for fmt in formats.values()}
    rates = Rates(device.link, first, {tag: s * _NEXT_ROW for tag, s in first.items()}, _ROUND_TRIP, 0, "planned")
    return costs({HIGH: formats.get(options.high), LOW: formats.get(options.low)}, rates, options.misses_rows)


def _agreement(precisions: str, options: Options) -> float | None:
    """Return the agreement with 16 bits that benchmarks/quality measured, or None."""
    table = json.loads(resources.files("vllm_dymoe.plan").joinpath("quality.json").read_text())
    found = table.get(precisions, {}).get(options.quantizer)
    return None if found is None else float(found)


def _prompt_seconds(
    high_nbytes: int, active: float, shape: ModelShape, device: Device, prompt: float, rate: ExpertRate
) -> float:
    of_experts = shape.moe_layers * shape.top_k * 3 * shape.hidden * shape.intermediate
    computing = 2 * prompt * (shape.token_weights / device.compute + of_experts / rate.compute)
    reading = shape.token_weights * ITEM / device.bandwidth + shape.moe_layers * active * high_nbytes / rate.read
    launching, deciding = shape.moe_layers * device.launch_seconds, shape.moe_layers * device.layer_seconds
    return max(computing + deciding, reading + deciding, launching)


def room_for_experts(shape: ModelShape, device: Device, serving: ServeSettings, least: int) -> int:
    """Return the bytes that ``expert_budget`` "auto" would take; ConfigError if not even the smallest budget fits.

    This calls the function that decides at start.
    """
    free = int(device.memory * serving.gpu_memory_utilization) - shape.dense_bytes
    step = StepShape(
        tokens=serving.max_num_batched_tokens, sequences=serving.max_num_seqs, hidden=shape.hidden,
        attention=shape.attention_width, intermediate=shape.intermediate, top_k=shape.top_k,
        vocabulary=shape.vocabulary,
    )  # fmt: skip
    length = min(serving.max_model_len, shape.longest)
    return automatic_share(free, shape.kv_bytes * length, step.nbytes, least, length)


def choices(
    shape: ModelShape, device: Device, routings: Routings, serving: ServeSettings, prompt: int
) -> Iterator[Choice]:
    """Yield every candidate at a quarter, half, three quarters and all of the memory available for experts."""
    for candidate in CANDIDATES:
        given = {**candidate, "misses": "share"} if device.host else candidate
        options = resolve_options(given, environment={})
        experts = shape.packed(tuple(options.stored_bits), options.group_size)
        policy, workspace = make_policy(options), workspace_bytes(experts, "cuda")
        least = minimum_budget(experts, options, policy, workspace)
        room = room_for_experts(shape, device, serving, least)
        most = options.expert_budget if options.expert_budget.slots is not None else ExpertBudget(share=1.0)
        most = most if policy.residency.keeps else ExpertBudget(slots="top-k")
        limit = limit_in_bytes(most, experts, options, workspace, room)
        parts = {min(limit, int(part * room)): part for part in reversed(_PARTS)}
        for nbytes, part in sorted(parts.items()):
            if nbytes >= least:
                yield predict(given, nbytes, part, shape, device, routings, prompt, serving.max_num_batched_tokens)


def shown(rows: Sequence[Choice], policies: Sequence[str]) -> list[Choice]:
    """Return the rows of these policies; without policies, the one recommended at each share of the memory."""
    if policies:
        return [row for row in rows if row.given["policy"] in policies]
    good = [row for row in rows if (row.agreement or 0) >= GOOD_ENOUGH]
    return [recommended(at) for part in _PARTS if (at := [row for row in good if row.part == part])]


def recommended(rows: Sequence[Choice]) -> Choice:
    """Return the fastest row of sufficient quality; among rows within 5 % of its speed, the one of best quality.

    ConfigError if there is none.
    """
    good = [row for row in rows if (row.agreement or 0) >= GOOD_ENOUGH]
    if not good:
        raise ConfigError("nothing fits on this device; lower --max-model-len or --max-num-seqs.")
    fastest = min(row.tpot for row in good)
    return max((row for row in good if row.tpot <= 1.05 * fastest), key=lambda row: (row.agreement or 0, -row.tpot))
