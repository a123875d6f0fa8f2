"""Runs pieces of work concurrently, each on one core.

Quantizing is many small operations, too small to be split.
"""

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from vllm_dymoe.cache.store import StoreError
from vllm_dymoe.cgroups import cores_of_process, usable_cores

# Memory of waiting and running pieces; it keeps a machine with many cores below 2 GiB in addition to the packed
# experts.
_MOST_BYTES = 1 << 30


class SideBySide:
    """Runs pieces of work that one thread submits.

    Calls ``done`` with each one's arguments, in the order of submission.
    """

    def __init__(self, done: Callable[..., object]) -> None:
        self._done = done
        self._pool, cores = _one_core_each()
        self._most = 2 * cores
        self._pending: deque[tuple[Future[object], int, tuple[Any, ...]]] = deque()
        self._bytes = 0

    def submit(self, nbytes: int, do: Callable[..., object], *arguments: Any) -> None:
        """Submit a piece that needs ``nbytes`` bytes, once there is room.

        Raises the error of an earlier piece.
        """
        while self._pending and (len(self._pending) == self._most or self._bytes + nbytes > _MOST_BYTES):
            self._finish_oldest()
        self._pending.append((self._pool.submit(do, *arguments), nbytes, arguments))
        self._bytes += nbytes

    def wait(self) -> None:
        """Wait for all submitted pieces. Raises the error of a piece."""
        while self._pending:
            self._finish_oldest()

    def close(self) -> None:
        """Start nothing more, and wait for the running pieces."""
        self._pool.shutdown(cancel_futures=True)

    def _finish_oldest(self) -> None:
        future, nbytes, arguments = self._pending.popleft()
        self._bytes -= nbytes
        future.result()
        self._done(*arguments)


def _one_core_each() -> tuple[ThreadPoolExecutor, int]:
    """Return threads whose tensor operations stay on one core, and their number.

    StoreError if they cannot be started.
    """
    cores = cores_of_process()
    count = usable_cores(len(cores))
    started = threading.Barrier(count)
    pool = ThreadPoolExecutor(count, "dymoe-pack")

    def start() -> None:
        try:
            os.sched_setaffinity(0, cores)
            torch.get_num_threads()  # from here on this thread has its own number
        finally:
            started.wait()

    # Like torch.set_num_threads, which vLLM's CPU worker replaces: the caller's own number is restored.
    before = torch.get_num_threads()
    torch._C.set_num_threads(1)
    try:
        for future in [pool.submit(start) for _ in range(count)]:
            future.result()
    except BaseException as error:
        started.abort()  # otherwise the threads that have started would wait for ever
        pool.shutdown(cancel_futures=True)
        if not isinstance(error, RuntimeError):
            raise
        raise StoreError(
            f"packing takes {count} threads, one for each core, but they cannot be started ({error}); raise the limit "
            "on processes (ulimit -u, or --pids-limit of a container), or allow fewer cores (taskset)."
        ) from error
    finally:
        torch._C.set_num_threads(before)
    return pool, count
