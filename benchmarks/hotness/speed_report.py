"""The tables and the picture of what ``speed.py`` measured."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))

from readme import markdown, put  # noqa: E402

FULL_LOAD = "all at 4 bits"
SPEEDS = ["batch", "system", "tokens/s", "x fetching", "x fetching ahead", "TTFT ms", "TPOT ms", "P99", "P99 / median"]
SPEEDS += ["waits of a step", "KB/token on demand", "ahead", "moves"]
STALLS = ["prompt", "answer", "system", "TTFT ms", "of it waiting", "TPOT ms", "of it waiting"]
PLANE = ["batch", "", "step ms", "paired difference", "95 of 100", "host time in it", "moves", "link used", "pairs"]
PLANE += ["a plan, ms"]
AIMS = ["", "aim", "reached"]


def sweep(results: dict[str, Any]) -> dict[int, dict[str, dict[str, Any]]]:
    """What was measured by batch and system."""
    found: dict[int, dict[str, dict[str, Any]]] = {}
    for row in results["rows"]:
        if row["workload"]["name"] == "by domain":
            label = FULL_LOAD if row["label"].startswith("full load") else row["label"]
            found.setdefault(row["batch"], {})[label] = row["measured"]
    return found


def times(cases: dict[str, dict[str, Any]], label: str, other: str) -> float:
    """By how much one system's whole throughput, prompts and answers, is above another's."""
    return float(cases[label]["tokens_per_second"] / cases[other]["tokens_per_second"])


def speeds(results: dict[str, Any]) -> Iterator[list[str]]:
    """Figures 6 to 10."""
    for batch, cases in sorted(sweep(results).items()):
        for label, found in cases.items():
            decode, tpot, tokens = found["decode"], found["tpot_ms"], found["decode_tokens"]
            waits = 1e3 * decode["exposed_wait_seconds"] / found["decode_steps"]
            moved = [decode["bytes_moved"][reason] / tokens / 1e3 for reason in ("demand", "prefetch")]
            yield [
                str(batch), label, f"{found['tokens_per_second']:.0f}",
                *(f"{times(cases, label, other):.2f}" for other in ("fetching", "fetching ahead")),
                f"{found['ttft_ms']['median']:.0f}", f"{tpot['median']:.1f}", f"{tpot['p99']:.1f}",
                f"{tpot['p99'] / tpot['median']:.2f}", f"{waits:.1f}", *(f"{kb:.1f}" for kb in moved),
                str(sum(found[phase]["transfers"]["migration"] for phase in ("prefill", "decode"))),
            ]  # fmt: skip


def at_a_glance(results: dict[str, Any]) -> str:
    """The front page's: tokens a second over batches."""
    cases = sorted(sweep(results).items())
    head = ["requests at once", *(str(batch) for batch, _ in cases)]
    labels = {"fetching": "fetched when the router has chosen", "fetching ahead": "fetched ahead"}
    labels |= {"dynaexq": "`dynaexq`: all at 2 bits, the busiest at 4", FULL_LOAD: "all on the device, at 4 bits"}
    speeds_of = {label: [f"{found[label]['tokens_per_second']:.0f}" for _, found in cases] for label in labels}
    return markdown(head, ([said, *speeds_of[label]] for label, said in labels.items()))


def stalls(results: dict[str, Any]) -> Iterator[list[str]]:
    """Figure 1: the share of a request's time in which the host waits for experts, over lengths."""
    for row in results["rows"]:
        work, found = row["workload"], row["measured"]
        if work["name"] == "by domain":
            continue
        requests = work["requests"]
        prompt, answer = (word for word in work["name"].split() if word.isdigit())
        seconds = {"prefill": sum_of(found["ttft_ms"], requests), "decode": found["decode_seconds"]}
        shares = {phase: found[phase]["exposed_wait_seconds"] / spent for phase, spent in seconds.items()}
        yield [
            prompt, answer, row["label"], f"{found['ttft_ms']['mean']:.0f}", f"{shares['prefill']:.0%}",
            f"{found['tpot_ms']['mean']:.1f}", f"{shares['decode']:.0%}",
        ]  # fmt: skip


def sum_of(distribution: dict[str, Any], count: int) -> float:
    """Seconds of all requests together."""
    return float(distribution["mean"]) * count / 1e3


def plane(results: dict[str, Any]) -> Iterator[list[str]]:
    """What planning and moving cost a step."""
    for row in results["plane"]:
        yield [
            str(row["batch"]), "moving" if row["moving"] else "nothing to move", f"{row['step_ms']:.1f}",
            f"{row['paired_share']:+.1%}", f"{row['paired_share_low']:+.1%} to {row['paired_share_high']:+.1%}",
            f"{row['host_share']:.1%}", str(row["moves"]["published"]), f"{row['link_share']:.0%}", str(row["pairs"]),
            f"{row['plan_ms']:.1f}",
        ]  # fmt: skip


def aims(results: dict[str, Any]) -> Iterator[list[str]]:
    """What was to be reached, and what is."""
    cases = sweep(results)
    last = max(cases)
    for other in ("fetching", "fetching ahead"):
        yield [f"throughput at batch {last}, times {other}", "2", f"{times(cases[last], 'dynaexq', other):.2f}"]
    worst = {batch: found["dynaexq"]["tpot_ms"] for batch, found in sorted(cases.items())}
    reached = ", ".join(f"{tpot['p99'] / tpot['median']:.2f} ({batch})" for batch, tpot in worst.items())
    yield ["P99 of TPOT beside the median (batch)", "1.3 at most", reached]
    for moving, aim in ((False, "below 1%"), (True, "below 3%")):
        rows = [row for row in results["plane"] if row["moving"] is moving]
        reached = ", ".join(f"{row['paired_share']:+.1%} ({row['batch']})" for row in rows) or "not measured"
        yield [f"the plane, {'moving' if moving else 'nothing to move'} (batch)", aim, reached]


def report(results: dict[str, Any], folder: Path | None) -> dict[str, Any]:
    """Print everything; with a folder also write speed.json, speed.png and README.md's tables.

    Returns:
        What a line can hold.
    """
    tables = {
        "aims": (AIMS, list(aims(results))),
        "speeds": (SPEEDS, list(speeds(results))),
        "stalls": (STALLS, list(stalls(results))),
        "plane": (PLANE, list(plane(results))),
    }
    for head, lines in tables.values():
        print(markdown(head, lines), end="\n\n")
    if folder is not None:
        for name, (head, lines) in tables.items():
            put(folder / "README.md", name, markdown(head, lines) if lines else "Not measured yet.")
        put(folder.parents[1] / "README.md", "batches", at_a_glance(results))
        (folder / "speed.json").write_text(json.dumps(slim(results), indent=1) + "\n")
        draw(results, folder / "speed.png")
    return {
        f"tokens_per_second_batch_{batch}": {label: round(row["tokens_per_second"], 1) for label, row in cases.items()}
        for batch, cases in sweep(results).items()
    }


def slim(results: dict[str, Any]) -> dict[str, Any]:
    """Without the digests of answers, and what all rows have in common."""
    kept = ("label", "options", "budget", "batch", "workload")
    drop = ("outputs", "prompt_tokens")
    rows = [
        {name: row[name] for name in kept}
        | {"measured": {name: value for name, value in row["measured"].items() if name not in drop}}
        for row in results["rows"]
    ]
    return results | {"rows": rows}


def draw(results: dict[str, Any], path: Path) -> None:
    """Throughput, time to the first token, and time per token with its slowest hundredth, over batches."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases = sweep(results)
    batches = sorted(cases)
    figure, (rate, first, each) = pyplot.subplots(1, 3, figsize=(13, 4))
    for number, label in enumerate(cases[batches[0]]):
        found, color = [cases[batch][label] for batch in batches], f"C{number}"
        rate.plot(batches, [row["tokens_per_second"] for row in found], "o-", color=color, label=label)
        first.plot(batches, [row["ttft_ms"]["median"] for row in found], "o-", color=color)
        each.plot(batches, [row["tpot_ms"]["median"] for row in found], "o-", color=color)
        each.plot(batches, [row["tpot_ms"]["p99"] for row in found], "o:", color=color)
    for axes, title in ((rate, "tokens/s"), (first, "ms to the first token"), (each, "ms per token; dotted: P99")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(batches, [str(batch) for batch in batches])
        axes.set_xlabel("requests at once")
        axes.set_title(title, fontsize=10)
        axes.grid(alpha=0.3)
    rate.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
