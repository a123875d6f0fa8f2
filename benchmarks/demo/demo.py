"""`make demo`: the shipped model through vLLM with a quarter of its experts on the device.

Three engines answer the same prompts one after the other, each in a process of its
own: vLLM as it is, and vllm-dymoe with 16-bit and with 4-bit experts. The parent
prints the texts, what serving them cost, and how many tokens are the same.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table

MODEL = Path(__file__).resolve().parents[1] / "tiny_moe" / "model"
NEW_TOKENS = 48
ENGINES: dict[str, dict[str, Any] | None] = {
    "vLLM": None,
    "dymoe 16-bit": {"hi": 16, "expert_budget": "25%"},
    "dymoe 4-bit": {"hi": 4, "expert_budget": "25%"},
}


def serve(options: dict[str, Any] | None, result: Path) -> None:
    """Child: answer all prompts with one engine and write what happened as JSON."""
    from vllm import LLM, SamplingParams

    begin = time.perf_counter()
    settings = {} if options is None else {"quantization": "dymoe", "additional_config": {"dymoe": options}}
    llm = LLM(
        model=str(MODEL),
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=32,
        enable_prefix_caching=False,
        disable_log_stats=False,
        **settings,
    )
    ready = time.perf_counter() - begin
    prompts = [prompt["prompt"] for prompt in json.loads((MODEL / "prompts.json").read_text())]
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    llm.generate(prompts[:1], sampling, use_tqdm=False)  # first-call costs are nobody's latency
    if options is not None:
        llm.collective_rpc("dymoe_reset_stats")

    singles = [llm.generate([prompt], sampling, use_tqdm=False)[0].metrics for prompt in prompts[::4]]
    begin = time.perf_counter()
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - begin
    data = {
        "ready_seconds": ready,
        "ttft_ms": [1e3 * m.first_token_latency for m in singles],
        "tpot_ms": [1e3 * (m.last_token_ts - m.first_token_ts) / (m.num_generation_tokens - 1) for m in singles],
        "batch_tokens_per_second": sum(len(o.outputs[0].token_ids) for o in outputs) / seconds,
        "prompts": prompts,
        "texts": [output.outputs[0].text for output in outputs],
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "stats": llm.collective_rpc("dymoe_stats")[0] if options is not None else None,
    }
    result.write_text(json.dumps(data))


def run_engine(name: str, log: Path) -> dict[str, Any]:
    """Parent: run one child and return its data; its log is shown if it fails."""
    with tempfile.TemporaryDirectory() as folder, log.open("w") as output:
        result = Path(folder) / "result.json"
        environment = os.environ | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"),
            "VLLM_LOGGING_COLOR": "0",
        }
        command = [sys.executable, __file__, "--engine", name, "--result", str(result)]
        if subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=environment, check=False).returncode:
            sys.exit(f"{name} failed; the end of its log {log}:\n" + "".join(log.open().readlines()[-30:]))
        data: dict[str, Any] = json.loads(result.read_text())
        return data


def equal_share(tokens: list[list[int]], reference: list[list[int]], *, comparable: bool) -> float:
    """Share of equal tokens.

    Args:
        tokens: of each answer.
        reference: of vLLM's.
        comparable: look no further than each answer's first difference, behind which the two continue other texts.
    """
    equal = compared = 0
    for ours, theirs in zip(tokens, reference, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            compared += 1
            equal += a == b
            if comparable and a != b:
                break
    return equal / compared


def size(nbytes: float) -> str:
    """Bytes for people."""
    return f"{nbytes / 2**20:.2f} MiB"


def show_texts(console: Console, results: dict[str, dict[str, Any]]) -> None:
    """The answers of the 4-bit engine to a few prompts of each domain."""
    shown = results["dymoe 4-bit"]
    domains = [prompt["domain"] for prompt in json.loads((MODEL / "prompts.json").read_text())]
    seen: dict[str, int] = {}
    for domain, prompt, text in zip(domains, shown["prompts"], shown["texts"], strict=True):
        seen[domain] = seen.get(domain, 0) + 1
        if seen[domain] <= 2:
            from rich.text import Text

            body = Text(prompt, style="bold") + Text(text, style="cyan", end="")
            console.print(Panel(body, title=domain, title_align="left", width=min(console.width, 110)))


def show_table(console: Console, results: dict[str, dict[str, Any]]) -> None:
    """One column per engine."""
    table = Table(title="The same prompts, a quarter of the experts on the device", title_justify="left")
    table.add_column("")
    for name in results:
        table.add_column(name, justify="right")

    def row(label: str, cell: Any) -> None:
        table.add_row(label, *(cell(data) for data in results.values()))

    def stat(show: Any) -> Any:
        return lambda data: "-" if data["stats"] is None else show(data["stats"])

    reference = results["vLLM"]["tokens"]
    row("time to first token", lambda d: f"{statistics.median(d['ttft_ms']):.1f} ms")
    row("time per output token", lambda d: f"{statistics.median(d['tpot_ms']):.1f} ms")
    row(f"rate, batch of {len(reference)}", lambda d: f"{d['batch_tokens_per_second']:.0f} tok/s")
    row("engine ready after", lambda d: f"{d['ready_seconds']:.1f} s")
    row("cache hit rate", stat(lambda s: f"{s['hit_rate']:.1%}"))
    row("bytes moved", stat(lambda s: size(sum(s["bytes_moved"].values()))))
    row("peak expert bytes", stat(lambda s: size(s["peak_expert_bytes"])))
    row("expert budget", stat(lambda s: size(s["budget_bytes"])))
    row("equal tokens", lambda d: f"{equal_share(d['tokens'], reference, comparable=False):.1%}")
    row("... to the first difference", lambda d: f"{equal_share(d['tokens'], reference, comparable=True):.1%}")
    console.print(table)
    console.print(
        "Times of one request at a time; equal tokens against vLLM without the plugin, greedy, at the same position.\n"
        "A budget of 25% holds a quarter of the experts; the kernel's workspace comes on top and is counted.",
        style="dim",
        highlight=False,
    )


def main() -> None:
    """Parse the command line; without arguments run the whole demonstration."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="also write everything that was measured to this file")
    arguments = parser.parse_args()
    if arguments.engine:
        serve(ENGINES[arguments.engine], arguments.result)
        return

    console = Console()
    logs = Path(tempfile.mkdtemp(prefix="dymoe-demo-"))
    results = {}
    for name in ENGINES:
        with console.status(f"{name}: starting the engine and answering ..."):
            log = logs / f"{name.replace(' ', '-')}.log"
            results[name] = run_engine(name, log)
        active = [line for line in log.read_text().splitlines() if "is active" in line]
        console.print(f"[bold]{name}[/bold] answered.", highlight=False)
        if active:
            console.print(active[-1][active[-1].index("vllm-dymoe") :], style="dim", highlight=False)
    console.print()
    show_texts(console, results)
    show_table(console, results)
    console.print(f"Logs of the engines: {logs}", style="dim", highlight=False)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
