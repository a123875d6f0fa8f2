"""The CPU worker: threads that execute misses while the device computes the rest.

Plans post misses to a queue in memory that both device and host map (``kernels.cpu_queue``); a native thread, which
does not hold the interpreter lock, answers them.
"""

import threading
import time
from collections.abc import Callable
from statistics import median
from typing import cast

import torch
from torch import Tensor

from vllm_dymoe.cache.pages import map_bytes
from vllm_dymoe.cgroups import usable_cores
from vllm_dymoe.experts.format import ExpertFormat, ModelExperts
from vllm_dymoe.kernels import Activation
from vllm_dymoe.kernels.cpu import Forms
from vllm_dymoe.kernels.cpu_queue import QueueMemory, QueueShape, native_library
from vllm_dymoe.kernels.native import Layer, set_activation
from vllm_dymoe.planner.large_batch import MOST_PARTS

_LOOKS = 16  # checks of the watchdog within one timeout
_TRIPS = 256  # number of round trips, of which the median counts
SPINNING_CORES = 8  # threads spin on ranks with at least so many cores; vLLM needs them all where there are fewer
_SPIN_NS = 5_000_000
"""How long threads spin after an answer: longer than the time until the next decode step asks again."""


def cpu_worker_threads(device_type: str, ranks: int) -> int:
    """Return how many cores may execute misses.

    These are all cores but the one that launches, or half of them with an emulated card. Where threads spin, another
    core stays free for the process that feeds the engine.

    Args:
        ranks: of this machine, which share its usable cores equally.
    """
    cores = usable_cores() // ranks
    if device_type == "cpu":
        return max(1, cores // 2)
    return max(1, cores - 1 - spins(device_type, ranks))


def spins(device_type: str, ranks: int) -> bool:
    """Return whether threads of the queue spin between two answers, and do not sleep."""
    return device_type != "cpu" and usable_cores() // ranks >= SPINNING_CORES


WATCHDOG_S = 1.0
"""Longest wait in seconds for an answer on a card that ends long kernels; Windows ends them after two seconds."""


def longest_wait(timeout: float, *, ends_long_kernels: bool) -> float:
    """Return the seconds that a device waits for an answer, 0 for no limit.

    Args:
        timeout: the option transfer_timeout_s.
        ends_long_kernels: a display watchdog ends a kernel that waits for too long, and the server with it.
    """
    return min(timeout or WATCHDOG_S, WATCHDOG_S) if ends_long_kernels else timeout


def _late(layer: int, experts: int, timeout: float) -> str:
    return (
        f"the CPU has not computed {experts} experts of layer {layer} within {timeout:g} seconds (transfer_timeout_s, "
        f"and at most {WATCHDOG_S:g} where a display watchdog ends long kernels); free CPU cores, or raise "
        "transfer_timeout_s. From now on all misses are fetched."
    )


class CpuQueue:
    """The CPU worker of a device.

    It is a queue that device and host map, a thread that answers, and a watchdog.

    Args:
        tokens: most tokens of a step.
        timeout: seconds that an answer may take; 0 for no limit.
        activations: bits of the activations that codes are multiplied with.
        spins: threads spin between two answers while steps follow, and do not sleep; see :func:`spins`.
        pin: pins memory for the device; returns the reason why that failed, or None.
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
        pin: Callable[[Tensor], str | None] = lambda memory: None,
        on_failure: Callable[[str], None] = lambda sentence: None, *, spins: bool = False,
    ) -> None:  # fmt: skip
        fmt = next(iter(experts.formats.values()))
        sizes = (tokens, experts.top_k, experts.num_experts, fmt.hidden, fmt.dtype)
        shape = QueueShape(2 * MOST_PARTS * len(experts.layers) + 2, *sizes)
        memory = map_bytes(shape.nbytes)
        memory.zero_()
        if (reason := pin(memory)) is not None:
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
        queue, library, times = self.queue, self._library, list[float]()
        arguments = queue.address, Layer(), (), queue.shape.tokens, self._spin_ns
        poller = threading.Thread(target=library.answer, args=arguments, daemon=True)
        poller.start()

        for number in range(1, 1 + _TRIPS):
            until = time.perf_counter() + pause
            while time.perf_counter() < until:
                pass
            begun = time.perf_counter()
            queue.entry(number).header[:4] = torch.tensor([number, 0, 0, 0])
            library.post(queue.address, number)
            library.wait(queue.address, number)
            times.append(time.perf_counter() - begun)
        queue.control.stop = 1
        poller.join()
        queue.memory.zero_()
        self.queue = QueueMemory(queue.shape, queue.memory)
        return median(times)

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
                self._on_failure(_late(int(header[1]), int(header[3]), self._timeout))
                self._library.give_up(self.queue.address)
