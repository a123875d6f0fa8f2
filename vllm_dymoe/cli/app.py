"""The commands and their options."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from vllm_dymoe import __version__

Model = Annotated[str, typer.Argument(help="Model to serve, as for `vllm serve`.")]
TraceFile = Annotated[Path, typer.Argument(help="Trace file, or folder of recorded traces.")]
Engine = Annotated[str, typer.Option(help="Arguments of vLLM's LLM, as JSON: '{\"max_model_len\": 4096}'.")]
Prompts = Annotated[
    str, typer.Option(help="File of prompts (ShareGPT, custom, spec_bench or lines), 'shipped', or random:LENGTH.")
]
Link = Annotated[
    list[str] | None,
    typer.Option(help="Rate of the emulated link on a CPU: 12MB/s; repeatable."),
]
Disk = Annotated[str | None, typer.Option(help="Rate of the disk with the experts: 2GB/s; `bench` emulates it.")]
HostMemory = Annotated[str | None, typer.Option(help="Host memory for experts: 16GB.")]
TensorParallel = Annotated[int, typer.Option(min=1, help="Ranks of tensor parallelism.")]
DataParallel = Annotated[int, typer.Option(min=1, help="Data-parallel engines, with a batch each.")]
Stages = Annotated[int, typer.Option(min=1, help="Pipeline stages.")]
Nodes = Annotated[int, typer.Option(min=1, help="Machines that share the ranks; `bench` finds them through Ray.")]
Figure = Annotated[Path | None, typer.Option(help="Picture to write: a .png or .svg file; needs matplotlib.")]
ExpertParallel = Annotated[bool, typer.Option("--ep", help="Expert parallelism: each rank has whole experts.")]
Architecture = Annotated[
    Literal["linear+input", "paper", "paper+input", "paper-shared", "linear"],
    typer.Option(help="Kind of network; those with +input need a trace with router inputs."),
]


class Commands(TyperGroup):
    """Commands that print errors of this package as a sentence.

    They print it on stderr and exit with 1. Other errors keep their traceback.
    """

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            if not type(error).__module__.startswith("vllm_dymoe."):
                raise
            typer.echo(f"vllm-dymoe: {str(error).removeprefix('vllm-dymoe: ')}", err=True)
            raise typer.Exit(1) from None


app = typer.Typer(
    cls=Commands,
    name="vllm-dymoe",
    help="Serve Mixture-of-Experts models that do not fit on the accelerator, with vLLM.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def json_object(option: str, text: str) -> dict[str, Any]:
    from vllm_dymoe.options import ConfigError

    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{option} is not JSON ({error}).") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{option} must be a JSON object, such as '{{\"high\": 16}}'.")
    return value


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(
    context: typer.Context,
    model: Model,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be started, and stop.")] = False,
    retune: Annotated[bool, typer.Option("--retune", help="Measure this machine and choose again.")] = False,
    machine: Annotated[
        Path | None, typer.Option(help="JSON file that describes a machine, to choose for that one; a dry run.")
    ] = None,
) -> None:
    """Choose how to serve MODEL on this machine, say why, and start `vllm serve`.

    All arguments of `vllm serve` can follow; they are never changed.
    """
    from vllm_dymoe.cli.serve import run

    run(model, context.args, machine, dry_run=dry_run, retune=retune)


@app.command()
def quantize(
    model: Annotated[Path, typer.Argument(help="Folder of a Hugging Face checkpoint, 16-bit or quantized.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write; `vllm serve` opens it as it is.")],
    high: Annotated[Literal["16", "8", "4", "2"], typer.Option(help="Bits per weight of the high precision.")] = "4",
    low: Annotated[
        Literal["8", "4", "2", "0"], typer.Option(help="Bits per weight of the low precision; 0 stores none.")
    ] = "0",
    group_size: Annotated[
        Literal["32", "64", "128"] | None,
        typer.Option(help="Weights per scale and zero; default 64, or as in a quantized checkpoint."),
    ] = None,
    quantizer: Annotated[
        Literal["rtn", "hqq", "gptq", "e8"] | None,
        typer.Option(help="gptq or e8 (best at 2 bits) with --calibration; otherwise rtn or hqq."),
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option(help="Folder that `vllm-dymoe calibrate` wrote for MODEL; for gptq and e8.")
    ] = None,
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16"],
        typer.Option(help="Type of scales, activations and 16-bit experts; auto keeps the checkpoint's."),
    ] = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it is a dymoe checkpoint.")] = False,
) -> None:
    """Write a checkpoint with packed experts, which vLLM then opens in seconds."""
    from vllm_dymoe.cli.quantize import run

    asked = {
        "high": int(high), "low": int(low), "group_size": None if group_size is None else int(group_size),
        "quantizer": quantizer,
    }  # fmt: skip
    run(model, out, asked, calibration, dtype, overwrite=overwrite)


@app.command()
def calibrate(
    model: Annotated[Path, typer.Argument(help="Folder of a checkpoint with 16-bit weights, or of a store.")],
    texts: Annotated[
        list[Path] | None,
        typer.Option("--texts", help='File of plain text, or .jsonl with {"text": ...} in each line; repeatable.'),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder to write; give it again to resume.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to read.")] = 131072,
    length: Annotated[int, typer.Option(min=2, help="Tokens per sequence.")] = 2048,
    high: Annotated[Literal["16", "8", "4"], typer.Option(help="Bits per weight while the model runs.")] = "16",
    expert_budget: Annotated[
        str, typer.Option(help='Device memory for experts, as the option expert_budget: "auto", "4GiB" or "25%".')
    ] = "auto",
    link: Annotated[str | None, typer.Option(help="Without texts: rate of an emulated link on a CPU, 25GB/s.")] = None,
) -> None:
    """Run texts through a model in vLLM and record its experts' inputs, for `quantize --calibration`.

    Without texts, measure link and CPU with a store's experts, for `misses`.
    """
    from vllm_dymoe.cli.calibrate import measure, run

    if not texts:
        measure(model, link)
        return
    if out is None:
        from vllm_dymoe.options import ConfigError

        raise ConfigError("set the folder for the recorded inputs of experts: --out.")
    run(model, texts, out, tokens=tokens, length=length, high=int(high), expert_budget=expert_budget)


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(help="Folder of an expert store, a dymoe checkpoint or a MoE checkpoint.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read every expert and check its checksums.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    budget: Annotated[str, typer.Option(help="Device budget for the table of memory tiers.")] = "25%",
    host_memory: Annotated[str, typer.Option(help="Host memory for the table of memory tiers.")] = "auto",
) -> None:
    """Show layers, experts, sizes and feasible budgets of a store or checkpoint.

    Also shows what each memory tier would hold.
    """
    from vllm_dymoe.cli.inspect import run

    run(path, budget, host_memory, verify=verify, as_json=as_json)


cache = typer.Typer(cls=Commands, name="cache", help="Packed experts of earlier starts.", no_args_is_help=True)
app.add_typer(cache)
StoreDir = Annotated[Path | None, typer.Option(help="Folder of the stores; default as for the option store_dir.")]


@cache.command("list")
def list_(
    store_dir: StoreDir = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list instead of a table.")] = False,
) -> None:
    """List stores, and whether a start can use them."""
    from vllm_dymoe.cli.cache import list_stores

    list_stores(store_dir, as_json=as_json)


@cache.command("clean")
def clean_(
    names: Annotated[list[str] | None, typer.Argument(help="Stores to remove, as `list` names them.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Remove all stores.")] = False,
    unused_days: Annotated[int | None, typer.Option(min=0, help="Remove stores unused for this many days.")] = None,
    store_dir: StoreDir = None,
) -> None:
    """Remove stores; without arguments, damaged or unfinished ones, which no start can use."""
    from vllm_dymoe.cli.cache import clean_stores

    clean_stores(names or (), store_dir, everything=everything, unused_days=unused_days)


@app.command()
def trace(
    model: Model,
    prompts: Annotated[str, typer.Option(help="File of prompts, as for `bench`.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the trace.")],
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 128,
    inputs: Annotated[
        bool, typer.Option("--inputs", help="Record the routers' inputs as well: hundreds of times larger.")
    ] = False,
    limit: Annotated[str, typer.Option(help="Maximum size of the folder.")] = "256MiB",
    options: Annotated[str, typer.Option(help="Options of the plugin, as JSON: '{\"high\": 16}'.")] = "{}",
    engine: Engine = "{}",
) -> None:
    """Run prompts through a model and record which experts each token chooses.

    A trace reveals information about the prompts.
    """
    import vllm_dymoe
    from vllm_dymoe.bench.prompts import read_prompts
    from vllm_dymoe.options import ConfigError
    from vllm_dymoe.units import size

    asked = read_prompts(prompts)
    if asked.is_random:
        raise ConfigError("random prompts say nothing about routing; give a file of prompts.")
    texts = [prompt.text for prompt in asked.prompts]
    found = vllm_dymoe.record_trace(
        model, texts, out, max_tokens=max_tokens, limit=limit, inputs=inputs,
        options=json_object("--options", options), engine=json_object("--engine", engine),
    )  # fmt: skip
    typer.echo(f"{found['tokens']} tokens of {len(texts)} prompts, {size(found['bytes'])} in {out}.")
    if not found["recording"]:
        typer.echo(f"The trace ends early, because it reached --limit {limit}.")
    typer.echo(f"To plan with it:\nvllm-dymoe plan {model} --gpu GPU --trace {out}")


@app.command()
def train(
    trace: TraceFile,
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write, for the option `predictor`.")],
    architecture: Architecture = "linear+input",
    epochs: Annotated[int, typer.Option(min=1, help="Maximum number of epochs; linear+input uses none.")] = 20,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Where it is trained.")] = "cpu",
) -> None:
    """Train a predictor of the next layers' experts on a trace.

    A server can also train one itself (`train_predictor`).
    """
    from vllm_dymoe.cli.train import run
    from vllm_dymoe.prefetch.training import Recipe

    run(trace, out, architecture, Recipe(epochs), device)


@app.command()
def bench(
    model: Model,
    policy: Annotated[
        list[str] | None, typer.Option(help='A policy\'s name, or options as JSON with a "label"; repeatable.')
    ] = None,
    peer: Annotated[list[str] | None, typer.Option(help="Another server to compare with; repeatable.")] = None,
    budget: Annotated[list[str] | None, typer.Option(help="As the option expert_budget; repeatable.")] = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Concurrent requests; repeatable.")] = None,
    link: Link = None,
    misses: Annotated[
        list[str] | None, typer.Option(help="As the option misses: fetch, compute or share; repeatable.")
    ] = None,
    prompts: Prompts = "shipped",
    requests: Annotated[int, typer.Option(min=1, help="Measured requests for each row.")] = 16,
    warm_up: Annotated[int, typer.Option(min=1, help="Unmeasured requests before them.")] = 4,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 64,
    options: Annotated[str, typer.Option(help="Options of every policy, as JSON: '{\"high\": 8}'.")] = "{}",
    engine: Engine = "{}",
    disk: Disk = None,
    host_memory: HostMemory = None,
    tp: TensorParallel = 1,
    dp: DataParallel = 1,
    pp: Stages = 1,
    ep: ExpertParallel = False,
    nodes: Nodes = 1,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of rows; give it again to resume.")] = Path("bench"),
    figure: Figure = None,
    prefixes: Annotated[
        int, typer.Option(min=0, help="Measure first tokens of prompts of so many tokens instead: cold and cached.")
    ] = 0,
) -> None:
    """Measure policies side by side: latency, hits, bytes and memory, for each budget and batch size."""
    from vllm_dymoe.bench.cases import Workload
    from vllm_dymoe.bench.prompts import read_prompts
    from vllm_dymoe.cli.bench import Bench
    from vllm_dymoe.plan.device import parse_rate
    from vllm_dymoe.plan.ranks import Ranks

    asked, common = read_prompts(prompts), json_object("--options", options)
    common |= {} if host_memory is None else {"host_memory": host_memory}
    common |= {} if disk is None else {"disk_gbps": parse_rate(disk) / 1e9}
    workload = Workload(asked.digest, asked.name, asked.is_random, requests, warm_up, max_tokens)
    ranks = Ranks(tp, dp, pp, ep, nodes).for_engines()
    run = Bench(model, asked, workload, common, ranks | json_object("--engine", engine), out, figure)
    if prefixes:
        run.prefixes(policy or ["exact"], budget or ["25%", "50%", "100%"], prefixes)
        return
    policies = policy or ["on-demand", "exact"]
    run.compare(policies, peer or [], budget or ["25%", "50%"], batch or [1], link or [], misses or [])


@app.command()
def plan(
    model: Annotated[str, typer.Argument(help="Folder with a config.json, or a model on the Hugging Face hub.")],
    gpu: Annotated[str | None, typer.Option(help="Name of a GPU, such as rtx4090.")] = None,
    link: Annotated[str | None, typer.Option(help="Rate of the link: 25GB/s; default from the data sheet.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Recorded routing; default synthetic routing.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Requests that decode concurrently.")] = 1,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 512,
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="As for `vllm serve`; default 8192, or the model's longest.")
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="As for `vllm serve`.")] = 16,
    gpu_memory_utilization: Annotated[float, typer.Option(min=0.1, max=1, help="As for `vllm serve`.")] = 0.9,
    policy: Annotated[list[str] | None, typer.Option(help="Show this policy at every budget; repeatable.")] = None,
    disk: Disk = None,
    host_memory: HostMemory = None,
    misses: Annotated[
        str, typer.Option(help="fetch, or the rate of CPU execution that shares the misses: 60GB/s.")
    ] = "fetch",
    tp: TensorParallel = 1,
    dp: DataParallel = 1,
    pp: Stages = 1,
    ep: ExpertParallel = False,
    nodes: Nodes = 1,
    cards_per_switch: Annotated[int, typer.Option(min=1, help="Cards that share one link to the host.")] = 1,
    network: Annotated[str | None, typer.Option(help="Rate between a node and the others: 12GB/s.")] = None,
    figure: Figure = None,
    measured: Annotated[Path | None, typer.Option(help="Report of `make gpu` on this GPU.")] = None,
) -> None:
    """Predict what fits on a device and how fast each policy is, and recommend options; nothing is loaded."""
    from vllm_dymoe.cli import plan as planning
    from vllm_dymoe.options import ConfigError
    from vllm_dymoe.plan.choice import ServeSettings
    from vllm_dymoe.plan.device import find_device, parse_rate
    from vllm_dymoe.plan.ranks import Ranks

    if gpu is None:
        raise ConfigError("name the device, such as --gpu rtx4090.")
    serving = ServeSettings(max_num_seqs=max_num_seqs, gpu_memory_utilization=gpu_memory_utilization)
    ranks = Ranks(tp, dp, pp, ep, nodes, cards_per_switch, parse_rate(network) if network else 0.0)
    card = find_device(gpu, link, measured)
    planning.run(
        model, card, trace, batch, prompt, serving, policy or (), disk, host_memory, misses, ranks, figure,
        max_model_len,
    )  # fmt: skip
