"""Options and a budget on a device: how fast they are, and which to take.

Speeds come from the simulator of schedules.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from math import ceil
from statistics import fmean
from typing import Any

from vllm_dymoe.cache.budget import (
    limit_in_bytes,
    minimum_budget,
    plan_slots,
    slot_bits,
    workspace_bytes,
)
from vllm_dymoe.executor.device_share import StepShape, automatic_share
from vllm_dymoe.experts.format import ModelExperts
from vllm_dymoe.options import ConfigError, ExpertBudget, Options
from vllm_dymoe.plan.costs import Costs
from vllm_dymoe.plan.device import Device
from vllm_dymoe.plan.model import ModelShape
from vllm_dymoe.plan.routings import Routings
from vllm_dymoe.plan.simulator import Model, Simulator, run_ranks
from vllm_dymoe.policies import Policy, make_policy
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
_PARTS = (0.25, 0.5, 0.75, 1.0)  # of the room for experts
_CHUNK_STEP, _LARGEST_CHUNK = 512, 8192  # tokens


@dataclass(frozen=True)
class ServeSettings:
    """The settings of ``vllm serve`` that determine the memory left for experts.

    Fields have the names of its options.
    """

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
    *,
    cached: float = 0.0,
    costs: Costs | None = None,
) -> Choice:
    """Return what options do on a device.

    The batch is that of the routings; a prompt has so many tokens, computed in chunks. A few layers are simulated and
    stand for all. Of ranks that share out the experts the slowest counts.

    Args:
        cached: bytes of KV cache that a decode step reads.
        costs: of the host and of small kernels; None for the measured ones.
    """
    options, costs = resolve_options(given, environment={}), costs or Costs.measured()
    experts = shape.packed(tuple(options.stored_bits), options.group_size)
    policy, workspace = make_policy(options), workspace_bytes(experts, "cuda")
    layers = routings.trace.header.num_layers
    scale = shape.moe_layers / layers
    head = shape.vocabulary * shape.hidden * options.dense // 8
    held = shape.held and replace(shape.held, weights=shape.held.weights // shape.moe_layers)
    of_layers = max(0, shape.read_of_dense(options.dense) - head - (shape.held.nbytes if shape.held else 0))
    model = Model(
        replace(experts, layers=experts.layers[:layers]), of_layers // shape.moe_layers, head, options.dense, held
    )
    small, chunks = _of_layers(experts, options, policy, limit, workspace, layers), -(-prompt // chunk)
    if device.host_memory is not None:
        device = replace(device, host_memory=int(device.host_memory / scale))
    simulators = [
        Simulator(
            routings.trace, model, options, make_policy(options), device, costs, small,
            first_expert=rank * experts.num_experts,
        )
        for rank in range(routings.ranks)
    ]  # fmt: skip
    cold, warm = routings.steps
    run_ranks(simulators, cold, measured=False)
    decoded = run_ranks(simulators, warm)
    (prefill,) = run_ranks(simulators, [routings.prompt(-(-prompt // chunks))])[0].seconds
    decode_end, prompt_end = simulators[0].last(routings.batch), simulators[0].last(1)

    def whole(seconds: float, last: float) -> float:
        return scale * (seconds - last) + last

    slowest = max(decoded, key=lambda result: result.moved)
    precisions = f"{options.high}/{options.low}" if options.policy == "dymoe" else f"{options.high}"
    return Choice(
        given,
        limit,
        part,
        precisions,
        share=min(1.0, (limit - workspace) / experts.nbytes(options.high)),
        agreement=_agreement(precisions, options),
        hit_rate=slowest.hits / max(1, slowest.active),
        moved=scale * slowest.moved / len(warm),
        tpot=whole(fmean(slowest.seconds), decode_end) + cached / device.bandwidth,
        ttft=chunks * whole(prefill, prompt_end),
    )


def _of_layers(experts: ModelExperts, options: Options, policy: Policy, limit: int, workspace: int, layers: int) -> int:
    """Return a budget with which a few layers stand for the whole model.

    They keep what they keep in the whole model, and there are as many staging slots.

    Raises:
        ConfigError: the whole model's budget is too small.
    """
    plan = plan_slots(experts, options, policy, limit, workspace)
    few = replace(experts, layers=experts.layers[:layers])
    least = minimum_budget(few, options, policy, 0)
    if policy.residency.migrating is not None:
        return max(least, (limit - workspace) * layers // len(experts.layers))
    sizes = slot_bits(experts, options, policy.precision.precisions)
    kept = {precision: ceil(sum(of) * layers / len(experts.layers)) for precision, of in plan.quotas.items()}
    slots = {precision: kept[precision] + plan.staging[precision] for precision in plan.slots}
    return max(least, sum(count * experts.formats[sizes[precision]].nbytes for precision, count in slots.items()))


def _agreement(precisions: str, options: Options) -> float | None:
    """Return the agreement with 16 bits that benchmarks/quality measured, or None."""
    table = json.loads(resources.files("vllm_dymoe.plan").joinpath("quality.json").read_text())
    found = table.get(precisions, {}).get(options.quantizer)
    return None if found is None else float(found)


def room_for_experts(
    shape: ModelShape, device: Device, serving: ServeSettings, least: int, *, dense: int = 16, kv_share: float = 1.0,
    requests: int = 1, automatic: bool = True,
) -> int:  # fmt: skip
    """Return the most bytes that ``expert_budget`` may take.

    Those of "auto" are computed by the function that decides at start.

    Args:
        dense: the option of that name.
        kv_share: of the KV cache at 16 bits, what a smaller type of it takes.
        requests: whose KV cache at ``max_model_len`` stays free.
        automatic: whether the budget is; if the user sets it, it may take all that the KV cache leaves.

    Raises:
        ConfigError: no experts fit.
    """
    free = int(device.memory * serving.gpu_memory_utilization) - shape.memory_of_dense(dense)
    step = StepShape(
        tokens=serving.max_num_batched_tokens, sequences=serving.max_num_seqs, hidden=shape.hidden,
        attention=shape.attention_width, intermediate=shape.intermediate, top_k=shape.top_k,
        vocabulary=shape.vocabulary,
    )  # fmt: skip
    length = serving.max_model_len
    kv_cache = int(shape.kv_bytes * kv_share * length * requests)
    if not automatic:
        return free - step.nbytes - kv_cache
    return automatic_share(free, kv_cache, step.nbytes, least, length, requests=requests)


def chunk_of(missing: int, shape: ModelShape, device: Device) -> int:
    """Return the tokens that are computed while missing experts arrive.

    Nearly every expert is active in a chunk of a prompt. So a chunk fetches each expert that is not on the device,
    however many tokens it has, and concurrently decoding requests wait for it. With as many tokens as the device
    computes in that time a prompt needs the fewest chunks, and no chunk takes longer than the link.

    Args:
        missing: bytes of experts that arrive.

    Returns:
        tokens, in steps of 512 up to 8192; 0 for no bytes.
    """
    weights = shape.token_weights + shape.moe_layers * shape.top_k * shape.expert_weights
    tokens = missing / device.link * device.compute / (2 * weights)
    return min(_LARGEST_CHUNK, -(-int(tokens) // _CHUNK_STEP) * _CHUNK_STEP)


def choices(
    shape: ModelShape, device: Device, routings: Routings, serving: ServeSettings, prompt: int
) -> Iterator[Choice]:
    """Yield every candidate at four shares of the memory for experts.

    They are a quarter, half, three quarters and all of the available memory.
    """
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
    """Return the rows of these policies.

    Without policies, return the row recommended at each share of the memory.
    """
    if policies:
        return [row for row in rows if row.given["policy"] in policies]
    good = [row for row in rows if (row.agreement or 0) >= GOOD_ENOUGH]
    return [recommended(at) for part in _PARTS if (at := [row for row in good if row.part == part])]


def recommended(rows: Sequence[Choice]) -> Choice:
    """Return the fastest row of sufficient quality.

    Among rows within 5 % of its speed, it is the one of best quality.

    Raises:
        ConfigError: there is none.
    """
    good = [row for row in rows if (row.agreement or 0) >= GOOD_ENOUGH]
    if not good:
        raise ConfigError("nothing fits on this device; lower --max-model-len or --max-num-seqs.")
    fastest = min(row.tpot for row in good)
    return max((row for row in good if row.tpot <= 1.05 * fastest), key=lambda row: (row.agreement or 0, -row.tpot))
