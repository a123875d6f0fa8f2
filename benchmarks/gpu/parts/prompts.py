"""Large batches, with host and device time apart; and decode by policy.

This is the second part of fifteen minutes on a card. Meanwhile vLLM's wheel arrives in pieces (``wheel_parts.py``);
nothing here needs it.
"""

import time
from itertools import product

import torch
from kernel_speeds import measure_machine
from layers import Machine, Model, work_of
from record import Recorder

from parts.decided import DevicePlannedSteps, server_of
from parts.speeds import OfAllLayers
from parts.stack import Stack, pinned_store
from vllm_dymoe.cache.store import HostStore
from vllm_dymoe.kernels import Decode, Grouped
from vllm_dymoe.policies.base import Policy
from vllm_dymoe.policies.duoserve import DuoServe
from vllm_dymoe.policies.exact import Exact
from vllm_dymoe.policies.layer_prefetch import LayerPrefetch

MODEL = Model(layers=4, experts=128, top_k=8, hidden=2048, intermediate=768)
"""Four of Qwen3-30B-A3B's 48 MoE layers, with random weights."""
BITS = 4
BUDGETS = ("25%", "50%", "100%")
TOKENS = (512, 2048)
LARGE_STEPS, DECODE_STEPS = 6, 60
POLICIES: dict[str, tuple[Policy, str]] = {
    "exact": (Exact(look_ahead=0), "25%"),
    "exact, next gate": (Exact(), "25%"),
    "duoserve, popularity": (DuoServe(), "minimum"),
    "layer-prefetch": (LayerPrefetch(), "minimum"),
}
"""Policies, and the budget of each."""


def run(record: Recorder) -> None:
    """Measure prompts first, then decode by policy."""
    machine, store, stack = measure_machine(), pinned_store(MODEL, (BITS,)), Stack(MODEL, exact=False)
    for tokens, budget in product(TOKENS, BUDGETS):
        with record.check(f"{tokens} tokens at {budget} could be measured"):
            _measure_large(record, machine, store, stack, tokens, budget)
    for name, (policy, budget) in POLICIES.items():
        with record.check(f"decode with {name} could be measured"):
            _measure_policy(record, machine, store, stack, name, policy, budget)
    store.close()


def _measure_large(
    record: Recorder, machine: Machine, store: HostStore, stack: Stack, tokens: int, budget: str
) -> None:
    """Measure the time until a step is enqueued, and until it has ended.

    Both are compared with what the link or the card needs.
    """
    ways = {"decode": Decode.TENSOR_CORES, "grouped": Grouped.IN_REGISTERS}
    server = server_of(stack, store, BITS, budget, OfAllLayers, **ways)
    steps = DevicePlannedSteps(stack, server, tokens, launched=True, large=True)
    inputs = [stack.inputs(tokens, seed) for seed in range(LARGE_STEPS)]
    steps.step(inputs[0])
    torch.cuda.synchronize()
    server.reset_stats()
    enqueued = 0.0
    begin = time.perf_counter()
    for x in inputs:
        before = time.perf_counter()
        seen = steps.step(x)
        enqueued += time.perf_counter() - before
        torch.cuda.synchronize()
    whole, count = time.perf_counter() - begin, LARGE_STEPS * MODEL.layers
    fetched = server.stats().misses * server.experts.formats[BITS].nbytes / count
    on_card = work_of(MODEL, seen[0].ids.tolist(), (BITS,)).seconds(machine)
    bound = max(on_card, fetched / machine.host_bytes_per_second)
    name = f"{tokens} tokens at {budget}, a layer"
    record.speed(name, "us", 1e6 * whole / count, 1e6 * bound, bound * count / whole, "host and device together")
    record.speed(f"{name}, host", "us", 1e6 * enqueued / count, 1e6 * bound, bound * count / enqueued, "until enqueued")
    server.close(keep_store=True)


def _measure_policy(
    record: Recorder, machine: Machine, store: HostStore, stack: Stack, name: str, policy: Policy, budget: str
) -> None:
    """Measure a decode step of one token as one graph, planned by the device."""
    prefetch = "next-gate" if policy.prefetch is not None and policy.prefetch.needs_gates else "none"
    server = stack.server(store, BITS, budget=budget, prefetch=prefetch, policy=policy, decode=Decode.TENSOR_CORES)
    steps = DevicePlannedSteps(stack, server, 1)
    inputs = [stack.inputs(1, seed) for seed in range(DECODE_STEPS)]
    for x in inputs[: DECODE_STEPS // 3]:
        steps.step(x)
    measured, bound, stats = steps.measure(machine, inputs, BITS, ahead=True)
    remark = f"{stats.hit_rate:.0%} hits, {stats.prefetches}"
    record.speed(
        f"decode with {name} at {budget}, a layer", "us", 1e6 * measured, 1e6 * bound, bound / measured, remark
    )
    server.close(keep_store=True)
