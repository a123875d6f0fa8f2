"""Deterministic threads: one runs at a time, chosen by a seeded random number.

They replace Python's locks, conditions and threads, so the transfer engine runs unchanged and the same seed gives the
same interleaving. Time passes only when no thread can run: then one of those that wait with a timeout times out. If
there is none, that is a deadlock.
"""

import random
import threading
from collections.abc import Callable
from typing import Any

from tests.support.happens_before import Clock, History


class DeadlockError(AssertionError):
    """No thread can run."""


class DeterministicThreads:
    """Lock, Condition and Thread, to be passed to the engine as ``concurrency``.

    The thread that creates them is the first to run. The history records the order that locks impose. ``restless`` is
    the probability of a switch where nothing forces one, and ``trace`` contains the name of the thread chosen at each
    step.
    """

    def __init__(self, history: History, seed: int, restless: float = 0.5) -> None:
        self.history = history
        self._random = random.Random(seed)
        self._restless = restless
        self._runners: dict[threading.Thread, _Runner] = {}
        self._deadlocked = False
        self.trace: list[str] = []
        self._main = self._enter(threading.current_thread())

    def Lock(self) -> "_Lock":  # noqa: N802
        return _Lock(self)

    def Condition(self, lock: "_Lock") -> "_Condition":  # noqa: N802
        return _Condition(self, lock)

    def Thread(self, target: Callable[[], None], name: str, daemon: bool) -> "_Thread":  # noqa: N802
        return _Thread(self, target, name)

    def pause(self) -> None:
        if self._random.random() < self._restless:
            self.block(lambda: True)

    def block(self, until: Callable[[], bool], limit: bool = False) -> bool:
        """Wait until ``until`` holds and return True; if ``limit``, False on timeout.

        Raises DeadlockError if no thread can run.
        """
        me = self._runners[threading.current_thread()]
        me.until, me.limit, me.timed_out = until, limit, False
        self._pass_on()
        me.go.acquire()
        if self._deadlocked and me is self._main:
            raise DeadlockError
        return not me.timed_out

    def _enter(self, thread: threading.Thread) -> "_Runner":
        self._runners[thread] = _Runner(thread.name)
        return self._runners[thread]

    def _leave(self) -> None:
        del self._runners[threading.current_thread()]
        self._pass_on()

    def _pass_on(self) -> None:
        able = [runner for runner in self._runners.values() if runner.until()]
        if not able:
            able = [runner for runner in self._runners.values() if runner.limit]
            for runner in able:
                runner.timed_out = True
        self._deadlocked = not able
        chosen = self._random.choice(able) if able else self._main
        for runner in able:
            runner.timed_out &= runner is chosen
        self.trace.append(chosen.name)
        chosen.go.release()


class _Runner:
    """A thread: what it waits for, and the semaphore that wakes it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.go = threading.Semaphore(0)
        self.until: Callable[[], bool] = lambda: True
        self.limit = self.timed_out = False


class _Lock:
    def __init__(self, scheduler: DeterministicThreads) -> None:
        self._scheduler = scheduler
        self._taken = False
        self._point: Clock = {}

    def __enter__(self) -> None:
        self._scheduler.pause()
        if self._taken:
            self._scheduler.block(lambda: not self._taken)
        self._taken = True
        self._scheduler.history.follow(threading.current_thread(), self._point)

    def __exit__(self, *_: Any) -> None:
        self._point = self._scheduler.history.now(threading.current_thread())
        self._taken = False


class _Condition:
    def __init__(self, scheduler: DeterministicThreads, lock: _Lock) -> None:
        self._scheduler, self._lock = scheduler, lock
        self._waiting: list[object] = []

    def __enter__(self) -> None:
        self._lock.__enter__()

    def __exit__(self, *_: Any) -> None:
        self._lock.__exit__()

    def wait(self, timeout: float | None = None) -> bool:
        if timeout is not None and timeout <= 0:
            return False
        me = object()
        self._waiting.append(me)
        self._lock.__exit__()
        notified = self._scheduler.block(lambda: me not in self._waiting, limit=timeout is not None)
        if not notified:
            self._waiting.remove(me)
        self._lock.__enter__()
        return notified

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        while not predicate():
            if not self.wait(timeout):
                return predicate()
        return True

    def notify(self, count: int = 1) -> None:
        del self._waiting[:count]

    def notify_all(self) -> None:
        self._waiting.clear()


class _Thread(threading.Thread):
    def __init__(self, scheduler: DeterministicThreads, target: Callable[[], None], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._scheduler, self._does = scheduler, target
        self._ended = False

    def start(self) -> None:
        self._scheduler.history.follow(self, self._scheduler.history.now(threading.current_thread()))
        self._runner = self._scheduler._enter(self)
        super().start()

    def run(self) -> None:
        self._runner.go.acquire()
        try:
            self._does()
        finally:
            self._ended = True
            self._scheduler._leave()

    def join(self, timeout: float | None = None) -> None:
        if self._scheduler.block(lambda: self._ended, limit=timeout is not None):
            super().join()
