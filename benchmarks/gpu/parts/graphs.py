"""Graphs that are replayed compute what eager launches compute, with whatever has changed in between."""

from collections.abc import Callable

import torch
from capture import captured
from experts import compute_experts, work_of_ids
from record import Recorder
from torch import Tensor

from parts.decided import DecidedSteps, runtime_of
from parts.stack import DEVICE, DTYPE, Model, Stack, pinned_store, same_bits
from vllm_dymoe.kernels import Activation
from vllm_dymoe.kernels.triton import TritonKernel
from vllm_dymoe.quantize.dummy import fill_randomly
from vllm_dymoe.residency.format import Format
from vllm_dymoe.store import HostStore

MODEL = Model(layers=4, experts=16, top_k=4, hidden=520, intermediate=328, group=32)
BITS = 4, 2
LAUNCHED = (1, 2, 40, 200)
"""Tokens of a call: each way that kernels are launched in."""
CHANGES = 3
"""Of x, in the same graph."""
BATCH, WIDE = 4, 40
STEPS = 12


def run(record: Recorder) -> None:
    """Launches alone, then steps that the device decides."""
    with record.check("the kernels' launches: replayed with another x, the bits of eager launches") as wrong:
        for tokens in LAUNCHED:
            wrong += _check_launches(tokens)
    store = pinned_store(MODEL, BITS)
    for budget, ahead in (("100%", 0), ("50%", 0), ("50%", 4), ("minimum", 0)):
        name = f"decode steps that the device decides at {budget}, {ahead} projections ahead"
        with record.check(f"{name}: one graph, replayed, the bits of the host's steps at 100%") as wrong:
            wrong += _check_decided(store, budget, ahead)
    for budget in ("100%", "50%", "minimum"):
        for launched in (False, True):
            form = "launched, copies ahead" if launched else "one graph"
            with record.check(f"wide steps decided on the device at {budget}: {form}, the host's bits") as wrong:
                wrong += _check_decided(store, budget, 0, tokens=WIDE, launched=launched)
    store.close()


def fixed_launch(formats: list[Format], x: Tensor, out: Tensor, ids: Tensor) -> tuple[Callable[[], None], ...]:
    """The launches of a layer whose experts stay in their slots, which graphs capture, and a whole call of the kernel.

    The first is good as long as the second lives: it has the slots' addresses only.
    """
    generator, slots = torch.Generator().manual_seed(3), {}
    for expert, fmt in enumerate(formats):
        blob = torch.empty(fmt.nbytes, dtype=torch.uint8)
        for matrix, section in zip(fmt.matrices, fmt.sections, strict=True):
            fill_randomly(matrix, blob[section], generator)
        slots[expert] = fmt.view(blob.to(DEVICE))
    work = work_of_ids(slots, ids)
    kernel = TritonKernel(DEVICE, formats=[matrix for fmt in formats for matrix in fmt.matrices])

    def eager() -> None:
        compute_experts(kernel, x, work, out, Activation.SILU)

    eager()  # compiles
    return lambda: kernel.compute(range(len(work))), eager


def _check_launches(tokens: int) -> list[str]:
    stack = Stack(MODEL, exact=True)
    x = stack.inputs(tokens, 0)
    out = torch.empty(tokens * MODEL.top_k, MODEL.hidden, dtype=DTYPE, device=DEVICE)
    formats = MODEL.at(BITS).formats
    _, ids = stack.route(0, x)
    slots = [formats[BITS[expert % len(BITS)]] for expert in range(MODEL.experts)]
    launch, eager = fixed_launch(slots, x, out, ids)
    graph = captured(launch)
    wrong = []
    for seed in range(1, 1 + CHANGES):
        x.copy_(stack.inputs(tokens, seed))
        out.fill_(torch.nan)
        eager()
        want = out.clone()
        out.fill_(torch.nan)
        graph.replay()
        if not same_bits(out, want):
            wrong.append(f"{tokens} tokens: the replay has other bits than the eager launch")
        if out.isnan().any():
            wrong.append(f"{tokens} tokens: rows are left unwritten")
    return wrong


def _check_decided(store: HostStore, budget: str, ahead: int, tokens: int = 0, launched: bool = False) -> list[str]:
    """Narrow steps as one graph; wide ones of so many tokens in the form that is given."""
    stack = Stack(MODEL, exact=True)
    host, device = stack.runtime(store, BITS[0]), runtime_of(stack, store, BITS[0], budget, ahead)
    replayed, wrong = DecidedSteps(stack, device, tokens or BATCH, launched=launched, wide=tokens > 0), []
    for seed in range(STEPS):
        x = stack.inputs(tokens or BATCH, seed)
        for got, want in zip(replayed.step(x), stack.step(host, x), strict=True):
            if not same_bits(got.out, want.out):
                wrong.append(f"step {seed}, layer {got.layer}: other bits than the host's step gives")
    device.check_integrity()
    stats = device.stats()
    if stats.misses == 0 and budget != "100%":
        wrong.append("nothing was fetched")
    if device.memory.device_side.table.ahead[:, 1].any() and not stats.prefetches["useful"]:
        wrong.append("nothing that was fetched ahead was of use")
    for runtime in (host, device):
        runtime.engine.close()
    return wrong
