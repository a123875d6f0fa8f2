"""Polling for the effects of other threads."""

import time


def becomes(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    return condition()


def ended(ticket):
    return becomes(lambda: ticket.ended)
