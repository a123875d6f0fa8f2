"""Host time of a MoE layer on a CPU: one native call, or planning step by step.

Both serve the same random experts at 4 bits: all of them resident, and a quarter, with misses computed in memory.
Outputs have to be equal, bit for bit. The step-by-step path plans in NumPy, as without the native library. Times are of
one thread's processor; the two paths alternate, and ratios are of medians.

    python benchmarks/cpu/host_time.py [--steps 60]
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from vllm_dymoe.cache.store import FileStore
from vllm_dymoe.cache.store.manifest import Manifest
from vllm_dymoe.cache.store.writer import StoreWriter
from vllm_dymoe.cache.transfer import make_engine
from vllm_dymoe.experts.encoding import encoding_of
from vllm_dymoe.experts.format import ExpertFormat, ModelExperts
from vllm_dymoe.options import Options
from vllm_dymoe.planner.routing import Routing
from vllm_dymoe.quantize.dummy import random_store
from vllm_dymoe.server import ExpertServer

CPU = torch.device("cpu")
SHAPES = {  # layers, experts, experts of a token, hidden, intermediate
    "32 x [64, 256], top 4": (8, 32, 4, 256, 64),
    "128 x [768, 2048], top 8": (2, 128, 8, 2048, 768),
}


def make_server(store: FileStore, budget: str, *, stepwise: bool) -> ExpertServer:
    """Return a server that computes misses in memory.

    Args:
        stepwise: plan and compute step by step, without the native call.
    """
    options = Options(high=4, low=0, expert_budget=budget, misses="compute")
    engine = make_engine(store, CPU, 0) if stepwise else None
    server = ExpertServer(store, options, CPU, engine=engine)
    if stepwise != (server.host_planned.cpu is None):
        raise SystemExit("there is no native library; install vllm-dymoe again with a C++ compiler")
    return server


def measure(store: FileStore, shape: tuple[int, ...], steps: int, tokens: int) -> dict[str, float]:
    """Return the median us of a layer, by path and budget.

    Raises:
        SystemExit: outputs differ.
    """
    layers, experts, top_k, hidden, _ = shape
    servers = {
        (path, budget): make_server(store, budget, stepwise=path == "stepwise")
        for budget in ("100%", "25%")
        for path in ("stepwise", "native")
    }
    generator = torch.Generator().manual_seed(tokens)
    every = torch.arange(experts, dtype=torch.int32).view(-1, top_k)  # once, so that a budget of 100 % has all
    for server in servers.values():
        for layer in range(layers):
            x = torch.randn(len(every), hidden, generator=generator).bfloat16()
            server.host_planned.forward(Routing(layer, layers, x, every, torch.full(every.shape, 1 / top_k)))
    times: dict[tuple[str, str], list[float]] = {key: [] for key in servers}
    for step in range(2 * steps):
        asked = []
        for layer in range(layers):
            scores = torch.rand(tokens, experts, generator=generator)
            weights, ids = scores.topk(top_k, dim=1)
            x = torch.randn(tokens, hidden, generator=generator).bfloat16()
            asked.append(Routing(layer, layers, x, ids.int(), weights / weights.sum(1, keepdim=True)))
        answers = []
        for key, server in servers.items():
            fresh = [Routing(r.layer, layers, r.x, r.ids, r.weights) for r in asked]
            begin = time.thread_time()
            outputs = [server.host_planned.forward(routing) for routing in fresh]
            if step >= steps:  # the first steps choose the quarter that stays
                times[key].append((time.thread_time() - begin) / layers)
            answers.append(outputs)
        if not all(torch.equal(a, b) for outputs in answers for a, b in zip(outputs, answers[0], strict=True)):
            raise SystemExit("the two paths gave different bits: no times are reported")
    for server in servers.values():
        server.close(keep_store=True)
    return {f"{path}_{budget}": 1e6 * statistics.median(found) for (path, budget), found in times.items()}


def main() -> None:
    """Print a row for each shape and number of tokens, and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("layer", "tokens", "100 %: stepwise, us", "native", "ratio", "25 %: stepwise, us", "native", "ratio")
    rows = []
    for name, shape in SHAPES.items():
        layers, experts, top_k, hidden, intermediate = shape
        fmt = ExpertFormat(hidden, intermediate, encoding_of(4), 64, torch.bfloat16)
        model = ModelExperts(tuple(range(layers)), experts, top_k, {4: fmt})
        with tempfile.TemporaryDirectory() as folder:
            store = random_store(model, StoreWriter(Path(folder) / "store", Manifest(model, "random", "made up")), 0)
            for tokens in (1, 4, 16):
                found = measure(store, shape, arguments.steps // (1 if hidden < 1024 else 4), tokens)
                rows.append({"layer": name, "tokens": tokens, **{k: round(v, 1) for k, v in found.items()}})
                cells = []
                for budget in ("100%", "25%"):
                    old, new = found[f"stepwise_{budget}"], found[f"native_{budget}"]
                    cells += [f"{old:.0f}", f"{new:.0f}", f"{new / old:.2f}"]
                table.add_row(name, str(tokens), *cells)
            store.close()
    Console().print(table)
    print(json.dumps({"median_us_of_a_layer": rows}))


if __name__ == "__main__":
    main()
