"""Faults to plant into `make gpu` on the host, by name; each is one that its parts exist to find."""


def plant(name):
    if name is not None:
        FAULTS[name]()


def _reused_slot():
    """Half of an expert stays what was in its slot before."""
    from vllm_dymoe.cache.transfer.cuda import CudaStreams

    copy, written = CudaStreams.copy, set()

    def half(self, source, destination, **others):
        kept = source.numel() // 2 if destination.data_ptr() in written else source.numel()
        written.add(destination.data_ptr())
        return copy(self, source[:kept], destination[:kept], **others)

    CudaStreams.copy = half


def _old_input():
    """A graph reads what it was captured with, and nothing is written there."""
    from parts.decided import DevicePlannedSteps

    DevicePlannedSteps.step = lambda self, x: (self._replay(), self._seen)[1]


def _no_fetches():
    """A budget that is none: everything is resident before the first step, so that equal bits say nothing."""
    from vllm_dymoe.server import ExpertServer

    ExpertServer.stats = lambda self, stats=ExpertServer.stats: _without_misses(stats(self))


def _without_misses(stats):
    from dataclasses import replace

    return replace(stats, misses=0)


FAULTS = {"reused slot": _reused_slot, "old input": _old_input, "no fetches": _no_fetches}
