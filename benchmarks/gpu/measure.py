"""Times on the device, and random experts that lie on it."""

from collections.abc import Callable

import torch
from experts import ExpertWork
from layers import GROUP, Layer, Machine

from vllm_dymoe.kernels.triton import ExpertShape
from vllm_dymoe.residency.matrix import PackedMatrix

DTYPE = torch.bfloat16
SIDE = 8192
"""Of the matrices whose product gives the dense rate."""


def seconds(function: Callable[[], None], least: float = 0.2) -> float:
    """Of one call, from CUDA events around as many as take `least` seconds, after a warm-up."""
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


def graphed(functions: list[Callable[[], None]]) -> Callable[[], None]:
    """All of them as one CUDA graph: launches cost the host nothing."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for function in functions:  # compiles what is not compiled yet
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for function in functions:
            function()
    return graph.replay


def measure_machine() -> Machine:
    """Bandwidth of a copy, rate of a product, bandwidth from pinned memory."""
    size = min(1 << 30, torch.cuda.mem_get_info()[0] // 8)
    source, target = (torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in range(2))
    copy = 2 * size / seconds(lambda: target.copy_(source))
    host = torch.zeros(min(size, 256 << 20), dtype=torch.uint8).pin_memory()
    link = host.numel() / seconds(lambda: target[: host.numel()].copy_(host, non_blocking=True))
    a, b = (torch.randn(SIDE, SIDE, device="cuda", dtype=DTYPE) for _ in range(2))
    product = 2 * SIDE**3 / seconds(lambda: torch.mm(a, b))
    return Machine(torch.cuda.get_device_name(), copy, product, link)


def copies(bytes_each: int) -> int:
    """How many sets of experts to rotate over, so that none is in the second-level cache when its turn comes."""
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    free = torch.cuda.mem_get_info()[0]
    return max(1, min(4 * cache // bytes_each + 2, free // 2 // bytes_each, 64))


def shape_of(layer: Layer) -> ExpertShape:
    """Of its experts."""
    return ExpertShape(layer.hidden, layer.intermediate, GROUP, DTYPE)


def random_expert(layer: Layer, bits: int) -> tuple[PackedMatrix, PackedMatrix, PackedMatrix]:
    """One blob of random bytes with scales of about the size that models have."""
    formats = shape_of(layer).formats(bits)
    blob = torch.randint(0, 256, (sum(fmt.nbytes for fmt in formats),), dtype=torch.uint8, device="cuda")
    matrices, start = [], 0
    for fmt in formats:
        packed = fmt.view(blob[start : start + fmt.nbytes])
        start += fmt.nbytes
        size = fmt.columns**-0.5
        if packed.scales_zeros is None:
            packed.weight.normal_(std=size)
        else:
            packed.scales_zeros[..., 0].uniform_(size, 2 * size).mul_(4 / (1 << bits))
            packed.scales_zeros[..., 1].normal_(std=size / 4)
        matrices.append(packed)
    return matrices[0], matrices[1], matrices[2]


def work_for(
    experts: dict[int, tuple[PackedMatrix, PackedMatrix, PackedMatrix]], routing: list[list[int]]
) -> list[ExpertWork]:
    """The step's work, as the runtime makes it."""
    top_k = len(routing[0])
    chosen: dict[int, list[int]] = {}
    for token, row in enumerate(routing):
        for k, expert in enumerate(row):
            chosen.setdefault(expert, []).append(token * top_k + k)
    work = []
    for expert, pairs in sorted(chosen.items()):
        index = torch.tensor(pairs, device="cuda")
        work.append(ExpertWork(*experts[expert], index // top_k, index))
    return work
