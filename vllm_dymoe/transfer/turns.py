"""Threads that take turns: one runs at a time, and at every step a random number decides which goes on.

With these in the place of Python's own locks, conditions and threads, the engine runs
unchanged, and a seed decides its interleaving: the same seed, the same run. Time passes
only when nobody can go on; then one of those who wait with a limit gives up. If there
is none either, that is a deadlock.
"""

import random
import threading
from collections.abc import Callable
from typing import Any

from vllm_dymoe.transfer.happens_before import Clock, History


class DeadlockError(AssertionError):
    """Every thread waits for another one."""


class Turns:
    """Lock, Condition and Thread for ``QueuedEngine(concurrency=...)``; used from the thread that makes it.

    Args:
        history: told what locks order.
        seed: decides who goes on.
        restless: probability of another thread's turn where nothing forces it.

    Attributes:
        trace: names of the threads that went on, one for each step.
    """

    def __init__(self, history: History, seed: int, restless: float = 0.5) -> None:
        self.history = history
        self._random = random.Random(seed)
        self._restless = restless
        self._players: dict[threading.Thread, _Player] = {}
        self._deadlocked = False
        self.trace: list[str] = []
        self._main = self._enter(threading.current_thread())

    def Lock(self) -> "_Lock":  # noqa: N802
        """As ``threading.Lock``."""
        return _Lock(self)

    def Condition(self, lock: "_Lock") -> "_Condition":  # noqa: N802
        """As ``threading.Condition``."""
        return _Condition(self, lock)

    def Thread(self, target: Callable[[], None], name: str, daemon: bool) -> "_Thread":  # noqa: N802
        """As ``threading.Thread``."""
        return _Thread(self, target, name)

    def pause(self) -> None:
        """Let others go first, or not."""
        if self._random.random() < self._restless:
            self.block(lambda: True)

    def block(self, until: Callable[[], bool], limit: bool = False) -> bool:
        """Go on when ``until`` holds; False if with a ``limit`` the time for it has passed.

        Raises:
            DeadlockError: nobody can go on.
        """
        me = self._players[threading.current_thread()]
        me.until, me.limit, me.timed_out = until, limit, False
        self._pass_on()
        me.baton.acquire()
        if self._deadlocked and me is self._main:
            raise DeadlockError
        return not me.timed_out

    def _enter(self, thread: threading.Thread) -> "_Player":
        self._players[thread] = _Player(thread.name)
        return self._players[thread]

    def _leave(self) -> None:
        del self._players[threading.current_thread()]
        self._pass_on()

    def _pass_on(self) -> None:
        """Give the baton to somebody who can go on."""
        able = [player for player in self._players.values() if player.until()]
        if not able:
            able = [player for player in self._players.values() if player.limit]
            for player in able:
                player.timed_out = True
        self._deadlocked = not able
        chosen = self._random.choice(able) if able else self._main
        for player in able:
            player.timed_out &= player is chosen
        self.trace.append(chosen.name)
        chosen.baton.release()


class _Player:
    """A thread: what it waits for, and its right to go on."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.baton = threading.Semaphore(0)
        self.until: Callable[[], bool] = lambda: True
        self.limit = self.timed_out = False


class _Lock:
    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._taken = False
        self._point: Clock = {}

    def __enter__(self) -> None:
        self._turns.pause()
        if self._taken:
            self._turns.block(lambda: not self._taken)
        self._taken = True
        self._turns.history.follow(threading.current_thread(), self._point)

    def __exit__(self, *_: Any) -> None:
        self._point = self._turns.history.now(threading.current_thread())
        self._taken = False


class _Condition:
    def __init__(self, turns: Turns, lock: _Lock) -> None:
        self._turns, self._lock = turns, lock
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
        notified = self._turns.block(lambda: me not in self._waiting, limit=timeout is not None)
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
    def __init__(self, turns: Turns, target: Callable[[], None], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._turns, self._does = turns, target
        self._ended = False

    def start(self) -> None:
        self._turns.history.follow(self, self._turns.history.now(threading.current_thread()))
        self._player = self._turns._enter(self)
        super().start()

    def run(self) -> None:
        self._player.baton.acquire()
        try:
            self._does()
        finally:
            self._ended = True
            self._turns._leave()

    def join(self, timeout: float | None = None) -> None:
        if self._turns.block(lambda: self._ended, limit=timeout is not None):
            super().join()
