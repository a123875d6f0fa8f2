"""The papers' rows in virtual time: what their policies gain on a machine whose clock no other process disturbs.

The real server, cache, predictors and transfer engine replay the decode steps of a trace, with its router inputs, and
the model's gates; experts take as long to compute and to move as the data sheet of an RTX 3090 behind PCIe 4 says of
Qwen3-30B-A3B's at 4 bits. So a row is the same on every machine. The first pass over the trace warms caches up, tunes
HEOP and shows the oracle what comes; the second is measured. The trace is recorded, and DuoServe-MoE's network trained
on requests that are not replayed, where they are not there from an earlier run.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from safetensors import safe_open

sys.path += [str(Path(__file__).resolve().parents[2])]

import compared

from tests.small_model import make_experts, make_store
from tests.support.deterministic_threads import DeterministicThreads
from tests.support.happens_before import History
from vllm_dymoe.bench.prompts import by_turns, read_prompts
from vllm_dymoe.cache.store import disk
from vllm_dymoe.cache.transfer import engine, queue
from vllm_dymoe.cache.transfer.delivery import CpuDelivery, EmulatedLink
from vllm_dymoe.cache.transfer.engine import TransferEngine
from vllm_dymoe.options import Options
from vllm_dymoe.planner.routing import Routing
from vllm_dymoe.policies import make_policy
from vllm_dymoe.prefetch import RoutedModel, base
from vllm_dymoe.prefetch.gate import Gate
from vllm_dymoe.server import ExpertServer
from vllm_dymoe.trace.trace import Trace

MODEL = Path(__file__).resolve().parents[1] / "tiny_moe" / "model"
_BANDWIDTH, _LINK = 936e9, 31.51e9  # RTX 3090 and PCIe 4 x16, bytes per second
_EXPERT, _ATTENTION = 2_654_208, 2 * 2048 * (2 * 4096 + 2 * 512)  # bytes of an expert at 4 bits, and of attention

_TRAINED_BEHIND = 8  # requests that are replayed, or nearly


def _parts(ahead: str, **parts: Any) -> Mapping[str, Any]:
    return {"policy": "compared", "policy_options": {"ahead": ahead, **parts}}


def _dymoe(**parameters: Any) -> Mapping[str, Any]:
    # Rounded up, 63 of 64 choices of Mixtral's decode stay high at r = 0.75, and rows would not differ.
    return {"high_by": "depth", "rounding": "nearest", "heavy_share": 0.2, **parameters}


_FIRST_IN = partial(_parts, evicts="first in")  # FIRM-MoE's one cache, in which what came first goes first
_NOTHING_AHEAD = {"firm": "nothing ahead", "duoserve": "ACC", "dymoe": "2. cache"}
"""The row of each paper that predicts nothing: what overlaps in others is compared with it."""
_ROWS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "firm": {
        "Baseline": _FIRST_IN("next gate", whole=True),
        "+ FG": _FIRST_IN("next gate", projections=1),
        "+ MoL": _FIRST_IN("meeting of layers", whole=True, k=3, p=3),
        "+ FG + MoL": _FIRST_IN("meeting of layers", projections=1, k=3, p=3),
        "All": _FIRST_IN("tuned meeting", projections=1),
        "All, and the hottest kept": {"policy": "firm", "policy_options": {"projections": 1}},
        "an oracle": _FIRST_IN("oracle"),
        "nothing ahead": _FIRST_IN("nothing", whole=True),
    },
    "duoserve": {
        "MoESys": {"policy": "layer-prefetch"},
        "ACC": {"policy": "on-demand", "policy_options": {"overlap": False}},
        "DuoServe-MoE": {"policy": "duoserve", "predictor": "trained here"},
        "an oracle": _parts("oracle", keeps=False),
        "ACC, pageable copies": {"policy": "on-demand", "policy_options": {"overlap": False}},
    },
    "dymoe": {
        "1. load on demand": {"policy": "on-demand"},
        "2. cache": {"policy": "exact", "policy_options": {"look_ahead": 0}},
        "3. cache, prefetch": {"policy": "exact"},
        "4. cache, 4/2": {"policy": "dymoe", "low": 2, "policy_options": _dymoe(look_ahead=0)},
        "5. cache, 4/2, prefetch": {"policy": "dymoe", "low": 2, "policy_options": _dymoe()},
        "6. cache, 4/0, prefetch": {"policy": "dymoe", "low": 0, "policy_options": _dymoe()},
        "2, and an oracle": _parts("oracle"),
        "4/2 by one threshold": {"policy": "dymoe", "low": 2},
    },
}
"""Options of the plugin."""
_BUDGETS = {"firm": ("9%", "18%", "36%", "53%"), "dymoe": ("25%", "75%")}
_LAYER, _PAGEABLE = {"MoESys": "layer"}, {"ACC, pageable copies": 0.4}  # budget; share of the link's rate


class VirtualTime(DeterministicThreads):
    """Deterministic threads; time passes when all of them sleep or wait."""

    def __init__(self) -> None:
        super().__init__(History(), seed=0, restless=0.0)
        self.now = 0.0
        self._wakes: dict[object, float] = {}

    def sleep_until(self, due: float) -> None:
        """Let the others go on until a moment."""
        if due > self.now:
            me = object()
            self._wakes[me] = due
            self.block(lambda: self.now >= due)
            del self._wakes[me]

    def _pass_on(self) -> None:
        if not any(runner.until() for runner in self._runners.values()) and self._wakes:
            self.now = min(self._wakes.values())
        super()._pass_on()


class Replay:
    """A trace with router inputs, of which so many steps are served, each layer in ``host`` seconds of the host; and
    the file of DuoServe-MoE's network."""

    def __init__(self, trace: Trace, steps: int, host: float, predictor: Path | None) -> None:
        header, decoded = trace.header, trace.select(~trace.prefill)
        order = decoded.in_order()[:steps]
        assert decoded.router_inputs is not None, "the trace was recorded without router inputs"
        self._inputs = decoded.router_inputs[order].to(torch.bfloat16)
        self._ids, self._weights = decoded.experts[order].int(), decoded.weights[order].float()
        self._header, self._host, self._predictor = header, host, predictor
        with safe_open(MODEL / "model.safetensors", framework="pt") as file:
            names = (f"model.layers.{layer}.mlp.gate.weight" for layer in range(header.num_layers))
            self._gates = [Gate(partial(_logits, file.get_tensor(name).float())) for name in names]
        shape = {"layers": header.num_layers, "num_experts": header.num_experts, "top_k": header.top_k}
        self._stores = {nested: make_store(make_experts(nested=nested, **shape)) for nested in (False, True)}

    def served(self, options: Mapping[str, Any], budget: str, link_share: float = 1.0) -> tuple[float, float]:
        """Milliseconds of a token, and the share of its experts that were there."""
        threads = VirtualTime()
        clock = SimpleNamespace(perf_counter=lambda: threads.now, monotonic=time.monotonic)
        with contextlib.ExitStack() as stack:
            for module in (engine, disk, queue, base):
                stack.enter_context(patch.object(module, "time", clock))
            stack.enter_context(patch.object(disk, "sleep_until", threads.sleep_until))
            return self._serve(threads, options, budget, link_share)

    def _serve(
        self, threads: VirtualTime, options: Mapping[str, Any], budget: str, link_share: float
    ) -> tuple[float, float]:
        header, store = self._header, self._stores[bool(options.get("low"))]
        given = dict(options)
        network = given.pop("predictor", None) is not None
        chosen = Options(group_size=32, expert_budget=budget, planning="host", **given)
        policy, whole = make_policy(chosen), store.experts.formats[4].whole_nbytes
        predictor, servers = None, list[ExpertServer]()
        if policy.prefetch is not None:
            predictor = policy.prefetch.make(RoutedModel(
                header.num_layers, header.num_experts, header.top_k, self._gates,
                held=lambda layer: frozenset(servers[0].cache.table.precision[layer].nonzero()[0].tolist()),
                hidden=header.hidden, fingerprint=header.fingerprint,
                predictor=self._predictor if network else None,
            ))  # fmt: skip
        moves = EmulatedLink(CpuDelivery(store), link_share * _LINK * whole / _EXPERT)
        transfers = TransferEngine(moves, 1, waiters_move=False, concurrency=threads)
        device = torch.device("cpu")
        server = ExpertServer(store, chosen, device, policy=policy, engine=transfers, predictor=predictor)
        servers.append(server)
        serving = server.host_planned
        if serving.prefetcher is not None:
            serving.prefetcher.clock = lambda: threads.now
        step = SimpleNamespace()

        def begin(x: Any, plan: Any, out: Any, activation: Any) -> None:
            step.views = plan.views
            out.zero_()

        def compute(items: Sequence[int], receive: Any = None) -> None:
            for projection in range(3):
                if receive is not None:
                    receive(projection + 1)
                nbytes = sum(_bytes_of(step.views[item].gate.format) for item in items)
                threads.sleep_until(threads.now + nbytes / whole * _EXPERT / _BANDWIDTH)

        server.kernel.begin, server.kernel.compute = begin, compute  # type: ignore[method-assign]
        tokens, layers = self._ids.shape[:2]
        for _ in range(2):
            server.reset_stats()
            begun = threads.now
            for token in range(tokens):
                for layer in range(layers):
                    threads.sleep_until(threads.now + _ATTENTION / _BANDWIDTH + self._host)
                    x, ids, weights = (of[token : token + 1, layer] for of in (self._inputs, self._ids, self._weights))
                    serving.forward(Routing(layer, layers, x, ids, weights))
            seconds = threads.now - begun
        hits = server.stats().hit_rate
        server.engine.close()
        return 1e3 * seconds / tokens, hits


def _logits(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(x.float(), weight)


def _bytes_of(form: Any) -> int:
    """Of one projection that is read, base and fine."""
    return form.nbytes + (form.base.nbytes if form.nested else 0)


def recorded(work: Path) -> tuple[Trace, Path]:
    """A trace of the shipped prompts with the routers' inputs, and DuoServe-MoE's network."""
    trace, others, network = work / "trace", work / "others.safetensors", work / "predictor.safetensors"
    if not network.exists():
        work.mkdir(parents=True, exist_ok=True)
        prompts = work / "prompts.jsonl"
        asked = by_turns(read_prompts("shipped").prompts)
        prompts.write_text("".join(json.dumps({"prompt": prompt.text}) + "\n" for prompt in asked))
        _command("trace", MODEL, "--prompts", prompts, "--out", trace, "--inputs")
        found = Trace.load(trace)
        found.select(torch.cat(list(found.by_request())[_TRAINED_BEHIND:])).save(others)
        # Often, for so few tokens.
        _command("train", others, "--out", network, "--architecture", "paper-shared", "--epochs", 60)
    return Trace.load(trace), network


def _command(*words: object) -> None:
    subprocess.run([str(Path(sys.executable).with_name("vllm-dymoe")), *map(str, words)], check=True)


def show(paper: str, label: str, cells: Mapping[str, tuple[float, float]]) -> None:
    """One row: milliseconds of a token and hits, by budget."""
    shown = "  ".join(f"{budget} {ms:.2f} ms ({hits:.0%})" for budget, (ms, hits) in cells.items())
    print(f"  {paper}: {label:<40} {shown}", flush=True)


def main() -> None:
    """A line for each row, and one of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("papers", nargs="*", default=tuple(_ROWS), help=f"some of {', '.join(_ROWS)}; all if none")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "dymoe-papers", help="for the trace")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--host-us", type=float, nargs="+", default=(0, 300), help="of the host, for each layer")
    plan = parser.parse_args()
    torch.set_num_threads(1)
    compared.make_known()
    (trace, network), found = recorded(plan.work.resolve()), {}
    for host in plan.host_us:
        replay = Replay(trace, plan.steps, 1e-6 * host, network)
        computing = (
            1e3
            * trace.header.num_layers
            * (_ATTENTION / _BANDWIDTH + 1e-6 * host + trace.header.top_k * _EXPERT / _BANDWIDTH)
        )
        print(f"host {host:g} us a layer: a token computes {computing:.2f} ms", flush=True)
        for paper in plan.papers:
            for label, options in _ROWS[paper].items():
                budgets = _BUDGETS.get(paper, (_LAYER.get(label, "top-k"),))
                share = _PAGEABLE.get(label, 1.0)
                cells = {budget: replay.served(options, budget, share) for budget in budgets}
                show(paper, label, cells)
                found[f"{paper}, host {host:g} us, {label}"] = {name: ms for name, (ms, _) in cells.items()}
                if label == _NOTHING_AHEAD[paper]:
                    bounds = {name: (max(computing, ms - computing), hits) for name, (ms, hits) in cells.items()}
            show(paper, f"bound: all of {_NOTHING_AHEAD[paper]} overlaps", bounds)
    print(json.dumps({"ms_per_token": found, "model": "Qwen3-30B-A3B's sizes, the shipped model's routers"}))


if __name__ == "__main__":
    main()
