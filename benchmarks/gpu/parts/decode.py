"""Checks decode on tensor cores on this card, and measures what it gains.

It is compared with decode without tensor cores, alone and in whole steps. This is the first part of fifteen minutes on
a card: the most important results come first, and every line is kept if time runs out.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from kernel_speeds import compile_layer, measure_layer, measure_machine
from launched import ON_TENSOR_CORES, SHARED, TOLERANCE, Launch, ran
from layers import LAYERS, Machine, Model
from record import Recorder
from torch import Tensor

from parts.decided import DevicePlannedSteps
from parts.speeds import measure_cpu_queue
from parts.stack import Seen, Stack, pinned_store, same_bits
from vllm_dymoe.cache.store import HostStore
from vllm_dymoe.executor import cpu_worker
from vllm_dymoe.experts.encoding import NESTED, STEPS
from vllm_dymoe.kernels import Decode, Grouped, native
from vllm_dymoe.kernels.triton.start import Overlap, run_kernel

DEVICE = "cuda"
LAUNCHES = (
    *(Launch(code, 3, **SHARED, tensor_cores=8) for code in ON_TENSOR_CORES),
    *(Launch(code, 3, **SHARED, tensor_cores=8, dtype=torch.float16) for code in (STEPS[4], STEPS[8], NESTED[4])),
    *(Launch(code, 13, tensor_cores=16, warps=8, sizes=(1100, 500)) for code in (STEPS[4], NESTED[4])),
    Launch(STEPS[4], 5, tensor_cores=8, group=32, bias=True, act_order=True, integer_zeros=True),
    *(
        Launch(STEPS[4], 3, **SHARED, tensor_cores=8, dependent=True, overlap=overlap, sizes=(2048, 768))
        for overlap in Overlap
    ),
    *(Launch(code, 90, grouped=True, sizes=(2048, 768)) for code in (STEPS[4], STEPS[2], NESTED[4])),
    *(Launch(code, 12, grouped=True, sizes=(1104, 504), dtype=torch.float16) for code in (STEPS[4], NESTED[4])),
)
ALONE = tuple(Launch(code, 1, tensor_cores=8, sizes=(2048, 768)) for code in (STEPS[4], NESTED[4], STEPS[2]))
BESIDE = (5, 8), (8, 16), (16, 16)
"""Tokens, and positions that are computed at a time."""
MODEL = Model(layers=4, experts=64, top_k=8, hidden=2048, intermediate=768)
"""Layers of Qwen3-30B-A3B's size with half as many experts, which are packed in half the time."""
KERNEL_LAYERS, KERNEL_PRECISIONS = LAYERS[:2], ("4", "4/2")
DECODE_TOKENS, PROMPT_TOKENS = (1, 4, 16), (512, 2048, 8192)
STEPS_MEASURED = 50
OVERLAPPING = Decode.DEPENDENT, Decode.CHAINED
"""Ways that differ only in whether gate and up begin before the plan is complete."""
PROFILED = "mma_gate_up_kernel", "mma_down_kernel", "mma_grouped_gate_up_kernel"


class Card:
    """Runs launches on the card; has the methods of `launched.Host`."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[Tensor, Tensor]] = {}

    def _on_card(self, tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in self._held:
            self._held[tensor.data_ptr()] = tensor, tensor.to(DEVICE, copy=True)
        return self._held[tensor.data_ptr()][1]

    def place(self, tensor: Tensor) -> int:
        """Return a tensor's address on the card."""
        return self._on_card(tensor).data_ptr()

    def read(self, tensor: Tensor) -> Tensor:
        """Return a tensor's current content."""
        return self._on_card(tensor).cpu()

    def run(self, kernel: Any, grid: Any, tensors: Any, constants: Any, options: Any) -> None:
        """Launch a kernel on the card."""
        run_kernel(kernel, grid, [self._on_card(tensor) for tensor in tensors], constants, options)


def run(record: Recorder) -> None:
    """Run checks, kernels, whole steps, the queue, and a profile."""
    cores = min(os.cpu_count() or 1, 12)
    with ProcessPoolExecutor(cores, get_context("spawn")) as pool:
        compiled = [pool.submit(_compile, *case) for case in product(KERNEL_LAYERS, KERNEL_PRECISIONS, _ways())]
        with record.check("tensor cores agree with float64, repeat their bits, and fetch true bytes") as wrong:
            wrong += [sentence for found in pool.map(check, LAUNCHES) for sentence in found]
        with record.check("a token has the same bits on tensor cores alone and beside others") as wrong:
            wrong += [sentence for found in pool.map(check_alone, ALONE) for sentence in found]
        with record.check("the kernels to measure could be compiled"):
            for one in compiled:
                one.result()
    machine = measure_machine()
    _measure_kernels(record, machine)
    with record.check("a model to measure could be made"):
        store, stack = pinned_store(MODEL, (4,)), Stack(MODEL, exact=False)
    steps = partial(_measure_steps, record, machine, store, stack)
    for budget in ("100%", "50%"):
        steps(budget, tuple(Decode))
    if native.load() is None:
        record.say("Left out: the CPU queue, since the native library was not built here.")
    else:
        for spins in (False, True):
            how = f"threads that {_of(spins)}"
            with record.check(f"the CPU queue could be measured with {how}") as wrong, _threads(spins):
                wrong += measure_cpu_queue(record, machine, store, stack, how)
        for budget in ("100%", "50%"):
            steps(budget, OVERLAPPING, misses="share")
    steps("50%", OVERLAPPING, prefetch="next-gate")
    store.close()
    _profile(record)


def check(launch: Launch) -> list[str]:
    """Return what is wrong with a launch on this card, as sentences."""
    first, second = ran(launch, Card()), ran(launch, Card())
    name = f"{launch.encoding.name}, {launch.tokens} tokens, {launch}"
    wrong = [] if first.error < TOLERANCE else [f"{name}: relative error {first.error:.2g}"]
    return wrong if torch.equal(first.out, second.out) else [*wrong, f"{name}: other bits when it is repeated"]


def check_alone(launch: Launch) -> list[str]:
    """Return where the first token's bits differ between alone and together."""
    alone, wrong = ran(launch, Card()).out[0], []
    for tokens, most in BESIDE:
        beside = ran(replace(launch, tokens=tokens, tensor_cores=most), Card()).out[0]
        if not torch.equal(alone, beside):
            wrong.append(f"{launch.encoding.name}: a token has other bits beside {tokens - 1} others than alone")
    return wrong


def _ways() -> tuple[Decode, ...]:
    return Decode.PLAIN, Decode.TENSOR_CORES


def _compile(layer: Model, precisions: str, decode: Decode) -> None:
    compile_layer(layer, precisions, decode, Grouped.PLAIN if decode is Decode.PLAIN else Grouped.IN_REGISTERS)


def _measure_kernels(record: Recorder, machine: Machine) -> None:
    """Measure each variant of decode kernels, few tokens first; then prompts."""
    for count, layer, precisions in product(DECODE_TOKENS, KERNEL_LAYERS, KERNEL_PRECISIONS):
        for decode in _ways():
            with record.check(f"{layer.name}, {precisions} bits, {count} tokens, {decode.name}, could be measured"):
                measure_layer(record, machine, layer, precisions, count, decode)
    for count, layer, grouped in product(PROMPT_TOKENS, KERNEL_LAYERS, Grouped):
        with record.check(f"{layer.name}, {count} tokens, {grouped.name}, could be measured"):
            measure_layer(record, machine, layer, KERNEL_PRECISIONS[0], count, Decode.TENSOR_CORES, grouped)


def _measure_steps(
    record: Recorder, machine: Machine, store: HostStore, stack: Stack, budget: str, ways: Sequence[Decode],
    *, misses: str = "fetch", prefetch: str = "none",
) -> None:  # fmt: skip
    """Measure device-planned decode steps in several ways, each as one graph.

    All ways on tensor cores have to give the same bits, layer by layer, in steps with the same inputs, launched and as
    a graph.
    """
    inputs = [stack.inputs(1, seed) for seed in range(STEPS_MEASURED)]
    case = f"a decode layer at {budget}, misses {misses}, prefetch {prefetch}"
    with record.check(f"{case}: the same bits, whichever launches overlap") as wrong:
        costs, found = None, dict[Decode, list[list[Seen]]]()
        for decode in ways:
            server = stack.server(store, 4, budget=budget, misses=misses, prefetch=prefetch, decode=decode)
            assert server.small_batches is not None
            # With the same costs the CPU executes the same misses, whose last bits are others.
            own = server.small_batches.table.cpu_costs
            costs = own.clone() if costs is None else own.copy_(costs)
            replayed = DevicePlannedSteps(stack, server, 1)
            launched = DevicePlannedSteps(stack, server, 1, launched=True)
            found[decode] = [
                _kept(steps.step(x)) for steps in (launched, replayed) for x in inputs[: STEPS_MEASURED // 2]
            ]
            measured, bound, _ = replayed.measure(machine, inputs, 4)
            name = f"{case}, {decode.name.lower()}"
            record.speed(name, "us", 1e6 * measured, 1e6 * bound, bound / measured)
            server.close(keep_store=True)
        first, *others = (decode for decode in ways if decode is not Decode.PLAIN)
        for decode in others:
            wrong += _different(f"{decode.name.lower()} and {first.name.lower()}", found[decode], found[first])


def _kept(seen: Sequence[Seen]) -> list[Seen]:
    return [Seen(layer, *(tensor.clone() for tensor in tensors)) for layer, *tensors in seen]


def _different(names: str, some: Sequence[Sequence[Seen]], others: Sequence[Sequence[Seen]]) -> list[str]:
    """Return what is wrong with the outputs of steps by two ways, as sentences.

    Layers are compared as long as their inputs are the same: gates may sum in another order in another graph.
    """
    wrong, compared = [], 0
    for step, both in enumerate(zip(some, others, strict=True)):
        for one, other in zip(*both, strict=True):
            if not all(torch.equal(*pair) for pair in zip(one[1:-1], other[1:-1], strict=True)):
                break
            compared += 1
            if not same_bits(one.out, other.out):
                wrong.append(f"{names} give different bits in step {step}, layer {one.layer}")
                break
    return wrong if compared else [f"{names} had no inputs in common"]


def _of(spins: bool) -> str:
    return "spin" if spins else "sleep"


@contextmanager
def _threads(spins: bool) -> Iterator[None]:
    """Give queues threads that spin, or that sleep, whatever the number of cores."""
    before = cpu_worker.SPINNING_CORES
    cpu_worker.SPINNING_CORES = 1 if spins else 1 << 20
    try:
        yield
    finally:
        cpu_worker.SPINNING_CORES = before


def profiled(record: Recorder) -> None:
    """Run a few launches of the kernels, for the profiler."""
    machine = Machine("", 1.0, 1.0, 1.0)
    for count in (1, 512):
        with record.check(f"{count} tokens could be launched"):
            measure_layer(record, machine, KERNEL_LAYERS[1], "4", count, max(_ways()), max(Grouped), least=0.0)


def _profile(record: Recorder) -> None:
    """Record what bounds the kernels, measured by NVIDIA's profiler.

    Nothing is recorded if the profiler is missing or may not read counters.
    """
    program = shutil.which("ncu") or shutil.which("ncu", path="/usr/local/cuda/bin")
    if program is None:
        record.say("Left out: there is no ncu here.")
        return
    command = [sys.executable, str(Path(__file__).parents[1] / "gpu.py"), "--part", "profiled", "--result", os.devnull]
    chosen = "regex:" + "|".join(PROFILED)
    metrics = (
        "sm__inst_executed.sum,sm__throughput.avg.pct_of_peak_sustained_elapsed,"
        "dram__throughput.avg.pct_of_peak_sustained_elapsed,gpu__time_duration.sum"
    )
    under = [program, "--csv", "--launch-count", "3", "--kernel-name", chosen, "--metrics", metrics]
    done = subprocess.run(
        [*under, *command, "--deadline", str(time.time() + 40)], capture_output=True, text=True, timeout=45, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith('"') or "ERR" in line]
    record.say("ncu: " + ("; ".join(lines)[:4000] or f"it printed nothing, exit status {done.returncode}"))
