"""How far the kernels and the runtime are from what the card's memory and its link allow."""

import time
from statistics import median

import torch
from kernel_speeds import measure
from layers import LAYERS, Layer, Machine, work_of
from record import Recorder

from parts.decided import DecidedSteps, runtime_of
from parts.stack import Model, Stack, pinned_store, same_bits
from vllm_dymoe.runtime import MoERuntime
from vllm_dymoe.store import HostStore
from vllm_dymoe.systems.exact import Exact

KERNEL_LAYERS, KERNEL_TOKENS = LAYERS[:2], (1, 16, 512)
"""A selection of `make bench-gpu`."""
MODEL = Model(layers=4, experts=128, top_k=8, hidden=2048, intermediate=768)
"""Four of Qwen3-30B-A3B's 48 MoE layers, with random weights; 2.7 MB for an expert at 4 bits."""
BITS = 4
BUDGETS = ("25%", "50%", "100%")
PREFETCH = ("none", "next-gate")
STEPS = {"decode": (1, 50), "prefill": (2048, 4)}
"""Tokens of a step, and how many steps are measured."""
AHEAD = (0, 1, 3)
"""Projections that a step which the device decides fetches ahead for a layer."""
WARM = 20
"""Steps of decode before those that are measured, behind a prefill that fills what is there for all experts."""


class OfAllLayers(Exact):
    """With as many staging slots as the whole model has: a prompt's experts pass in groups of eight, and not of two."""

    def staging_slots(self, slots: int) -> int:
        """Of 48 layers' slots."""
        return min(super().staging_slots(48 // MODEL.layers * slots), slots // 4)


def run(record: Recorder) -> None:
    """The kernels' selection before the runtime, whose bounds it measures; what is wrong is not measured at all."""
    store, stack = pinned_store(MODEL, (BITS,)), Stack(MODEL, exact=False)
    if not _same_at_every_budget(record, store, stack):
        return
    with record.check("the kernels' speeds could be measured"):
        machine = measure(record, KERNEL_LAYERS, ("4", "4/2"), KERNEL_TOKENS)
    _measure_runtime(record, machine, store, stack)
    _measure_decided(record, machine, store, stack)
    store.close()


def _same_at_every_budget(record: Recorder, store: HostStore, stack: Stack) -> bool:
    with record.check("the stack to measure gives the same bits at every budget") as wrong:
        inputs = stack.inputs(4, 0)
        outs = []
        for budget in BUDGETS:
            runtime = stack.runtime(store, BITS, budget=budget)
            outs.append(stack.step(runtime, inputs)[-1].out.clone())
            runtime.engine.close()
        for budget, out in zip(BUDGETS, outs, strict=True):
            if not same_bits(out, outs[-1]):
                wrong.append(f"{budget} gives other bits than {BUDGETS[-1]}; no speed is measured")
    return not wrong


def _measure_runtime(record: Recorder, machine: Machine, store: HostStore, stack: Stack) -> None:
    for phase in STEPS:
        for budget in BUDGETS:
            for prefetch in PREFETCH if budget != "100%" else PREFETCH[:1]:
                with record.check(f"the runtime's {phase} at {budget}, prefetch {prefetch}, could be measured"):
                    runtime = stack.runtime(store, BITS, budget=budget, prefetch=prefetch)
                    name = f"{phase}, {budget}, prefetch {prefetch}"
                    _measure(record, machine, stack, runtime, name, *STEPS[phase])
                    runtime.engine.close()
                    del runtime


def _measure_decided(record: Recorder, machine: Machine, store: HostStore, stack: Stack) -> None:
    """Steps between which the host does nothing: a layer's time, beside what link or memory allow.

    Decode of one token is one graph; a prompt is launched, and streams through the staging slots.
    """
    for phase, (tokens, steps) in STEPS.items():
        wide = phase == "prefill"
        for budget, ahead in [(budget, ahead) for budget in BUDGETS for ahead in AHEAD]:
            if ahead and (wide or budget == "100%"):
                continue
            name = f"{phase} decided on the device, {budget}, {ahead} projections ahead"
            with record.check(f"{name}, could be measured"):
                runtime = runtime_of(stack, store, BITS, budget, ahead, OfAllLayers)
                replayed = DecidedSteps(stack, runtime, tokens, launched=wide, wide=wide)
                for seed in range(1 if wide else WARM):
                    replayed.step(stack.inputs(tokens, steps + seed))
                inputs = [stack.inputs(tokens, seed) for seed in range(steps)]
                torch.cuda.synchronize()
                runtime.reset_stats()
                begin = time.perf_counter()
                for x in inputs:
                    seen = replayed.step(x)
                torch.cuda.synchronize()
                measured = (time.perf_counter() - begin) / steps / MODEL.layers
                stats, layer = runtime.stats(), Layer("", MODEL.hidden, MODEL.intermediate, MODEL.experts, MODEL.top_k)
                on_card = work_of(layer, seen[0].ids.tolist(), (BITS,)).seconds(machine)
                missed = stats.misses * runtime.experts.formats[BITS].nbytes / steps / MODEL.layers
                bound = max(on_card, missed / machine.host_bytes_per_second)
                remark = f"{stats.hit_rate:.0%} hits, {stats.prefetches}"
                record.speed(f"{name}, a layer", "us", 1e6 * measured, 1e6 * bound, bound / measured, remark)
                runtime.engine.close()


def _measure(
    record: Recorder, machine: Machine, stack: Stack, runtime: MoERuntime, name: str, tokens: int, steps: int
) -> None:
    """Time of a layer; what has to be moved is counted in the same steps."""
    inputs = [stack.inputs(tokens, seed) for seed in range(steps)]
    stack.step(runtime, stack.inputs(STEPS["prefill"][0], steps))
    for seed in range(WARM if tokens == 1 else 0):
        stack.step(runtime, stack.inputs(tokens, steps + 1 + seed))
    torch.cuda.synchronize()
    runtime.reset_stats()
    times, seen = [], []
    for x in inputs:
        begin = time.perf_counter()
        seen += stack.step(runtime, x)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) / MODEL.layers)
    stats = runtime.stats()
    layer = Layer("", MODEL.hidden, MODEL.intermediate, MODEL.experts, MODEL.top_k)
    works = [work_of(layer, one.ids.tolist(), (BITS,)) for one in seen]
    on_card = sum(work.seconds(machine) for work in works) / len(works)
    # Experts that were needed and not kept; prefetch makes hits of some, whose bytes came over the link as well.
    fetched = stats.misses + stats.prefetches["useful"]
    link = fetched * runtime.experts.formats[BITS].nbytes / len(works) / machine.host_bytes_per_second
    bound, measured = max(on_card, link), median(times)
    remark = f"{stats.hit_rate:.0%} hits"
    record.speed(f"runtime, {name}, a layer", "us", 1e6 * measured, 1e6 * bound, bound / measured, remark)
