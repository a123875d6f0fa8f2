"""Times of the kernels on a card, beside the bound that the card's own copy bandwidth and matrix rate set.

They are of CUDA graphs that rotate over copies of the experts, so that weights come from memory and not from a cache.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch
from experts import ExpertWork, compute_experts, table_of_blobs
from layers import LAYERS, TIERS, Layer, Machine, expert_bytes, route, work_of
from measure import DTYPE, copies, graphed, measure_machine, random_expert, seconds, shape_of, work_for
from record import Recorder

from vllm_dymoe.kernels import Activation
from vllm_dymoe.kernels.triton import (
    DecodeTile,
    Scratch,
    TritonKernel,
    WorkList,
    choose_tiles,
    decode_down,
    decode_gate_up,
)


def measure(record: Recorder, layers: Sequence[Layer], tiers: Sequence[str], tokens: Sequence[int]) -> Machine:
    """Measure the card, then one layer of each kind, then experts that are fetched through."""
    chosen = [(layer, name) for layer in layers for name in tiers]
    # Compiling takes longer than measuring; processes do it side by side, and Triton's cache on disk keeps it.
    with ProcessPoolExecutor(min(os.cpu_count() or 1, 8), get_context("spawn")) as pool:
        list(pool.map(compile_layer, *zip(*chosen, strict=True)))
    machine = measure_machine()
    record.say(
        f"Measured first: copy on the card {machine.copy_bytes_per_second / 1e9:.0f} GB/s, dense bf16 "
        f"{machine.flops_per_second / 1e12:.0f} TFLOP/s, from page-locked memory "
        f"{machine.host_bytes_per_second / 1e9:.1f} GB/s."
    )
    for layer, name in chosen:
        for count in tokens:
            _measure_layer(record, machine, layer, name, count)
    _measure_fetch(record, machine)
    return machine


def compile_layer(layer: Layer, tiers: str) -> None:
    """Compile every kernel of a layer; the first launch does."""
    bits = TIERS[tiers]
    expert = random_expert(layer, bits[0])
    x = torch.zeros(1, layer.hidden, device="cuda", dtype=DTYPE)
    row = torch.zeros(1, dtype=torch.int64, device="cuda")
    kernel = TritonKernel("cuda", 64 << 20, [shape_of(layer).formats(width)[0] for width in bits])
    compute_experts(kernel, x, [ExpertWork(*expert, row, row)], x.clone(), Activation.SILU)
    torch.cuda.synchronize()


def _measure_layer(record: Recorder, machine: Machine, layer: Layer, tiers: str, count: int) -> None:
    bits = TIERS[tiers]
    routing = route(layer, count)
    work = work_of(layer, routing, bits)
    # Hidden activations of all tokens at once, as far as memory goes: this times kernels, not workspaces.
    pairs = count * layer.top_k
    workspace_bytes = (1 << 20) + min(4 << 30, 8 * pairs * layer.intermediate + (64 << 20))
    kernel = TritonKernel("cuda", workspace_bytes, [shape_of(layer).formats(width)[0] for width in bits])
    x = torch.randn(count, layer.hidden, device="cuda", dtype=DTYPE)
    out = torch.empty(pairs, layer.hidden, device="cuda", dtype=DTYPE)
    active = {expert for row in routing for expert in row}
    steps = []
    sets = []
    for _ in range(copies(work.weight_bytes)):
        experts = {expert: random_expert(layer, bits[expert % len(bits)]) for expert in active}
        sets.append(work_for(experts, routing))
        compute_experts(kernel, x, sets[-1], out, Activation.SILU)
        steps.append(kernel.step)

    def again(step: Any) -> None:
        kernel.step = step
        kernel.compute(range(len(active)))

    time = seconds(graphed([lambda step=step: again(step) for step in steps])) / len(steps)
    bound = work.seconds(machine)
    moved = work.weight_bytes + work.other_bytes
    remark = f"{moved / time / 1e9:.0f} GB/s, {work.flops / time / 1e12:.1f} TFLOP/s"
    name = f"kernels, {layer.model}, {tiers} bits, {count} tokens"
    record.speed(name, "us", time * 1e6, bound * 1e6, bound / time, remark)


def _measure_fetch(record: Recorder, machine: Machine) -> None:
    """Missing experts computed and cached in one pass, beside a copy from pinned memory."""
    layer = LAYERS[0]
    size = expert_bytes(layer, 4)
    step = fetching_step(layer)
    bound, time = 2 * size / machine.host_bytes_per_second, seconds(step)
    name = f"kernels, two experts of {layer.model} fetched through from the host"
    record.speed(name, "us", time * 1e6, bound * 1e6, bound / time)


def fetching_step(layer: Layer) -> Callable[[], None]:
    """Compute one token with two experts of 4 bits that lie in pinned memory, and write them into slots."""
    size, shape = expert_bytes(layer, 4), shape_of(layer)
    blobs = [torch.zeros(size, dtype=torch.uint8).pin_memory() for _ in range(2)]
    slots = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2)]
    starts, targets = ([blob.data_ptr() for blob in some] for some in (blobs, slots))
    table = table_of_blobs(shape, starts, [4, 4], "cuda", targets)
    items = torch.tensor([[0, 0, 1], [1, 1, 2]], dtype=torch.int32, device="cuda")
    work = WorkList(items, torch.zeros(2, dtype=torch.int64, device="cuda"), torch.arange(2, device="cuda"))
    x = torch.randn(1, layer.hidden, device="cuda", dtype=DTYPE)
    hidden = torch.empty(2, layer.intermediate, device="cuda", dtype=DTYPE)
    out = torch.empty(2, layer.hidden, device="cuda", dtype=DTYPE)
    major, minor = torch.cuda.get_device_capability()
    tiles = choose_tiles(10 * major + minor, layer.hidden, layer.intermediate)
    scratch = scratch_for(layer, 2, tiles.gate_up, tiles.down)

    def step() -> None:
        assert blobs
        assert slots  # the table has their addresses only
        decode_gate_up(x, hidden, table, work, Activation.SILU, tiles.gate_up, scratch)
        decode_down(hidden, out, table, work, tiles.down, scratch)

    return step


def scratch_for(layer: Layer, rows: int, gate_up: DecodeTile, down: DecodeTile) -> Scratch:
    """What programs need that share a sum of so many rows."""
    inner, hidden = (64 * -(-size // 64) for size in (layer.intermediate, layer.hidden))
    partials = rows * max(2 * gate_up.split * inner, down.split * hidden)
    semaphores = rows * max(inner, hidden) // 64
    return Scratch(torch.empty(partials, device="cuda"), torch.zeros(semaphores, dtype=torch.int32, device="cuda"))
