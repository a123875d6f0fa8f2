"""Random steps of a small model, and servers that run them."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch

from vllm_dymoe.cache.transfer import make_engine
from vllm_dymoe.kernels import Activation
from vllm_dymoe.options import Options
from vllm_dymoe.planner.precision import Precision
from vllm_dymoe.planner.routing import Routing
from vllm_dymoe.policies.base import PrecisionPolicy
from vllm_dymoe.policies.exact import Exact
from vllm_dymoe.server import ExpertServer

CPU = torch.device("cpu")
STEPS = [(seed, seed % 2, (1, 1, 1, 7, 40)[seed % 5]) for seed in range(30)]
BUDGETS = ["100%", "50%", "25%", "minimum"]
FAST = 100.0  # GB/s of the link of an emulated card, for tests in which only results matter


@dataclass(frozen=True)
class NumberPrecision(PrecisionPolicy):
    low: frozenset[int] = frozenset()
    skipped: frozenset[int] = frozenset()
    planned: ClassVar[bool] = False

    def shares(self, num_layers, top_k):
        return dict.fromkeys(self.precisions, [1.0] * num_layers)

    def select(self, routing):
        return {
            e: Precision.SKIPPED if e in self.skipped else Precision.LOW if e in self.low else Precision.HIGH
            for e in routing.active
        }


class ByNumber(Exact):
    """A policy whose precisions depend only on an expert's number.

    So they are the same for every budget.
    """

    low: frozenset[int] = frozenset()
    skipped: frozenset[int] = frozenset()
    staging: int | None = None
    projections: int = 3

    @cached_property
    def precision(self):
        precisions = frozenset((Precision.HIGH, Precision.LOW)) if self.low else frozenset((Precision.HIGH,))
        return NumberPrecision(precisions, low=self.low, skipped=self.skipped)

    def staging_slots(self, slots):
        return super().staging_slots(slots) if self.staging is None else min(self.staging, slots)

    @cached_property
    def prefetch(self):
        prefetch = super().prefetch
        return prefetch and replace(prefetch, projections=self.projections)


def make_server(
    store, budget="100%", policy=None, low=2, predictor=None, engine=None, parts=None, threads=None, high=4, rates=None,
    on_late=print, all_experts=0, **options,
):  # fmt: skip
    if isinstance(policy, str):
        options, policy = options | {"policy": policy}, None
    options = Options(high=high, low=low, group_size=32, expert_budget=budget, **options)
    if threads is not None:
        engine = make_engine(store, CPU, 0, io_threads=threads)
    given = {"policy": policy, "predictor": predictor, "engine": engine, "parts": parts, "rates": rates}
    given |= {"on_late": on_late, "all_experts": all_experts}
    return ExpertServer(store, options, CPU, **given)


def with_budget(store, budget, policy=None, **options):
    server = make_server(store, "100%", policy, **options)
    server.resize(server.minimum_budget if budget == "minimum" else budget)
    return server


def slow_reads(store, gbps):
    """An engine that reads like a disk, at this rate in GB/s.

    It occupies no core, so a CPU prefetches.
    """
    return make_engine(store, CPU, 0, link_gbps=gbps)


def random_step(seed, tokens, experts):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, experts.num_experts, generator=generator)
    weights, ids = scores.topk(experts.top_k, dim=1)
    fmt = next(iter(experts.formats.values()))
    x = torch.randn(tokens, fmt.hidden, generator=generator).to(fmt.dtype)
    return x, weights / weights.sum(1, keepdim=True), ids.int()


def forward(server, layer, x, weights, ids, activation=Activation.SILU, **told):
    """Run one layer of one step; the arguments are in vLLM's order."""
    return server.host_planned.forward(Routing(layer, len(server.experts.layers), x, ids, weights, **told), activation)


def run(server, steps, activation=Activation.SILU, **told):
    outputs = [
        forward(server, layer, *random_step(seed, tokens, server.experts), activation, **told)
        for seed, layer, tokens in steps
    ]
    server.check_integrity()
    return outputs


def equal(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def kept_by(server):
    return {precision: server.cache.table.residents(precision) for precision in server.cache.pools}
