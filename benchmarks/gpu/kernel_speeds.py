"""Times of the kernels on a card, compared with their bounds.

The bounds follow from the card's own copy bandwidth and matrix rate. Times are those of CUDA graphs that rotate over
copies of the experts, so that weights come from memory and not from a cache.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch
from experts import Products, captured, table_of_slices
from layers import DTYPE, LAYERS, PRECISIONS, TOKENS, Machine, Model, route, work_of
from record import Recorder

from vllm_dymoe.experts.format import PackedExpert
from vllm_dymoe.kernels import Activation, Decode, Grouped
from vllm_dymoe.kernels.triton import (
    DecodeTile,
    ExpertShape,
    Scratch,
    TritonKernel,
    WorkList,
    choose_tiles,
    decode_down,
    decode_gate_up,
)

SIDE = 8192
"""Size of the matrices whose product gives the dense rate."""


def run(record: Recorder, precisions: Sequence[str] = tuple(PRECISIONS)) -> None:
    """Measure every layer shape, precision and number of tokens (`make bench-gpu`)."""
    with record.check("the kernels' speeds could be measured"):
        measure(record, LAYERS, precisions, TOKENS)


def measure(record: Recorder, layers: Sequence[Model], precisions: Sequence[str], tokens: Sequence[int]) -> Machine:
    """Measure the card, then a layer of each kind, then a step that fetches."""
    chosen = [(layer, name) for layer in layers for name in precisions]
    # Compiling takes longer than measuring, so processes compile concurrently into Triton's cache on disk.
    with ProcessPoolExecutor(min(os.cpu_count() or 1, 8), get_context("spawn")) as pool:
        list(pool.map(compile_layer, *zip(*chosen, strict=True)))
    machine = measure_machine()
    record.say(
        f"Measured first: copy on the card {machine.copy_bytes_per_second / 1e9:.0f} GB/s, dense bf16 "
        f"{machine.flops_per_second / 1e12:.0f} TFLOP/s, from pinned memory "
        f"{machine.host_bytes_per_second / 1e9:.1f} GB/s."
    )
    for layer, name in chosen:
        for count in tokens:
            measure_layer(record, machine, layer, name, count)
    # Misses that are computed and cached in one pass are compared with a copy from pinned memory.
    layer = LAYERS[0]
    bound, time = 2 * layer.format(4).nbytes / machine.host_bytes_per_second, seconds(fetching_step(layer))
    name = f"kernels, two experts of {layer.name} fetched through from the host"
    record.speed(name, "us", time * 1e6, bound * 1e6, bound / time)
    return machine


def seconds(function: Callable[[], object], least: float = 0.2) -> float:
    """Return the seconds of one call, from CUDA events.

    The events enclose as many calls as take `least` seconds, after a warm-up.
    """
    function()
    torch.cuda.synchronize()
    calls = 1
    while True:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            function()
        end.record()
        torch.cuda.synchronize()
        total = begin.elapsed_time(end) / 1e3
        if total >= least:
            return total / calls
        calls = max(calls + 1, min(100 * calls, int(1.2 * calls * least / max(total, 1e-6))))


def measure_machine() -> Machine:
    """Return the bandwidth of a copy, the rate of a product, and the link's bandwidth.

    The link's is that of a copy from pinned memory.
    """
    size = min(1 << 30, torch.cuda.mem_get_info()[0] // 8)
    source, target = (torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in range(2))
    copy = 2 * size / seconds(lambda: target.copy_(source))
    host = torch.zeros(min(size, 256 << 20), dtype=torch.uint8).pin_memory()
    link = host.numel() / seconds(lambda: target[: host.numel()].copy_(host, non_blocking=True))
    a, b = (torch.randn(SIDE, SIDE, device="cuda", dtype=DTYPE) for _ in range(2))
    product = 2 * SIDE**3 / seconds(lambda: torch.mm(a, b))
    return Machine(torch.cuda.get_device_name(), copy, product, link)


def random_expert(layer: Model, bits: int) -> PackedExpert:
    """Return an expert of random bytes and scales of a usual size."""
    fmt = layer.format(bits)
    expert = fmt.view(torch.randint(0, 256, (fmt.nbytes,), dtype=torch.uint8, device="cuda"))
    for packed in expert:
        size = packed.format.columns**-0.5
        if packed.scales_zeros is None:
            packed.weight.normal_(std=size)
        else:
            packed.scales_zeros[..., 0].uniform_(size, 2 * size).mul_(4 / (1 << bits))
            packed.scales_zeros[..., 1].normal_(std=size / 4)
    return expert


def compile_layer(
    layer: Model, precisions: str, decode: Decode = Decode.PLAIN, grouped: Grouped = Grouped.PLAIN
) -> None:
    """Compile every kernel of a layer by launching steps of all sizes."""
    kernel, bits = TritonKernel("cuda", decode=decode, grouped=grouped), PRECISIONS[precisions]
    one = [random_expert(layer, width) for width in bits]
    experts = {expert: one[expert % len(bits)] for expert in range(layer.experts)}
    for count in TOKENS:
        x = torch.zeros(count, layer.hidden, device="cuda", dtype=DTYPE)
        out = torch.empty(count * layer.top_k, layer.hidden, device="cuda", dtype=DTYPE)
        _products(kernel, layer, bits, experts, route(layer, count)).launch(x, out)
    torch.cuda.synchronize()


def _products(
    kernel: TritonKernel, layer: Model, bits: Sequence[int], experts: Mapping[int, PackedExpert],
    routing: Sequence[Sequence[int]],
) -> Products:  # fmt: skip
    formats = [layer.format(width).matrices for width in bits]
    return Products(kernel, experts, formats, torch.tensor(routing), layer.experts, Activation.SILU)


def measure_layer(
    record: Recorder, machine: Machine, layer: Model, precisions: str, count: int, decode: Decode = Decode.PLAIN,
    grouped: Grouped = Grouped.PLAIN, least: float = 0.2,
) -> None:  # fmt: skip
    """Measure a layer's step of `count` tokens, and compare it with the bound.

    `least` is explained in :func:`seconds`.
    """
    bits, routing = PRECISIONS[precisions], route(layer, count)
    work = work_of(layer, routing, bits)
    kernel = TritonKernel("cuda", decode=decode, grouped=grouped)
    x = torch.randn(count, layer.hidden, device="cuda", dtype=DTYPE)
    out = torch.empty(count * layer.top_k, layer.hidden, device="cuda", dtype=DTYPE)
    # Enough sets of experts that none is still in the second-level cache when it is used again.
    cache, free = torch.cuda.get_device_properties(0).L2_cache_size, torch.cuda.mem_get_info()[0]
    copies = max(1, min(4 * cache // work.weight_bytes + 2, free // 2 // work.weight_bytes, 64))
    active, sets = sorted({expert for row in routing for expert in row}), []
    for _ in range(copies):
        experts = {expert: random_expert(layer, bits[expert % len(bits)]) for expert in active}
        sets.append(_products(kernel, layer, bits, experts, routing))

    def all_of_them() -> None:
        for products in sets:
            products.launch(x, out)

    time, bound = seconds(captured(all_of_them).replay, least) / copies, work.seconds(machine)
    moved = work.weight_bytes + work.other_bytes
    remark = f"{moved / time / 1e9:.0f} GB/s, {work.flops / time / 1e12:.1f} TFLOP/s"
    name = f"kernels, {layer.name}, {precisions} bits, {count} tokens" + ", tensor cores" * (decode > Decode.PLAIN)
    name += ", weights in registers" * (grouped > Grouped.PLAIN)
    record.speed(name, "us", time * 1e6, bound * 1e6, bound / time, remark)


def fetching_step(layer: Model) -> Callable[[], None]:
    """Return a step that computes one token with two experts that it fetches.

    The experts have 4 bits and lie in pinned memory; the step also writes them into slots.
    """
    size, shape = layer.format(4).nbytes, ExpertShape(layer.hidden, layer.intermediate, layer.group, DTYPE)
    slices = [torch.zeros(size, dtype=torch.uint8).pin_memory() for _ in range(2)]
    slots = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2)]
    starts, targets = ([packed.data_ptr() for packed in some] for some in (slices, slots))
    table = table_of_slices(shape, starts, [4, 4], "cuda", targets)
    items = torch.tensor([[0, 0, 1], [1, 1, 2]], dtype=torch.int32, device="cuda")
    work = WorkList(items, torch.zeros(2, dtype=torch.int64, device="cuda"), torch.arange(2, device="cuda"))
    x, hidden, out = (
        torch.randn(rows, columns, device="cuda", dtype=DTYPE)
        for rows, columns in ((1, layer.hidden), (2, layer.intermediate), (2, layer.hidden))
    )
    major, minor = torch.cuda.get_device_capability()
    tiles = choose_tiles(10 * major + minor, layer.hidden, layer.intermediate)
    scratch = scratch_for(layer, 2, tiles.gate_up, tiles.down)

    def step(held: Any = (slices, slots)) -> None:  # keeps the memory that the table addresses
        decode_gate_up(x, hidden, table, work, Activation.SILU, tiles.gate_up, scratch)
        decode_down(hidden, out, table, work, tiles.down, scratch)

    return step


def scratch_for(layer: Model, rows: int, gate_up: DecodeTile, down: DecodeTile) -> Scratch:
    """Return the scratch memory of programs that share a sum of ``rows`` rows."""
    inner, hidden = (64 * -(-size // 64) for size in (layer.intermediate, layer.hidden))
    partials = rows * max(2 * gate_up.split * inner, down.split * hidden)
    semaphores = rows * max(inner, hidden) // 64
    return Scratch(torch.empty(partials, device="cuda"), torch.zeros(semaphores, dtype=torch.int32, device="cuda"))
