"""The server on real streams: results are correct, and equal bit for bit.

Budget, store, prefetch and timing must not change them.
"""

import tempfile
from pathlib import Path

import torch
from layers import Model
from record import Recorder
from torch import Tensor

from parts.stack import DEVICE, ByNumber, Seen, Stack, file_store, pinned_store, relative_error, same_bits
from vllm_dymoe.cache.store import HostStore
from vllm_dymoe.server import ExpertServer

# The sizes are no multiples of a tile's.
MODEL = Model(layers=4, experts=16, top_k=4, hidden=520, intermediate=328, group=32)
PRECISIONS = {"4": (4, 0), "4/2": (4, 2), "16": (16, 0)}
BUDGETS = ("minimum", "25%", "50%", "100%")
TOKENS = (1, 1, 2, 70, 1, 1, 300, 5, 1, 1, 17, 1)
"""Tokens of each step: decode, of a few requests, and prefill."""
# bf16 rounds with a relative error of 2^-8, four times: a tile's dequantized weight, the inner activation, the result,
# and the weighted sum.
TOLERANCE = 2e-2
HELD_BACK = 20_000_000
"""Cycles, about ten milliseconds, for which the card is stalled in each layer while the host runs ahead."""
BUSY_BYTES = 128 << 20
"""Bytes copied in each layer, before what it needs."""


def run(record: Recorder) -> None:
    """Run all precisions.

    The file store and the stalled card are checked with two precisions, the riskiest case.
    """
    stack = Stack(MODEL, exact=True)
    steps = [stack.inputs(tokens, seed) for seed, tokens in enumerate(TOKENS)]
    for name, (high, low) in PRECISIONS.items():
        stored = (high, low) if low else (high,)
        with record.check(f"{name} bits: everything resident agrees with float64") as wrong:
            store = pinned_store(MODEL, stored)
            server = stack.server(store, high, low)
            want = _compute(stack, server, steps)
            bits = {expert: low if low and expert % 3 == 0 else high for expert in range(MODEL.experts)}
            for seen in want:
                error = relative_error(seen.out, stack.reference(store, seen, bits))
                if not error < TOLERANCE:
                    wrong.append(f"{len(seen.x)} tokens of layer {seen.layer}: relative error {error:.2g}")
        for prefetch in ("none", "next-gate"):
            with record.check(f"{name} bits, prefetch {prefetch}: the same bits at {', '.join(BUDGETS)}") as wrong:
                for budget in BUDGETS:
                    server = stack.server(store, high, low, budget, prefetch)
                    wrong += compare(stack, server, steps, want, budget)
        if low:
            _check_files(record, stack, steps, want, high, low)
            _check_timing(record, stack, store, steps, want, high, low)
        store.close()


def _check_files(record: Recorder, stack: Stack, steps: list[Tensor], want: list[Seen], high: int, low: int) -> None:
    name = "from files, through pinned buffers: the same bits"
    with tempfile.TemporaryDirectory() as folder, record.check(name) as wrong:
        store = file_store(MODEL, (high, low), Path(folder) / "store")
        for budget in BUDGETS[:2]:
            for threads in (0, 2):
                server = stack.server(store, high, low, budget, "next-gate", threads=threads)
                wrong += compare(stack, server, steps, want, f"{budget}, {threads} threads")
        store.close()


def _check_timing(
    record: Recorder, stack: Stack, store: HostStore, steps: list[Tensor], want: list[Seen], high: int, low: int
) -> None:
    """Check timing with one side slowed down: only then a missing wait shows."""
    busy = torch.zeros(BUSY_BYTES, dtype=torch.uint8).pin_memory()
    target = torch.empty(BUSY_BYTES, dtype=torch.uint8, device=DEVICE)
    side = torch.cuda.Stream()

    def stand_still() -> None:
        torch.cuda._sleep(HELD_BACK)

    def occupy() -> None:
        with torch.cuda.stream(side):
            target.copy_(busy, non_blocking=True)

    for name, before in {"computation late behind transfers": stand_still, "transfers late": occupy}.items():
        with record.check(f"{name}: the same bits") as wrong:
            for budget in BUDGETS[:2]:
                for prefetch in ("none", "next-gate"):
                    server = stack.server(store, high, low, budget, prefetch, ByNumber(before=before))
                    wrong += compare(stack, server, steps, want, f"{budget}, prefetch {prefetch}")


def compare(stack: Stack, server: ExpertServer, steps: list[Tensor], want: list[Seen], name: str) -> list[str]:
    """Return differences as sentences, also if the run did not test what it should."""
    got = _compute(stack, server, steps)
    wrong = [
        f"{name}: {len(one.x)} tokens of layer {one.layer} have other bits"
        for one, other in zip(got, want, strict=True)
        if not same_bits(one.out, other.out)
    ]
    stats = server.stats()
    if stats.misses < MODEL.layers:
        wrong.append(f"{name}: only {stats.misses} experts were fetched, so this check proves nothing")
    return wrong[:3] + ([f"{name}: and {len(wrong) - 3} more"] if len(wrong) > 3 else [])


def _compute(stack: Stack, server: ExpertServer, steps: list[Tensor]) -> list[Seen]:
    """Run all steps as fast as the host can; read results only at the end."""
    seen: list[Seen] = []
    for x in steps:
        seen += stack.step(server, x)
    torch.cuda.synchronize()
    server.check_integrity()
    server.engine.close()
    return seen
