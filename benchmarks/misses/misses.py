"""What does sharing misses between link and host gain, and does the rule find the best split?

    python benchmarks/misses/misses.py table [BATCH ...]  virtual time, from what routers of the small model chose
    python benchmarks/misses/misses.py emulated  a device and a link that are emulated, and one core of the host
    python benchmarks/misses/misses.py here      the CPU is the device: misses copied, or computed where they lie

The bound of both is 1 + B_cpu / B_link, for misses without end. A table's cell has tokens per second beside fetching
alone, and in brackets those of the best of four: off, and the rule with half, all and twice of the host's rate. Steps
of more than 16 are fetched or narrow ones, as `narrow_parts` says, and in brackets shared as one.
"""

import itertools
import json
import sys
import time
from pathlib import Path
from statistics import median
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402

from tests.support.recorded_routing import EXPERTS, TOP_K, recorded_streams  # noqa: E402
from vllm_dymoe.plan.replay import Routings, replay  # noqa: E402
from vllm_dymoe.residency.tier import Tier  # noqa: E402
from vllm_dymoe.residency.wide_rule import narrow_parts  # noqa: E402

RATIOS, RESIDENT = (0.5, 1, 2, 3, 4, 6, 8), (0.1, 0.25, 0.5, 0.75, 0.9)
COMPUTING = 0.35
"""Of the time of a miss over the link: a layer of one token beside it, as of Qwen3-30B-A3B on an RTX 4090 at 4 bits."""
NEXT_ROW = 0.2  # of an expert's first row on the host: measured, `emulated` prints it


class Recorded(Routings):
    """What routers chose, for a number of requests side by side: above 16 from several places of the 16 answers."""

    def __init__(self, batch, most=16):
        """Steps of at most so many requests; those of a larger batch one behind the other."""
        streams = next(recorded_streams(min(batch, 16)))
        if (places := -(-batch // 16)) > 1:
            steps = streams.shape[1] // places
            streams = np.concatenate([streams[:, n * steps : (n + 1) * steps] for n in range(places)])[:batch]
        self.batch, self.header = batch, mock.Mock(num_experts=EXPERTS, top_k=TOP_K, num_layers=streams.shape[2])
        self.steps = {}
        for layer in (1, streams.shape[2] - 2):
            self.steps[layer] = []
            for step in range(min(60, streams.shape[1])):
                for first in range(0, batch, most):
                    of_step = streams[first : first + most, step, layer].astype(np.int64)
                    uses, rows = np.unique(of_step, return_counts=True)
                    self.steps[layer].append((uses, rows << 40, rows))
        steps = list(itertools.chain(*self.steps.values()))
        self.used = sum(len(uses) for uses, *_ in steps) / len(steps)


def costs(ratio):
    """Of one miss over the link in 1000 units; of no ratio nothing is computed there."""
    host = round(1000 / ratio) if ratio else 0
    return np.array([[20, 0, 0, 0], [0] * 4, [1000, host, round(host * NEXT_ROW), 16]])


def table(*batches):
    """Speeds beside fetching alone."""
    worst, result = 9.0, {}
    for batch in map(int, batches or (1, 8)):
        whole, narrow = Recorded(batch, batch), Recorded(batch)
        print(f"\nbatch {batch}      B_cpu / B_link " + "".join(f"{ratio:>13g}" for ratio in RATIOS))
        for share in RESIDENT:
            quotas, cells = {Tier.HI: [round(share * EXPERTS)]}, []
            for ratio in RATIOS:

                def time_of(assumed, ratio=ratio, quotas=quotas, routings=whole):
                    found = replay(routings, quotas, None, False, costs=costs(assumed), real=costs(ratio))
                    return max(found.shared * 1e9, 1000 * COMPUTING * routings.used / TOP_K)

                fetched, shared = time_of(0), time_of(ratio)
                parts = narrow_parts(batch, 16, TOP_K, EXPERTS, 1 - share, costs(ratio))
                ours = parts * time_of(ratio, routings=narrow) if parts else shared if batch <= 16 else fetched
                best = min(fetched, shared, ours, time_of(ratio / 2), time_of(2 * ratio))
                cells.append((fetched / ours, fetched / best))
                worst = min(worst, cells[-1][0])
                result[f"batch_{batch}_resident_{share:g}_ratio_{ratio:g}"] = [round(c, 3) for c in cells[-1]]
            print(f"{share:>8.0%} resident     " + "".join(f"  {a:5.2f} ({b:4.2f})" for a, b in cells))
    print(f"never below {worst:.2f} of fetching alone")
    print(json.dumps({"benchmark": "misses, virtual time", "speedup_and_best": result}))


def emulated(share="25%", layers=4, steps=24):
    """One core is the device, behind a link, the other one the host's, with experts of Qwen3-30B-A3B at 4 bits.

    Copies that the emulated device makes with its core have to be fast beside the link. So both cores compute without
    vector instructions where the link is not slower than the host by far.
    """
    torch.set_num_threads(1)
    from vllm_dymoe.kernels import native
    from vllm_dymoe.runtime.rates import host_seconds
    from vllm_dymoe.runtime.there import Beside

    best, results, store = native.load(), {}, _store(layers, 32)
    (fmt,) = store.experts.formats.values()
    for ratio in (0.5, 1, 2, 3, 6):
        library = native.load("DEFAULT") if ratio < 3 else best
        with mock.patch.object(native, "load", lambda isa=None, library=library: library):
            first = host_seconds(store, fmt, Beside(1, 0, 16), 1, 1.0)
            gbps = fmt.nbytes / first / ratio / 1e9
            print(f"B_cpu = {ratio:g} B_link; one core with {library.name} takes {1e3 * first:.2f} ms for an expert")
            for batch in (1, 8):
                found = _in_turns(store, share, "share", batch, steps, decisions="device", link_gbps=gbps)
                results[f"ratio_{ratio:g}_batch_{batch}"] = found
    print(json.dumps({"benchmark": "misses, emulated", "resident": share, **results}))


def here(layers=2, steps=48):
    """The device is this CPU, with all of its cores: what does copying a miss cost?"""
    results, store = {}, _store(layers, 128)
    for share in ("top-k", "25%", "50%", "75%"):
        for batch in (1, 16):
            results[f"{share}_batch_{batch}"] = _in_turns(store, share, "compute", batch, steps)
    print(json.dumps({"benchmark": "misses, the CPU is the device", **results}))


def _store(layers, number):
    """Random experts of Qwen3-30B-A3B's shape, so many in each layer, at 4 bits."""
    from tests.support.memory_writer import MemoryWriter
    from vllm_dymoe.quantize.dummy import random_store
    from vllm_dymoe.residency.code import code_of
    from vllm_dymoe.residency.format import Format, ModelExperts

    fmt = Format(2048, 768, code_of(4), 64, torch.bfloat16)
    experts = ModelExperts(tuple(range(layers)), number, 8, {4: fmt})
    return random_store(experts, MemoryWriter(experts), seed=1)


def _in_turns(store, share, way, batch, steps, **options):
    """Milliseconds of a layer whose misses are fetched, and where they are dealt with in another way."""
    from tests.runtime.decided import decode
    from tests.runtime.steps import forward
    from vllm_dymoe.config import Options
    from vllm_dymoe.observe.synthetic import synthetic_trace
    from vllm_dymoe.residency.identity import ModelIdentity
    from vllm_dymoe.runtime import MoERuntime
    from vllm_dymoe.systems.exact import Exact

    experts, runtimes = store.experts, {}
    layers, hidden = len(experts.layers), experts.formats[4].hidden
    sizes = ModelIdentity("made up", "", layers, experts.num_experts, experts.top_k, hidden)
    trace = synthetic_trace(sizes, requests=batch, prompt=1, decode=steps, skew=0.5, locality=0.3)
    for name in ("fetch", way):
        chosen = Options(hi=4, expert_budget="100%", misses=name, **options)
        runtimes[name] = MoERuntime(store, chosen, torch.device("cpu"), system=Exact(look_ahead=0))
        runtimes[name].resize(share)
    times = {name: [] for name in runtimes}
    for step in trace.steps(batch)[:steps]:
        x, outs = torch.randn(batch, hidden).bfloat16(), {}
        for name, runtime in runtimes.items():  # in turn, so that what else the machine does hits both
            run, begun = forward if runtime.decode is None else decode, time.perf_counter()
            for layer in range(layers):
                ids = trace.experts[step][:, layer].int().contiguous()
                weights = trace.weights[step][:, layer].float().contiguous()
                outs[name] = run(runtime, layer, x, weights, ids)
            times[name].append(time.perf_counter() - begun)
        one, other = outs.values()
        assert torch.equal(one, other), "the answer changes; no speed is reported"
    took = {f"{name}_ms": round(1e3 * median(some[len(some) // 4 :]) / layers, 3) for name, some in times.items()}
    fetched, ours = took.values()
    stats, said = runtimes[way].stats(), runtimes[way].host_side.describe()
    print(
        f"  {share} resident, batch {batch}: a layer {fetched:.2f} ms fetching, {ours:.2f} otherwise: "
        f"{fetched / ours:.2f} times; {stats.there} of {stats.misses} misses computed there; {said}",
        flush=True,
    )
    for runtime in runtimes.values():
        runtime.close(keep_store=True)
    return took | {"gain": round(fetched / ours, 3)}


if __name__ == "__main__":
    {"table": table, "emulated": emulated, "here": here}[sys.argv[1]](*sys.argv[2:])
