"""``vllm-dymoe plan``: what fits, how fast it will be, and which options to take."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import typer

from vllm_dymoe.cli.display import print_table
from vllm_dymoe.cli.figures import Panel, draw, require
from vllm_dymoe.experts.identity import ModelIdentity
from vllm_dymoe.options import ConfigError, ExpertBudget
from vllm_dymoe.plan.choice import CANDIDATES, GOOD_ENOUGH, Choice, ServeSettings, choices, recommended, shown
from vllm_dymoe.plan.device import Device, parse_rate
from vllm_dymoe.plan.model import ModelShape, read_shape
from vllm_dymoe.plan.ranks import Ranks
from vllm_dymoe.plan.routings import LOCALITY, SKEW, Routings, made_up
from vllm_dymoe.trace.trace import Trace
from vllm_dymoe.units import size

ALONE = Ranks()


def run(
    model: str, card: Device, trace: Path | None, batch: int, prompt: int, serving: ServeSettings,
    policies: Sequence[str], disk: str | None = None, host_memory: str | None = None, misses: str = "fetch",
    ranks: Ranks = ALONE, figure: Path | None = None, max_model_len: int | None = None,
) -> None:  # fmt: skip
    if figure is not None:
        require(figure)
    planned = {candidate["policy"] for candidate in CANDIDATES}
    if unknown := set(policies) - planned:
        raise ConfigError(f"{', '.join(sorted(unknown))}: plan supports the policies {', '.join(sorted(planned))}.")
    ranks.check()
    whole = read_shape(model)
    shape, device = ranks.shape(whole), ranks.device(card)
    length = max_model_len or min(serving.max_model_len, whole.longest or serving.max_model_len)
    serving = replace(serving, max_model_len=length)
    if (disk is None) != (host_memory is None):
        raise ConfigError(
            "set --disk and --host-memory together: experts that host memory has no room for are read from the disk."
        )
    if disk is not None:
        if (held := ExpertBudget.parse(host_memory).bytes) is None:
            raise ConfigError(f"--host-memory is {host_memory}, but must be bytes such as 16GB.")
        device = replace(device, disk=parse_rate(disk), host_memory=held)
    if misses != "fetch":
        device = replace(device, host=parse_rate(misses))
    asking = batch * ranks.dp if ranks.meets else batch
    routings = _routings(replace(whole, moe_layers=shape.moe_layers), model, trace, asking).spread(ranks.experts_over)
    found = choices(shape, device, routings, serving, prompt)
    rows = [ranks.whole(row, whole, card, batch, prompt) for row in found]
    best, some = recommended(rows), shown(rows, policies)
    packed = whole.packed((16, 4))
    rate = device.expert_rate(shape.expert_weights, batch, nested=False)
    routers = f"as in {trace}" if trace else f"synthetic (popularity ~ rank^-{SKEW}, {LOCALITY:.0%} repeated)"
    said = (
        f"{model}: {whole.moe_layers} layers of {whole.experts} experts, {whole.top_k} per token; experts "
        f"{size(packed.nbytes(16))} at 16 bits, {size(packed.nbytes(4))} at 4; everything else "
        f"{size(whole.dense_bytes)}.\n{device.name}: {size(device.memory)}, reads {device.bandwidth / 1e9:.0f} GB/s, "
        f"experts at {rate.read / 1e9:.0f} GB/s ({_source(card, rate.card)}), its link {device.link / 1e9:.1f} GB/s; "
        f"routing is {routers}."
        + (f"\nHost memory holds {host_memory} of experts, the disk reads {disk}." if disk else "")
    )
    typer.echo(said)
    if ranks != ALONE:
        columns = _of_one_rank(ranks, shape, whole, card, batch)
        print_table("One rank", list(columns), [list(columns.values())], whole=True)
    heads = "policy", "bits", "experts", "of all", "TTFT ms", "TPOT ms", "hits", "as 16 bits"
    bold = next((number for number, row in enumerate(some) if row is best), -1)
    print_table(f"Batch {batch}, prompts of {prompt} tokens", heads, map(_cells, some), whole=True, bold=bold)
    typer.echo(
        f"Recommended: the fastest whose most likely tokens agree with 16 bits in {GOOD_ENOUGH:.0%} of cases, as "
        "measured on this project's small model. Measure quality on yours.\n"
        f"{_command(model, best, serving, device.host_memory, ranks)}"
    )
    if figure is not None:
        source = f"as in {trace}" if trace else "made-up routers"
        title = f"{model.rstrip('/').rpartition('/')[2]} on {device.name}, planned, batch {batch}"
        typer.echo(f"Written: {draw(figure, _panels(rows, title, source))}")


def _panels(rows: Sequence[Choice], title: str, source: str) -> list[Panel]:
    """Return speed and hits by budget: a line for each policy and precision."""
    speeds = Panel(title, "GPU memory for experts, GB", "tokens per second of one request")
    hits = Panel(f"Hits, {source}", "GPU memory for experts, GB", "needed experts that are resident, %")
    for row in rows:
        label = f"{row.given['policy']}, {row.precisions} bits"
        speeds.lines.setdefault(label, []).append((row.limit / 1e9, 1 / row.tpot))
        hits.lines.setdefault(label, []).append((row.limit / 1e9, 100 * row.hit_rate))
    return [speeds, hits]


def _source(card: Device, measured: str) -> str:
    """Return on which card the kernels' rate was measured."""
    return "measured" if measured == card.key else f"by the share measured on {measured}"


def _cells(row: Choice) -> list[str]:
    return [
        row.given["policy"], row.precisions, size(row.limit), f"{row.share:.0%}", f"{1e3 * row.ttft:.0f}",
        f"{1e3 * row.tpot:.1f}", f"{row.hit_rate:.0%}", "" if row.agreement is None else f"{row.agreement:.0%}",
    ]  # fmt: skip


def _of_one_rank(ranks: Ranks, shape: ModelShape, whole: ModelShape, card: Device, batch: int) -> dict[str, str]:
    (near, far), packed = ranks.sent(whole, batch), shape.packed((16, 4))
    seconds, link = ranks.seconds(whole, card, batch), ranks.device(card).link
    return {
        "experts": f"{shape.experts} x {shape.intermediate}",
        "16 bits": size(packed.nbytes(16)),
        "4 bits": size(packed.nbytes(4)),
        "the rest": size(shape.dense_bytes),
        "link GB/s": f"{link / 1e9:.1f}",
        "to ranks": size(round(near)),
        "to nodes": size(round(far)),
        "ms a step": f"{1e3 * seconds:.2f}",
    }


def _routings(shape: ModelShape, model: str, trace: Path | None, batch: int) -> Routings:
    if trace is None:
        sizes = ModelIdentity(model, "planned", shape.moe_layers, shape.experts, shape.top_k, shape.hidden)
        return made_up(sizes, batch)
    found = Trace.load(trace)
    experts, top_k = found.header.num_experts, found.header.top_k
    if (experts, top_k) != (shape.experts, shape.top_k):
        raise ConfigError(
            f"{trace} is of a model with {experts} experts, {top_k} per token, but {model} has {shape.experts} and "
            f"{shape.top_k}."
        )
    return Routings(found, batch)


def _command(model: str, row: Choice, serving: ServeSettings, host_memory: int | None, ranks: Ranks) -> str:
    held = {} if host_memory is None else {"host_memory": host_memory}
    options = json.dumps({"dymoe": {**row.given, **held, "expert_budget": row.limit}})
    return (
        f"vllm serve {model} --quantization dymoe --max-model-len {serving.max_model_len} "
        f"--max-num-seqs {serving.max_num_seqs} --gpu-memory-utilization {serving.gpu_memory_utilization:g}"
        f"{ranks.arguments} --additional-config '{options}'"
    )
