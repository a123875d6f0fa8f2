"""Waiting in tests for what threads do."""

import time


def becomes(condition, seconds=10):
    """Whether a condition holds at last."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    return condition()


def ended(ticket):
    """Whether a ticket comes to its end."""
    return becomes(lambda: ticket.ended)
