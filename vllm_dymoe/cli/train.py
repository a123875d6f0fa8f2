"""``vllm-dymoe train``: trains a predictor on a trace, and prints its accuracy."""

import time
from dataclasses import asdict
from pathlib import Path

import torch
import typer
from rich.markup import escape

from vllm_dymoe import __version__
from vllm_dymoe.cli.display import count_progress, print_table
from vllm_dymoe.prefetch.checkpoint import PredictorCard, save_predictor, worse_than_next_gate
from vllm_dymoe.prefetch.expert_mlp import ARCHITECTURES
from vllm_dymoe.prefetch.training import Recipe, TrainingError, train
from vllm_dymoe.trace.trace import Trace
from vllm_dymoe.units import size


def run(path: Path, out: Path, architecture: str, recipe: Recipe, device: str) -> None:
    """Train, write ``out``, and print its accuracy.

    Raises:
        TrainingError: the predictor is worse than the next gate.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise TrainingError("there is no CUDA device to train on; leave --device out.")
    begin = time.perf_counter()
    trace = Trace.load(path)
    with count_progress(f"Training on {escape(path.name)}") as advance:

        def show(epoch: int, loss: float, held_out: float) -> None:
            advance(epoch, recipe.epochs, f"epoch {epoch}: loss {loss:.4f}, held out {held_out:.4f}")

        trained = train(trace, ARCHITECTURES[architecture], recipe, show, device)
    network = trained.network
    if worse := worse_than_next_gate(trained.metrics):
        raise TrainingError(f"{out} was not written: {worse}")
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
    how = "by least squares" if ARCHITECTURES[architecture].by_least_squares else f"and {trained.epochs} epochs"
    typer.echo(
        f"Trained {architecture} in {time.perf_counter() - begin:.1f} s {how} on {tokens} tokens of {requests} "
        f"requests; {held_out} tokens of {apart} others were held out. It looks up to {network.look_ahead} layers "
        f"ahead, and takes {size(network.nearest(1).nbytes // 2)} for one of them on a GPU, twice as much on a CPU.\n"
        "To serve with it:"
    )
    option = f'{{"dymoe": {{"expert_budget": "25%", "predictor": "{out}"}}}}'
    typer.echo(f"vllm serve MODEL --quantization dymoe --additional-config '{option}'")
