"""What does one MoE layer cost on this CPU, and how much of it is not the kernel?

Runs the runtime alone, without vLLM, on random experts of the shipped model's shape
in a real store on disk: 1 and 16 tokens, every expert resident and a quarter of
them, with and without a thread that reads ahead. The kernel's time is the bound:
the rest is the host's work and the wait for transfers.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch

from vllm_dymoe.config import Options
from vllm_dymoe.experts.layout import ExpertFormat, ModelExperts, Projection
from vllm_dymoe.experts.store import Manifest
from vllm_dymoe.quantize import make_quantizer
from vllm_dymoe.quantize.experts import ExpertPacker, FileSink
from vllm_dymoe.runtime import MoERuntime

LAYERS, EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 8, 32, 4, 256, 64
WARM_UP, STEPS = 10, 60


def make_store(folder: Path, bits: int):
    """Random experts, packed into files."""
    formats = {bits: ExpertFormat(HIDDEN, INTERMEDIATE, bits, 64, torch.bfloat16)}
    experts = ModelExperts(tuple(range(LAYERS)), EXPERTS, TOP_K, formats)
    packer = ExpertPacker(experts, make_quantizer("rtn"), FileSink(folder, Manifest(experts, "rtn", "random")))
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            for projection, matrix in zip(Projection, formats[bits].matrices, strict=True):
                packer.put(layer, expert, projection, torch.randn(matrix.rows, matrix.columns) * 0.05)
    return packer.finish()


def measure(store, bits: int, tokens: int, threads: int, budget: str) -> dict[str, float]:
    """Medians over all layers of all steps."""
    runtime = MoERuntime(store, Options(hi=bits, expert_budget=budget, io_threads=threads), torch.device("cpu"))
    kernel_forward, kernel_seconds = runtime.kernel.forward, 0.0

    def timed(*arguments) -> None:
        nonlocal kernel_seconds
        begin = time.perf_counter()
        kernel_forward(*arguments)
        kernel_seconds += time.perf_counter() - begin

    runtime.kernel.forward = timed
    x = torch.randn(tokens, HIDDEN).bfloat16()
    weights = torch.full((tokens, TOP_K), 1 / TOP_K)
    totals, others = [], []
    for step in range(WARM_UP + STEPS):
        ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(tokens)]).int()
        if step == WARM_UP:
            runtime.reset_stats()
            totals, others = [], []
        for layer in range(LAYERS):
            kernel_seconds = 0.0
            begin = time.perf_counter()
            runtime.forward(layer, x, weights, ids)
            totals.append(time.perf_counter() - begin)
            others.append(totals[-1] - kernel_seconds)
    stats = runtime.stats()
    runtime.engine.close()
    total, other = statistics.median(totals), statistics.median(others)
    return {
        "layer_us": round(total * 1e6),
        "kernel_us": round((total - other) * 1e6),
        "not_kernel_us": round(other * 1e6),
        "hit_rate": round(stats.hit_rate, 3),
        "exposed_wait_ms_in_all": round(stats.exposed_wait_seconds * 1e3, 1),
    }


def main() -> None:
    """Print a line for each case, and one JSON line at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", type=int, default=4, choices=(16, 8, 4, 2))
    parser.add_argument("--threads", type=int, default=1, help="torch's threads")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        store = make_store(Path(folder) / "store", arguments.bits)
        for tokens in (1, 16):
            for threads in (0, 1):
                for budget in ("100%", "25%"):
                    case = f"{tokens} tokens, io_threads {threads}, budget {budget}"
                    results[case] = measure(store, arguments.bits, tokens, threads, budget)
                    print(f"{case:38}", results[case])
        store.close()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
