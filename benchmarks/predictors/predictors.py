"""Which predictor of the next layer's experts is worth its price?

Part "offline" replays traces through every predictor: of the shipped model, recorded while it serves, and made up at
the sizes of Mixtral-8x7B and Qwen3-30B-A3B. Part "random" does the same with models of random weights whose routers are
of other kinds: DeepSeek-V3's, with groups and a correction, and GPT-OSS's, with a bias. Part "engine" lets the shipped
model answer through the real vLLM engine over an emulated link with each of them (see serve_all.py). Writes
results.json, predictors.png and the README's tables.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import report
import torch
from contestants import Told, gates_of, untrained
from stick import Replay, replay

from vllm_dymoe.predict import Predictor
from vllm_dymoe.predict.checkpoint import PredictorCard, save_predictor
from vllm_dymoe.predict.expert_mlp import ARCHITECTURES
from vllm_dymoe.predict.folded import FoldedMLP, fold
from vllm_dymoe.predict.trained import TrainedPredictor
from vllm_dymoe.residency.routing import Routing
from vllm_dymoe.traces import MIXTRAL_8X7B, QWEN3_30B_A3B, Trace, synthetic_trace
from vllm_dymoe.training import Recipe, split_by_request, train

HERE = Path(__file__).resolve().parent
SHIPPED = HERE.parent / "tiny_moe" / "model"
# In bytes: experts of 4 bits in groups of 64, what is moved when one is.
EXPERT_BYTES = {"shipped": 27_648, "Mixtral-8x7B": 99_090_432, "Qwen3-30B-A3B": 2_654_208}
TRACE_RECIPES: dict[str, dict[str, Any]] = {
    "Mixtral-8x7B": {"requests": 32, "prompt": 16, "decode": 64, "skew": 0.5, "locality": 0.3, "correlation": 0.4},
    "Qwen3-30B-A3B": {"requests": 48, "prompt": 16, "decode": 64, "skew": 0.8, "locality": 0.3, "correlation": 0.4},
}
PARTS = ["offline", "random", "engine"]
HEADERS = {"Mixtral-8x7B": MIXTRAL_8X7B, "Qwen3-30B-A3B": QWEN3_30B_A3B}
# The paper's networks for 47 layers with 128 experts each have 1.2 billion weights, more than a predictor may.
KINDS = {
    "shipped": tuple(ARCHITECTURES),
    "Mixtral-8x7B": ("paper", "shared", "linear"),
    "Qwen3-30B-A3B": ("shared", "linear"),
}
# As in the tests, but with layers and experts enough to tell predictors apart.
RANDOM_MODELS: dict[str, dict[str, int]] = {
    "deepseek-v3": {
        "num_hidden_layers": 9,
        "n_routed_experts": 32,
        "num_experts_per_tok": 4,
        "n_group": 8,
        "topk_group": 4,
    },
    "gpt-oss": {"num_hidden_layers": 8, "num_local_experts": 32, "num_experts_per_tok": 4},
}
RANDOM_KINDS = ("linear", "linear+input")
RECIPES = {"paper": Recipe(epochs=6, patience=2), "paper+input": Recipe(epochs=6, patience=2)}


def training_recipe(kind: str) -> Recipe:
    """The paper's networks are large: fewer passes over the data."""
    return replace(RECIPES.get(kind, Recipe(epochs=20)), held_out=0.2)


def record_shipped(work: Path, requests: int, tokens: int) -> Trace:
    """The shipped model goes on from held-out texts of three domains, and its routers are recorded."""
    return record(SHIPPED, work / f"trace-{requests}-{tokens}", work, requests, tokens)


def record_random(name: str, work: Path, requests: int, tokens: int) -> Trace:
    """A model of random weights goes on from random tokens, and its routers are recorded."""
    sys.path.append(str(HERE.parents[1]))
    from tests.e2e.architectures import ARCHITECTURES as MODELS
    from tests.e2e.architectures import VOCABULARY

    folder = work / name
    if not folder.is_dir():
        replace(MODELS[name], sizes=MODELS[name].sizes | RANDOM_MODELS[name]).save(folder)
    out = work / f"trace-{name}-{requests}-{tokens}"
    return record(folder, out, work, requests, tokens, "--random", str(VOCABULARY))


def record(model: Path, folder: Path, work: Path, requests: int, tokens: int, *more: str) -> Trace:
    """The trace in a folder, which is recorded if it is not there."""
    if not folder.is_dir():
        command = [sys.executable, HERE / "record.py", "--model", model, "--out", folder, *more]
        command += ["--requests", str(requests), "--new-tokens", str(tokens)]
        environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
        environment["DYMOE_STORE_DIR"] = str(work / "stores")
        subprocess.run(command, check=True, env=os.environ | environment)
    return Trace.load(folder)


def offline(name: str, trace: Trace, kinds: tuple[str, ...], most: int, keep: Path) -> dict[str, Any]:
    """Every predictor on the held-out requests of one trace.

    Args:
        name: of the model.
        trace: its trace.
        kinds: of the networks that are trained.
        most: tokens to replay.
        keep: folder for the networks' files.
    """
    # As train() orders and splits it.
    trace = trace.select(trace.in_order())
    mask, held_out = split_by_request(trace, training_recipe("").held_out, training_recipe("").seed)
    seen, unseen = mask.nonzero().flatten(), held_out.nonzero().flatten()
    unseen = unseen[~trace.prefill[unseen]][:most] if not trace.prefill[unseen].all() else unseen[:most]
    gates = gates_of(SHIPPED, trace.header) if name == "shipped" and trace.router_inputs is not None else []
    contestants: dict[str, tuple[Predictor, dict[str, Any]]] = {}
    for label, predictor in untrained(trace, seen, gates).items():
        warm_up(predictor, trace, seen[-256:])
        contestants[label] = predictor, {}
    if trace.next_gate is not None and not gates:
        contestants["next-gate"] = Told(trace.next_gate[unseen]), {}
    for kind in kinds:
        begin = time.perf_counter()
        trained = train(trace, ARCHITECTURES[kind], training_recipe(kind))
        network = fold(trained.model)
        file = keep / f"{name}-{kind}.safetensors"
        save_predictor(file, PredictorCard(trace.header, {"name": kind}, metrics=trained.metrics), network)
        facts = {"bytes": file.stat().st_size, "training_s": time.perf_counter() - begin, "epochs": trained.epochs}
        contestants[kind] = TrainedPredictor(network, trace.header.top_k), facts
        print(f"{name}: {kind} trained in {facts['training_s']:.0f} s", flush=True)
    contestants["oracle"] = Told(trace.experts[unseen, 1:]), {}
    rows = {}
    for label, (predictor, facts) in contestants.items():
        found = replay(predictor, trace, unseen)
        rows[label] = facts | describe(found, trace, unseen, EXPERT_BYTES.get(name, 0))
        print(f"{name}: {label} {rows[label]['all_k']:.1%} all, {rows[label]['microseconds']:.0f} us", flush=True)
    return {"tokens": len(unseen), "requests": trace.num_requests, "predictors": rows}


def warm_up(predictor: Predictor, trace: Trace, tokens: torch.Tensor) -> None:
    """What learns while it serves has served before."""
    for token in tokens.tolist():
        for layer in range(trace.header.num_layers):
            ids = trace.experts[token, layer][None].int()
            x = torch.zeros(1, trace.header.hidden)
            predictor.observe(Routing(layer, trace.header.num_layers, x, ids, torch.ones(ids.shape)))


def describe(found: Replay, trace: Trace, tokens: torch.Tensor, expert_bytes: int) -> dict[str, Any]:
    """Overall, by layer and by domain."""
    layers = trace.header.num_layers
    overall = found.rates()
    domains: dict[str, torch.Tensor] = {}
    if trace.domain is not None:
        of_token = [trace.domain[request] for request in trace.request[tokens].tolist()]
        domains = {d: torch.tensor([name == d for name in of_token]) for d in sorted(set(of_token))}
    return overall | {
        "microseconds": found.microseconds,
        "useful_bytes_per_token": overall["useful"] * (layers - 1) * expert_bytes,
        "wasted_bytes_per_token": overall["wasted"] * (layers - 1) * expert_bytes,
        "by_layer": [found.rates(layer=layer)["all_k"] for layer in range(1, layers)],
        "by_domain": {name: found.rates(rows)["all_k"] for name, rows in domains.items()},
    }


def of_random_models(work: Path, requests: int, tokens: int, most: int) -> dict[str, Any]:
    """Hit rates alone: what an expert of such a model weighs, and how long such a small one takes, says nothing."""
    cases = {}
    for name in RANDOM_MODELS:
        case = offline(name, record_random(name, work, requests, tokens), RANDOM_KINDS, most, work)
        kept = ("all_k", "at_least_one", "accuracy", "utilisation", "by_layer")
        case["predictors"] = {label: {key: row[key] for key in kept} for label, row in case["predictors"].items()}
        cases[name] = case
    return cases


def across_domains(trace: Trace, kind: str, most: int) -> dict[str, dict[str, float]]:
    """All-k hits of a network that was trained on one domain, or on all, in each domain's held-out requests."""
    assert trace.domain is not None
    trace = trace.select(trace.in_order())
    _, held_out = split_by_request(trace, training_recipe("").held_out, training_recipe("").seed)
    of_token = torch.tensor([sorted(set(trace.domain)).index(trace.domain[r]) for r in trace.request.tolist()])
    names = sorted(set(trace.domain))
    table: dict[str, dict[str, float]] = {}
    for trained_on in [*names, "all"]:
        mask = torch.ones_like(held_out) if trained_on == "all" else of_token == names.index(trained_on)
        part = trace.select(mask & ~held_out)
        network: FoldedMLP = fold(train(part, ARCHITECTURES[kind], training_recipe(kind)).model)
        table[trained_on] = {}
        for place, name in enumerate(names):
            tokens = (held_out & (of_token == place) & ~trace.prefill).nonzero().flatten()[:most]
            found = replay(TrainedPredictor(network, trace.header.top_k), trace, tokens)
            table[trained_on][name] = found.rates()["all_k"]
    return table


def main() -> None:
    """Record, train, replay, serve, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "dymoe-predictors")
    parser.add_argument("--requests", type=int, default=32, help="of each domain, to record")
    parser.add_argument("--new-tokens", type=int, default=48, help="of each request")
    parser.add_argument("--most", type=int, default=600, help="tokens to replay")
    parser.add_argument("--architecture", choices=list(ARCHITECTURES), default="linear+input", help="that is served")
    parser.add_argument("--out", type=Path, default=HERE, help="where results.json and predictors.png go")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1))
    file = arguments.out / "results.json"
    results: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    results["machine"] = f"{platform.machine()} CPU, {os.cpu_count()} cores"
    if "offline" in arguments.parts:
        shipped = record_shipped(arguments.work, arguments.requests, arguments.new_tokens)
        results["offline"] = {"shipped": offline("shipped", shipped, KINDS["shipped"], arguments.most, arguments.work)}
        results["across_domains"] = across_domains(shipped, arguments.architecture, arguments.most // 3)
        for name, recipe in TRACE_RECIPES.items():
            made_up = synthetic_trace(HEADERS[name], **recipe)
            results["offline"][name] = offline(name, made_up, KINDS[name], arguments.most // 4, arguments.work)
        file.write_text(json.dumps(results, indent=2) + "\n")
    if "random" in arguments.parts:
        results["random"] = of_random_models(
            arguments.work, 3 * arguments.requests, arguments.new_tokens, arguments.most
        )
        file.write_text(json.dumps(results, indent=2) + "\n")
    if "engine" in arguments.parts:
        from serve_all import serve_all

        predictor = arguments.work / f"shipped-{arguments.architecture}.safetensors"
        results["engine"] = serve_all(SHIPPED, predictor, arguments.work)
        file.write_text(json.dumps(results, indent=2) + "\n")
    report.show(results)
    report.draw(results, arguments.out / "predictors.png")
    report.write_readme(results, arguments.out / "README.md")


if __name__ == "__main__":
    main()
