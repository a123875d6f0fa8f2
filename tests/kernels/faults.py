"""Faults to plant into `make gpu` on the host, by name.

The command's parts exist to find them.
"""


def plant(name):
    if name is not None:
        FAULTS[name]()


def _reused_slot():
    """Let half of a fetched expert keep the slot's previous bytes."""
    from vllm_dymoe.cache.transfer.cuda import CudaStreams

    copy, written = CudaStreams.copy, set()

    def half(self, source, destination, **others):
        kept = source.numel() // 2 if destination.data_ptr() in written else source.numel()
        written.add(destination.data_ptr())
        return copy(self, source[:kept], destination[:kept], **others)

    CudaStreams.copy = half


def _old_input():
    """Let a graph read the inputs of its capture, which nothing updates."""
    from parts.decided import DevicePlannedSteps

    DevicePlannedSteps.step = lambda self, x: (self._replay(), self._seen)[1]


def _no_fetches():
    """Let a budget have no effect, so that equal bits prove nothing.

    Everything is resident before the first step.
    """
    from vllm_dymoe.server import ExpertServer

    ExpertServer.stats = lambda self, stats=ExpertServer.stats: _without_misses(stats(self))


def _without_misses(stats):
    from dataclasses import replace

    return replace(stats, misses=0)


FAULTS = {"reused slot": _reused_slot, "old input": _old_input, "no fetches": _no_fetches}
