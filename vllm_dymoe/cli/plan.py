"""``vllm-dymoe plan``: what fits, how fast it will be, and which options to take."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from vllm_dymoe.bench.systems import make_known
from vllm_dymoe.config import ConfigError
from vllm_dymoe.observe.trace import Trace
from vllm_dymoe.plan.choice import CANDIDATES, GOOD_ENOUGH, Choice, Serving, choices, command, recommended, shown
from vllm_dymoe.plan.device import Device, find_device
from vllm_dymoe.plan.model import ModelShape, read_shape
from vllm_dymoe.plan.replay import LOCALITY, SKEW, Routings, made_up
from vllm_dymoe.residency.identity import ModelIdentity
from vllm_dymoe.units import size


def run(
    model: str,
    *,
    gpu: str,
    link: str | None,
    trace: Path | None,
    batch: int,
    prompt: int,
    serving: Serving,
    systems: Sequence[str],
) -> None:
    """Print a plan.

    Raises:
        ConfigError: model, device or system are not known, or nothing fits.
        TraceError: the trace is of another model, or damaged.
    """
    planned = {candidate["system"] for candidate in CANDIDATES}
    if unknown := set(systems) - planned:
        raise ConfigError(f"{', '.join(sorted(unknown))}: a plan has the systems {', '.join(sorted(planned))}.")
    if Path(gpu).is_dir():
        make_known()  # its rows may be of systems that only bench has
    shape, device = read_shape(model), find_device(gpu, link)
    rows = list(choices(shape, device, routings_of(shape, model, trace, batch), serving, prompt))
    best = recommended(rows)
    console = Console()
    console.print(_said(model, shape, device, trace), soft_wrap=True, highlight=False)
    console.print(_table(shown(rows, systems), best, batch, prompt))
    console.print(
        f"Recommended: the fastest of which {GOOD_ENOUGH:.0%} of the likeliest tokens are those of 16 bits, as "
        "measured on this project's small model. Measure quality on yours.",
        soft_wrap=True, highlight=False,
    )  # fmt: skip
    console.print(command(model, best, serving), soft_wrap=True, markup=False, highlight=False)


def routings_of(shape: ModelShape, model: str, trace: Path | None, batch: int) -> Routings:
    """What was recorded, or made-up routers.

    Raises:
        ConfigError: the trace is of a model with other sizes.
    """
    if trace is None:
        return made_up(
            ModelIdentity(model, "planned", shape.moe_layers, shape.experts, shape.top_k, shape.hidden), batch
        )
    found = Trace.load(trace)
    sizes = (found.header.num_experts, found.header.top_k)
    if sizes != (shape.experts, shape.top_k):
        raise ConfigError(
            f"{trace} is of a model with {sizes[0]} experts, {sizes[1]} for a token, and {model} has {shape.experts} "
            f"and {shape.top_k}."
        )
    return Routings(found, batch)


def _said(model: str, shape: ModelShape, device: Device, trace: Path | None) -> str:
    experts = shape.packed((16, 4))
    routers = f"as in {trace}" if trace else f"made up (popularity ~ rank^-{SKEW}, {LOCALITY:.0%} repeated)"
    return (
        f"{model}: {shape.moe_layers} layers of {shape.experts} experts, {shape.top_k} for a token; experts "
        f"{size(experts.nbytes(16))} at 16 bits, {size(experts.nbytes(4))} at 4; everything else "
        f"{size(shape.dense_bytes)}.\n{device.name}: {size(device.memory)}, reads {device.bandwidth / 1e9:.0f} GB/s, "
        f"its link {device.link / 1e9:.1f} GB/s, {1e6 * device.layer_seconds:.0f} us of the host for a layer; "
        f"routers are {routers}."
    )


def _table(rows: Sequence[Choice], best: Choice, batch: int, prompt: int) -> Table:
    table = Table(
        title=f"Batch {batch}, prompts of {prompt} tokens", title_justify="left", box=None, padding=(0, 2, 0, 0)
    )
    for name in ("system", "bits", "experts", "of all", "TTFT ms", "TPOT ms", "hits", "as 16 bits"):
        table.add_column(name, justify="left" if name == "system" else "right", no_wrap=True)
    for row in rows:
        bits = f"{row.options.hi}" + (f"/{row.options.lo}" if row.given["system"] == "dymoe" else "")
        table.add_row(
            row.given["system"], bits, size(row.limit), f"{row.share:.0%}", f"{1e3 * row.ttft:.0f}",
            f"{1e3 * row.tpot:.1f}", f"{row.hit_rate:.0%}",
            "" if row.agreement is None else f"{row.agreement:.0%}", style="bold" if row is best else None,
        )  # fmt: skip
    return table
