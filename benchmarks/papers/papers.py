"""Which claims of four papers hold, and why? A simulation of their tables.

The simulator (vllm_dymoe/plan/simulator.py) runs the real planner, policies and predictors over the shipped model's
routing, recorded on texts of three domains. Sizes are those of the papers' models, rates those of their devices, and
host time is charged as measured. Results go into results.json, pictures and README.md; --page writes the last two
again.
"""

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

sys.path += [str(Path(__file__).resolve().parents[2])]

import compared
import page
from recorded import ANSWER, LENGTHS, MODEL, domain_of, recorded

from vllm_dymoe.experts.encoding import encoding_of
from vllm_dymoe.experts.format import ExpertFormat, ModelExperts, stored_formats
from vllm_dymoe.options import Options
from vllm_dymoe.plan.device import Device
from vllm_dymoe.plan.device import find_device as find_measured
from vllm_dymoe.plan.simulator import Costs, Model, Result, Simulator, Step, sessions
from vllm_dymoe.planner.routing import Phase, Routing
from vllm_dymoe.policies import make_policy
from vllm_dymoe.prefetch import Predictor, RoutedModel
from vllm_dymoe.prefetch.gate import Gate
from vllm_dymoe.prefetch.meeting_of_layers import MeetingOfLayers
from vllm_dymoe.trace.trace import Trace

HERE = Path(__file__).resolve().parent
_LONGEST = 24  # simulated tokens of an answer
_WARM = 2  # requests of other texts that warm up a cache, with whole answers of 48 tokens
_SETTLE = 5  # the same where HEOP has to settle, which takes it 200 decode steps
_HOST = 40e9  # bytes of experts per second that a CPU executes; an assumption
_ANSWERS = (8, 16, 24)  # tokens, of FIRM-MoE's Figure 5
_PCIE3 = "13.4GB/s"  # 15.75 GB/s minus protocol overhead


def find_device(name: str, link: str | None) -> Device:
    """Return a card by its data sheet alone, as the papers' kernels would use it."""
    return replace(find_measured(name, link), rates=())


@dataclass(frozen=True)
class Sizes:
    """Sizes of a paper's model, with the trace's layers and experts."""

    hidden: int
    intermediate: int
    attention: int  # bytes outside of experts, for each layer
    layers: int  # layers of the model itself, for peak memory
    each: int  # experts of a layer of the model, likewise

    def expert_bytes(self, bits: int) -> int:
        return ExpertFormat(self.hidden, self.intermediate, encoding_of(bits), 64, torch.bfloat16).whole_nbytes

    def experts(self, header: Any, bits: tuple[int, ...]) -> ModelExperts:
        def form(width: int) -> ExpertFormat:
            return ExpertFormat(self.hidden, self.intermediate, encoding_of(width), 64, torch.bfloat16)

        return ModelExperts(
            tuple(range(header.num_layers)), header.num_experts, header.top_k, stored_formats(bits, form)
        )


QWEN3 = Sizes(2048, 768, 2 * 2048 * (2 * 4096 + 2 * 512), 48, 128)
QWEN15 = Sizes(2048, 1408, 2 * (4 * 2048 * 2048 + 3 * 2048 * 5632), 24, 60)
MIXTRAL = Sizes(4096, 14336, 2 * 4096 * (2 * 4096 + 2 * 1024), 32, 8)
MIXTRAL22 = Sizes(6144, 16384, 2 * 6144 * (2 * 6144 + 2 * 1024), 56, 8)
OLMOE = Sizes(2048, 1024, 2 * 4 * 2048 * 2048, 16, 64)
DEEPSEEK16 = Sizes(2048, 1408, 2 * (4 * 2048 * 2048 + 3 * 2048 * 2816), 27, 64)


def policy(name: str, high: int = 4, low: int = 0, **parameters: Any) -> dict[str, Any]:
    """Return options of the plugin, without the budget."""
    return {"policy": name, "high": high, "low": low, "policy_options": parameters}


RESIDENT = policy("exact", look_ahead=0)  # the bound: every expert is resident, whatever the share
RESIDENT16 = policy("exact", 16, look_ahead=0)


class Bench:
    """The recorded routing, and rows that are simulated over it."""

    def __init__(self, work: Path) -> None:
        compared.make_known()
        self.trace, self._attention, self.others, self._attention_of_others, self.network = recorded(work)
        header = self.trace.header
        with safe_open(MODEL / "model.safetensors", framework="pt") as file:
            names = (f"model.layers.{layer}.mlp.gate.weight" for layer in range(header.num_layers))
            self.gates = [Gate(partial(_logits, file.get_tensor(name).float())) for name in names]
        self.costs, self._rows = Costs.measured(), work / "rows.jsonl"
        lines = self._rows.read_text().splitlines() if self._rows.exists() else []
        self._known: dict[str, dict[str, Any]] = dict(map(json.loads, lines))

    @cache  # noqa: B019
    def steps(
        self, batch: int = 1, *, others: bool = False, requests: tuple[int, ...] | None = None, longest: int = _LONGEST
    ) -> list[Step]:
        return list(_shortened(sessions(self.others if others else self.trace, batch, requests), longest))

    def simulator(
        self, given: Mapping[str, Any], share: float | str, sizes: Sizes, device: Device, costs: Costs | None = None,
        *, trace: Trace | None = None, all_of_16: bool = False, **how: Any,
    ) -> Simulator:  # fmt: skip
        """Return a simulator with a share of all experts' bytes at high.

        The share can also be "top-k" or "layer". With ``all_of_16`` the share is of all experts at 16 bits.
        """
        trace = trace or self.trace
        header, chosen = trace.header, Options(**{"planning": "host", "group_size": 64, **given})
        kind, experts = make_policy_of(chosen, self.network), sizes.experts(header, tuple(chosen.stored_bits))
        whole = experts.formats[chosen.high].whole_nbytes
        everything = header.num_layers * header.num_experts * whole * (16 / chosen.high if all_of_16 else 1)
        slots = {"top-k": header.top_k, "layer": header.num_experts}
        limit = int(slots[share] * whole if isinstance(share, str) else share * everything)
        made: list[Simulator] = []
        predictor = self._predictor(kind, trace, made)
        limit += 0 if predictor is None else predictor.nbytes
        model = Model(experts, sizes.attention)
        made.append(Simulator(
            trace, model, chosen, kind, device, costs or self.costs, limit, predictor=predictor,
            attention=self._attention_of(trace), **how
        ))  # fmt: skip
        return made[0]

    def _attention_of(self, trace: Trace) -> torch.Tensor:
        return self._attention if trace is self.trace else self._attention_of_others

    def _predictor(self, kind: Any, trace: Trace, made: list[Simulator]) -> Predictor | None:
        if kind.prefetch is None:
            return None
        header = trace.header

        def held(layer: int) -> frozenset[int]:
            return frozenset(made[0].table.precision[layer].nonzero()[0].tolist())

        takes = kind.prefetch.needs_predictor
        predictor = kind.prefetch.make(RoutedModel(
            header.num_layers, header.num_experts, header.top_k, self.gates, held=held, hidden=header.hidden,
            fingerprint=header.fingerprint, predictor=self.network if takes else None,
        ))  # fmt: skip
        if isinstance(predictor, compared.Oracle):
            for step in self.steps(longest=ANSWER):
                tokens = torch.from_numpy(step.tokens)
                for layer in range(header.num_layers):
                    ids, weights = trace.experts[tokens, layer].int(), trace.weights[tokens, layer].float()
                    predictor.observe(Routing(layer, header.num_layers, torch.empty(len(tokens), 0), ids, weights))
        return predictor

    def row(
        self, given: Mapping[str, Any], share: float | str, sizes: Sizes, device: Device, **how: Any
    ) -> dict[str, Any]:
        """Serve the replayed requests one at a time, after requests of other texts.

        Returns:
            means, with their spread over the requests.
        """
        share = 1.0 if given is RESIDENT or given == RESIDENT16 else share
        key = json.dumps([given, share, vars(sizes), vars(device), str(how)], sort_keys=True)
        if key in self._known:  # from an interrupted run
            return self._known[key]
        simulator = self._warmed(given, share, sizes, device, **how)
        found = self._known[key] = summary_of(simulator.run(self.steps()), simulator)
        with self._rows.open("a") as file:
            file.write(json.dumps([key, found]) + "\n")
        return found

    def _warmed(
        self, given: Mapping[str, Any], share: float | str, sizes: Sizes, device: Device, **how: Any
    ) -> Simulator:
        """Return a simulator with a warm cache and a predictor that has settled.

        Both have seen requests of other texts.
        """
        simulator = self.simulator(given, share, sizes, device, **how)
        simulator.tell(self.others, self._attention_of_others)
        warm = _SETTLE if isinstance(simulator.predictor, MeetingOfLayers) else _WARM
        each = (1 + int(self.others.request.max())) // warm
        for number in range(warm):
            simulator.run(self.steps(others=True, requests=(number * each,), longest=ANSWER), measured=False)
        if isinstance(simulator.predictor, MeetingOfLayers):
            assert simulator.predictor.settled, "HEOP still moves K and P"
        simulator.tell(self.trace, self._attention)
        return simulator

    def lengths(
        self, given: Mapping[str, Any], share: float | str, sizes: Sizes, device: Device, **how: Any
    ) -> dict[str, float]:
        """Return tokens per second of whole requests, by "prompt, answer" in tokens."""
        simulator = self._warmed(given, share, sizes, device, **how)
        found = simulator.run(self.steps())
        by_request: dict[int, list[float]] = {}
        for seconds, step in zip(found.seconds, found.steps, strict=True):
            by_request.setdefault(step.requests[0], []).append(seconds)
        made: dict[str, float] = {}
        for at, prompt in enumerate(LENGTHS):
            same = [times for number, times in by_request.items() if number % len(LENGTHS) == at]
            for answer in _ANSWERS:
                seconds = float(np.mean([sum(times[: 1 + answer]) for times in same]))
                made[f"{prompt}, {answer}"] = round(answer / seconds, 4)
        return made


def make_policy_of(chosen: Options, network: Path) -> Any:
    """Return the policy; DuoServe-MoE's own needs a trained network."""
    needs = chosen.policy == "duoserve-paper"
    return make_policy(chosen.model_copy(update={"predictor": str(network)}) if needs else chosen)


def summary_of(found: Result, simulator: Simulator) -> dict[str, Any]:
    """Return means, percentiles, and the spread over requests."""
    tokens: dict[int, list[float]] = {}
    for seconds, step in zip(found.seconds, found.steps, strict=True):
        if step.phase is Phase.DECODE and len(step.requests) == 1:
            tokens.setdefault(step.requests[0], []).append(1e3 * seconds)
    means = [float(np.mean(of)) for of in tokens.values()]
    made = found.summary() | {
        "tpot_spread": float(np.std(means)) if means else 0.0,
        "tpot_by_request": [round(value, 5) for value in means],
        "fetched": found.fetched,
        "high": found.high / max(1, found.choices),
        "predictor_bytes": 0 if simulator.predictor is None else simulator.predictor.nbytes,
    }
    if found.decided:
        made |= {
            "accuracy": found.correct / max(1, found.needed), "utilization": found.correct / max(1, found.predicted),
            "named_whole": found.whole / found.decided, "named_some": found.some / found.decided,
        }  # fmt: skip
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in made.items()}


def _shortened(steps: Iterator[Step], longest: int) -> Iterator[Step]:
    done: dict[int, int] = {}
    for step in steps:
        for number in step.requests if step.phase is Phase.DECODE else ():
            done[number] = done.get(number, 0) + 1
        if step.phase is Phase.PREFILL or done[step.requests[0]] <= longest:
            yield step


def _logits(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(x.float(), weight)


Table = dict[str, dict[str, Any]]


def dymoe(bench: Bench) -> dict[str, Any]:
    """Return Table 3 (the gain of each part) and Figure 10 (TTFT and TPOT by memory)."""
    device = find_device("rtx3090", _PCIE3)
    rows = {
        "1. load on demand": policy("on-demand"),
        "2. cache": policy("exact", look_ahead=0, evicts="least recent"),
        "3. cache, prefetch": policy("exact", evicts="least recent"),
        "4. cache, 4/2": policy("dymoe-paper", low=2, look_ahead=0),
        "5. cache, prefetch, 4/2": policy("dymoe-paper", low=2),
        "6. cache, prefetch, 4/0": policy("dymoe-paper"),
        "ours: dymoe, 4/2": policy("dymoe", low=2),
        "an oracle": policy("compared", ahead="oracle", evicts="least recent"),
        "everything resident": RESIDENT,
        "Accelerate": policy("on-demand", overlap=False),
    }
    shares = (0.25, 0.5, 0.75)
    found = {
        f"{share:.0%}": {name: bench.row(of, share, QWEN3, device) for name, of in rows.items()} for share in shares
    }
    data_sheet = {name: bench.row(of, 0.5, QWEN3, device, costs=Costs.nothing()) for name, of in rows.items()}
    # Table 3's own model: what 16 and 24 GB leave after 5 GB for everything but experts.
    mixtral: dict[str, Any] = {}
    for memory in (16, 24):
        share = (memory - 5) * 1e9 / (MIXTRAL.layers * MIXTRAL.each * MIXTRAL.expert_bytes(4))
        mixtral[f"{memory} GB"] = {name: bench.row(of, share, MIXTRAL, device) for name, of in rows.items()}
    return {"budgets": found, "no host, 50%": data_sheet, "Mixtral": mixtral}


def duoserve(bench: Bench) -> dict[str, Any]:
    """Return Figures 5 and 6, and Tables 2 and 3."""
    rows: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
        "MoESys": (policy("layer-prefetch"), "layer", {"fetches_all": True}),
        "ACC": (policy("on-demand", overlap=False), "top-k", {}),
        "DuoServe-MoE": (policy("duoserve-paper"), "top-k", {}),
        "ours: duoserve without a network": (policy("duoserve"), "top-k", {}),
        "the next gate": (policy("compared", ahead="next gate", keeps=False), "top-k", {}),
        "an oracle": (policy("compared", ahead="oracle", keeps=False), "top-k", {}),
        "everything resident": (RESIDENT, "top-k", {}),
    }
    found: dict[str, Any] = {}
    for card in ("a5000", "a6000"):
        for costs, said in ((bench.costs, "measured host"), (Costs.nothing(), "no host")):
            device = find_device(card, None)
            found[f"{card}, {said}"] = {
                name: bench.row(given, share, MIXTRAL, device, costs=costs, **how)
                for name, (given, share, how) in rows.items()
            }
    return found


def firm(bench: Bench) -> dict[str, Any]:
    """Return Tables 1 and 2, and Figures 4, 6 and 7."""
    device = find_device("rtx3090", None)
    parts = partial(policy, "compared", 16, evicts="least recent")
    rows = {
        "Baseline": parts(ahead="next gate", whole=True),
        "+ FG": parts(ahead="next gate", projections=1),
        "+ MoL": parts(ahead="meeting of layers", whole=True, k=3, p=3),
        "+ FG + MoL": parts(ahead="meeting of layers", projections=1, k=3, p=3),
        "All (firm-paper)": policy("firm-paper", 16),
        "n = 2": policy("firm-paper", 16, projections=2),
        "n = 3": policy("firm-paper", 16, projections=3),
        "ours: firm": policy("firm", 16),
        "nothing ahead": parts(ahead="nothing"),
        "an oracle": parts(ahead="oracle"),
        "everything resident": RESIDENT16,
    }
    shares = {size: int(size) / 1440 for size in ("128", "256", "512", "768")}
    found = {
        name: {row: bench.row(of, share, QWEN15, device) for row, of in rows.items()} for name, share in shares.items()
    }
    quick = {row: bench.row(of, shares["256"], QWEN15, device, costs=Costs.nothing()) for row, of in rows.items()}
    grid = {
        f"{k},{p}": bench.row(parts(ahead="meeting of layers", projections=1, k=k, p=p), shares["256"], QWEN15, device)
        for k in (3, 4, 8)
        for p in (1, 2, 3)
    }
    votes = {
        "MoL": (1.0, 1.0, 1.0, 3.0), "union": (1.0, 1.0, 1.0, 1.0),
        **{f"weighted, at least {least:g}": (1.5, 1.0, 0.5, least) for least in (2.0, 2.5)},
    }  # fmt: skip
    strategies = {"top 4": parts(ahead="next gate", projections=1)} | {
        name: parts(ahead="votes", projections=1, k=3, weights=of[:3], least=of[3]) for name, of in votes.items()
    }
    named = {name: bench.row(of, shares["256"], QWEN15, device) for name, of in strategies.items()}
    return {"caches": found, "no host, 256": quick, "grid": grid, "named": named}


def lengths(bench: Bench) -> dict[str, Any]:
    """Return FIRM-MoE's Figure 5: tokens per second by model, system and lengths.

    The cache has 256 experts. Fiddler executes misses on the CPU where that is faster.
    """
    device = find_device("rtx3090", None)
    with_cpu = replace(device, host=_HOST)
    systems = {
        "All (firm-paper)": (policy("firm-paper", 16), device),
        "ours: firm": (policy("firm", 16), device),
        "CPU execution (Fiddler)": (policy("exact", 16, look_ahead=0) | {"misses": "share"}, with_cpu),
        "load on demand": (policy("on-demand", 16), device),
    }
    models = {"OLMoE-1B-7B": OLMOE, "Qwen1.5-MoE-A2.7B": QWEN15, "DeepSeek-MoE-16B": DEEPSEEK16}
    return {
        model: {
            system: bench.lengths(of, 256 / (sizes.layers * sizes.each), sizes, on)
            for system, (of, on) in systems.items()
        }
        for model, sizes in models.items()
    }


def memory(bench: Bench) -> dict[str, Any]:
    """Return DuoServe-MoE's Table 2: bytes in addition to those of ACC, by model."""
    found = {}
    for name, sizes in (("Mixtral 8x7B", MIXTRAL), ("Mixtral 8x22B", MIXTRAL22)):
        # Eq. 5 and section 4.2: affinity, popularity and the choices of all layers before; then the hidden layers.
        widths = ((sizes.layers - 1) * sizes.each + 2 * sizes.each, 2048, 1024, 512, 256, 128, 64, sizes.each)
        found[name] = {
            "network": 2 * sum(one * other for one, other in itertools.pairwise(widths)),
            "rest of a layer": (sizes.each - 2) * sizes.expert_bytes(4),
            "all experts but two": (sizes.layers * sizes.each - 2) * sizes.expert_bytes(4),
        }
    return found


def dynaexq(bench: Bench) -> dict[str, Any]:
    """Return throughput by batch, TTFT by prompt, and a shift of traffic."""
    device, window = find_device("a6000", None), {"window_s": 0.02}
    rows = {
        "static 4": (policy("exact", 4, look_ahead=0), None),
        "static 2": (policy("exact", 2, look_ahead=0), None),
        "dynaexq-paper, 16/4": (policy("dynaexq-paper", 16, 4, **window), 0.7),
        "ours: dynaexq, 16/4": (policy("dynaexq", 16, 4, **window), 0.7),
        "offloading, 16": (policy("exact", 16), 0.7),
    }
    batches: dict[str, Table] = {}
    for batch in (1, 2, 4, 8, 16, 32):
        batches[str(batch)] = {}
        for name, (given, share) in rows.items():
            how: dict[str, Any] = {"trace": bench.others}
            simulator = bench.simulator(given, 1.0 if share is None else share, QWEN3, device, **how)
            requests = tuple(range(max(4, batch)))
            simulator.run(bench.steps(4, others=True, requests=tuple(range(32, 36))), measured=False)
            found = simulator.run(bench.steps(batch, others=True, requests=requests))
            batches[str(batch)][name] = summary_of(found, simulator)
    lengths: dict[str, Table] = {}
    for name, (given, share) in rows.items():
        simulator = bench.simulator(given, 1.0 if share is None else share, QWEN3, device)
        found = simulator.run(bench.steps())
        for seconds, step in zip(found.seconds, found.steps, strict=True):
            if step.phase is Phase.PREFILL:
                of = lengths.setdefault(str(len(step.tokens)), {}).setdefault(name, {"ttft": []})
                of["ttft"].append(round(1e3 * seconds, 4))
    shift: Table = {}
    for name in ("dynaexq-paper, 16/4", "ours: dynaexq, 16/4"):
        for frozen in (False, True):
            given = rows[name][0]
            if frozen:
                given = {**given, "policy_options": {**given["policy_options"], "window_s": 1e9}}
            simulator = bench.simulator(given, 0.4, QWEN3, device)
            by_domain: dict[str, float] = {}
            for number in range(12):
                of = simulator.run(bench.steps(requests=(number,)))
                by_domain.setdefault(domain_of(number), 0.0)
                by_domain[domain_of(number)] += of.high / of.choices / 4
            shift[name + (", frozen" if frozen else "")] = {key: round(value, 4) for key, value in by_domain.items()}
    return {"batches": batches, "lengths": lengths, "high after a shift": shift}


def adaptive(bench: Bench) -> dict[str, Any]:
    """Return the time that fetching high versions costs, by batch.

    It is measured at 4/2 bits, with half and with a quarter of the residual slices.
    """
    device, window = replace(find_device("a6000", None), decides=True), {"window_s": 0.02}
    rows = {
        "dynaexq": policy("dynaexq", 4, 2, **window),
        "adaptive, threshold 1.6": policy("adaptive", 4, 2, threshold=1.6, **window),
        "adaptive (wait_share 0.1)": policy("adaptive", 4, 2, **window),
        "uniform 4 (wait_share 1)": policy("adaptive", 4, 2, wait_share=1, **window),
        "exact, as many bytes": policy("exact", 4),
    }
    found: dict[str, Any] = {}
    for residuals in (0.5, 0.25):
        for batch in (1, 4, 32):
            table = found.setdefault(f"{residuals:.0%}", {})[str(batch)] = {}
            for name, options in rows.items():
                given = options | {"planning": "auto"}
                share = (2.5 + 2 * residuals) / 4.5
                simulator = bench.simulator(given, share, QWEN3, device, trace=bench.others)
                simulator.run(bench.steps(4, others=True, requests=tuple(range(32, 36))), measured=False)
                requests = tuple(range(max(8, batch)))
                table[name] = summary_of(simulator.run(bench.steps(batch, others=True, requests=requests)), simulator)
    return found


SECTIONS: Mapping[str, Callable[[Bench], dict[str, Any]]] = {
    "dymoe": dymoe, "duoserve": duoserve, "memory": memory, "firm": firm, "lengths": lengths, "dynaexq": dynaexq,
    "adaptive": adaptive,
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("papers", nargs="*", help=f"some of {', '.join(SECTIONS)}; all if none")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "dymoe-papers", help="for the trace")
    parser.add_argument("--page", action="store_true", help="write pictures and page alone")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    path = HERE / "results.json"
    if not asked.page:
        results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        bench = Bench(asked.work.resolve())
        for name in asked.papers or SECTIONS:
            begun = time.perf_counter()
            results[name] = SECTIONS[name](bench)
            print(f"{name}: {time.perf_counter() - begun:.0f} s", flush=True)
            path.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    page.write(json.loads(path.read_text()), HERE)  # in the file's order, as --page does


if __name__ == "__main__":
    main()
