"""Is the default prefetch ever slower than none, and does it use the idle link? The real runtime, in virtual time.

A small trained model on an emulated link: 8 layers of 32 experts, 4 for a token, the next gate right in 0.8 of what it
names. What a layer computes, what asking a gate takes the host and what an expert travels are given, so that there is
no noise; cache, schedule, pace and transfer engine are the ones that serve. The bound is what a perfect order of the
same transfers would take: the longer of computation and link.
"""

import argparse
import contextlib
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table

sys.path.append(str(Path(__file__).resolve().parents[1] / "staging"))
from staging import VirtualTime

from vllm_dymoe.config import Options
from vllm_dymoe.predict import Candidate, Predictor
from vllm_dymoe.residency.code import code_of
from vllm_dymoe.residency.format import Format, ModelExperts, all_keys
from vllm_dymoe.residency.routing import Phase, Routing
from vllm_dymoe.runtime import MoERuntime
from vllm_dymoe.store import MemoryStore
from vllm_dymoe.systems.exact import Exact
from vllm_dymoe.transfer import engine, link, mover, queue
from vllm_dymoe.transfer.engine import TransferEngine
from vllm_dymoe.transfer.host import CpuDelivery
from vllm_dymoe.transfer.link import EmulatedLink

LAYERS, EXPERTS, TOP_K = 8, 32, 4
EXPERT_BYTES = 27_648  # of width 256 and 64, at 4 bits
WARM_UP = 64
REUSED = 0.3  # of a token's experts are the token's before


class NextGate(Predictor):
    """Names what the next layer will want, with mistakes, and takes the host's time for it."""

    def __init__(self, accuracy: float, seconds: float, threads: VirtualTime) -> None:
        self._accuracy, self._seconds, self._threads, self._random = accuracy, seconds, threads, random.Random(1)
        self.coming: list[list[int]] = []

    def observe(self, routing: Routing) -> None:
        """Nothing to learn."""

    def predict(self, layer: int) -> Sequence[Candidate]:
        """The experts of the next layer."""
        if layer + 1 >= LAYERS:
            return []
        self._threads.sleep_until(self._threads.now + self._seconds)
        right = self._random.random
        named = [e if right() < self._accuracy else self._random.randrange(EXPERTS) for e in self.coming[layer + 1]]
        return [Candidate(layer + 1, expert, 1.0) for expert in dict.fromkeys(named)]


def make_store() -> MemoryStore:
    """Tiny experts that travel as long as large ones; each one's bytes say which it is."""
    fmt = Format(64, 32, code_of(4), 32, torch.bfloat16)
    store = MemoryStore(ModelExperts(tuple(range(LAYERS)), EXPERTS, TOP_K, {4: fmt}))
    for number, key in enumerate(all_keys(store.experts)):
        store.blob(key).view(torch.int64)[:] = number
    return store


def make_routing(tokens: int) -> list[list[list[int]]]:
    """Experts of each layer of each token: some are popular, and some are the token's before."""
    generator = torch.Generator().manual_seed(0)
    popularity = torch.rand(LAYERS, EXPERTS, generator=generator).mul(1.5).exp()
    before = torch.rand(LAYERS, EXPERTS, generator=generator).topk(TOP_K).indices
    routing = []
    for _ in range(tokens):
        keys = popularity / torch.empty(LAYERS, EXPERTS).exponential_(generator=generator)
        kept = torch.rand(LAYERS, TOP_K, generator=generator) < REUSED
        for layer in range(LAYERS):
            keys[layer, before[layer][kept[layer]]] = float("inf")
        before = keys.topk(TOP_K).indices
        routing.append(before.tolist())
    return routing


def serve(
    store: MemoryStore, rate: float, share: float, accuracy: float | None, plan: argparse.Namespace,
    routing: list[list[list[int]]],
) -> dict[str, float]:  # fmt: skip
    """Decode one request; accuracy None without prefetch."""
    threads = VirtualTime()
    clock = SimpleNamespace(perf_counter=lambda: threads.now, monotonic=time.monotonic)
    with contextlib.ExitStack() as stack:
        for module in (engine, link, mover, queue):
            stack.enter_context(patch.object(module, "time", clock))
        stack.enter_context(patch.object(link, "_sleep_until", threads.sleep_until))
        return _serve(threads, store, rate, share, accuracy, plan, routing)


def _serve(
    threads: VirtualTime, store: MemoryStore, rate: float, share: float, accuracy: float | None,
    plan: argparse.Namespace, routing: list[list[list[int]]],
) -> dict[str, float]:  # fmt: skip
    nbytes = store.experts.formats[4].nbytes
    delivery = EmulatedLink(CpuDelivery(store), rate * nbytes / EXPERT_BYTES)
    transfers = TransferEngine(delivery, 1, waiters_move=False, concurrency=threads)
    options = Options(hi=4, group_size=32, expert_budget=share)
    gate = None if accuracy is None else NextGate(accuracy, plan.ask_us / 1e6, threads)
    system = Exact(look_ahead=int(gate is not None))
    runtime = MoERuntime(store, options, torch.device("cpu"), system=system, engine=transfers, predictor=gate)
    if runtime.serving.prefetcher is not None:
        runtime.serving.prefetcher.clock = lambda: threads.now
    x, weights = torch.zeros(1, 64, dtype=torch.bfloat16), torch.full((1, TOP_K), 1 / TOP_K)

    def forward(x: Any, work: Sequence[Any], out: Any, activation: Any, receive: Callable[[int], None] | None) -> None:
        for projection in range(3):
            if receive is not None:
                receive(projection + 1)
            threads.sleep_until(threads.now + len(work) * plan.expert_us / 3e6)

    runtime.kernel.forward = forward  # type: ignore[method-assign]
    begin = 0.0
    for number, layers in enumerate(routing):
        if gate is not None:
            gate.coming = layers
        if number == WARM_UP:
            runtime.reset_stats()
            begin = threads.now
        for layer, ids in enumerate(layers):
            threads.sleep_until(threads.now + plan.layer_us / 1e6)
            runtime.serving.forward(Routing(layer, LAYERS, x, torch.tensor([ids]).int(), weights, Phase.DECODE))
    tokens, stats = len(routing) - WARM_UP, runtime.stats()
    transfers.close()
    moved, ahead = stats.bytes_moved, stats.prefetches
    experts = (stats.misses + ahead["useful"]) / tokens
    link_ms = 1e3 * experts * EXPERT_BYTES / rate
    compute_ms = 1e-3 * LAYERS * (plan.layer_us + TOP_K * plan.expert_us)
    return {
        "ms_per_token": 1e3 * (threads.now - begin) / tokens,
        "bound_ms_per_token": max(link_ms, compute_ms),
        "ahead": moved["prefetch"] / sum(moved.values()),
        "useful": ahead["useful"] + ahead["late"],
        "wasted": ahead["wasted"],
        "interval": stats.prefetch_interval.get("decode", 0),
        "hit_rate": stats.hit_rate,
    }


def main() -> None:
    """One table, and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", type=float, nargs="+", default=[12.5, 25, 50, 100, 200], help="MB/s")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.25, 0.5, 0.75])
    parser.add_argument("--layer-us", type=float, default=750, help="of everything but experts")
    parser.add_argument("--expert-us", type=float, default=40, help="to compute one")
    parser.add_argument("--ask-us", type=float, default=150, help="of the host, to ask one gate")
    parser.add_argument("--accuracy", type=float, default=0.8)
    parser.add_argument("--tokens", type=int, default=200)
    plan = parser.parse_args()
    store, routing = make_store(), make_routing(plan.tokens + WARM_UP)
    table = Table(title=f"guesses right {plan.accuracy:.0%}, asking takes {plan.ask_us:g} us")
    for head in (
        "MB/s",
        "experts",
        "none ms",
        "default ms",
        "none / default",
        "bound",
        "ahead",
        "right",
        "one of",
        "hits",
    ):
        table.add_column(head, justify="right")
    results = []
    for share in plan.shares:
        for rate in plan.links:
            none = serve(store, rate * 1e6, share, None, plan, routing)
            ours = serve(store, rate * 1e6, share, plan.accuracy, plan, routing)
            results.append({"mb_per_s": rate, "share": share, "none": none, "default": ours})
            judged = ours["useful"] + ours["wasted"]
            table.add_row(
                f"{rate:g}",
                f"{share:.0%}",
                f"{none['ms_per_token']:.2f}",
                f"{ours['ms_per_token']:.2f}",
                f"{none['ms_per_token'] / ours['ms_per_token']:.3f}",
                f"{none['ms_per_token'] / none['bound_ms_per_token']:.2f}",
                f"{ours['ahead']:.0%}",
                f"{ours['useful'] / judged:.0%}" if judged else "",
                f"{ours['interval']:g}",
                f"{none['hit_rate']:.0%}",
            )
    Console(width=120).print(table)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
