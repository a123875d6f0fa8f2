"""Polling for what other threads do."""

import time


def becomes(condition, seconds=10):
    """Whether a condition holds within some seconds."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    return condition()


def ended(ticket):
    """Whether a ticket ends within some seconds."""
    return becomes(lambda: ticket.ended)
