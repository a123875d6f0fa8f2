"""How much of the link's time do policies and predictors hide?

    python benchmarks/predictors/emulated_card.py [--work FOLDER] [--tokens 32] [--misses fetch share]

Measures the time per token on an emulated card. Routing and router inputs are the shipped model's, from the trace of
``predictors.py``; experts have its sizes at 4 bits and random values. The device plans every layer, behind an emulated
link, with slots for a quarter of the experts. A pause stands for attention, long enough for Python's work to be a small
part. The link's rate follows from the sizes of Qwen3-30B-A3B on PCIe 4: a 4-bit expert (2.7 MB at 25 GB/s, 106 us)
takes about as long as a layer of an RTX 4090 with every expert resident. Here an expert takes as long as a layer of
this emulated card with every expert resident, which is measured first.

Each time is printed with its bound: the link's time for the bytes that have to cross it, or the time with every expert
resident if that is longer. Where all misses are fetched, these are the misses' bytes, which prefetch does not change;
where the CPU computes some, they are the bytes that have crossed the link. Outputs have to be bit for bit those with
every expert resident.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path += [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[2])]

import torch
from predictors import answers_of, recorded

from tests.small_model import make_experts, make_store
from vllm_dymoe.kernels import Activation
from vllm_dymoe.options import Options
from vllm_dymoe.planner.prefetch import MOST_AHEAD
from vllm_dymoe.policies import make_policy
from vllm_dymoe.prefetch import Gate, Predictor, RoutedModel, TrainedPredictor
from vllm_dymoe.prefetch.linear import train_on
from vllm_dymoe.prefetch.training import split_by_request
from vllm_dymoe.server import ExpertServer
from vllm_dymoe.trace.trace import Trace

RESULTS = Path(__file__).with_name("emulated_card.json")
POLICIES = {
    "on-demand": {"policy": "on-demand"},
    "duoserve, popularity": {"policy": "duoserve"},
    "duoserve, linear+input": {"policy": "duoserve"},
    "firm": {"policy": "firm"},
    "exact, nothing ahead": {"policy": "exact", "policy_options": {"look_ahead": 0}},
    "exact, next gate": {"policy": "exact"},
    "exact, linear+input": {"policy": "exact"},
}
PAUSE = 8e-3  # seconds of attention and router before a layer
WARM_UP = 40  # tokens before those that are measured: the first trial without prefetch is over


class Model:
    """The shipped model's routing: tokens to serve, gates, and a network.

    The network was trained on the other tokens.
    """

    def __init__(self, trace: Trace, tokens: int) -> None:
        decoded, header = answers_of(trace), trace.header
        learnt, held_out = split_by_request(decoded, 0.1, 0)
        assert trace.gates is not None
        assert decoded.router_inputs is not None
        gates, some = trace.gates, decoded.select(learnt)
        assert some.router_inputs is not None
        popularity = torch.ones(header.num_layers, header.num_experts)
        self.network = train_on(gates, header, some.experts.long(), some.router_inputs, popularity, MOST_AHEAD)
        weights = zip(gates.weights.float(), gates.biases, strict=True)
        self.gates = [Gate(lambda x, w=w, b=b: torch.nn.functional.linear(x.float(), w, b)) for w, b in weights]
        self.header, served = header, decoded.select(held_out)
        assert served.router_inputs is not None
        self.x = served.router_inputs[: tokens + WARM_UP].bfloat16()
        self.ids = served.experts[: tokens + WARM_UP].int()
        self.weights = served.weights[: tokens + WARM_UP].float()
        sizes = {"layers": header.num_layers, "num_experts": header.num_experts, "top_k": header.top_k}
        self.experts = make_experts(hidden=header.hidden, intermediate=64, bits=(4,), group_size=64, **sizes)
        self.store = make_store(self.experts)

    def server(self, label: str, misses: str, budget: str, link_gbps: float) -> ExpertServer:
        """Return a server of the emulated card."""
        given: dict[str, Any] = {"high": 4, "group_size": 64, "planning": "device", "misses": misses}
        options = Options(**given, **POLICIES[label], expert_budget=budget, link_gbps=link_gbps)
        header, prefetch = self.header, make_policy(options).prefetch
        sizes = header.num_layers, header.num_experts, header.top_k

        def make(on_device: bool) -> Predictor | None:
            if label.endswith("linear+input"):
                return TrainedPredictor(self.network, header.top_k)
            return (
                None if prefetch is None else prefetch.make(RoutedModel(*sizes, gates=self.gates, hidden=header.hidden))
            )

        return ExpertServer(self.store, options, torch.device("cpu"), predictor=make)

    def serve(self, server: ExpertServer) -> tuple[float, list[torch.Tensor]]:
        """Return the median seconds of a token, and all outputs."""
        path, times, outputs = server.small_batches, list[float](), []
        assert path is not None
        for token in range(len(self.x)):
            if token == WARM_UP:
                server.reset_stats()
            path.begin_step(1, large=False)
            begun = time.perf_counter()
            for layer in range(self.header.num_layers):
                time.sleep(PAUSE)
                one = slice(token, token + 1)
                given = self.x[one, layer], self.weights[one, layer].contiguous(), self.ids[one, layer].contiguous()
                outputs.append(path.forward(layer, *given, Activation.SILU))
            times.append(time.perf_counter() - begun)
        return median(times[WARM_UP:]), outputs


def measure(model: Model, way: str) -> dict[str, Any]:
    """Measure every policy with one of the options ``misses``.

    Raises:
        AssertionError: outputs are not those with every expert resident.
    """
    layers, nbytes = model.header.num_layers, model.experts.formats[4].whole_nbytes
    resident = model.server("exact, nothing ahead", "fetch", "100%", 1e3)
    full, expected = model.serve(resident)
    resident.close(keep_store=True)
    link, rows, expert = nbytes * layers / full, [], {"on_link_ms": round(1e3 * full / layers, 3)}
    for label in POLICIES:
        server = model.server(label, way, "25%", link / 1e9)
        seconds, outputs = model.serve(server)
        assert all(map(torch.equal, outputs, expected)), f"{label}, {way}: outputs differ"
        stats, tokens = server.stats(), len(model.x) - WARM_UP
        crossed = sum(stats.bytes_moved.values()) / tokens
        has_to = stats.misses * nbytes / tokens if way == "fetch" else crossed
        row = {"policy": label, "ms": 1e3 * seconds, "bound_ms": 1e3 * max(full, has_to / link)}
        row |= {"hits": stats.hit_rate, "on_cpu": stats.cpu_executed / tokens}
        row |= {outcome: count / tokens for outcome, count in stats.prefetches.items()}
        row |= {f"{why}_experts": moved / nbytes / tokens for why, moved in stats.bytes_moved.items()}
        rows.append({name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()})
        print(f"{label}, {way}: {rows[-1]}", flush=True)
        if (rates := server.cpu_execution.rates) is not None:
            expert["on_cpu_ms"] = round(1e3 * max(rates.first_row.values()), 3)
        server.close(keep_store=True)
    sizes = {"layers": layers, "tokens": len(model.x) - WARM_UP, "pause_ms": 1e3 * PAUSE}
    return sizes | {"full_ms": round(1e3 * full, 2), "expert": expert, "rows": rows}


def main() -> int:
    """Write emulated_card.json, which the README quotes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "dymoe-predictors", help="a trace")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--misses", nargs="+", choices=("fetch", "share"), default=["fetch", "share"])
    plan = parser.parse_args()
    torch.set_num_threads(1)
    model = Model(recorded(plan.work.resolve()), plan.tokens)
    found = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    for way in plan.misses:
        found[way] = measure(model, way)
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
