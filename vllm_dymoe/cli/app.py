"""The commands and their options."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from vllm_dymoe import __version__

Model = Annotated[str, typer.Argument(help="Model to serve, as for `vllm serve`.")]
TraceFile = Annotated[Path, typer.Argument(help="Trace file, or folder that one is or was recorded to.")]
Engine = Annotated[str, typer.Option(help="Arguments of vLLM's LLM, as JSON: '{\"max_model_len\": 4096}'.")]
Prompts = Annotated[
    str, typer.Option(help="File of prompts (ShareGPT, custom, spec_bench or lines), shipped, or random:LENGTH.")
]
Link = Annotated[
    list[str] | None,
    typer.Option(help="Emulated on a CPU: 12MB/s; several times."),
]
Disk = Annotated[str | None, typer.Option(help="Rate of a disk under host memory: 2GB/s; `bench` emulates it.")]
HostMemory = Annotated[str | None, typer.Option(help="Bytes of host memory for experts: 16GB.")]
TensorParallel = Annotated[int, typer.Option(min=1, help="Ranks of tensor parallelism.")]
DataParallel = Annotated[int, typer.Option(min=1, help="Engines of data parallelism, with a batch each.")]
Stages = Annotated[int, typer.Option(min=1, help="Stages of a pipeline.")]
Nodes = Annotated[int, typer.Option(min=1, help="Machines over which the ranks are spread; `bench` finds them by Ray.")]
Figure = Annotated[Path | None, typer.Option(help="Picture to write: a .png or .svg file; needs matplotlib.")]
ExpertParallel = Annotated[bool, typer.Option("--ep", help="Ranks share out whole experts.")]
Architecture = Annotated[
    Literal["linear+input", "paper", "paper+input", "paper-shared", "linear"],
    typer.Option(help="Kind of network; those with +input need a trace with router inputs."),
]


class Commands(TyperGroup):
    """Errors of this package are a sentence on stderr and exit code 1; any other stays a traceback."""

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
        raise ConfigError(f"{option} has to be a JSON object, such as '{{\"high\": 16}}'.")
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
    """Look at this machine and at MODEL, choose how to serve it, say why, and start `vllm serve` so; all arguments of
    `vllm serve` can follow, and are never changed."""
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
        typer.Option(help="Weights that share one scale and zero: 64, or what a quantized checkpoint has."),
    ] = None,
    quantizer: Annotated[
        Literal["rtn", "hqq", "gptq", "e8"] | None,
        typer.Option(help="With --calibration GPTQ, or E8, the best at 2 bits; else round to nearest, or HQQ."),
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option(help="Folder that `vllm-dymoe calibrate` wrote for MODEL; for gptq and e8.")
    ] = None,
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16"],
        typer.Option(help="Of scales, activations and 16-bit experts; auto takes the checkpoint's."),
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
        typer.Option("--texts", help='File of plain text, or .jsonl with {"text": ...} in each line; several times.'),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder to write; the same one to go on after a break.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to read.")] = 131072,
    length: Annotated[int, typer.Option(min=2, help="Tokens of a text that are read together.")] = 2048,
    high: Annotated[Literal["16", "8", "4"], typer.Option(help="Bits per weight while the model reads.")] = "16",
    expert_budget: Annotated[
        str, typer.Option(help='Device memory for experts, as the option: "auto", "4GiB" or "25%".')
    ] = "auto",
    link: Annotated[str | None, typer.Option(help="Without texts, of an emulated link on a CPU: 25GB/s.")] = None,
) -> None:
    """Let a model read texts in vLLM and record what its experts see, for `quantize --calibration`; without texts,
    measure the link and the host with a store's experts, for `misses`."""
    from vllm_dymoe.cli.calibrate import measure, run

    if not texts:
        measure(model, link)
        return
    if out is None:
        from vllm_dymoe.options import ConfigError

        raise ConfigError("what experts see in the texts has to be written somewhere: --out.")
    run(model, texts, out, tokens=tokens, length=length, high=int(high), expert_budget=expert_budget)


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(help="Folder of an expert store, a dymoe checkpoint or a MoE checkpoint.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read every expert and check its checksums.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    budget: Annotated[str, typer.Option(help="Budget for which to say what is where.")] = "25%",
    host_memory: Annotated[str, typer.Option(help="The same of host memory.")] = "auto",
) -> None:
    """Show layers, experts, bytes and feasible budgets of a store or a checkpoint, and what each memory tier would
    hold."""
    from vllm_dymoe.cli.inspect import run

    run(path, budget, host_memory, verify=verify, as_json=as_json)


cache = typer.Typer(cls=Commands, name="cache", help="Packed experts that earlier starts keep.", no_args_is_help=True)
app.add_typer(cache)
StoreDir = Annotated[Path | None, typer.Option(help="Folder of the stores, if it is not that of the option store_dir.")]


@cache.command("list")
def list_(
    store_dir: StoreDir = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list instead of a table.")] = False,
) -> None:
    """Show what is kept, and whether a start can use it."""
    from vllm_dymoe.cli.cache import list_stores

    list_stores(store_dir, as_json=as_json)


@cache.command("clean")
def clean_(
    names: Annotated[list[str] | None, typer.Argument(help="Stores to remove, as `list` names them.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Remove all stores.")] = False,
    unused_days: Annotated[int | None, typer.Option(min=0, help="Remove those that were not used for so long.")] = None,
    store_dir: StoreDir = None,
) -> None:
    """Remove stores; without arguments those that are damaged or unfinished, which no start can use."""
    from vllm_dymoe.cli.cache import clean_stores

    clean_stores(names or (), store_dir, everything=everything, unused_days=unused_days)


@app.command()
def trace(
    model: Model,
    prompts: Annotated[str, typer.Option(help="File of prompts, as for `bench`.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder that the trace goes to.")],
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 128,
    inputs: Annotated[
        bool, typer.Option("--inputs", help="Record the routers' inputs as well: hundreds of times larger.")
    ] = False,
    limit: Annotated[str, typer.Option(help="How large the folder may become.")] = "256MiB",
    options: Annotated[str, typer.Option(help="Options of the plugin, as JSON: '{\"high\": 16}'.")] = "{}",
    engine: Engine = "{}",
) -> None:
    """Run prompts through a model and record which experts each token chooses; a trace tells about the prompts."""
    import vllm_dymoe
    from vllm_dymoe.bench.prompts import read_prompts
    from vllm_dymoe.options import ConfigError
    from vllm_dymoe.units import size

    asked = read_prompts(prompts)
    if asked.is_random:
        raise ConfigError("random prompts say nothing about routers; give a file.")
    texts = [prompt.text for prompt in asked.prompts]
    found = vllm_dymoe.record_trace(
        model, texts, out, max_tokens=max_tokens, limit=limit, inputs=inputs,
        options=json_object("--options", options), engine=json_object("--engine", engine),
    )  # fmt: skip
    typer.echo(f"{found['tokens']} tokens of {len(texts)} prompts, {size(found['bytes'])} in {out}.")
    if not found["recording"]:
        typer.echo(f"It ends early: --limit {limit} was reached.")
    typer.echo(f"To see what a cache gains by it:\nvllm-dymoe plan {model} --gpu GPU --trace {out}")


@app.command()
def train(
    trace: TraceFile,
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write, for the option `predictor`.")],
    architecture: Architecture = "linear+input",
    epochs: Annotated[int, typer.Option(min=1, help="At most; linear+input has none.")] = 20,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Where it is trained.")] = "cpu",
) -> None:
    """Train a predictor of the next layers' experts on a trace; a server can do it by itself (`train_predictor`)."""
    from vllm_dymoe.cli.train import run
    from vllm_dymoe.prefetch.training import Recipe

    run(trace, out, architecture, Recipe(epochs), device)


@app.command()
def bench(
    model: Model,
    policy: Annotated[
        list[str] | None, typer.Option(help='A policy\'s name, or options as JSON with a "label"; several times.')
    ] = None,
    peer: Annotated[list[str] | None, typer.Option(help="Something else that serves the model; several times.")] = None,
    budget: Annotated[list[str] | None, typer.Option(help="As the option expert_budget; several times.")] = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Requests at once; several times.")] = None,
    link: Link = None,
    misses: Annotated[
        list[str] | None, typer.Option(help="As the option misses: fetch, compute or share; several times.")
    ] = None,
    prompts: Prompts = "shipped",
    requests: Annotated[int, typer.Option(min=1, help="Requests that are measured for each row.")] = 16,
    warm_up: Annotated[int, typer.Option(min=1, help="Requests before them that are not.")] = 4,
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
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of rows; the same one to go on.")] = Path("bench"),
    figure: Figure = None,
    prefixes: Annotated[
        int, typer.Option(min=0, help="Measure first tokens of prompts of so many tokens instead: cold and cached.")
    ] = 0,
) -> None:
    """Measure policies side by side: times, hits, bytes and memory, for each budget and batch size."""
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
    model: Annotated[str, typer.Argument(help="Folder with a config.json, or a model of the Hugging Face hub.")],
    gpu: Annotated[str | None, typer.Option(help="A GPU's name.")] = None,
    link: Annotated[str | None, typer.Option(help="Rate of the link: 25GB/s; else that of the data sheet.")] = None,
    trace: Annotated[Path | None, typer.Option(help="What routers chose; else a stated skew.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Requests that decode at once.")] = 1,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 512,
    max_model_len: Annotated[int, typer.Option(min=1, help="As of `vllm serve`.")] = 8192,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="As of `vllm serve`.")] = 16,
    gpu_memory_utilization: Annotated[float, typer.Option(min=0.1, max=1, help="As of `vllm serve`.")] = 0.9,
    policy: Annotated[list[str] | None, typer.Option(help="Show this policy at every budget; repeatable.")] = None,
    disk: Disk = None,
    host_memory: HostMemory = None,
    misses: Annotated[
        str, typer.Option(help="fetch, or the rate at which the host computes those that it does not: 60GB/s.")
    ] = "fetch",
    tp: TensorParallel = 1,
    dp: DataParallel = 1,
    pp: Stages = 1,
    ep: ExpertParallel = False,
    nodes: Nodes = 1,
    cards_per_switch: Annotated[int, typer.Option(min=1, help="Cards that share one link to the host.")] = 1,
    network: Annotated[str | None, typer.Option(help="Rate between a node and the others: 12GB/s.")] = None,
    figure: Figure = None,
    measured: Annotated[Path | None, typer.Option(help="What `make gpu` has written on this GPU.")] = None,
) -> None:
    """Say what fits on a device, how fast each policy will be, and which options to take; nothing is loaded."""
    from vllm_dymoe.cli import plan as planning
    from vllm_dymoe.options import ConfigError
    from vllm_dymoe.plan.choice import ServeSettings
    from vllm_dymoe.plan.device import find_device, parse_rate
    from vllm_dymoe.plan.ranks import Ranks

    if gpu is None:
        raise ConfigError("say for which device: --gpu rtx4090.")
    serving = ServeSettings(max_model_len, max_num_seqs, gpu_memory_utilization=gpu_memory_utilization)
    ranks = Ranks(tp, dp, pp, ep, nodes, cards_per_switch, parse_rate(network) if network else 0.0)
    card = find_device(gpu, link, measured)
    planning.run(model, card, trace, batch, prompt, serving, policy or (), disk, host_memory, misses, ranks, figure)
