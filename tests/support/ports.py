"""Ports for servers that tests and tools start."""

import contextlib
import random
import socket

_NEVER_HANDED_OUT = range(10_000, 32_000)  # Linux gives sockets that ask for any port one of 32768 to 60999


def free_port(count: int = 1) -> int:
    """Return the first of ``count`` consecutive free ports.

    A server may bind them many seconds later. Tests that run concurrently open connections meanwhile, so the ports are
    none of those that the kernel gives to connections.
    """
    while True:
        first = random.SystemRandom().randrange(_NEVER_HANDED_OUT.start, _NEVER_HANDED_OUT.stop - count)
        with contextlib.suppress(OSError), contextlib.ExitStack() as probes:
            for port in range(first, first + count):
                probes.enter_context(socket.socket()).bind(("", port))
            return first
