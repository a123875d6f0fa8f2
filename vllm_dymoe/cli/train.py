"""``vllm-dymoe train``: a predictor from a trace, and what it is worth."""

import time
from dataclasses import asdict
from pathlib import Path

import torch
import typer
from rich.markup import escape

from vllm_dymoe import __version__
from vllm_dymoe.cli.display import count_progress, print_table
from vllm_dymoe.prefetch.checkpoint import PredictorCard, save_predictor
from vllm_dymoe.prefetch.expert_mlp import ARCHITECTURES
from vllm_dymoe.prefetch.folded import fold
from vllm_dymoe.prefetch.training import Recipe, TrainingError, train
from vllm_dymoe.trace.trace import Trace
from vllm_dymoe.units import size


def run(path: Path, out: Path, architecture: str, recipe: Recipe, device: str) -> None:
    """Train, write ``out``, and print what it is worth; "auto" is what measured best for what the trace holds."""
    if device == "cuda" and not torch.cuda.is_available():
        raise TrainingError("there is no CUDA device to train on; leave --device out.")
    begin = time.perf_counter()
    trace = Trace.load(path)
    if architecture == "auto":
        architecture = "linear" if trace.router_inputs is None else "linear+input"
    with count_progress(f"Training on {escape(path.name)}") as advance:

        def show(epoch: int, loss: float, held_out: float) -> None:
            advance(epoch, recipe.epochs, f"epoch {epoch}: loss {loss:.4f}, held out {held_out:.4f}")

        trained = train(trace, ARCHITECTURES[architecture], recipe, show, device)
    network = fold(trained.model)
    card = PredictorCard(
        header=trace.header,
        architecture={"name": architecture, **asdict(ARCHITECTURES[architecture])},
        trace={"path": str(path), "tokens": trained.tokens, "requests": trained.requests},
        metrics=trained.metrics,
        seed=recipe.seed,
        version=__version__,
    )
    save_predictor(out, card, network)
    rows = [
        (name, *(f"{rates[key]:.1%}" for key in ("all_k", "at_least_one", "accuracy")))
        for name, rates in trained.metrics.items()
    ]
    print_table(escape(str(out)), ("on held-out requests", "all experts", "at least one", "accuracy"), rows)
    (tokens, held_out), (requests, apart) = trained.tokens, trained.requests
    typer.echo(
        f"Trained {architecture} in {time.perf_counter() - begin:.1f} s and {trained.epochs} epochs on {tokens} tokens "
        f"of {requests} requests; {held_out} tokens of {apart} others were held out. "
        f"On a GPU it takes {size(network.nbytes // 2)}, on a CPU {size(network.nbytes)}.\nTo serve with it:"
    )
    accuracy = {name: rates["accuracy"] for name, rates in trained.metrics.items()}
    if accuracy["trained"] < accuracy.get("next gate", 0.0):
        typer.echo("The next layer's gate, which needs no training, predicts more: serve without a predictor.")
    option = f'{{"dymoe": {{"predictor": "{out}"}}}}'
    typer.echo(f"vllm serve MODEL --quantization dymoe --additional-config '{option}'")
