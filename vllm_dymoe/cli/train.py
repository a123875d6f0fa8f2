"""``vllm-dymoe train``: a predictor from a trace, and what it is worth."""

import time
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from vllm_dymoe import __version__
from vllm_dymoe.observe.trace import Trace
from vllm_dymoe.predict.checkpoint import PredictorCard, save_predictor
from vllm_dymoe.predict.expert_mlp import ARCHITECTURES
from vllm_dymoe.predict.folded import FoldedMLP, fold
from vllm_dymoe.training import Epoch, Recipe, Trained, TrainingError, train
from vllm_dymoe.units import size


def run(trace_path: Path, out: Path, *, architecture: str, recipe: Recipe, device: str = "cpu") -> None:
    """Train on a trace, and write ``out``.

    The architecture "auto" is the one that measured best for what the trace holds.

    Raises:
        TraceError: the trace cannot be read.
        TrainingError: it is not enough, or not what the architecture sees.
        PredictorError: the file cannot be written.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise TrainingError("there is no CUDA device to train on; leave --device out.")
    begin = time.perf_counter()
    trace = Trace.load(trace_path)
    if architecture == "auto":
        architecture = "linear" if trace.router_inputs is None else "linear+input"
    trained, network = write(trace, trace_path, out, architecture=architecture, recipe=recipe, device=device)
    _print(out, architecture, trained, network, time.perf_counter() - begin)


def write(
    trace: Trace, path: Path, out: Path, *, architecture: str, recipe: Recipe, device: str = "cpu"
) -> tuple[Trained, FoldedMLP]:
    """Train on a trace that was read from ``path``, and write ``out``.

    Raises:
        TrainingError: the trace is not enough, or not what the architecture sees.
        PredictorError: the file cannot be written.
    """
    with _Epochs(f"Training on {escape(path.name)}", recipe.epochs) as progress:
        trained = train(trace, ARCHITECTURES[architecture], recipe, progress.show, device)
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
    return trained, network


class _Epochs(Progress):
    """A bar on stderr if that is a terminal, with the losses of the last epoch."""

    def __init__(self, description: str, epochs: int) -> None:
        console = Console(stderr=True)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[said]}"),
            TimeRemainingColumn(),
        )
        super().__init__(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self.add_task(description, total=epochs, said="")

    def show(self, epoch: Epoch) -> None:
        """One more epoch."""
        said = f"epoch {epoch.number}: loss {epoch.loss:.4f}, held out {epoch.held_out_loss:.4f}"
        self.update(self._task, completed=epoch.number, said=said)


def _print(out: Path, architecture: str, trained: Trained, network: FoldedMLP, seconds: float) -> None:
    table = Table("on held-out requests", title=escape(str(out)), title_justify="left")
    for column in ("all experts", "at least one", "accuracy"):
        table.add_column(column, justify="right")
    for name, rates in trained.metrics.items():
        table.add_row(name, *(f"{rates[key]:.1%}" for key in ("all_k", "at_least_one", "accuracy")))
    console = Console()
    console.print(table)
    (tokens, held_out), (requests, apart) = trained.tokens, trained.requests
    console.print(
        f"Trained {architecture} in {seconds:.1f} s and {trained.epochs} epochs on {tokens} tokens of "
        f"{requests} requests; {held_out} tokens of {apart} others were held out. "
        f"On a GPU it takes {size(network.nbytes // 2)}, on a CPU {size(network.nbytes)}.",
        soft_wrap=True,
    )
    console.print("To serve with it:", soft_wrap=True)
    option = f'{{"dymoe": {{"predictor": "{out}"}}}}'
    console.print(f"vllm serve ... --additional-config '{option}'", soft_wrap=True, markup=False)
