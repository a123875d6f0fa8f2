"""Random steps of a small model, and runtimes to run them."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from vllm_dymoe.config import Options
from vllm_dymoe.kernels import Activation
from vllm_dymoe.residency.routing import Routing
from vllm_dymoe.residency.tier import Tier
from vllm_dymoe.runtime import MoERuntime
from vllm_dymoe.systems.base import Precision
from vllm_dymoe.systems.exact import Exact
from vllm_dymoe.transfer import make_engine

CPU = torch.device("cpu")
STEPS = [(seed, seed % 2, (1, 1, 1, 7, 40)[seed % 5]) for seed in range(30)]
BUDGETS = ["100%", "50%", "25%", "minimum"]


@dataclass(frozen=True)
class NumberPrecision(Precision):
    low: frozenset[int] = frozenset()
    skipped: frozenset[int] = frozenset()

    def shares(self, num_layers, top_k):
        return dict.fromkeys(self.tiers, [1.0] * num_layers)

    def select(self, routing):
        return {e: Tier.SKIP if e in self.skipped else Tier.LO if e in self.low else Tier.HI for e in routing.active}


class ByNumber(Exact):
    """A precision plan that depends on the expert alone, so that it is the same for every budget."""

    low: frozenset[int] = frozenset()
    skipped: frozenset[int] = frozenset()
    staging: int | None = None
    projections: int = 3

    @cached_property
    def precision(self):
        tiers = frozenset((Tier.HI, Tier.LO)) if self.low else frozenset((Tier.HI,))
        return NumberPrecision(tiers, low=self.low, skipped=self.skipped)

    def staging_slots(self, slots):
        return super().staging_slots(slots) if self.staging is None else min(self.staging, slots)

    @cached_property
    def foresight(self):
        foresight = super().foresight
        return foresight and replace(foresight, projections=self.projections)


def make_runtime(
    store, budget="100%", system=None, lo=2, predictor=None, engine=None, parts=None, threads=None, hi=4, rates=None,
    **options,
):  # fmt: skip
    if isinstance(system, str):
        options, system = options | {"system": system}, None
    options = Options(hi=hi, lo=lo, group_size=32, expert_budget=budget, **options)
    if threads is not None:
        engine = make_engine(store, CPU, 0, io_threads=threads)
    given = {"system": system, "predictor": predictor, "engine": engine, "parts": parts, "rates": rates}
    return MoERuntime(store, options, CPU, **given)


def with_budget(store, budget, system=None, **options):
    runtime = make_runtime(store, "100%", system, **options)
    runtime.resize(runtime.minimum_budget if budget == "minimum" else budget)
    return runtime


def random_step(seed, tokens, experts):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, experts.num_experts, generator=generator)
    weights, ids = scores.topk(experts.top_k, dim=1)
    fmt = next(iter(experts.formats.values()))
    x = torch.randn(tokens, fmt.hidden, generator=generator).to(fmt.dtype)
    return x, weights / weights.sum(1, keepdim=True), ids.int()


def forward(runtime, layer, x, weights, ids, activation=Activation.SILU, **told):
    """One layer of one step; the order of arguments is that of vLLM's."""
    return runtime.serving.forward(Routing(layer, len(runtime.experts.layers), x, ids, weights, **told), activation)


def run(runtime, steps, activation=Activation.SILU, **told):
    outputs = [
        forward(runtime, layer, *random_step(seed, tokens, runtime.experts), activation, **told)
        for seed, layer, tokens in steps
    ]
    runtime.check_integrity()
    return outputs


def equal(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def kept_by(runtime):
    return {tier: runtime.memory.table.residents(tier) for tier in runtime.memory.pools}
