"""``vllm-dymoe plan``: what fits, how fast it will be, and which options to take."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from vllm_dymoe.bench.rows import read_rows
from vllm_dymoe.bench.systems import make_known
from vllm_dymoe.config import ConfigError
from vllm_dymoe.plan.advice import GOOD_ENOUGH, Choice, Serving, choices, command, recommended
from vllm_dymoe.plan.device import Device, find_device, measured_device
from vllm_dymoe.plan.errors import compare, median_error, reversed_rankings
from vllm_dymoe.plan.model import ModelShape, read_shape
from vllm_dymoe.plan.replay import Routings, stated_skew
from vllm_dymoe.traces import Trace, TraceHeader
from vllm_dymoe.units import size

SKEW, LOCALITY = 0.5, 0.3
"""Of routers that nobody has recorded: popularity falls with the root of the rank, a third of the choices repeat."""


def run(
    model: str, *, gpu: str, link: str | None, trace: Path | None, batch: int, prompt: int, serving: Serving
) -> None:
    """Print a plan.

    Raises:
        ConfigError: model or device are not known, or nothing fits.
        TraceError: the trace is of another model, or damaged.
    """
    make_known()
    shape, device = read_shape(model), find_device(gpu, link)
    routings = routings_of(shape, model, trace, batch)
    rows = list(choices(shape, device, routings, serving, prompt))
    best = recommended(rows)
    console = Console()
    console.print(_said(model, shape, device, trace, batch), soft_wrap=True, highlight=False)
    console.print(_table(rows, best, batch, prompt))
    console.print(
        f"Recommended: the fastest of which {GOOD_ENOUGH:.0%} of the likeliest tokens are those of 16 bits, as "
        "measured on this project's small model. Measure quality on yours.",
        soft_wrap=True, highlight=False,
    )  # fmt: skip
    console.print(command(model, best, shape, serving), soft_wrap=True, markup=False, highlight=False)


def check(model: str, folder: Path, trace: Path | None) -> None:
    """Print how far predictions are from the rows of a run on this model.

    Raises:
        ConfigError: the run has no full load.
    """
    make_known()
    shape, rows = read_shape(model), read_rows(folder / "rows.jsonl")
    device = measured_device(rows, str(folder))
    batches = {row["batch"] for row in rows if row["kind"] == "speed"}
    routings = {batch: routings_of(shape, model, trace, batch) for batch in batches}
    compared = compare(rows, shape, device, routings)
    if not compared:
        raise ConfigError(f"{folder} has no row but those that a plan begins with.")
    table = Table(title=f"Predicted and measured: {folder}", title_justify="left")
    for name in ("", "budget", "batch", "link MB/s", "predicted ms", "measured ms", "error"):
        table.add_column(name, justify="right" if name else "left")
    for row in compared:
        table.add_row(row.label, row.budget, str(row.batch), f"{row.link / 1e6:.1f}", f"{1e3 * row.predicted:.1f}",
                      f"{1e3 * row.measured:.1f}", f"{row.error:+.0%}")  # fmt: skip
    console = Console()
    console.print(table)
    console.print(f"Median error {median_error(compared):.1%}; {len(reversed_rankings(compared))} rankings reversed.")
    for one, other in reversed_rankings(compared):
        console.print(f"Reversed: {one.label} and {other.label} at {one.budget}, batch {one.batch}")


def routings_of(shape: ModelShape, model: str, trace: Path | None, batch: int) -> Routings:
    """What was recorded, or a stated skew.

    Raises:
        ConfigError: the trace is of a model with other sizes.
    """
    if trace is None:
        header = TraceHeader(model, "planned", shape.moe_layers, shape.experts, shape.top_k, shape.hidden)
        return stated_skew(header, batch, SKEW, LOCALITY)
    found = Trace.load(trace)
    sizes = (found.header.num_experts, found.header.top_k)
    if sizes != (shape.experts, shape.top_k):
        raise ConfigError(
            f"{trace} is of a model with {sizes[0]} experts, {sizes[1]} for a token, and {model} has {shape.experts} "
            f"and {shape.top_k}."
        )
    return Routings(found, batch)


def _said(model: str, shape: ModelShape, device: Device, trace: Path | None, batch: int) -> str:
    experts = shape.packed((16, 4))
    made_up = f"routers are made up (popularity ~ rank^-{SKEW}, {LOCALITY:.0%} repeated)"
    return (
        f"{model}: {shape.moe_layers} layers of {shape.experts} experts, {shape.top_k} for a token; experts "
        f"{size(experts.nbytes(16))} at 16 bits, {size(experts.nbytes(4))} at 4; everything else "
        f"{size(shape.dense_bytes)}.\n{device.name}: {size(device.memory)}, reads {device.bandwidth / 1e9:.0f} GB/s, "
        f"its link {device.link / 1e9:.1f} GB/s, {1e6 * device.layer_seconds:.0f} us of the host for a layer; "
        f"{f'routers as in {trace}' if trace else made_up}."
    )


def _table(rows: list[Choice], best: Choice, batch: int, prompt: int) -> Table:
    table = Table(title=f"Batch {batch}, prompts of {prompt} tokens", title_justify="left")
    for name in ("", "experts on device", "of all", "TTFT ms", "TPOT ms", "tokens/s", "hits", "MB/token", "as 16 bits"):
        table.add_column(name, justify="right" if name else "left")
    for row in rows:
        options = row.options
        bits = f"{options['hi']}/{options.get('lo', 0)}" if options.get("system") == "dymoe" else f"{options['hi']}"
        found = row.prediction
        table.add_row(
            f"{options.get('system', 'exact')}, {bits} bits", size(row.limit), f"{min(1, row.share):.0%}",
            f"{1e3 * found.ttft:.0f}", f"{1e3 * found.tpot:.1f}", f"{batch / found.tpot:.1f}", f"{found.hit_rate:.0%}",
            f"{found.moved / batch / 1e6:.3g}", "" if row.agreement is None else f"{row.agreement:.0%}",
            style="bold" if row is best else None,
        )  # fmt: skip
    return table
