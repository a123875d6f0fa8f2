"""CPU workers: threads that execute misses while the device computes the rest.

Device-side plans post misses to a queue in memory that both device and host map (``kernels.cpu_queue``); a native
thread, which does not hold the interpreter lock, answers them. Host-side plans hand misses to a Python thread while
the link transfers others.
"""

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as LateError
from dataclasses import replace
from statistics import median
from typing import cast

import torch
from torch import Tensor

from vllm_dymoe.cache.pages import map_bytes
from vllm_dymoe.cache.transfer import TransferError
from vllm_dymoe.cgroups import usable_cores
from vllm_dymoe.experts.format import ExpertFormat, ModelExperts
from vllm_dymoe.kernels import Activation, CpuKernel
from vllm_dymoe.kernels.cpu import Forms
from vllm_dymoe.kernels.cpu_queue import QueueMemory, QueueShape, native_library
from vllm_dymoe.kernels.native import Layer, set_activation
from vllm_dymoe.planner.large_batch import MOST_PARTS
from vllm_dymoe.planner.plan import LayerPlan

_LOOKS = 16  # checks of the watchdog within one timeout
_TRIPS = 256  # number of round trips, of which the median counts
SPINNING_CORES = 8  # threads spin on ranks with at least so many cores; vLLM needs them all where there are fewer
_SPIN_NS = 5_000_000
"""How long threads spin after an answer: longer than the time until the next decode step asks again."""


def cpu_worker_threads(device_type: str) -> int:
    """Return how many cores may execute misses.

    These are all cores but the one that launches, or half of them with an emulated card. Where threads spin, another
    core stays free for the process that feeds the engine.
    """
    cores = _cores_of_rank()
    if device_type == "cpu":
        return max(1, cores // 2)
    return max(1, cores - 1 - spins(device_type))


def spins(device_type: str) -> bool:
    """Return whether threads of the queue spin between two answers, and do not sleep."""
    return device_type != "cpu" and _cores_of_rank() >= SPINNING_CORES


def _cores_of_rank() -> int:
    """Return the usable cores of this machine, which its ranks share equally."""
    ranks = 1
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        ranks = torch.distributed.get_world_size()
    return usable_cores() // ranks


WATCHDOG_S = 1.0
"""Longest wait in seconds for an answer on a card that ends long kernels; Windows ends them after two seconds."""


def longest_wait(timeout: float, *, ends_long_kernels: bool) -> float:
    """Return the seconds that a device waits for an answer, 0 for no limit.

    Args:
        timeout: the option transfer_timeout_s.
        ends_long_kernels: a display watchdog ends a kernel that waits for too long, and the server with it.
    """
    return min(timeout or WATCHDOG_S, WATCHDOG_S) if ends_long_kernels else timeout


def _late(what: str, timeout: float) -> str:
    return (
        f"the CPU has not computed {what} within {timeout:g} seconds (transfer_timeout_s, and at most {WATCHDOG_S:g} "
        "where a display watchdog ends long kernels); free CPU cores, or raise transfer_timeout_s. From "
        "now on all misses are fetched."
    )


def _round_trip(ask: Callable[[], object], pause: float = 0.0) -> float:
    """Return the median seconds of an empty round trip.

    Args:
        ask: makes one round trip.
        pause: seconds for which the caller is busy before each.
    """
    times = []
    for _ in range(_TRIPS):
        until = time.perf_counter() + pause
        while time.perf_counter() < until:
            pass
        begun = time.perf_counter()
        ask()
        times.append(time.perf_counter() - begun)
    return median(times)


class CpuQueue:
    """The CPU worker of device-side plans.

    It is a queue that device and host map, a thread that answers, and a watchdog.

    Args:
        tokens: most tokens of a step.
        timeout: seconds that an answer may take; 0 for no limit.
        activations: bits of the activations that codes are multiplied with.
        spins: threads spin between two answers while steps follow, and do not sleep; see :func:`spins`.
        lock: pins memory for the device; returns the reason why that failed, or None.
        on_failure: called with a message when an answer is given up, before the device continues.

    Attributes:
        turn: int64 [3] on the device: the last number posted, the running layer's number or 0, and the queue's
            address.
        present: int32 on the device, scratch: which pairs are to be summed.
        failed: an answer took too long; from the next step on every miss is fetched.

    Raises:
        ValueError: there is no native library.
        OSError: the memory cannot be allocated or pinned.
    """

    def __init__(
        self, experts: ModelExperts, tokens: int, threads: int, timeout: float, activations: int, device: torch.device,
        lock: Callable[[Tensor], str | None] = lambda memory: None,
        on_failure: Callable[[str], None] = lambda sentence: None, *, spins: bool = False,
    ) -> None:  # fmt: skip
        fmt = next(iter(experts.formats.values()))
        sizes = (tokens, experts.top_k, experts.num_experts, fmt.hidden, fmt.dtype)
        shape = QueueShape(2 * MOST_PARTS * len(experts.layers) + 2, *sizes)
        memory = map_bytes(shape.nbytes)
        memory.zero_()
        if (reason := lock(memory)) is not None:
            raise OSError(f"a CPU queue of {shape.nbytes} bytes cannot be pinned for the device ({reason})")
        self.queue, self.threads, self.activations, self._timeout = (
            QueueMemory(shape, memory),
            threads,
            activations,
            timeout,
        )
        self.turn = torch.tensor([0, 0, self.queue.address], device=device)
        self.present = torch.empty(tokens * experts.top_k, dtype=torch.int32, device=device)
        self._on_failure, self.failed, self._spin_ns = on_failure, False, _SPIN_NS * spins
        self._experts, self._library, self._activation = experts, native_library(), cast("Activation | None", None)
        self._closing, self._threads = threading.Event(), list[threading.Thread]()

    @property
    def nbytes(self) -> int:
        """Device memory in bytes."""
        return self.turn.nbytes + self.present.nbytes

    def serve(self, activation: Activation) -> None:
        """Start the threads; to be called before anything is posted.

        Raises:
            ValueError: an earlier call named another activation.
        """
        if self._activation is not None and activation != self._activation:
            raise ValueError("the CPU worker supports one activation function for all layers")
        if self._activation is None:
            self._activation = activation
            self._start(self._answer, "answers")
            self._start(self._watch, "watches")

    def _start(self, target: Callable[[], None], name: str) -> None:
        self._threads.append(threading.Thread(target=target, name=f"dymoe {name}", daemon=True))
        self._threads[-1].start()

    def round_trip(self, pause: float = 0.0) -> float:
        """Return the median seconds of an empty round trip; call it before ``serve``.

        The device's own access is not included. Before each round trip the caller is busy for ``pause`` seconds, as a
        device is between two layers.
        """
        queue, library, numbers = self.queue, self._library, itertools.count(1)
        arguments = queue.address, Layer(), (), queue.shape.tokens, self._spin_ns
        poller = threading.Thread(target=library.answer, args=arguments, daemon=True)
        poller.start()

        def ask() -> None:
            number = next(numbers)
            queue.entry(number).header[:4] = torch.tensor([number, 0, 0, 0])
            library.post(queue.address, number)
            library.wait(queue.address, number)

        took = _round_trip(ask, pause)
        queue.control.stop = 1
        poller.join()
        queue.memory.zero_()
        self.queue = QueueMemory(queue.shape, queue.memory)
        return took

    def close(self) -> None:
        """Stop both threads; no step may be running."""
        self._closing.set()
        self.queue.control.stop = 1
        for thread in self._threads:
            thread.join()

    def _answer(self) -> None:
        assert self._activation is not None
        queue, shape, forms, layer = self.queue, self.queue.shape, Forms(), Layer()
        x, numbers = torch.empty(0, shape.hidden, dtype=shape.dtype), dict[ExpertFormat, int]()
        for fmt in self._experts.all_formats:
            numbers[fmt] = forms.learn(*fmt.matrices, x, self._activation)[0]
        known = [[(fmt.encoding.tag, numbers[fmt]) for fmt in of.values()] for of in self._experts.of_layers]
        set_activation(layer, self._activation)
        floats = self._library.row_floats(forms.width)
        # Inputs have a row for each pair where weights multiply them.
        inputs = [torch.empty(shape.tokens * shape.top_k * floats, dtype=torch.float32) for _ in range(2)]
        layer.inter, layer.width, layer.matrices = fmt.matrices[1].rows, forms.width, forms.address
        layer.inputs, layer.activations = (scratch.data_ptr() for scratch in inputs)
        layer.floats, (layer.outer, layer.inner) = forms.floats, (fmt.matrices[n].rotation for n in (1, 2))
        layer.dtype, layer.threads = shape.dtype is torch.float16, self.threads
        layer.digits = self.activations // 8 if forms.integers else 0
        self._library.answer(queue.address, layer, known, shape.tokens, self._spin_ns)

    def _watch(self) -> None:
        """Give up an answer that takes too long, and all later ones."""
        control, seen, since = self.queue.control, -1, 0.0
        pause = min(1.0, self._timeout / _LOOKS) if self._timeout else 1.0
        while not self._closing.wait(0.001 if self.failed else pause):
            answered, now = int(control.answered), time.monotonic()
            if control.posted <= answered // 2 or not self._timeout:
                seen = -1
            elif answered != seen and not self.failed:
                seen, since = answered, now
            elif self.failed or now - since >= self._timeout:
                header, self.failed = self.queue.entry(answered // 2 + 1).header, True
                self._on_failure(_late(f"{int(header[3])} experts of layer {int(header[1])}", self._timeout))
                self._library.give_up(self.queue.address)


class CpuWorker:
    """The CPU worker of host-side plans.

    One thread executes misses on the CPU's cores. If a layer takes longer than ``timeout`` seconds (0: no limit), the
    worker has ``failed``, and every miss is fetched from then on.
    """

    def __init__(self, threads: int, timeout: float, activations: int) -> None:
        self.threads, self.activations, self._timeout = threads, activations, timeout or None
        self._kernel = CpuKernel(threads=threads, activations=activations)
        self._thread, self.failed = ThreadPoolExecutor(1, "dymoe computes"), False

    def begin(self, plan: LayerPlan, x: Tensor, out: Tensor, activation: Activation) -> Callable[[], None]:
        """Start to compute a plan's items; return a function that waits for them.

        Args:
            plan: host-planned; every item has a place in host memory.
            x: the step's input, on the device.
            out: [tokens * top_k, hidden] on the device; the returned function writes the rows into it, or raises
                TransferError after the timeout.
        """
        pairs, rows, inputs = plan.pairs, out, x
        if not x.is_cpu:  # copy only the rows that are computed, in both directions
            used, inverse = plan.rows.unique(return_inverse=True)
            inputs = x[used.to(x.device)].cpu()
            rows = torch.empty(len(pairs), x.shape[1], dtype=x.dtype, device="cpu")
            plan = replace(plan, rows=inverse, pairs=torch.arange(len(pairs)))
        future = self._thread.submit(self._compute, inputs, plan, rows, activation)

        def wait() -> None:
            try:
                future.result(self._timeout)
            except LateError:
                self.failed = True
                raise TransferError(_late("a layer's experts", self._timeout or 0.0)) from None
            if rows is not out:
                out[pairs.to(out.device)] = rows.to(out.device)

        return wait

    def round_trip(self) -> float:
        """Return the median seconds of an empty round trip."""
        return _round_trip(lambda: self._thread.submit(time.perf_counter).result())

    def _compute(self, x: Tensor, plan: LayerPlan, rows: Tensor, activation: Activation) -> None:
        self._kernel.begin(x, plan, rows, activation)
        self._kernel.compute(range(len(plan.views)))

    def close(self) -> None:
        """Stop the thread."""
        self._thread.shutdown()
