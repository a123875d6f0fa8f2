"""Faults to plant into `make gpu` on the host, by name; each is one that its parts exist to find."""


def plant(name):
    if name is not None:
        FAULTS[name]()


def _reused_slot():
    """Half of an expert stays what was in its slot before."""
    from vllm_dymoe.transfer.cuda import CudaStreams

    copy, written = CudaStreams.copy, set()

    def half(self, source, destination, **others):
        kept = source.numel() // 2 if destination.data_ptr() in written else source.numel()
        written.add(destination.data_ptr())
        return copy(self, source[:kept], destination[:kept], **others)

    CudaStreams.copy = half


def _fresh_output():
    """What vLLM's own operator does: the next piece was captured with another tensor than it is given now."""
    from parts.graphs import MODEL, Pieces

    operator = Pieces._operator

    def fresh(self, layer, x, weights, ids, out):
        replayed = len(self._graphs) > MODEL.layers
        operator(self, layer, x, weights, ids, out.clone() if replayed else out)

    Pieces._operator = fresh


def _no_fetches():
    """A budget that is none: everything is resident before the first step, so that equal bits say nothing."""
    from vllm_dymoe.runtime import MoERuntime

    MoERuntime.stats = lambda self, stats=MoERuntime.stats: _without_misses(stats(self))


def _without_misses(stats):
    from dataclasses import replace

    return replace(stats, misses=0)


FAULTS = {"reused slot": _reused_slot, "fresh output": _fresh_output, "no fetches": _no_fetches}
