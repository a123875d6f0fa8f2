"""How many staging slots keep the link busy? The real runtime and engine, in the virtual time of a GPU.

Qwen3-30B-A3B at 4 bits on an RTX 3090 behind PCIe 4: what computes and what is moved takes as long as the data sheet
says (hardware.py), in virtual time, so that the answer is the same on every machine, however busy. Cache,
schedule, prefetch and transfer engine are the ones that serve; the kernel is replaced by the time that it takes and a
check that its experts' bytes are there. Slots for staging are taken from what layers keep: more of them cost hits.
"""

import argparse
import contextlib
import itertools
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

sys.path += [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2])]
from hardware import LINKS, MEMORY_BYTES_PER_SECOND, QWEN3_30B, Shape

from tests.support.deterministic_threads import DeterministicThreads
from tests.support.happens_before import History
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

SHAPE, INTERMEDIATE, EXPERTS = Shape(**QWEN3_30B), 768, 128
OPERATIONS_PER_SECOND = 71e12 / 2  # RTX 3090, bf16 with float32 sums; half of the data sheet's
LINK = "PCIe 4 x16"
REUSED = 0.45  # of a token's experts are the token's before (a trained miniature's)


class VirtualTime(DeterministicThreads):
    """Deterministic threads; time passes when all of them sleep or wait."""

    def __init__(self) -> None:
        super().__init__(History(), seed=0, restless=0.0)
        self.now = 0.0
        self._wakes: dict[object, float] = {}

    def sleep_until(self, due: float) -> None:
        """Let the others go on until a moment."""
        if due > self.now:
            me = object()
            self._wakes[me] = due
            self.block(lambda: self.now >= due)
            del self._wakes[me]

    def _pass_on(self) -> None:
        if not any(runner.until() for runner in self._runners.values()) and self._wakes:
            self.now = min(self._wakes.values())
        super()._pass_on()


class WithSlots(Exact):
    """The default with a given number of slots for staging."""

    slots: int

    def staging_slots(self, slots: int) -> int:
        """As many as are to be tried."""
        return min(self.slots, slots)


class Foresight(Predictor):
    """Names what the next layer will want, with mistakes."""

    def __init__(self, accuracy: float) -> None:
        self._accuracy, self._random, self.coming = accuracy, random.Random(1), [[0]]

    def observe(self, *heard: Any) -> None:
        """Nothing to learn."""

    def predict(self, layer: int) -> Sequence[Candidate]:
        """The experts of the next layer, the most wanted first."""
        if layer + 1 >= len(self.coming):
            return []
        right = self._random.random
        named = [e if right() < self._accuracy else self._random.randrange(EXPERTS) for e in self.coming[layer + 1]]
        return [Candidate(layer + 1, expert, 1.0) for expert in dict.fromkeys(named)]


def make_store(layers: int) -> MemoryStore:
    """Tiny experts that travel as long as large ones; each one's bytes say which it is."""
    fmt = Format(64, 32, code_of(4), 32, torch.bfloat16)
    store = MemoryStore(ModelExperts(tuple(range(layers)), EXPERTS, SHAPE.top_k, {4: fmt}))
    for number, key in enumerate(all_keys(store.experts)):
        store.blob(key).view(torch.int64)[:] = number
    return store


def make_routing(layers: int, steps: Sequence[int]) -> list[list[torch.Tensor]]:
    """ids [tokens, top_k] for each layer of each step: some experts are popular, and some are the token's before."""
    generator = torch.Generator().manual_seed(0)
    popularity = torch.rand(layers, EXPERTS, generator=generator).mul(2.5).exp()
    before = torch.rand(layers, EXPERTS, generator=generator).topk(SHAPE.top_k).indices
    routing = []
    for tokens in steps:
        routing.append([])
        for layer in range(layers):
            rows = []
            for _ in range(min(tokens, 256)):  # more tokens want no other experts
                keys = popularity[layer] / torch.empty(EXPERTS).exponential_(generator=generator)
                kept = before[layer][torch.rand(SHAPE.top_k, generator=generator) < REUSED]
                keys[kept] = float("inf")
                before[layer] = keys.topk(SHAPE.top_k).indices
                rows.append(before[layer].clone())
            routing[-1].append(torch.stack(rows).int())
    return routing


def attention_seconds(tokens: int) -> float:
    """Everything of a layer but its experts."""
    weights = SHAPE.attention_weights
    return max(2 * weights / MEMORY_BYTES_PER_SECOND, tokens * 2 * weights / OPERATIONS_PER_SECOND)


def expert_seconds(tokens: float) -> float:
    """One expert."""
    weights = 3 * SHAPE.hidden * INTERMEDIATE
    return max(SHAPE.expert_bytes / MEMORY_BYTES_PER_SECOND, tokens * 2 * weights / OPERATIONS_PER_SECOND)


def serve(
    store: MemoryStore, slots: int | None, share: float, host: float, accuracy: float | None, steps: Sequence[int],
    routing: list[list[torch.Tensor]],
) -> dict[str, float]:  # fmt: skip
    """Prefill and decode with one number of slots; None for the default."""
    threads = VirtualTime()
    clock = SimpleNamespace(perf_counter=lambda: threads.now, monotonic=time.monotonic)
    with contextlib.ExitStack() as stack:
        for module in (engine, link, mover, queue):
            stack.enter_context(patch.object(module, "time", clock))
        stack.enter_context(patch.object(link, "_sleep_until", threads.sleep_until))
        return _serve(threads, store, slots, share, host, accuracy, steps, routing)


def _serve(
    threads: VirtualTime, store: MemoryStore, slots: int | None, share: float, host: float, accuracy: float | None,
    steps: Sequence[int], routing: list[list[torch.Tensor]],
) -> dict[str, float]:  # fmt: skip
    rate = store.experts.formats[4].nbytes / (SHAPE.expert_bytes / LINKS[LINK])
    delivery = EmulatedLink(CpuDelivery(store), rate)
    engine = TransferEngine(delivery, 1, waiters_move=False, concurrency=threads)
    options = Options(hi=4, group_size=32, expert_budget=share)
    foresight = None if accuracy is None else Foresight(accuracy)
    system = Exact(look_ahead=int(accuracy is not None)) if slots is None else WithSlots(slots=slots)
    runtime = MoERuntime(store, options, torch.device("cpu"), system=system, engine=engine, predictor=foresight)
    if runtime.serving.prefetcher is not None:
        runtime.serving.prefetcher.clock = lambda: threads.now
    blobs = {id(slot.expert.gate): slot.blob for pool in runtime.memory.pools.values() for slot in pool.slots}
    state = SimpleNamespace(layer=0, tokens=1, experts={})

    def forward(x: Any, work: Sequence[Any], out: Any, activation: Any, receive: Callable[[int], None] | None) -> None:
        seconds = [expert_seconds(e.tokens.shape[0] * max(1, state.tokens / x.shape[0])) / 3 for e in work]
        for projection in range(3):
            if receive is not None:
                receive(projection + 1)
            threads.sleep_until(threads.now + sum(seconds))
        for expert in work:
            blob = blobs[id(expert.gate)]
            assert state.experts.get(bytes(blob[:16].tolist())) == state.layer, "computed with another expert's bytes"

    state.experts = {bytes(store.blob(key)[:16].tolist()): key.layer for key in all_keys(store.experts)}
    runtime.kernel.forward = forward  # type: ignore[method-assign]
    seconds: dict[str, float] = {"prefill": 0.0, "decode": 0.0}
    moved, counts = 0, {"prefill": 0, "decode": 0}
    for number, (tokens, layers) in enumerate(zip(steps, routing, strict=True)):
        phase = Phase.PREFILL if tokens > 1 else Phase.DECODE
        if foresight is not None:
            foresight.coming = [ids.flatten().unique(return_counts=True) for ids in layers]
            foresight.coming = [e[c.argsort(descending=True)].tolist() for e, c in foresight.coming]
        begin = threads.now
        if number == 1:  # the first request has warmed the cache up
            runtime.reset_stats()
        for layer, ids in enumerate(layers):
            state.layer, state.tokens = layer, tokens
            threads.sleep_until(threads.now + attention_seconds(tokens) + host)
            rows = len(ids)
            x = torch.zeros(rows, 64, dtype=torch.bfloat16)
            runtime.serving.forward(
                Routing(layer, len(runtime.experts.layers), x, ids, torch.full(ids.shape, 1 / SHAPE.top_k), phase)
            )
        if number:
            seconds[phase.value] += threads.now - begin
            counts[phase.value] += 1
            if phase is Phase.PREFILL:
                moved = sum(runtime.stats().bytes_moved.values())
    stats = runtime.stats()
    engine.close()
    return {
        "slots": runtime.plan.staging[next(iter(runtime.plan.staging))],
        "prefill_ms": 1e3 * seconds["prefill"] / counts["prefill"],
        "prefill_link_used": moved / rate / seconds["prefill"],
        "decode_ms": 1e3 * seconds["decode"] / counts["decode"],
        "hit_rate": stats.hit_rate,
    }


def main() -> None:
    """One table for each case, and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 2, 3, 4, 6, 8, 12, 16])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.05, 0.25, 0.75])
    parser.add_argument("--prompts", type=int, nargs="+", default=[24, 2048], help="tokens of a prompt")
    parser.add_argument("--host-us", type=float, nargs="+", default=[300], help="of the host, for each layer")
    parser.add_argument(
        "--accuracy", type=float, nargs="+", default=[0.85, 0.4, -1], help="of a guess; -1 for no prefetch"
    )
    parser.add_argument("--new-tokens", type=int, default=12)
    plan = parser.parse_args()
    store = make_store(plan.layers)
    print(
        f"an expert travels {1e6 * SHAPE.expert_bytes / LINKS[LINK]:.0f} us and computes {1e6 * expert_seconds(1):.1f} "
        f"us for a token; the rest of a layer takes {1e6 * attention_seconds(1):.0f} us"
    )
    results: dict[str, Any] = {}
    for prompt in plan.prompts:
        steps = [prompt, prompt, *[1] * plan.new_tokens]
        routing = make_routing(plan.layers, steps)
        for share, host, accuracy in itertools.product(plan.shares, plan.host_us, plan.accuracy):
            foreseen = None if accuracy < 0 else accuracy
            name = f"prompt of {prompt}, {share:.0%} of the experts, host {host:g} us a layer, "
            name += "no prefetch" if foreseen is None else f"guesses right {foreseen:.0%}"
            cases = [serve(store, slots, share, host / 1e6, foreseen, steps, routing) for slots in [*plan.slots, None]]
            results[name] = cases
            show(name, cases)
    print(json.dumps(results))


def show(title: str, cases: list[dict[str, float]]) -> None:
    """One table; times also in times of two slots'."""
    table = Table(title=title)
    for head in ("slots", "prefill ms", "x of 2", "link used", "decode ms", "x of 2", "hits"):
        table.add_column(head, justify="right")
    base = next(case for case in cases if case["slots"] == 2)
    for number, case in enumerate(cases):
        table.add_row(
            f"{case['slots']:.0f}" + (" (default)" if number == len(cases) - 1 else ""),
            f"{case['prefill_ms']:.1f}",
            f"{case['prefill_ms'] / base['prefill_ms']:.3f}",
            f"{case['prefill_link_used']:.0%}",
            f"{case['decode_ms']:.2f}",
            f"{case['decode_ms'] / base['decode_ms']:.3f}",
            f"{case['hit_rate']:.1%}",
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
