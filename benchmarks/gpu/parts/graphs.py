"""Graphs that are replayed compute what eager launches compute, with whatever has changed in between."""

from collections.abc import Callable
from typing import Any

import torch
from capture import captured
from experts import compute_experts, work_of_ids
from record import Recorder
from torch import Tensor

from parts.decided import DecidedSteps, runtime_of
from parts.stack import DEVICE, DTYPE, Model, Stack, normalized, pinned_store, same_bits
from vllm_dymoe.kernels import Activation
from vllm_dymoe.kernels.triton import TritonKernel
from vllm_dymoe.quantize.dummy import fill_randomly
from vllm_dymoe.residency.format import Format
from vllm_dymoe.residency.routing import Routing
from vllm_dymoe.runtime import MoERuntime
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
    """Launches alone, then pieces around the runtime's forward."""
    with record.check("the kernels' launches: replayed with another x, the bits of eager launches") as wrong:
        for tokens in LAUNCHED:
            wrong += _check_launches(tokens)
    store = pinned_store(MODEL, BITS)
    for budget, prefetch in (("100%", "none"), ("25%", "none"), ("25%", "next-gate"), ("minimum", "next-gate")):
        name = f"pieces around the runtime's forward at {budget}, prefetch {prefetch}"
        with record.check(f"{name}: captured beside its transfers and replayed, the bits of eager pieces") as wrong:
            wrong += _check_pieces(store, budget, prefetch)
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


class Pieces:
    """What vLLM makes of a model with an operator in it that no graph can hold: piece, operator, piece, ...

    A piece computes what lies between two MoE layers, and allocates the buffer that the operator behind it writes to.
    Captured, it reads and writes the memory of its capture for ever after.

    Args:
        stack: gates.
        runtime: of the operators.
    """

    def __init__(self, stack: Stack, runtime: MoERuntime) -> None:
        self._stack, self.runtime = stack, runtime
        self._graphs: list[Any] = []
        self._held: list[tuple[Tensor, ...]] = []

    def eager(self, x: Tensor) -> Tensor:
        """Every piece and operator, launched."""
        handed = self._piece(0, x)
        for layer in range(MODEL.layers):
            self._operator(layer, *handed)
            handed = self._piece(layer + 1, *handed)
        return handed[0]

    def capture(self, x: Tensor) -> None:
        """One graph for each piece, in one pool; operators run between the captures, which their transfers outlast."""
        with self.runtime.engine.paused():  # as the plugin does around vLLM's captures
            self._capture(x, torch.cuda.graph_pool_handle())

    def _capture(self, x: Tensor, pool: Any) -> None:
        handed: tuple[Tensor, ...] = (x,)
        for number in range(MODEL.layers + 1):
            inputs = handed
            box: list[tuple[Tensor, ...]] = []
            self._graphs.append(
                captured(lambda n=number, i=inputs, b=box: b.append(self._piece(n, *i)), pool, warm=False)
            )
            handed = box[-1]
            self._held.append(handed)
            self._graphs[-1].replay()  # so that the operator behind it is called with what it would be called with
            if number < MODEL.layers:
                self._operator(number, *handed)

    def replay(self) -> Tensor:
        """What capture saw, with what the input holds now."""
        for number, graph in enumerate(self._graphs):
            graph.replay()
            if number < MODEL.layers:
                self._operator(number, *self._held[number])
        return self._held[-1][0]

    def _piece(self, number: int, x: Tensor, *before: Tensor) -> tuple[Tensor, ...]:
        if before:  # the operator's output, which the next layer reads
            x = normalized(x + before[-1])
        if number == MODEL.layers:
            return (x,)
        weights, ids = self._stack.route(number, x)
        return x, weights, ids, torch.empty_like(x)

    def _operator(self, layer: int, x: Tensor, weights: Tensor, ids: Tensor, out: Tensor) -> None:
        out.copy_(self.runtime.serving.forward(Routing(layer, MODEL.layers, x, ids, weights)))


def _check_pieces(store: HostStore, budget: str, prefetch: str) -> list[str]:
    wrong = []
    stack = Stack(MODEL, exact=True)
    inputs = [stack.inputs(BATCH, seed) for seed in range(STEPS)]
    eager, replayed = (Pieces(stack, stack.runtime(store, *BITS, budget, prefetch)) for _ in range(2))
    want = [eager.eager(x).clone() for x in inputs]
    x = inputs[0].clone()
    replayed.eager(x)  # compiles, and leaves transfers under way
    replayed.capture(x)
    got = []
    for values in inputs:
        x.copy_(values)
        got.append(replayed.replay().clone())
    torch.cuda.synchronize()
    for number, (one, other) in enumerate(zip(got, want, strict=True)):
        if not same_bits(one, other):
            wrong.append(f"step {number} has other bits than eager pieces give")
    for pieces in (eager, replayed):
        pieces.runtime.check_integrity()
        pieces.runtime.engine.close()
    return wrong
