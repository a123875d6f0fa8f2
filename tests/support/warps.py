"""Triton's interpreter with warps, each of which runs at its own pace.

The interpreter runs a program's statements one after another, on whole vectors, so it cannot see what one warp loads
before or after another one has stored. Here each warp runs all statements, like warps that hold the same elements, and
stores only its own elements. At each load and store a seeded random number chooses the warp that continues; barriers
and atomic operations order them as on a card. There is a race if results differ from the interpreter's own, or if warps
wait forever.
"""

import contextlib
import inspect
import random
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, TensorHandle, interpreter_builder

from tests.support.deterministic_threads import DeterministicThreads
from tests.support.happens_before import History


class _Program:
    def __init__(self, index: tuple[int, int, int]) -> None:
        self.index, self.arrived, self.generation = index, 0, 0
        self.atomics: list[Any] = []


class _Own(threading.local):
    """The warp of a thread: its program, its number and its atomic operations so far."""

    program: _Program
    number = 0
    atomics = 0


class _Warps:
    """Replacements for the interpreter's own loads, stores, barriers and launches."""

    def __init__(self, seed: int, warps: int, restless: float, *, barriers: bool) -> None:
        self._threads, chosen, self._own = DeterministicThreads(History(), seed, restless), random.Random(seed), _Own()
        self._warps, self._barriers = warps, barriers
        self._together, self._scalars = chosen.random() < 0.5, chosen.randrange(warps)
        builder = interpreter_builder
        self._load, self._store, self._atomic = (
            builder.create_masked_load, builder.create_masked_store, builder.create_atomic_rmw
        )  # fmt: skip

    def _owner(self, size: int) -> Any:
        """Return the warp that stores each element: one piece per warp, or short strips.

        A warp may store any element that all warps hold, because sums and other layouts mix what they have loaded.
        """
        place = np.arange(size)
        if size == 1:
            return place + self._scalars
        return place * self._warps // size if self._together else place // 4 % self._warps

    def create_masked_load(self, *arguments: Any) -> Any:
        self._threads.pause()
        return self._load(*arguments)

    def create_masked_store(self, pointers: Any, value: Any, mask: Any, policy: Any) -> Any:
        self._threads.pause()
        mine = (self._owner(pointers.data.size) == self._own.number).reshape(pointers.data.shape)
        self._store(pointers, value, TensorHandle(np.logical_and(mask.data, mine), mask.dtype), policy)

    def create_barrier(self) -> None:
        program, generation = self._own.program, self._own.program.generation
        if not self._barriers:
            return
        program.arrived += 1
        if program.arrived == self._warps:
            program.arrived, program.generation = 0, generation + 1
        else:
            self._threads.block(lambda: program.generation != generation)

    def create_atomic_rmw(self, *arguments: Any) -> Any:
        """Run the operation on one warp's thread, and return its result to all."""
        own = self._own
        program, number, own.atomics = own.program, own.atomics, own.atomics + 1
        self._threads.pause()
        if own.number == 0:
            program.atomics.append(self._atomic(*arguments))
        self._threads.block(lambda: len(program.atomics) > number)
        return program.atomics[number]

    def create_get_program_id(self, axis: int) -> Any:
        return TensorHandle(np.array([self._own.program.index[axis]], np.int32), interpreter.tl.int32)

    def launch(self, executor: GridExecutor, *given: Any, **named: Any) -> None:
        known, ended = inspect.getfullargspec(executor.fn).args, list[BaseException | None]()
        scope = interpreter._patch_lang(executor.fn)
        try:
            bound = inspect.getcallargs(executor.fn, *given, **{k: v for k, v in named.items() if k in known})
            for name in set(bound) - set(executor.constexprs):
                bound[name] = interpreter._implicit_cvt(bound[name])
            grid = (*executor.grid, 1, 1)[:3]
            interpreter_builder.set_grid_dim(*grid)

            def run(program: _Program, number: int) -> None:
                self._own.program, self._own.number, self._own.atomics = program, number, 0
                try:
                    executor.fn(**bound)
                    ended.append(None)
                except BaseException as error:
                    ended.append(error)

            warps = [(_Program(index), range(self._warps)) for index in np.ndindex(*grid)]
            for program, number in ((program, number) for program, numbers in warps for number in numbers):
                self._threads.Thread(lambda p=program, n=number: run(p, n), "warp", True).start()
            self._threads.block(lambda: len(ended) == self._warps * len(warps))
        finally:
            scope.restore()
        for error in filter(None, ended):
            raise error


@contextlib.contextmanager
def random_warps(seed: int, warps: int = 4, *, barriers: bool = True, restless: float = 0.5) -> Iterator[None]:
    """Make launches within the ``with`` block run with warps in a random order.

    The seed determines the order. Without ``barriers`` the kernels' barriers do nothing.
    """
    made = _Warps(seed, warps, restless, barriers=barriers)
    with contextlib.ExitStack() as stack:
        launch = lambda executor, *given, **named: made.launch(executor, *given, **named)  # noqa: E731
        stack.enter_context(mock.patch.object(GridExecutor, "__call__", launch))
        for name in [name for name in vars(_Warps) if name.startswith("create_")]:
            stack.enter_context(mock.patch.object(interpreter_builder, name, getattr(made, name)))
        yield
