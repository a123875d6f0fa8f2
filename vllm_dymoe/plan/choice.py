"""Options and a budget on a device: how fast they are, and which of them to take.

With every expert resident a step takes what was measured so, or

    t = (bytes of weights / bandwidth of memory) + layers * (the host's time for a layer)

Each miss adds its bytes / the link, and what it costs the host, where a run has measured that. What was named ahead may
travel while the layer before computes: of the link's time for a layer, the smaller of

    accuracy * (its misses)        and        utilisation * (a layer's computation)

is hidden, since a wrong guess takes the link from a right one. A prompt streams what is not there while it computes,
so that it takes the longer of the two, and one expert more (DuoServe-MoE 5.2).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from typing import Any

from vllm_dymoe.config import ConfigError, ExpertBudget, Options
from vllm_dymoe.plan.device import Device
from vllm_dymoe.plan.model import ModelShape
from vllm_dymoe.plan.replay import LayerDemand, Routings, replay
from vllm_dymoe.residency.format import ModelExperts
from vllm_dymoe.residency.tier import Tier
from vllm_dymoe.resolve import resolve_options
from vllm_dymoe.runtime.device_share import StepShape, automatic_share
from vllm_dymoe.runtime.sizing import (
    SlotPlan,
    limit_in_bytes,
    minimum_budget,
    plan_slots,
    slot_bits,
    tier_bits,
    workspace_bytes,
)  # fmt: skip
from vllm_dymoe.systems import System, make_system
from vllm_dymoe.systems.dymoe import Dymoe

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
_PARTS = (0.25, 0.5, 0.75, 1.0)  # of the room for experts
_NEXT_GATE = 0.75  # of the next layer's experts, where no trace says how right its gate is (papers: 0.6 to 0.9)
_ITEM = 2  # bytes of a weight outside of experts


@dataclass(frozen=True)
class Serving:
    """How the model is to be served, as far as memory goes: vLLM's options of these names."""

    max_model_len: int = 8192
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 2048
    gpu_memory_utilization: float = 0.9


@dataclass(frozen=True, eq=False)
class Choice:
    """Options of the plugin and what they do on a device.

    Attributes:
        given: options as a user writes them, without the budget.
        limit: bytes of device memory for experts.
        part: of the room for experts, up to which the budget may go.
        routings: of decode steps, with the batch that is asked about.
        prompt: tokens of a prompt.
    """

    given: Mapping[str, Any]
    limit: int
    part: float
    shape: ModelShape
    device: Device
    routings: Routings
    prompt: int

    @cached_property
    def options(self) -> Options:
        """All options."""
        return resolve_options(self.given, environment={})

    @cached_property
    def system(self) -> System:
        """The system of the options."""
        return make_system(self.options)

    @cached_property
    def experts(self) -> ModelExperts:
        """Packed."""
        return self.shape.packed(tuple(dict.fromkeys(self.options.stored_bits)), self.options.group_size)

    @cached_property
    def slots(self) -> SlotPlan:
        """What the budget is divided into."""
        shares = self.system.precision.shares(self.shape.moe_layers, self.shape.top_k)
        return plan_slots(self.experts, self.options, self.system, self.limit, self._workspace, shares)

    @property
    def share(self) -> float:
        """Experts at the high tier that fit, of all."""
        return min(1.0, (self.limit - self._workspace) / self.experts.nbytes(self.options.hi))

    @property
    def agreement(self) -> float | None:
        """Of the likeliest tokens with those of 16 bits, as benchmarks/quality has it; None if it was not measured."""
        table = json.loads(resources.files("vllm_dymoe.plan").joinpath("quality.json").read_text())
        options = self.options
        tiers = f"{options.hi}/{options.lo}" if options.system == "dymoe" else f"{options.hi}"
        found = table.get(tiers, {}).get(options.quantizer)
        return None if found is None else float(found)

    @cached_property
    def demand(self) -> LayerDemand:
        """What a layer needs and moves."""
        critical = None
        if isinstance(self.system, Dymoe):
            depth, schedule = self.routings.header.num_layers, self.system.precision.schedule
            critical = lambda layer, active: schedule.critical(layer, depth, active)  # noqa: E731
        quotas = self.slots.quotas if self.system.residency.keeps else {}
        return replay(self.routings, quotas, critical, low=self.options.lo > 0, nested=self._nested)

    @property
    def hit_rate(self) -> float:
        """Of the experts that a decode step needs."""
        needed = sum(self.demand.active.values())
        return 1 - self.demand.misses / needed if needed else 1.0

    @property
    def moved(self) -> float:
        """Bytes of experts that a decode step moves."""
        return self.shape.moe_layers * sum(self.demand.missing[tier] * size for tier, size in self._slot_bytes.items())

    @property
    def read(self) -> float:
        """Bytes of device memory that a decode step reads."""
        bits = {tier: tier_bits(self.options, tier) for tier in Tier}
        each = {tier: self.experts.formats[width].whole_nbytes if width else 0 for tier, width in bits.items()}
        layer = sum(count * each[tier] for tier, count in self.demand.active.items())
        return self.shape.token_weights * _ITEM + self.shape.moe_layers * layer

    @cached_property
    def tpot(self) -> float:
        """Seconds of a decode step."""
        shape, device = self.shape, self.device
        computing = device.step.get((self.options.hi, self.routings.batch))
        if computing is None:
            computing = self.read / device.bandwidth + shape.moe_layers * device.layer_seconds
        waiting = self.moved / shape.moe_layers / self.device.link
        accuracy, utilisation = self._foresight
        hidden = min(accuracy * waiting, utilisation * computing / shape.layers)
        return computing + shape.moe_layers * (waiting - hidden + self.demand.misses * device.miss)

    @cached_property
    def ttft(self) -> float:
        """Seconds to the first token of a prompt."""
        shape, device, active = self.shape, self.device, self.routings.distinct(self.prompt)
        high, streaming = 1.0, 0.0
        if isinstance(self.system, Dymoe):
            high = self.system.precision.schedule.realised(shape.moe_layers, max(1, round(active)))
        for tier, share in ((Tier.HI, high), (Tier.LO, 1.0 if self._nested else 1 - high)):
            if share > 0 and tier in self.slots.slots:
                kept = sum(self.slots.quotas[tier]) / shape.moe_layers / shape.experts
                streaming += share * active * max(0.0, 1 - kept) * self._slot_bytes[tier]
        streaming *= shape.moe_layers / self.device.link
        blob = self.experts.formats[self.options.hi].whole_nbytes
        if (at := (self.options.hi, self.routings.batch)) in device.prompt:
            computing = device.prompt[at] * self.prompt
        else:
            weights = shape.token_weights + shape.moe_layers * shape.top_k * 3 * shape.hidden * shape.intermediate
            reading = (shape.token_weights * _ITEM + shape.moe_layers * active * blob) / device.bandwidth
            computing = max(2 * weights * self.prompt / device.compute, reading)
            computing += shape.moe_layers * device.layer_seconds
        return max(computing, streaming) + (blob / self.device.link if streaming else 0.0)

    @cached_property
    def _workspace(self) -> int:
        return workspace_bytes(self.experts, "cuda")

    @property
    def _nested(self) -> bool:
        """Whether slots are of fine slices and of bases."""
        return Tier.HI in self.slots.slots and any(fmt.nested for fmt in self.experts.formats.values())

    @cached_property
    def _slot_bytes(self) -> dict[Tier, int]:
        bits = slot_bits(self.experts, self.options, self.system.precision.tiers)
        return {tier: self.experts.formats[width].nbytes for tier, width in bits.items()}

    @property
    def _foresight(self) -> tuple[float, float]:
        """How much of what a layer needs is named ahead, and how much of what is named is needed (FIRM-MoE 7, 8)."""
        system, routings = self.system, self.routings
        if system.foresight is None:
            return 0.0, 0.0
        if system.foresight.name == "popularity":
            return routings.popularity, routings.popularity
        right = _NEXT_GATE if routings.next_gate is None else routings.next_gate
        return right, right


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
    for given in CANDIDATES:
        options = resolve_options(given, environment={})
        experts = shape.packed(tuple(options.stored_bits), options.group_size)
        system, workspace = make_system(options), workspace_bytes(experts, "cuda")
        least = minimum_budget(experts, options, system, workspace)
        room = room_for_experts(shape, device, serving, least)
        most = options.expert_budget if options.expert_budget.slots is not None else ExpertBudget(share=1.0)
        most = most if system.residency.keeps else ExpertBudget(slots="top-k")
        limit = limit_in_bytes(most, experts, options, workspace, room)
        parts = {min(limit, int(part * room)): part for part in reversed(_PARTS)}
        for bytes_, part in sorted(parts.items()):
            if bytes_ >= least:
                yield Choice(given, bytes_, part, shape, device, routings, prompt)


def shown(rows: Sequence[Choice], systems: Sequence[str]) -> list[Choice]:
    """Rows of these systems; without any, at each part of the room the one that would be recommended there."""
    if systems:
        return [row for row in rows if row.given["system"] in systems]
    good = [row for row in rows if (row.agreement or 0) >= GOOD_ENOUGH]
    return [recommended(at) for part in _PARTS if (at := [row for row in good if row.part == part])]


def recommended(rows: Sequence[Choice]) -> Choice:
    """The fastest whose answers are good enough; of those within a twentieth of it, the best answers.

    Raises:
        ConfigError: there is none.
    """
    good = [row for row in rows if (row.agreement or 0) >= GOOD_ENOUGH]
    if not good:
        raise ConfigError("nothing fits on this device; lower --max-model-len or --max-num-seqs.")
    fastest = min(row.tpot for row in good)
    return max((row for row in good if row.tpot <= 1.05 * fastest), key=lambda row: (row.agreement or 0, -row.tpot))


def command(model: str, row: Choice, serving: Serving) -> str:
    """What serves the model so."""
    length = min(serving.max_model_len, row.shape.longest)
    return (
        f"vllm serve {model} --quantization dymoe --max-model-len {length} --max-num-seqs {serving.max_num_seqs} "
        f"--gpu-memory-utilization {serving.gpu_memory_utilization:g} "
        f"--additional-config '{json.dumps({'dymoe': {**row.given, 'expert_budget': row.limit}})}'"
    )
