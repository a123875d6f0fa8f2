"""How close do the Triton kernels come to what a GPU can do?

Needs torch, triton and a CUDA device; no vLLM, no network, no install. Compares every variant with float64 first, and
measures nothing if one is wrong. Then, for each layer shape, tier and number of tokens: the bound that the card's own
copy bandwidth and matrix rate set, the time of one layer's experts, and that of dequantizing and torch's matmul. Times
are of CUDA graphs that rotate over copies of the experts, so that weights come from memory and not from a cache.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from checkout import find_package, need
from layers import LAYERS, TIERS, TOKENS, Layer, expert_bytes, route, work_of

need("torch", "triton")
find_package()

import torch  # noqa: E402

HERE = Path(__file__).parent


def main() -> int:
    """Measure, or say in one sentence why not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", help="only these")
    parser.add_argument("--tokens", nargs="*", type=int, help="only these")
    parser.add_argument("--no-readme", action="store_true", help="leave the README's table as it is")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench_gpu: torch finds no CUDA device here, so there is nothing to measure.", file=sys.stderr)
        return 1
    # Compiling takes longer than measuring; processes do it side by side, and Triton's cache on disk keeps it.
    with ProcessPoolExecutor(min(os.cpu_count() or 1, 8), get_context("spawn")) as pool:
        wrong = check(pool)
        if not wrong:
            list(pool.map(compile_layer, *zip(*chosen(arguments.models), strict=True)))
    for sentence in wrong:
        print(f"bench_gpu: {sentence}", file=sys.stderr)
    if wrong:
        print("bench_gpu: the kernels are wrong on this card; nothing is measured.", file=sys.stderr)
        return 1
    print("every variant agrees with float64, and repeats its bits")
    results = measure(arguments.models, arguments.tokens)
    from report import verdicts, write_readme

    for aim, value, reached in verdicts(results):
        print(f"{'reached    ' if reached else 'NOT reached'} {value:.2f}  {aim}")
    path = HERE / f"results-{results['card'].replace(' ', '-')}-{results['date']}.json"
    path.write_text(json.dumps(results, indent=1) + "\n")
    if not arguments.no_readme:
        write_readme(results)
    print(json.dumps(results))
    return 0


def check(pool: ProcessPoolExecutor) -> list[str]:
    """What is wrong with the kernels, as sentences."""
    from correctness import DECODE_CASES, FORWARD_CASES, check_decode, check_forward

    found = [pool.submit(check_forward, case) for case in FORWARD_CASES]
    found += [pool.submit(check_decode, case) for case in DECODE_CASES]
    return [sentence for part in found for sentence in part.result()]


def chosen(models: Sequence[str] | None, tiers: Sequence[str] | None = None) -> list[tuple[Layer, str]]:
    """Layers and tiers to measure."""
    return [(layer, name) for layer in LAYERS if not models or layer.model in models for name in tiers or TIERS]


def compile_layer(layer: Layer, tiers: str) -> None:
    """Compile every kernel of a layer; the first launch does."""
    from measure import DTYPE, random_expert, shape_of

    from vllm_dymoe.kernels import Activation, ExpertWork, compute_experts
    from vllm_dymoe.kernels.triton import TritonKernel

    bits = TIERS[tiers]
    expert = random_expert(layer, bits[0])
    x = torch.zeros(1, layer.hidden, device="cuda", dtype=DTYPE)
    row = torch.zeros(1, dtype=torch.int64, device="cuda")
    kernel = TritonKernel("cuda", 64 << 20, [shape_of(layer).formats(width)[0] for width in bits])
    compute_experts(kernel, x, [ExpertWork(*expert, row, row)], x.clone(), Activation.SILU)
    torch.cuda.synchronize()


def measure(
    models: Sequence[str] | None, tokens: Sequence[int] | None, tiers: Sequence[str] | None = None
) -> dict[str, Any]:
    """All rows."""
    import triton
    from measure import measure_machine
    from others import VllmKernel, find_marlin, find_wna16

    machine = measure_machine()
    print(
        f"{machine.name}: copy {machine.copy_bytes_per_second / 1e9:.0f} GB/s, dense bf16 "
        f"{machine.flops_per_second / 1e12:.0f} TFLOP/s, from the host {machine.host_bytes_per_second / 1e9:.1f} GB/s"
    )
    others = {"wna16_us": VllmKernel("wna16", find_wna16), "marlin_us": VllmKernel("Marlin", find_marlin)}
    rows = []
    for layer, name in chosen(models, tiers):
        for count in tokens or TOKENS:
            rows.append(measure_layer(machine, layer, name, TIERS[name], count, others))
    return {
        "card": machine.name,
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "copy_gb_per_s": machine.copy_bytes_per_second / 1e9,
        "matmul_tflop_per_s": machine.flops_per_second / 1e12,
        "host_gb_per_s": machine.host_bytes_per_second / 1e9,
        "fetch_host_bandwidth_share": measure_fetch(machine),
        "vllm_notes": [other.note for other in others.values()],
        "rows": rows,
    }


def measure_layer(machine, layer, tiers, bits, count, others) -> dict[str, Any]:
    """One row; the bound is printed before the time."""
    from measure import DTYPE, copies, graphed, random_expert, seconds, shape_of, work_for
    from others import dequantize_matmul

    from vllm_dymoe.kernels import Activation, compute_experts
    from vllm_dymoe.kernels.triton import TritonKernel

    routing = route(layer, count)
    work = work_of(layer, routing, bits)
    bound = work.seconds(machine)
    print(f"{layer.model:18} {tiers:>4} bits {count:5} tokens: bound {bound * 1e6:9.1f} us", end="", flush=True)
    # Hidden activations of all tokens at once, as far as memory goes: the table is of kernels, not of workspaces.
    pairs = count * layer.top_k
    workspace_bytes = (1 << 20) + min(4 << 30, 8 * pairs * layer.intermediate + (64 << 20))
    kernel = TritonKernel("cuda", workspace_bytes, [shape_of(layer).formats(width)[0] for width in bits])
    x = torch.randn(count, layer.hidden, device="cuda", dtype=DTYPE)
    out = torch.empty(pairs, layer.hidden, device="cuda", dtype=DTYPE)
    active = {expert for row in routing for expert in row}
    sets = []
    for _ in range(copies(work.weight_bytes)):
        experts = {expert: random_expert(layer, bits[expert % len(bits)]) for expert in active}
        sets.append(work_for(experts, routing))
    steps = []
    for one in sets:
        compute_experts(kernel, x, one, out, Activation.SILU)
        steps.append(kernel.step)

    def again(step) -> None:
        kernel.step = step
        kernel.compute(range(len(active)))

    replay = graphed([lambda step=step: again(step) for step in steps])
    time = seconds(replay) / len(steps)
    moved = work.weight_bytes + work.other_bytes
    row = {
        "model": layer.model, "tiers": tiers, "tokens": count,
        "bound_us": bound * 1e6, "time_us": time * 1e6, "bound_share": bound / time,
        "gb_per_s": moved / time / 1e9, "tflop_per_s": work.flops / time / 1e12,
        "copy_bandwidth_share": moved / time / machine.copy_bytes_per_second,
        "matmul_rate_share": work.flops / time / machine.flops_per_second,
        "dequantize_matmul_us": seconds(lambda: dequantize_matmul(x, sets[0], out), 0.02) * 1e6,
    }  # fmt: skip
    for name, other in others.items():
        row[name] = other.microseconds(layer, x, routing) if tiers == "4" else None
    print(f", time {row['time_us']:9.1f} us, bound / time {row['bound_share']:.0%}", flush=True)
    return row


def measure_fetch(machine) -> float:
    """Share of the copy bandwidth from pinned memory at which missing experts are computed and cached in one pass."""
    from measure import DTYPE, seconds, shape_of

    from vllm_dymoe.kernels import Activation
    from vllm_dymoe.kernels.triton import (
        ExpertTable,
        Scratch,
        WorkList,
        choose_tiles,
        decode_down,
        decode_gate_up,
    )

    layer = LAYERS[0]
    size = expert_bytes(layer, 4)
    blobs = [torch.zeros(size, dtype=torch.uint8).pin_memory() for _ in range(2)]
    slots = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2)]
    shape = shape_of(layer)
    starts, targets = ([blob.data_ptr() for blob in some] for some in (blobs, slots))
    table = ExpertTable.of_blobs(shape, starts, [4, 4], "cuda", targets)
    items = torch.tensor([[0, 0, 1], [1, 1, 2]], dtype=torch.int32, device="cuda")
    work = WorkList(items, torch.zeros(2, dtype=torch.int64, device="cuda"), torch.arange(2, device="cuda"))
    x = torch.randn(1, layer.hidden, device="cuda", dtype=DTYPE)
    hidden = torch.empty(2, layer.intermediate, device="cuda", dtype=DTYPE)
    out = torch.empty(2, layer.hidden, device="cuda", dtype=DTYPE)
    scratch = Scratch(torch.empty(1, device="cuda"), torch.zeros(1, dtype=torch.int32, device="cuda"))
    major, minor = torch.cuda.get_device_capability()
    tiles = choose_tiles(10 * major + minor, layer.hidden, layer.intermediate)

    def step() -> None:
        decode_gate_up(x, hidden, table, work, Activation.SILU, tiles.gate_up, scratch)
        decode_down(hidden, out, table, work, tiles.down, scratch)

    bound = 2 * size / machine.host_bytes_per_second
    print(f"fetch-through, two experts of {layer.model} at 4 bits: bound {bound * 1e6:.0f} us", end="", flush=True)
    time = seconds(step)
    print(f", time {time * 1e6:.0f} us, bound / time {bound / time:.0%}")
    return bound / time


if __name__ == "__main__":
    sys.exit(main())
