"""What does one MoE layer cost on this CPU, and how much of it is the host's own work?

Runs the runtime alone, without vLLM, on random experts in a real store on disk, in
the layer shapes of a real model or of the shipped one: 1 and 16 tokens, every expert
resident and a quarter of them. The bound is printed first: the packed matrix
products of the layer and nothing else. What a layer takes beyond them, and beyond
waiting for transfers, is host overhead, listed by parts.
"""

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import vllm_dymoe.residency.routing as experts_routing
import vllm_dymoe.runtime.serving as serving
from vllm_dymoe.config import Options
from vllm_dymoe.residency.code import code_of
from vllm_dymoe.residency.format import BlobKey, Format, ModelExperts, Projection
from vllm_dymoe.residency.routing import Routing
from vllm_dymoe.residency.tier import Tier
from vllm_dymoe.runtime import MoERuntime
from vllm_dymoe.store import FileStore, Manifest
from vllm_dymoe.store.writer import StoreWriter

STEPS = 40
PARTS = ("grouping", "tiers", "table", "submitting", "waiting", "kernel", "products", "combining")


@dataclass(frozen=True)
class Shape:
    """Layers of a model; only as many as give every step cold caches."""

    layers: int
    experts: int
    top_k: int
    hidden: int
    intermediate: int


SHAPES = {
    "shipped": Shape(8, 32, 4, 256, 64),
    "qwen3-30b-a3b": Shape(3, 128, 8, 2048, 768),
}


class Clock:
    """Time inside of named calls, summed over one layer."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def timed(self, label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` with its time counted under ``label``."""

        def timed(*arguments: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                self.seconds[label] = self.seconds.get(label, 0.0) + time.perf_counter() - begin

        return timed

    def take(self) -> dict[str, float]:
        """What was counted since the last call."""
        seconds, self.seconds = self.seconds, {}
        return seconds


def make_store(folder: Path, shape: Shape, bits: int) -> FileStore:
    """Experts of random bytes: what is in them changes no time."""
    fmt = Format(shape.hidden, shape.intermediate, code_of(bits), 64, torch.bfloat16)
    experts = ModelExperts(tuple(range(shape.layers)), shape.experts, shape.top_k, {bits: fmt})
    sink = StoreWriter(folder, Manifest(experts, "rtn", "random"))
    for layer, expert in itertools.product(range(shape.layers), range(shape.experts)):
        for projection, matrix in zip(Projection, fmt.matrices, strict=True):
            sink.write(BlobKey(layer, expert, bits), projection, torch.zeros(matrix.nbytes, dtype=torch.uint8))
    return sink.finish()


def count_parts(runtime: MoERuntime, clock: Clock) -> None:
    """Count what a layer is made of; counting itself takes about half a microsecond a call."""
    system = runtime.system
    select = clock.timed("tiers", system.precision.select)
    precision = SimpleNamespace(renormalizes=False, select=select)
    runtime.serving.system = SimpleNamespace(precision=precision, residency=system.residency)
    table, fetcher = runtime.memory.table, runtime.serving.fetcher
    table.begin_step = clock.timed("table", table.begin_step)
    for name in ("complete", "release"):
        setattr(fetcher, name, clock.timed("table", getattr(fetcher, name)))
    runtime.engine.submit = clock.timed("submitting", runtime.engine.submit)
    runtime.engine.wait = clock.timed("waiting", runtime.engine.wait)
    runtime.kernel.compute = clock.timed("kernel", runtime.kernel.forward)
    choose = runtime.kernel._choose
    runtime.kernel._choose = lambda *kind: clock.timed("products", choose(*kind))


def bare_products(runtime: MoERuntime, layer: int, x: torch.Tensor, ids: torch.Tensor) -> float:
    """Seconds of the packed matrix products of a step alone; experts that are not there stand in for one another."""
    there = [
        runtime.memory.resident(*row, Tier.HI)[1][0]
        for row in sorted(runtime.memory.table.residents(Tier.HI))
        if row[0] == layer
    ]
    counts = ids.flatten().unique(return_counts=True)[1].tolist()
    choose, rows = runtime.kernel._choose, {count: x[:count] for count in set(counts)}
    begin = time.perf_counter()
    for slot, count in zip(itertools.cycle(there), counts, strict=False):
        gate, up, down = slot.expert
        hidden = choose(gate.format, count)(rows[count], gate)
        choose(up.format, count)(rows[count], up)
        choose(down.format, count)(hidden, down)
    return time.perf_counter() - begin


def measure(store: FileStore, shape: Shape, bits: int, tokens: int, budget: str) -> dict[str, float]:
    """Medians over all layers of all steps, in microseconds; host overhead is what neither computes nor waits."""
    generator = torch.Generator().manual_seed(0)
    runtime = MoERuntime(store, Options(hi=bits, expert_budget=budget), torch.device("cpu"))
    x = torch.randn(tokens, shape.hidden, generator=generator).bfloat16()
    weights = torch.full((tokens, shape.top_k), 1 / shape.top_k)

    def steps(count: int) -> Iterator[tuple[int, torch.Tensor]]:
        for _ in range(count):
            scores = torch.rand(tokens, shape.experts, generator=generator)
            ids = scores.topk(shape.top_k, dim=1).indices.int()
            yield from ((layer, ids) for layer in range(shape.layers))

    with torch.inference_mode():
        for layer in range(shape.layers):  # every expert that fits is there before anything is measured
            everyone = torch.arange(shape.experts).view(-1, shape.top_k).int()
            rows = x[:1].expand(len(everyone), -1).contiguous()
            runtime.serving.forward(Routing(layer, shape.layers, rows, everyone, weights[:1].expand(len(everyone), -1)))
        runtime.reset_stats()
        totals, products = [], []
        for layer, ids in steps(STEPS):
            begin = time.perf_counter()
            runtime.serving.forward(Routing(layer, shape.layers, x, ids, weights))
            totals.append(time.perf_counter() - begin)
            products.append(bare_products(runtime, layer, x, ids))
        clock, parts = Clock(), []
        count_parts(runtime, clock)
        group, combine = experts_routing.group_by_expert, serving.combine
        experts_routing.group_by_expert, serving.combine = (
            clock.timed("grouping", group),
            clock.timed("combining", combine),
        )
        for layer, ids in steps(STEPS):
            runtime.serving.forward(Routing(layer, shape.layers, x, ids, weights))
            parts.append(clock.take())
        experts_routing.group_by_expert, serving.combine = group, combine
    hit_rate = runtime.stats().hit_rate
    runtime.engine.close()
    medians = {label: statistics.median(part.get(label, 0.0) for part in parts) for label in PARTS}
    medians["around the products"] = medians.pop("kernel") - medians.pop("products")
    total, bound = statistics.median(totals), statistics.median(products)
    numbers = {"layer": total, "bound": bound, "host": total - bound - medians["waiting"], **medians}
    return {f"{label}_us": round(1e6 * seconds) for label, seconds in numbers.items()} | {"hit_rate": hit_rate}


def main() -> None:
    """Print one table, and one JSON line at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-30b-a3b")
    parser.add_argument("--bits", type=int, default=4, choices=(16, 8, 4, 2))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch's threads")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    shape = SHAPES[arguments.shape]
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        store = make_store(Path(folder) / "store", shape, arguments.bits)
        for tokens, budget in itertools.product((1, 16), ("100%", "25%")):
            results[f"{tokens} tokens, {budget}"] = measure(store, shape, arguments.bits, tokens, budget)
        store.close()
    table = Table(
        title=f"One layer of {arguments.shape}, {arguments.bits} bits, {arguments.threads} threads, microseconds"
    )
    table.add_column("")
    for case in results:
        table.add_column(case, justify="right")
    for label in next(iter(results.values())):
        table.add_row(
            label.removesuffix("_us"),
            *(f"{result[label]:.3g}" if label == "hit_rate" else str(result[label]) for result in results.values()),
        )
    Console().print(table)
    print(
        json.dumps({"shape": arguments.shape, "bits": arguments.bits, "threads": arguments.threads, "cases": results})
    )


if __name__ == "__main__":
    main()
