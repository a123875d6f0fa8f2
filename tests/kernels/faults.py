"""Faults to plant into `make gpu` on the host, by name.

The command's parts exist to find them.
"""


def plant(names):
    """Plant the faults with these names, separated by commas."""
    for name in names.split(", ") if names is not None else ():
        FAULTS[name]()


def _reused_slot():
    """Half of a fetched expert keeps the slot's previous bytes."""
    from vllm_dymoe.executor.plain_kernels import PlainKernels

    written = set()

    def half(self, source, destination):
        kept = source.numel() // 2 if destination.data_ptr() in written else source.numel()
        written.add(destination.data_ptr())
        destination[:kept].copy_(source[:kept])
        return destination

    PlainKernels.fetch = half


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
