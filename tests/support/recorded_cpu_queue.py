"""A CPU queue on a recorded device: a history records accesses to the ring.

Poller and watchdog are agents. The plain twin is the device's side; its operations on an entry are recorded as torch
runs them. The native library computes for the poller, in a ring of its own. Two words order all of this, the number
posted and the number answered: a write to one releases what its writer did before, a read of one acquires it.
"""

import random
import threading
from itertools import pairwise

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from tests.support.happens_before import Clock
from tests.support.recorded_device import COMPUTATION
from vllm_dymoe.executor.cpu_worker import CpuQueue
from vllm_dymoe.kernels.cpu_queue import Entry

PARTS = Entry._fields


class RecordedCpuQueue(CpuQueue):
    """A CPU queue, which also replaces the library that the device's side calls.

    Args:
        history: records accesses.
        turns: deterministic threads.
        late: probability, at each turn, that the watchdog gives up the pending request.
        arguments: passed on to ``CpuQueue``.

    Attributes:
        given_up: True once the device received the answer of an abandoned request. Its rows do not count, because
            the step fails.
    """

    def __init__(self, history, turns, late, *arguments, spins=False):
        super().__init__(*arguments)
        self._history, self._turns, self._late, self._chance = history, turns, late, random.Random(1)
        self._service, self.given_up = CpuQueue(*arguments), False
        self._posted: Clock = {}
        self._answered: Clock = {}
        for number in range(self.queue.shape.depth):
            for part, memory in zip(PARTS, self._sections(number), strict=True):
                history.watch(memory, f"{part} of entry {number}", [slice(0, len(memory))])

    def _sections(self, number):
        queue, first = self.queue, self.queue.memory.numel() - self.queue.shape.depth * self.queue.shape.places[-1]
        entry = queue.memory[first + number % queue.shape.depth * queue.shape.places[-1] :]
        return [entry[begin:end] for begin, end in pairwise((0, *queue.shape.places))]

    def section_of(self, tensor):
        """Return the section of an entry that contains a tensor; None for other memory."""
        end = self.queue.shape.places[-1]
        at = tensor.data_ptr() - self._sections(0)[0].data_ptr()
        if not 0 <= at < self.queue.shape.depth * end:
            return None
        return next(part for part in reversed(self._sections(at // end)) if part.data_ptr() <= tensor.data_ptr())

    def serve(self, activation):
        self._service.serve(activation)
        super().serve(activation)

    def close(self):
        super().close()
        self._service.close()

    def _start(self, target, name):
        self._threads.append(self._turns.Thread(target, f"that {name}", daemon=True))
        self._threads[-1].start()

    # -- the device's part ------------------------------------------------------------------------

    def post(self, address, number):
        self._posted = self._history.now(COMPUTATION)
        self._library.post(address, number)
        self._turns.pause()

    def wait(self, address, number):
        self._turns.block(lambda: self.queue.control.answered >= 2 * number)
        self._history.follow(COMPUTATION, self._answered)
        given_up = self._library.wait(address, number)
        self.given_up |= bool(given_up)
        return given_up

    # -- the host's -------------------------------------------------------------------------------

    def _due(self):
        return self.queue.control.posted > self.queue.control.answered // 2

    def _answer(self):
        me, control, history, pause = threading.current_thread(), self.queue.control, self._history, self._turns.pause
        while True:
            self._turns.block(lambda: control.stop or self._due())
            if control.stop or history.races:
                return
            seen = control.answered
            number = seen // 2 + 1
            self.acquire(me)
            entry, (*request, out) = self.queue.entry(number), self._sections(number)
            for section in request:
                history.read(me, section)
            pause()
            if not history.races:
                self.answer(me, number, seen, out, lambda entry=entry: entry.out.copy_(self._computed(entry)))

    def acquire(self, me):
        self._history.follow(me, self._posted)

    def answer(self, me, number, seen, section, compute):
        self._history.write(me, section)
        compute()
        self._turns.pause()
        self.move_on(me, number, seen)

    def move_on(self, me, number, seen):
        if self.queue.control.answered == seen:  # one thread runs at a time, so this is an atomic compare and exchange
            self._answered = self._history.now(me)
            self.queue.control.answered = 2 * number

    def _computed(self, entry):
        queue = self._service.queue
        number = queue.control.posted + 1
        asked = queue.entry(number)
        for there, part in zip(asked[:-1], entry[:-1], strict=True):
            there.copy_(part)
        asked.header[0] = number
        self._library.post(queue.address, number)
        self._library.wait(queue.address, number)
        return asked.out

    def _watch(self):
        me, control = threading.current_thread(), self.queue.control
        while not control.stop:
            self._turns.block(
                lambda: control.stop or (self._due() and (self.failed or self._chance.random() < self._late))
            )
            if not control.stop:
                self.failed = True
                self._history.follow(me, self._answered)
                self._answered = self._history.now(me)
                self._library.give_up(self.queue.address)


class DeviceAccesses(TorchFunctionMode):
    """Record which parts of a ring the computing stream reads and writes."""

    def __init__(self, history, cpu_queue):
        super().__init__()
        self._history, self._cpu_queue = history, cpu_queue
        history.follow(COMPUTATION, history.now(threading.current_thread()))  # of the launching thread

    def __torch_function__(self, function, types, args=(), kwargs=None):
        section, write = self._cpu_queue.section_of, None
        if function is torch.Tensor.__setitem__ or function is torch.Tensor.copy_:
            write, *args = args
            read, args = tree_leaves(args), (write, *args)
        else:
            read = tree_leaves((args, kwargs))
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and write is None and section(result) is not None:
            return result  # a view
        for tensor in () if self._cpu_queue.given_up else read:  # their rows do not count
            if isinstance(tensor, torch.Tensor) and (found := section(tensor)) is not None:
                self._history.read(COMPUTATION, found)
        if write is not None and (found := section(write)) is not None:
            self._history.write(COMPUTATION, found)
        return result
