"""A little of everything, for a sanitizer: both tiers, decode and grouped launches, transfers into slots in use."""

import torch
from record import Recorder

from parts.stack import Model, Stack, pinned_store

MODEL = Model(layers=2, experts=4, top_k=2, hidden=136, intermediate=72, group=32)
TOKENS = (1, 40, 2)


def run(record: Recorder) -> None:
    """At the smallest budget, where every slot is written again and again."""
    with record.check("a few steps at the smallest budget") as wrong:
        store, stack = pinned_store(MODEL, (4, 2)), Stack(MODEL, exact=True)
        runtime = stack.runtime(store, 4, 2, "minimum", "next-gate")
        for seed, tokens in enumerate(TOKENS):
            out = stack.step(runtime, stack.inputs(tokens, seed))[-1].out
            if not out.isfinite().all():
                wrong.append(f"{tokens} tokens: something is no number")
        torch.cuda.synchronize()
        runtime.check_integrity()
        runtime.close()
