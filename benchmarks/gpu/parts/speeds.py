"""How close do the kernels and the server come to the limits of card and link?"""

import time
from statistics import median

import torch
from experts import captured
from kernel_speeds import measure
from layers import LAYERS, Machine, Model, work_of
from record import Recorder

from parts.decided import DevicePlannedSteps, server_of
from parts.stack import DEVICE, Stack, pinned_store, same_bits
from vllm_dymoe.cache.store import HostStore
from vllm_dymoe.kernels import Activation, native
from vllm_dymoe.kernels.triton.cpu_queue import DeviceQueue, post, wait
from vllm_dymoe.planner.constants import Action
from vllm_dymoe.planner.plan import LayerPlan
from vllm_dymoe.policies.exact import Exact

KERNEL_LAYERS, KERNEL_TOKENS = LAYERS[:2], (1, 16, 512)
"""A selection of `make bench-gpu`."""
MODEL = Model(layers=4, experts=128, top_k=8, hidden=2048, intermediate=768)
"""Four of Qwen3-30B-A3B's 48 MoE layers, with random weights; 2.7 MB for an expert at 4 bits."""
BITS = 4
BUDGETS = ("25%", "50%", "100%")
PREFETCH = ("none", "next-gate")
STEPS = {"decode": (1, 50), "prefill": (2048, 4)}
"""Tokens of a step, and number of measured steps."""
WARM = 20
"""Steps of decode before the measured ones, after a prefill that fills all slots."""


class OfAllLayers(Exact):
    """Has as many staging slots as the whole model would have.

    A prompt's experts are then streamed in groups of eight instead of two.
    """

    def staging_slots(self, slots: int) -> int:
        """Return the number of staging slots for 48 layers."""
        return min(super().staging_slots(48 // MODEL.layers * slots), slots // 4)


def run(record: Recorder) -> None:
    """Measure selected kernels, which give the server's bounds; then the server.

    Parts with wrong results are not measured.
    """
    store, stack = pinned_store(MODEL, (BITS,)), Stack(MODEL, exact=False)
    if not _same_at_every_budget(record, store, stack):
        return
    with record.check("the kernels' speeds could be measured"):
        machine = measure(record, KERNEL_LAYERS, ("4", "4/2"), KERNEL_TOKENS)
    _measure_server(record, machine, store, stack)
    _measure_decided(record, machine, store, stack)
    if native.load() is None:
        record.say("Left out: CPU execution of misses, since the native library was not built here.")
    else:
        _measure_decided(record, machine, store, stack, "share")
        with record.check("the CPU queue could be measured") as wrong:
            wrong += measure_cpu_queue(record, machine, store, stack)
    store.close()


def _same_at_every_budget(record: Recorder, store: HostStore, stack: Stack) -> bool:
    with record.check("the stack to measure gives the same bits at every budget") as wrong:
        inputs = stack.inputs(4, 0)
        outs = []
        for budget in BUDGETS:
            server = stack.server(store, BITS, budget=budget)
            outs.append(stack.step(server, inputs)[-1].out.clone())
            server.engine.close()
        for budget, out in zip(BUDGETS, outs, strict=True):
            if not same_bits(out, outs[-1]):
                wrong.append(f"{budget} gives other bits than {BUDGETS[-1]}; no speed is measured")
    return not wrong


def _measure_server(record: Recorder, machine: Machine, store: HostStore, stack: Stack) -> None:
    """Measure host-planned steps.

    A layer's median time is compared with the time to move the bytes that the same steps had to move.
    """
    cases = [(phase, budget, prefetch) for phase in STEPS for budget in BUDGETS for prefetch in PREFETCH]
    for phase, budget, prefetch in cases:
        if budget == "100%" and prefetch != PREFETCH[0]:  # there are no misses
            continue
        tokens, steps = STEPS[phase]
        with record.check(f"the server's {phase} at {budget}, prefetch {prefetch}, could be measured"):
            server = stack.server(store, BITS, budget=budget, prefetch=prefetch)
            inputs = [stack.inputs(tokens, seed) for seed in range(steps)]
            stack.step(server, stack.inputs(STEPS["prefill"][0], steps))
            for seed in range(WARM if tokens == 1 else 0):
                stack.step(server, stack.inputs(tokens, steps + 1 + seed))
            torch.cuda.synchronize()
            server.reset_stats()
            times, seen = [], []
            for x in inputs:
                begin = time.perf_counter()
                seen += stack.step(server, x)
                torch.cuda.synchronize()
                times.append((time.perf_counter() - begin) / MODEL.layers)
            stats, measured = server.stats(), median(times)
            on_card = sum(work_of(MODEL, one.ids.tolist(), (BITS,)).seconds(machine) for one in seen) / len(seen)
            # Experts needed and not kept. Prefetch turns some into hits, whose bytes have crossed the link, too.
            fetched = (stats.misses + stats.prefetches["useful"]) * server.experts.formats[BITS].nbytes
            bound = max(on_card, fetched / len(seen) / machine.host_bytes_per_second)
            name, remark = f"server, {phase}, {budget}, prefetch {prefetch}, a layer", f"{stats.hit_rate:.0%} hits"
            record.speed(name, "us", 1e6 * measured, 1e6 * bound, bound / measured, remark)
            server.engine.close()
            del server


def _measure_decided(record: Recorder, machine: Machine, store: HostStore, stack: Stack, misses: str = "fetch") -> None:
    """Measure device-planned steps.

    A layer's time is compared with the limits of link and memory. Decode of one token is one graph; a prompt is
    launched, and streams through the staging slots. Misses that the CPU executes count as if they had been fetched, so
    a share above 1 is the gain.
    """
    cases = [(phase, budget) for phase in STEPS for budget in BUDGETS]
    for phase, budget in cases if misses == "fetch" else [("decode", budget) for budget in BUDGETS[:-1]]:
        (tokens, steps), large = STEPS[phase], phase == "prefill"
        name = f"{phase} decided on the device, misses {misses}, {budget}"
        with record.check(f"{name}, could be measured"):
            server = server_of(stack, store, BITS, budget, OfAllLayers, misses=misses)
            replayed = DevicePlannedSteps(stack, server, tokens, launched=large, large=large)
            for seed in range(1 if large else WARM):
                replayed.step(stack.inputs(tokens, steps + seed))
            inputs = [stack.inputs(tokens, seed) for seed in range(steps)]
            measured, bound, stats = replayed.measure(machine, inputs, BITS)
            remark = f"{stats.hit_rate:.0%} hits, {stats.cpu_executed} computed by the CPU, {stats.prefetches}"
            record.speed(f"{name}, a layer", "us", 1e6 * measured, 1e6 * bound, bound / measured, remark)
            server.close(keep_store=True)


def measure_cpu_queue(record: Recorder, machine: Machine, store: HostStore, stack: Stack, about: str = "") -> list[str]:
    """Measure the CPU queue.

    Both bandwidths are measured, each while the other side works, and the round trip to the host without a row.

    Returns:
        what is wrong, as sentences.
    """
    about = about and f", {about}"
    server = server_of(stack, store, BITS, BUDGETS[0], misses="share")
    cpu_queue, rates = server.cpu_execution.cpu_queue, server.cpu_execution.rates
    assert rates is not None
    _, steps = STEPS["decode"]
    assert cpu_queue is not None
    cpu_queue.serve(Activation.SILU)
    link, most = rates.link / 1e9, machine.host_bytes_per_second / 1e9
    record.speed(
        f"the link while the host computes{about}", "GB/s", link, most, link / most, rates.describe(store.experts)
    )
    device_queue = DeviceQueue(cpu_queue.queue.shape, cpu_queue.turn, cpu_queue.present)
    x, tag = stack.inputs(1, 0), store.experts.formats[BITS].encoding.tag
    plan = LayerPlan.allocate(1, stack.model.top_k, stack.model.experts, DEVICE).tensors
    for name, value in (("count", 1), ("action", int(Action.CPU)), ("bits", tag), ("addresses", 0)):
        plan[name].fill_(value)
    ids, one = torch.full((1, stack.model.top_k), -1, device=DEVICE), torch.ones_like(plan["count"])

    def post_and_wait() -> None:
        post(device_queue, 0, x, ids, one, plan)
        wait(cpu_queue.turn)

    graph = captured(post_and_wait)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(steps):
        graph.replay()
    torch.cuda.synchronize()
    trip, least = 1e6 * (time.perf_counter() - begin) / steps, 1e6 * rates.round_trip
    remark = "bound: between two of the host's cores"
    record.speed(f"CPU queue, there and back{about}", "us", trip, least, least / trip, remark)
    failed = cpu_queue.failed
    server.close(keep_store=True)
    return ["the host did not answer"] if failed else []
