"""Plans a byte budget: slots for each precision, and the smallest feasible budget."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace

import numpy as np
from numpy.typing import NDArray

from vllm_dymoe.experts.format import ModelExperts
from vllm_dymoe.kernels.cpu import MINIMUM_WORKSPACE_BYTES
from vllm_dymoe.options import ConfigError, ExpertBudget, Options
from vllm_dymoe.planner.precision import Precision
from vllm_dymoe.planner.table import layer_quotas
from vllm_dymoe.policies import Policy
from vllm_dymoe.policies.base import FEWEST_STAGING, Migrating

# A CPU gains nothing from more, because a tile should stay in the second-level cache; on a GPU each tile is a launch.
_LARGEST_WORKSPACE_BYTES = {"cpu": 1 << 20, "cuda": 32 << 20}


@dataclass(frozen=True)
class SlotPlan:
    """How a budget is divided into slots."""

    limit: int  # the hard budget in bytes, on this rank
    workspace_bytes: int  # part of it for the kernel's scratch and the predictor
    slots: Mapping[Precision, int]  # number of slots of each precision in use
    quotas: Mapping[
        Precision, Sequence[int]
    ]  # experts of each precision that each layer may keep; the table's ``quotas``
    kinds: Mapping[Precision, Sequence[int]] = field(default_factory=dict)
    """Number of slots for each kind of layers, if there are several kinds."""

    def slots_of_kinds(self, precision: Precision) -> Sequence[int]:
        return self.kinds.get(precision, (self.slots[precision],))

    def slots_nbytes(self, experts: ModelExperts, bits: Mapping[Precision, int]) -> int:
        """Return the bytes of all slots, given the bits in those of each precision."""
        return sum(
            count * formats[bits[precision]].nbytes
            for precision in self.slots
            for count, formats in zip(self.slots_of_kinds(precision), experts.of_kinds, strict=True)
        )

    @property
    def staging(self) -> Mapping[Precision, int]:
        """Number of staging slots of each precision."""
        return {precision: count - sum(self.quotas[precision]) for precision, count in self.slots.items()}


def workspace_bytes(experts: ModelExperts, device_type: str = "cpu") -> int:
    """Return the bytes of the kernel's scratch.

    The scratch holds one projection in float32 with its codes; its size is limited by device type.
    """
    largest = max(m.padded_rows * m.padded_columns * 5 for fmt in experts.all_formats for m in fmt.matrices)
    return min(max(largest, MINIMUM_WORKSPACE_BYTES), _LARGEST_WORKSPACE_BYTES[device_type])


def precision_bits(options: Options, precision: Precision) -> int:
    return (
        options.high if precision is Precision.HIGH else options.low if precision is Precision.LOW else 0
    )  # called for each expert of each step


def slot_bits(experts: ModelExperts, options: Options, precisions: frozenset[Precision]) -> dict[Precision, int]:
    """Return the bits in the slots of each precision, the high one first.

    A slot holds a version or, if versions are nested, a residual slice (HIGH) or a base slice (LOW).
    """
    if Precision.HIGH in precisions and experts.formats[options.high].nested:
        return {Precision.HIGH: options.high, Precision.LOW: options.high // 2}
    return {precision: precision_bits(options, precision) for precision in used_precisions(options, precisions)}


def used_precisions(options: Options, precisions: frozenset[Precision]) -> tuple[Precision, ...]:
    """Return the precisions that need slots, the high one first.

    A precision needs slots if the policy uses it and the store has it.
    """
    return tuple(
        precision
        for precision in (Precision.HIGH, Precision.LOW)
        if precision in precisions and precision_bits(options, precision) > 0
    )


def minimum_budget(experts: ModelExperts, options: Options, policy: Policy, workspace_bytes: int) -> int:
    """Return the smallest feasible budget in bytes.

    The budget must hold the workspace and one slot per precision, or one per expert if none is fetched.
    """
    if policy.residency.migrating is not None:
        return workspace_bytes + _resident_bytes(experts, options, policy, 1)
    bits = slot_bits(experts, options, policy.precision.precisions).values()
    return workspace_bytes + sum(formats[width].nbytes for formats in experts.of_kinds for width in bits)


def limit_in_bytes(
    budget: ExpertBudget, experts: ModelExperts, options: Options, workspace_bytes: int, automatic: int
) -> int:
    """Return a budget as a hard limit in bytes; ``automatic`` if it is automatic.

    An automatic limit is at most what all experts need. A share counts experts only, so that 100 % holds all of them;
    the limit also includes workspace and predictor. The same holds for budgets in slots.
    """
    everything = experts.nbytes(options.high)
    if budget.is_auto:
        return min(automatic, everything + workspace_bytes)
    if budget.bytes is not None:
        return budget.bytes
    if budget.share is not None:
        return int(budget.share * everything) + workspace_bytes
    slots = experts.top_k if budget.slots == "top-k" else experts.num_experts
    return slots * sum(formats[options.high].whole_nbytes for formats in experts.of_kinds) + workspace_bytes


def check_in_host_memory(expert_budget: int, host_memory: int) -> None:
    """Raise ConfigError if a CPU's expert budget exceeds its host memory, in bytes."""
    if expert_budget > host_memory:
        raise ConfigError(
            f"vllm-dymoe: expert_budget is {expert_budget} bytes and host_memory {host_memory}, but on a CPU both "
            "limit the same memory; leave expert_budget out, or raise host_memory."
        )


def plan_slots(
    experts: ModelExperts,
    options: Options,
    policy: Policy,
    limit: int,
    workspace_bytes: int,
    *,
    filled: bool = False,
) -> SlotPlan:
    """Divide ``limit`` bytes into slots.

    With two precisions, slots are divided in proportion to the experts wanted in each, overall and in each layer. If
    that gives more slots than experts, every expert gets one, as many as possible at high precision. ConfigError if the
    limit cannot hold one expert of each precision, or every expert if none is fetched.

    Args:
        workspace_bytes: the part for the kernel and the predictor.
        filled: slots for every expert are filled at start. Other slots are not filled before a device plans, because
            until then the host streams.
    """
    migrating = policy.residency.migrating
    _check_budget(experts, options, policy, limit, workspace_bytes)
    if migrating is not None:
        return _plan_residents(experts, options, policy, limit, workspace_bytes)
    bits = slot_bits(experts, options, policy.precision.precisions)
    layers = len(experts.layers)
    every_expert = layers * experts.num_experts
    shares = policy.precision.all_shares(experts)
    weights = {precision: shares.get(precision, [1.0] * layers) for precision in bits}
    if len(experts.of_kinds) > 1:
        return _plan_kinds(experts, policy, weights, limit, workspace_bytes)
    sizes = {precision: experts.formats[bits[precision]].nbytes for precision in bits}
    if Precision.HIGH in bits and experts.formats[bits[Precision.HIGH]].nested:
        high = (
            sum(weights[Precision.HIGH]) / layers
            if Precision.LOW in policy.precision.precisions and options.low
            else 1.0
        )
        slots = _slice_slots(sizes, high, every_expert, limit - workspace_bytes)
        weights[Precision.LOW] = [1.0] * layers  # every expert needs a base
    else:
        slots = _version_slots(sizes, weights, every_expert, limit - workspace_bytes)
    # If every expert has a slot, staging slots would only evict the last experts from their layers' quotas.
    complete = policy.residency.keeps
    if filled:
        complete &= next(iter(slots.values()), 0) == every_expert and (len(bits) == 1 or policy.precision.reuses_high)
    quotas = {}
    for precision, count in slots.items():
        staging = 0 if count == every_expert and complete else _staging(experts, policy, count)
        quotas[precision] = layer_quotas(count, weights[precision], staging, experts.num_experts)
    return SlotPlan(limit, workspace_bytes, slots, quotas)


def _plan_kinds(
    experts: ModelExperts, policy: Policy, weights: Mapping[Precision, Sequence[float]], limit: int,
    workspace_bytes: int,
) -> SlotPlan:  # fmt: skip
    """Plan for layers of several formats, which have one version of each expert.

    Every kind of layer has the same number of staging slots. Every layer keeps the same share of its experts, apart
    from its weight.
    """
    ((precision, of_layers),) = weights.items()
    kinds = np.array(experts.kinds)
    sizes = np.array([next(iter(formats.values())).nbytes for formats in experts.of_kinds])
    layers, each, spare = len(kinds), experts.num_experts, limit - workspace_bytes
    quotas, staging = np.full(layers, each), 0
    if not policy.residency.keeps or (sizes[kinds] * each).sum() > spare:
        most = spare // int(sizes.sum())
        usual = spare // max(1, int(sizes[kinds].sum()) // layers)  # slots, if all were of one kind
        staging = max(1, min(_staging(experts, policy, usual), most)) if policy.residency.keeps else min(most, each)
        room = spare - staging * int(sizes.sum())
        quotas = np.zeros(layers, np.int64)
        # D'Hondt, as in layer_quotas, until a layer's next slot does not fit.
        claims = [(-weight, layer) for layer, weight in enumerate(of_layers) if weight > 0 and policy.residency.keeps]
        heapify(claims)
        while claims:
            _, layer = claims[0]
            room -= int(sizes[kinds[layer]])
            if room < 0:
                break
            quotas[layer] += 1
            if quotas[layer] == each:
                heappop(claims)
            else:
                heapreplace(claims, (-of_layers[layer] / (quotas[layer] + 1), layer))
    counts = [int(quotas[kinds == kind].sum()) + staging for kind in range(len(sizes))]
    return SlotPlan(
        limit, workspace_bytes, {precision: sum(counts)}, {precision: quotas.tolist()}, {precision: tuple(counts)}
    )


def _version_slots(
    sizes: Mapping[Precision, int], weights: Mapping[Precision, Sequence[float]], every_expert: int, spare: int
) -> dict[Precision, int]:
    if len(sizes) < 2:
        return {precision: min(every_expert, spare // size) for precision, size in sizes.items()}
    low = _low_slots(sizes, weights, every_expert, spare)
    spare -= low * sizes[Precision.LOW]
    high = min(every_expert, spare // sizes[Precision.HIGH])
    spare -= high * sizes[Precision.HIGH]  # what the high precision cannot use goes back to the low one
    return {Precision.HIGH: high, Precision.LOW: min(every_expert, low + spare // sizes[Precision.LOW])}


def _check_budget(experts: ModelExperts, options: Options, policy: Policy, limit: int, workspace_bytes: int) -> None:
    """Raise ConfigError for an infeasible budget, with the smallest feasible one."""
    least, migrating = minimum_budget(experts, options, policy, workspace_bytes), policy.residency.migrating
    if limit < least:
        needed = "every expert at its low version, a high one" if migrating else "one expert of each precision"
        instead = ', or serve with policy "dymoe", which fetches misses' if migrating else ""
        raise ConfigError(
            f"vllm-dymoe: expert_budget is {limit} bytes on each rank, but {needed} and the kernel's workspace need "
            f"{least}; set expert_budget to at least {least} bytes{instead}.",
            option="expert_budget",
            least=least,
        )


def _staging(experts: ModelExperts, policy: Policy, count: int) -> int:
    # C of Eq. 10 limits prefetch: to a quarter of the slots, or layers would keep too little.
    wide = policy.prefetch.wide(experts.top_k) if policy.prefetch else 0
    ahead = min(FEWEST_STAGING + wide, count // 4)
    return max(policy.staging_slots(count), ahead if wide else 0)


def _resident_staging(experts: ModelExperts, options: Options, policy: Policy, high: int) -> int:
    """Return the number of staging slots of each precision.

    Moves of separate versions need them, and experts that steps fetch.
    """
    every, residency = len(experts.layers) * experts.num_experts, policy.residency
    if high == every or residency.migrating is None:
        return 0
    moves = 0 if experts.formats[options.high].nested else residency.migrating.in_flight
    return moves + FEWEST_STAGING * residency.rescues


def _resident_bytes(experts: ModelExperts, options: Options, policy: Policy, high: int) -> int:
    """Return the bytes with every expert resident and ``high`` of them high.

    Staging slots for moves are included. A residual slice is moved into the slot of the one that it replaces. Of
    separate versions, both of a pair arrive before either old one leaves.
    """
    high_format, low_format = experts.formats[options.high], experts.formats[options.low]
    every = len(experts.layers) * experts.num_experts
    staging = _resident_staging(experts, options, policy, high)
    if high_format.nested:
        return every * low_format.nbytes + (high + staging) * high_format.nbytes
    return (every - high + staging) * low_format.nbytes + (high + staging) * high_format.nbytes


def _plan_residents(
    experts: ModelExperts,
    options: Options,
    policy: Policy,
    limit: int,
    workspace_bytes: int,
) -> SlotPlan:
    """Plan a slot for every expert, as many of them high as fit (DynaExq 3.5)."""
    layers, each = len(experts.layers), experts.num_experts
    every, nested = layers * each, experts.formats[options.high].nested
    least, step = (_resident_bytes(experts, options, policy, high) for high in (1, 2))
    high = min(every - 1, 1 + (limit - workspace_bytes - least) // (step - least))
    if limit - workspace_bytes >= _resident_bytes(experts, options, policy, every):
        high = every
    places = layer_quotas(high, [1.0] * layers, 0, each)
    low = [each if nested else each - count for count in places]
    staging = _resident_staging(experts, options, policy, high)
    slots, quotas = {Precision.HIGH: high + staging}, {Precision.HIGH: places}
    if any(low):
        spare = 0 if nested else staging
        slots, quotas = slots | {Precision.LOW: sum(low) + spare}, quotas | {Precision.LOW: low}
    return SlotPlan(limit, workspace_bytes, slots, quotas)


def expert_worth(experts: ModelExperts, migrating: Migrating, layers: Sequence[float]) -> NDArray[np.float64]:
    """Return the worth of a high version per use: float64 [layers, experts].

    An expert's worth is its layer's, times the root of the quantization error of its low version, relative to the
    layer's mean. The error itself would be better for lattice codes, but gains nothing for GPTQ (benchmarks/LOG.md).
    """
    found = np.ones((len(experts.layers), experts.num_experts))
    for row, layer in zip(found, experts.layers, strict=True):
        lost = np.array(experts.lost.get(layer, ()))
        if migrating.by_gates and len(lost) == len(row) and lost.any():
            row[:] = np.sqrt(lost / lost.mean())
    return found * np.array(layers)[:, None]


def _slice_slots(sizes: Mapping[Precision, int], high: float, every_expert: int, spare: int) -> dict[Precision, int]:
    """Return the slots of residual and base slices, at least one of each.

    ``high`` is the number of residual slices for each base.
    """
    residual, base = sizes[Precision.HIGH], sizes[Precision.LOW]
    bases = min(every_expert, max(1, min(int(spare / (base + high * residual)), (spare - residual) // base)))
    residuals = max(1, min(every_expert, (spare - bases * base) // residual))
    bases = min(every_expert, (spare - residuals * residual) // base)  # what residual slices cannot use
    return {Precision.HIGH: residuals, Precision.LOW: bases}


def _low_slots(
    sizes: Mapping[Precision, int], weights: Mapping[Precision, Sequence[float]], every_expert: int, spare: int
) -> int:
    """Return the slots of the low precision if both precisions are in use.

    At least one slot is left for the high one.
    """
    high, low = sizes[Precision.HIGH], sizes[Precision.LOW]
    wanted_high, wanted_low = sum(weights[Precision.HIGH]), sum(weights[Precision.LOW])
    share = wanted_low / (wanted_high + wanted_low)
    slots = spare / ((1 - share) * high + share * low)
    count = int(share * slots) if slots <= every_expert else every_expert - (spare - every_expert * low) // (high - low)
    # A prompt's tokens may want the low precision where a single token never does: those experts stream through these
    # slots.
    return max(1, min(max(count, FEWEST_STAGING), (spare - high) // low))
