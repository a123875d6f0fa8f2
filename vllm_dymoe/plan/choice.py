"""Options and a budget on a device: how fast they are, and which of them to take.

With every expert resident a step takes

    t = bytes of dense layers / bandwidth + bytes of experts / rate of our kernels + layers * (time beside products)

The last time is the host's, or that of small kernels where a GPU decides. Each miss adds its bytes / the link, and what
it costs beside them; a GPU that decides fetches nothing ahead in decode. Each chunk of a prompt streams what is not
there while it computes, so that it takes the longer of the two, and one expert more (DuoServe-MoE 5.2).

Where host memory holds a part of the experts, what is in neither memory is read from the disk in front of the link. The
host's rule sees the device's misses, so that both together keep about what one memory of both sizes would.
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
from vllm_dymoe.plan.model import ModelShape
from vllm_dymoe.plan.replay import Routings, replay
from vllm_dymoe.planner.constants import SMALL_BATCH_ROWS
from vllm_dymoe.planner.precision import Precision
from vllm_dymoe.planner.rule import HIGH, LOW, Ints
from vllm_dymoe.policies import make_policy
from vllm_dymoe.policies.dymoe import CriticalHigh
from vllm_dymoe.resolve import resolve_options

GOOD_ENOUGH = 0.95  # of the likeliest tokens, those that have to be the ones of 16 bits for options to be recommended
CANDIDATES: tuple[Mapping[str, Any], ...] = (
    {"policy": "exact", "high": 16},
    {"policy": "exact", "high": 8},
    {"policy": "exact", "high": 4},
    {"policy": "dymoe", "high": 4, "low": 2},
    {"policy": "firm", "high": 4},
    {"policy": "duoserve", "high": 4},
    {"policy": "on-demand", "high": 4},
)
_PARTS = (0.25, 0.5, 0.75, 1.0)  # of the room for experts
_CHUNK_STEP, _LARGEST_CHUNK = 512, 8192  # tokens
_NEXT_ROW, _ROUND_TRIP = 0.2, 20e-6  # of an expert's first row on a host; seconds there and back


@dataclass(frozen=True)
class ServeSettings:
    """The settings of ``vllm serve`` that decide how much memory is left for experts, by their names there."""

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
    precisions: str  # bits of them
    share: float  # experts at the high precision that fit, of all
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
    cached: float = 0.0,
) -> Choice:
    """What options do on a device, for a batch as the routings have it, and a prompt of so many tokens in chunks.

    A decode step reads ``cached`` bytes of KV cache.
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
    shares = device.host and options.computes_misses and not large
    shared = _shared(formats, options, device) if shares else None
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
    dense = shape.read_of_dense(options.dense)
    step = (dense + cached) / device.bandwidth + layers * (weights / rate.read + deciding.layer_seconds)
    waiting = layer_moved / device.link if shared is None else demand.shared

    chunks = -(-prompt // chunk)
    active = routings.distinct(prompt // chunks)
    shares = {Precision.HIGH: [1.0]} if choose is None else precision_policy.shares(layers, max(1, round(active)))
    high = fmean(shares.get(Precision.HIGH, [0.0]))
    wanted = {Precision.HIGH: high, Precision.LOW: 1.0 if nested else 1 - high}
    streamed = read = 0.0  # bytes that a chunk moves, and reads from a disk: of its active experts what is not kept
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
    computing = _prompt_seconds(dense, high_nbytes, active, shape, deciding, prompt / chunks, rate)
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
        tpot=device.step_seconds + step + layers * (waiting + demand.misses * deciding.miss + layer_read / device.disk),
        ttft=chunks * (device.step_seconds + max(computing, streamed / device.link, read / device.disk))
        + bool(streamed) * high_nbytes / device.link,
    )


def _in_host_memory(device: Device, experts: ModelExperts) -> int | None:
    """Experts of a layer that a host cache keeps; None where all experts have room there."""
    if device.host_memory is None or device.host_memory >= experts.stored_nbytes:
        return None
    return int(experts.num_experts * device.host_memory / experts.stored_nbytes)


def _shared(formats: Mapping[int, ExpertFormat], options: Options, device: Device) -> Ints:
    """What fetching and computing a miss cost."""
    first = {fmt.encoding.tag: fmt.whole_nbytes / device.host for fmt in formats.values()}
    rates = Rates(device.link, first, {tag: s * _NEXT_ROW for tag, s in first.items()}, _ROUND_TRIP, 0, "planned")
    return costs({HIGH: formats.get(options.high), LOW: formats.get(options.low)}, rates, options.misses_rows)


def _agreement(precisions: str, options: Options) -> float | None:
    """As benchmarks/quality has measured it."""
    table = json.loads(resources.files("vllm_dymoe.plan").joinpath("quality.json").read_text())
    found = table.get(precisions, {}).get(options.quantizer)
    return None if found is None else float(found)


def _prompt_seconds(
    dense: int, high_nbytes: int, active: float, shape: ModelShape, device: Device, prompt: float, rate: ExpertRate
) -> float:
    of_experts = shape.moe_layers * shape.top_k * 3 * shape.hidden * shape.intermediate
    computing = 2 * prompt * (shape.token_weights / device.compute + of_experts / rate.compute)
    reading = dense / device.bandwidth + shape.moe_layers * active * high_nbytes / rate.read
    launching, deciding = shape.moe_layers * device.launch_seconds, shape.moe_layers * device.layer_seconds
    return max(computing + deciding, reading + deciding, launching)


def room_for_experts(
    shape: ModelShape, device: Device, serving: ServeSettings, least: int, *, dense: int = 16, kv_share: float = 1.0,
    requests: int = 1,
) -> int:  # fmt: skip
    """Bytes that ``expert_budget`` "auto" would take, by the function that decides at start; ConfigError if none fit.

    Args:
        dense: the option of that name.
        kv_share: of the KV cache at 16 bits, what a smaller type of it takes.
        requests: whose KV cache at ``max_model_len`` stays free.
    """
    free = int(device.memory * serving.gpu_memory_utilization) - shape.memory_of_dense(dense)
    step = StepShape(
        tokens=serving.max_num_batched_tokens, sequences=serving.max_num_seqs, hidden=shape.hidden,
        attention=shape.attention_width, intermediate=shape.intermediate, top_k=shape.top_k,
        vocabulary=shape.vocabulary,
    )  # fmt: skip
    length = min(serving.max_model_len, shape.longest)
    kv_cache = int(shape.kv_bytes * kv_share * length * requests)
    return automatic_share(free, kv_cache, step.nbytes, least, length)


def chunk_of(missing: int, shape: ModelShape, device: Device) -> int:
    """Return the tokens that are computed while so many bytes of experts arrive, in steps of 512 up to 8192; 0 for no
    bytes.

    Nearly every expert is active in a chunk of a prompt. So a chunk fetches each expert that is not on the device,
    however many tokens it has, and concurrently decoding requests wait for it. With as many tokens as the device
    computes in that time a prompt needs the fewest chunks, and no chunk takes longer than the link.
    """
    weights = shape.token_weights + shape.moe_layers * shape.top_k * 3 * shape.hidden * shape.intermediate
    tokens = missing / device.link * device.compute / (2 * weights)
    return min(_LARGEST_CHUNK, -(-int(tokens) // _CHUNK_STEP) * _CHUNK_STEP)


def choices(
    shape: ModelShape, device: Device, routings: Routings, serving: ServeSettings, prompt: int
) -> Iterator[Choice]:
    """Every candidate at a quarter, half, three quarters and all of the room for experts."""
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
    """Rows of these policies; without any, at each part of the room the one that would be recommended there."""
    if policies:
        return [row for row in rows if row.given["policy"] in policies]
    good = [row for row in rows if (row.agreement or 0) >= GOOD_ENOUGH]
    return [recommended(at) for part in _PARTS if (at := [row for row in good if row.part == part])]


def recommended(rows: Sequence[Choice]) -> Choice:
    """The fastest whose answers are good enough; of those within a twentieth the best answers. ConfigError if none."""
    good = [row for row in rows if (row.agreement or 0) >= GOOD_ENOUGH]
    if not good:
        raise ConfigError("nothing fits on this device; lower --max-model-len or --max-num-seqs.")
    fastest = min(row.tpot for row in good)
    return max((row for row in good if row.tpot <= 1.05 * fastest), key=lambda row: (row.agreement or 0, -row.tpot))
