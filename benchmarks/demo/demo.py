"""`make demo`: the shipped model in vLLM, a quarter of its experts resident.

Three engines answer the same prompts in turn, each in its own process: vLLM itself, and vllm-dymoe with experts at 16
and at 4 bits. The demo prints texts, times and bytes, and how many tokens are equal.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

sys.path.append(str(Path(__file__).resolve().parents[1]))
from readme import markdown, put

from vllm_dymoe.cli import figures

MODEL = Path(__file__).resolve().parents[1] / "tiny_moe" / "model"
NEW_TOKENS = 48
ENGINES: dict[str, dict[str, Any] | None] = {
    "vLLM": None,
    "dymoe 16-bit": {"high": 16, "expert_budget": "25%"},
    "dymoe 4-bit": {"high": 4, "expert_budget": "25%"},
}


def serve(options: dict[str, Any] | None) -> dict[str, Any]:
    """Answer all prompts with one engine, in this process."""
    from vllm import LLM, SamplingParams

    settings = {} if options is None else {"quantization": "dymoe", "additional_config": {"dymoe": options}}
    llm = LLM(
        model=str(MODEL), enforce_eager=True, max_model_len=512, max_num_seqs=32, enable_prefix_caching=False,
        disable_log_stats=False, **settings,
    )  # fmt: skip
    prompts = [prompt["prompt"] for prompt in json.loads((MODEL / "prompts.json").read_text())]
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    llm.generate(prompts[:1], sampling, use_tqdm=False)  # the first call compiles
    if options is not None:
        llm.collective_rpc("dymoe_reset_stats")

    singles = [llm.generate([prompt], sampling, use_tqdm=False)[0].metrics for prompt in prompts[::4]]
    begin = time.perf_counter()
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - begin
    return {
        "ttft_ms": [1e3 * m.first_token_latency for m in singles],
        "tpot_ms": [1e3 * (m.last_token_ts - m.first_token_ts) / (m.num_generation_tokens - 1) for m in singles],
        "batch_tokens_per_second": sum(len(o.outputs[0].token_ids) for o in outputs) / seconds,
        "prompts": prompts,
        "texts": [output.outputs[0].text for output in outputs],
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "stats": llm.collective_rpc("dymoe_stats")[0] if options is not None else None,
    }


def run_engine(name: str, log: Path) -> dict[str, Any]:
    """Return the results of an engine in its own process; show its log if it fails."""
    with ProcessPoolExecutor(1, get_context("spawn"), _print_into, (log,)) as pool:
        try:
            return pool.submit(serve, ENGINES[name]).result()
        except Exception as error:
            sys.exit(f"{name} failed ({error}); the end of its log {log}:\n" + "".join(log.open().readlines()[-30:]))


def _print_into(log: Path) -> None:
    with log.open("w") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)


def equal_shares(tokens: list[list[int]], reference: list[list[int]]) -> tuple[float, float]:
    """Return two shares of equal tokens.

    One is that of all tokens; the other counts each answer up to its first difference, after which texts diverge.
    """
    equal = compared = comparable = parted = 0
    for ours, theirs in zip(tokens, reference, strict=True):
        same = [a == b for a, b in zip(ours, theirs, strict=True)]
        equal, compared, parted = equal + sum(same), compared + len(same), parted + (False in same)
        comparable += same.index(False) + 1 if False in same else len(same)
    return equal / compared, (comparable - parted) / comparable


def show_texts(console: Console, answers: dict[str, Any]) -> None:
    """Print answers to two prompts of each domain."""
    domains = [prompt["domain"] for prompt in json.loads((MODEL / "prompts.json").read_text())]
    for number, domain in enumerate(domains):
        if domains[:number].count(domain) < 2:
            body = Text(answers["prompts"][number], style="bold") + Text(answers["texts"][number], style="cyan", end="")
            console.print(Panel(body, title=domain, title_align="left", width=min(console.width, 110)))


def rows(results: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Return the table: a head, then a row for each engine.

    The columns are latency, rate, hits, bytes and equal tokens.
    """
    reference = results["vLLM"]["tokens"]
    table = [["", "TTFT ms", "TPOT ms", f"batch of {len(reference)}, tokens/s", "experts on device", "hits", "moved"]]
    table[0] += ["equal tokens", "to first difference"]
    for name, data in results.items():
        held, stats = ["all", "", ""], data["stats"]
        if stats is not None:
            held = [f"{stats['peak_expert_bytes'] / 2**20:.2f} MiB", f"{stats['hit_rate']:.0%}"]
            held.append(f"{sum(stats['bytes_moved'].values()) / 2**20:.0f} MiB")
        ttft, tpot = (statistics.median(data[key]) for key in ("ttft_ms", "tpot_ms"))
        equal = [f"{share:.1%}" for share in equal_shares(data["tokens"], reference)]
        table.append([name, f"{ttft:.0f}", f"{tpot:.1f}", f"{data['batch_tokens_per_second']:.0f}", *held, *equal])
    return table


def picture(results: dict[str, dict[str, Any]], path: Path) -> Path:
    """Draw tokens per second by experts on the device: a point for each engine."""
    panel = figures.Panel("The small model, one request at a time", "experts on the device, MiB", "tokens per second")
    model = json.loads((MODEL / "config.json").read_text())
    weights = (
        3 * model["hidden_size"] * model["moe_intermediate_size"] * model["num_experts"] * model["num_hidden_layers"]
    )
    for name, data in results.items():
        held = 2 * weights if data["stats"] is None else data["stats"]["peak_expert_bytes"]
        panel.lines[name] = [(held / 2**20, 1e3 / statistics.median(data["tpot_ms"]))]
    return figures.draw(path, [panel])


def main() -> None:
    """Parse the command line; without arguments run the whole demonstration."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--readme", action="store_true", help="also put the table into this folder's README")
    arguments = parser.parse_args()
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_COLOR": "0"}
    console = Console(highlight=False)
    logs = Path(tempfile.mkdtemp(prefix="dymoe-demo-"))
    results = {}
    for name in ENGINES:
        with console.status(f"{name}: starting the engine and answering ..."):
            log = logs / f"{name.replace(' ', '-')}.log"
            results[name] = run_engine(name, log)
        console.print(f"[bold]{name}[/bold] answered.")
        for line in log.read_text().splitlines():
            if "is active" in line:
                console.print(line[line.index("vllm-dymoe") :], style="dim")
    show_texts(console, results["dymoe 4-bit"])
    table = Table(title="The same prompts, a quarter of the experts on the device", title_justify="left")
    lines = rows(results)
    for name in (line[0] for line in lines):
        table.add_column(name, justify="right" if name else "left")
    for line in list(zip(*lines, strict=True))[1:]:
        table.add_row(*line)
    console.print(table)
    console.print(
        "Times of one request at a time; equal tokens against vLLM without the plugin, greedy, at the same position.\n"
        "A budget of 25% holds a quarter of the experts; the kernel's workspace comes on top and is counted.\n"
        f"Logs of the engines: {logs}\n"
        f"Picture: {picture(results, logs / 'demo.png')}",
        style="dim",
    )
    if arguments.readme:
        machine = f"{platform.machine()} CPU, {os.cpu_count()} cores"
        note = f"Medians of one run on one {machine}; one request at a time but for the batch."
        put(Path(__file__).with_name("README.md"), "demo", f"{markdown(lines[0], lines[1:])}\n\n{note}")


if __name__ == "__main__":
    main()
