"""The papers' page and its pictures, from results.json alone.

For each claim it has the paper's number, ours, and the verdict.
"""

# ruff: noqa: E501 (sentences of the page)
import itertools
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))
from readme import markdown

Results = dict[str, Any]
_QUALITY = Path(__file__).resolve().parents[1] / "quality" / "results.json"
_HEAD = """# Four papers, side by side

    make bench-papers                          # or: python benchmarks/papers/papers.py duoserve

One simulator of schedules ([simulator.py](../../vllm_dymoe/plan/simulator.py)) serves routings of the shipped model, recorded on 12 prompts of
three domains (32 to 400 tokens, 16 tokens of each answer), with the real planner, policies and predictors. Sizes of experts are those of
the papers' models, rates those of their devices' data sheets, and the host's work is charged as it was measured
([costs.json](../../vllm_dymoe/plan/costs.json)). Times are of the trace's eight layers; what compares is ratios. Where a paper measured, it measured its own host:
rows with *no host* say what link and kernels alone give. ± is the spread over prompts. The papers' presets are what users get as
`"dymoe-paper"`, `"duoserve-paper"`, `"firm-paper"` and `"dynaexq-paper"`.

The routers are a small model's (32 experts, 4 for each token). Where a claim depends on routers (hits, predictions, quality), not
reproducing it here does not refute it for Mixtral or Qwen3.
"""


def _ratio(results: Results, *path: str, slow: str, fast: str, of: str = "tpot") -> float:
    at = results
    for name in path:
        at = at[name]
    return float(at[slow][of] / at[fast][of])


def claims(results: Results) -> list[tuple[str, str, str, str, str]]:
    """Return for each claim: paper, claim, its number, ours, and the verdict."""
    rows: list[tuple[str, str, str, str, str]] = []

    def say(paper: str, claim: str, theirs: str, ours: str, holds: bool | None, why: str = "") -> None:
        verdict = {True: "reproduced", False: "not reproduced", None: "in part"}[holds]
        rows.append((paper, claim, theirs, ours, f"**{verdict}**" + (f": {why}" if why and holds is not True else "")))

    if (found := results.get("dymoe")) is not None:
        for share, table in found["budgets"].items():
            steps = [table[name]["tpot"] for name in list(table)[:6]]
            ordered = all(before >= after * 0.995 for before, after in itertools.pairwise(steps[:4]))
            say("DyMoE", f"Table 3, {share} of the bytes: each part gains (on demand, cache, prefetch, 4/2)",
                "each row faster", " → ".join(f"{value:.2f}" for value in steps) + " ms", ordered and steps[4] <= steps[2],
                "" if ordered and steps[4] <= steps[2] else "with 4 active experts Eq. 5's ceiling leaves nearly all high, and fewer are fetched ahead")  # fmt: skip
        for of, theirs in (("ttft", 3.44), ("tpot", 2.86)):
            gains = [
                table["Accelerate"][of] / table["5. cache, prefetch, 4/2"][of]
                for table in (found["budgets"]["50%"], found["no host, 50%"])
            ]
            say("DyMoE", f"{of.upper()} against Accelerate, 4/2 (Qwen3-30B, 12 GB; here 50 % of the bytes)", f"{theirs:.2f}",
                f"{gains[0]:.2f}, without a host {gains[1]:.2f}", max(gains) > 0.8 * theirs or None, "" if max(gains) > 0.8 * theirs else "the order, not the size")  # fmt: skip
        share = found["budgets"]["25%"]
        say("DyMoE", "4/0 is faster than 4/2", "yes", f"{share['6. cache, prefetch, 4/0']['ttft']:.1f} and {share['5. cache, prefetch, 4/2']['ttft']:.1f} ms TTFT at 25 %",
            share["6. cache, prefetch, 4/0"]["ttft"] < share["5. cache, prefetch, 4/2"]["ttft"])  # fmt: skip
    if (found := results.get("duoserve")) is not None:
        for key, table in found.items():
            acc, moesys = (
                table[name]["end_to_end"] / table["DuoServe-MoE"]["end_to_end"] for name in ("ACC", "MoESys")
            )
            bound = table["ACC"]["end_to_end"] / table["an oracle"]["end_to_end"]
            say("DuoServe-MoE", f"end to end against ACC, {key}", "1.42 to 1.52", f"{acc:.2f}, an oracle {bound:.2f}",
                acc >= 1.35,
                "" if acc >= 1.35 else "an oracle gains no more than that" if bound < 1.35 else "the network names too few")  # fmt: skip
            say("DuoServe-MoE", f"end to end against MoESys, {key}", "up to 7.54", f"{moesys:.2f}", moesys > 3)
            ttft = table["ACC"]["ttft"] / table["DuoServe-MoE"]["ttft"]
            say(
                "DuoServe-MoE",
                f"TTFT against ACC, {key}",
                "1.78 and more",
                f"{ttft:.2f}",
                ttft > 1.7,
                "" if ttft > 1.7 else "copies take far longer than kernels, and two streams hide the kernels alone",
            )
        table = next(iter(found.values()))
        network = table["DuoServe-MoE"]
        say("DuoServe-MoE", "Table 3: all of a token's experts named; at least one", "54 to 67 %; 90 to 95 %",
            f"{network['named_whole']:.0%}; {network['named_some']:.0%} (the next gate {table['the next gate']['named_whole']:.0%})",
            None, "four of 32 have to be right here, where Mixtral has two of eight")  # fmt: skip
        widths = (31 * 8 + 8 + 8, 2048, 1024, 512, 256, 128, 64, 8)  # Eq. 5 for Mixtral-8x7B, and 4.2
        weights = sum(one * other for one, other in itertools.pairwise(widths))
        say(
            "DuoServe-MoE",
            "Table 2: the network takes little memory",
            "0.28 GB of 25",
            f"{2 * weights / 1e6:.1f} MB for Mixtral, in 16 bits",
            True,
        )
    if (found := results.get("firm")) is not None:
        theirs = {"128": 1.65, "256": 1.62, "512": 1.29, "768": 1.54}
        for cache, table in found["caches"].items():
            ours = {row: table["Baseline"]["tpot"] / of["tpot"] for row, of in table.items()}
            said = ", ".join(f"{row} {ours[row]:.2f}" for row in ("+ FG", "+ MoL", "+ FG + MoL", "All (firm-paper)"))
            say("FIRM-MoE", f"Table 1, cache of {cache}: all parts against the baseline", f"{theirs[cache]:.2f}",
                f"{said}; an oracle {ours['an oracle']:.2f}", ours["All (firm-paper)"] > 1.1,
                "" if ours["All (firm-paper)"] > 1.1 else "what is fetched ahead whole hides three times what one projection does")  # fmt: skip
        table = found["caches"]["256"]
        used = {name: table[name].get("utilization", 0) for name in ("Baseline", "+ MoL")}
        right = {name: table[name].get("accuracy", 0) for name in ("Baseline", "+ MoL")}
        say("FIRM-MoE", "Figure 7: MoL's utilisation and accuracy beside top-k's", "90.5 and 59.8 %; 78.8 %",
            f"{used['+ MoL']:.1%} and {right['+ MoL']:.1%}; {used['Baseline']:.1%}", used["+ MoL"] > used["Baseline"] > right["+ MoL"],
            "MoL names no more surely than the next gate does")  # fmt: skip
        n = [table[name]["tpot"] for name in ("All (firm-paper)", "n = 2", "n = 3")]
        say(
            "FIRM-MoE",
            "Table 2: n = 2 beats n = 1 for larger experts",
            "1.07 (Qwen1.5)",
            f"{n[0] / n[1]:.2f}, n = 3 {n[0] / n[2]:.2f}",
            n[1] < n[0],
            "" if n[1] < n[0] else "the link is busy, so more of what is wrong comes",
        )
    if (found := results.get("dynaexq")) is not None:
        gains = {
            batch: of["dynaexq-paper, 16/4"]["tokens_per_s"] / of["offloading, 16"]["tokens_per_s"]
            for batch, of in _by_number(found["batches"])
        }
        say("DynaExq", "throughput against offloading grows with the batch", "gap widens", ", ".join(f"{b}: {g:.1f}" for b, g in gains.items()),
            gains["32"] > gains["1"] > 1, "" if gains["32"] > gains["1"] > 1 else "a large batch computes for as long as it copies")  # fmt: skip
        beside = {
            batch: of["dynaexq-paper, 16/4"]["tokens_per_s"] / of["static 4"]["tokens_per_s"]
            for batch, of in _by_number(found["batches"])
        }
        say("DynaExq", "throughput close to static 4 bits", "near", ", ".join(f"{b}: {g:.2f}" for b, g in beside.items()),
            min(beside.values()) > 0.8 or None, "" if min(beside.values()) > 0.8 else "high experts are four times the bytes")  # fmt: skip
        shift = found["high after a shift"]
        paper, ours = shift["dynaexq-paper, 16/4"], shift["ours: dynaexq, 16/4"]
        frozen = shift["dynaexq-paper, 16/4, frozen"]
        say("DynaExq", "the high set follows a shift of traffic (choices served high)", "follows",
            f"paper's {_domains(paper)}; frozen {_domains(frozen)}; "
            f"ours {_domains(ours)}", sum(paper.values()) > sum(frozen.values()),
            "" if sum(paper.values()) > sum(frozen.values()) else "the windows end too seldom here")  # fmt: skip
    return rows


def _by_number(rows: dict[str, Any]) -> list[tuple[str, Any]]:
    return sorted(rows.items(), key=lambda item: int(item[0]))


def _domains(shares: dict[str, float]) -> str:
    return ", ".join(f"{domain} {share:.0%}" for domain, share in shares.items())


def _table(rows: dict[str, dict[str, Any]], columns: dict[str, Callable[[dict[str, Any]], str]]) -> str:
    return markdown(["row", *columns], ([name, *(make(of) for make in columns.values())] for name, of in rows.items()))


_TIMES: dict[str, Callable[[dict[str, Any]], str]] = {
    "TPOT, ms": lambda of: f"{of['tpot']:.2f} ± {of['tpot_spread']:.2f}",
    "p50": lambda of: f"{of['p50']:.2f}",
    "p95": lambda of: f"{of['p95']:.2f}",
    "p99": lambda of: f"{of['p99']:.2f}",
    "TTFT, ms": lambda of: f"{of['ttft']:.1f}",
    "end to end, ms": lambda of: f"{of['end_to_end']:.1f}",
    "hits": lambda of: f"{of['hits']:.0%}",
    "moved, GB": lambda of: f"{of['moved'] / 1e9:.2f}",
}


def sections(results: Results) -> Iterable[str]:
    """Yield every table."""
    yield "## What holds\n"
    yield markdown(["paper", "claim", "paper", "here", "verdict"], map(list, claims(results)))
    if (found := results.get("dymoe")) is not None:
        yield "\n## DyMoE: Qwen3-30B-A3B's experts on an RTX 3090 behind PCIe 3 (Table 3, Figure 10)\n\n![](dymoe.png)\n"
        for share, rows in found["budgets"].items():
            yield f"\nA budget of {share} of the bytes at 4 bits:\n\n{_table(rows, _TIMES)}"
        yield f"\nWithout a host, 50%:\n\n{_table(found['no host, 50%'], _TIMES)}"
        yield "\n" + _quality()
    if (found := results.get("duoserve")) is not None:
        yield "\n## DuoServe-MoE: Mixtral-8x7B's experts (Figures 5 and 6)\n\n![](duoserve.png)\n"
        for key, rows in found.items():
            columns = _TIMES | {
                "named whole": lambda of: f"{of['named_whole']:.0%}" if "named_whole" in of else "",
                "peak, GB": lambda of: f"{of['peak'] / 1e9:.2f}",
            }
            yield f"\n{key}:\n\n{_table(rows, columns)}"
        yield (
            "\nMoESys as its paper has it: the whole next layer comes, and nothing of it is cancelled when the router has chosen."
        )
    if (found := results.get("firm")) is not None:
        yield "\n## FIRM-MoE: Qwen1.5-MoE-A2.7B's experts at 16 bits on an RTX 3090 (Tables 1 and 2, Figures 4, 6 and 7)\n\n![](firm.png)\n"
        columns = _TIMES | {
            "accuracy (Eq. 7)": lambda of: f"{of['accuracy']:.0%}" if "accuracy" in of else "",
            "utilisation (Eq. 8)": lambda of: f"{of['utilization']:.0%}" if "utilization" in of else "",
        }
        for cache, rows in found["caches"].items():
            yield f"\nA cache of {cache} of 1440 experts:\n\n{_table(rows, columns)}"
        yield f"\nWithout a host, a cache of 256:\n\n{_table(found['no host, 256'], columns)}"
    if (found := results.get("dynaexq")) is not None:
        yield "\n## DynaExq: Qwen3-30B-A3B's experts on an A6000, 70 % of their bytes at 16 bits\n\n![](dynaexq.png)\n"
        names = list(next(iter(found["batches"].values())))
        for of, said in (("tokens_per_s", "tokens/s"), ("p99", "p99 of a step, ms")):
            lines = [
                [batch, *(f"{rows[name][of]:.2f}" for name in names)] for batch, rows in _by_number(found["batches"])
            ]
            yield f"\nDecode by batch, {said}:\n\n{markdown(['batch', *names], lines)}"
        lines = [
            [length, *(f"{np.mean(rows[name]['ttft']):.2f}" for name in names)]
            for length, rows in _by_number(found["lengths"])
        ]
        yield f"\nTTFT by tokens of a prompt, ms:\n\n{markdown(['tokens', *names], lines)}"
    if (found := results.get("adaptive")) is not None:
        yield from _adaptive(found)


def _adaptive(found: Results) -> Iterable[str]:
    """Yield time and copies of the policy adaptive, and its quality."""
    yield (
        "\n## And a policy that takes from two: `adaptive`\n\nDynaExq's floor with DyMoE's rescue, 4/2 on an A6000: every base slice is there, "
        "and a part of the residual ones.\nSlices that steps fetch are of decode and prompts together."
    )
    for share, batches in found.items():
        lines = [
            [
                batch,
                name,
                f"{of['tpot']:.2f}",
                f"{of['p99']:.2f}",
                f"{of['ttft']:.2f}",
                str(of["fetched"]),
                f"{of['high']:.0%}",
            ]
            for batch, rows in _by_number(batches)
            for name, of in rows.items()
        ]
        head = ["batch", "policy", "ms a step", "p99", "TTFT, ms", "slices fetched", "choices served high"]
        yield f"\n{share} of the residual slices:\n\n{markdown(head, lines)}"
    rows = json.loads(_QUALITY.read_text())["sections"].get("rescues", [])
    if rows:
        lines = [
            [
                f"{row['residuals']:.0%}",
                row["experts"],
                row["quantizer"],
                row["phase"],
                f"{1000 * row['kl_nats']:.2f}",
                f"{row['fetched_per_token']:.2f}",
            ]
            for row in rows
        ]
        head = ["residual slices", "policy", "quantizer", "phase", "KL, millinats", "fetched a token"]
        yield f"\nQuality in the engine (`benchmarks/quality/quality.py --only rescues`):\n\n{markdown(head, lines)}"


def _quality() -> str:
    """Return the KL of the options in the rows above, from benchmarks/quality."""
    rows = json.loads(_QUALITY.read_text())["sections"].get("papers", [])
    lines = [
        [row["experts"], row["phase"], row["quantizer"], f"{1000 * row['kl_nats']:.2f} ± {1000 * row['kl_error']:.2f}"]
        for row in rows
    ]
    if not lines:
        return ""
    said = "Quality of these rows' own options (`benchmarks/quality/quality.py --only papers`), KL from 16 bits:"
    return f"{said}\n\n{markdown(['options', 'phase', 'quantizer', 'KL, millinats'], lines)}"


def text(results: Results) -> str:
    """Return the page."""
    parts = (section.rstrip("\n") if section.startswith("|") else section for section in sections(results))
    return "\n".join(line.rstrip() for line in (_HEAD + "\n" + "\n".join(parts)).splitlines()) + "\n"


def write(results: Results, folder: Path) -> None:
    """Write the page, and pictures."""
    (folder / "README.md").write_text(text(results))
    try:
        import matplotlib
    except ImportError:
        print("The pictures are not drawn, because matplotlib is missing; install it with pip.")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    for name, draw in (("dymoe", _dymoe), ("duoserve", _duoserve), ("firm", _firm), ("dynaexq", _dynaexq)):
        if name in results:
            figure, axes = pyplot.subplots(1, 2, figsize=(11, 4))
            draw(results[name], axes)
            figure.tight_layout()
            figure.savefig(folder / f"{name}.png", dpi=80, metadata={"Software": None})
            pyplot.close(figure)


def _dymoe(found: Results, axes: Any) -> None:
    for at, (of, said) in zip(axes, (("ttft", "TTFT, ms"), ("tpot", "TPOT, ms")), strict=True):
        shares = list(found["budgets"])
        names = [
            "Accelerate",
            "3. cache, prefetch",
            "5. cache, prefetch, 4/2",
            "6. cache, prefetch, 4/0",
            "ours: dymoe, 4/2",
        ]
        for number, name in enumerate(names):
            places = np.arange(len(shares)) + number * 0.16
            at.bar(places, [found["budgets"][share][name][of] for share in shares], 0.15, label=name)
        at.set_xticks(np.arange(len(shares)) + 0.32, [f"{share} of bytes" for share in shares])
        at.set_ylabel(said)
    axes[0].set_title("DyMoE, Figure 10")
    axes[1].legend(fontsize=7)


def _duoserve(found: Results, axes: Any) -> None:
    table = found["a6000, measured host"]
    names = ["ACC", "DuoServe-MoE", "ours: duoserve without a network", "an oracle"]
    axes[0].bar(names, [table[name]["end_to_end"] for name in names], color="tab:blue", label="end to end")
    axes[0].bar(names, [table[name]["ttft"] for name in names], color="tab:red", label="TTFT")
    axes[0].set_title("DuoServe-MoE, Figure 5 (A6000)")
    axes[0].set_ylabel("ms")
    axes[0].tick_params(axis="x", labelsize=6)
    axes[0].legend(fontsize=7)
    for name in names:
        rates = np.sort([1e3 / ms for ms in table[name]["tpot_by_request"]])
        axes[1].step(rates, (1 + np.arange(len(rates))) / len(rates), where="post", label=name)
    axes[1].set_title("Figure 6: requests by decode throughput")
    axes[1].set_xlabel("tokens/s of eight layers")
    axes[1].legend(fontsize=7)


def _firm(found: Results, axes: Any) -> None:
    caches = list(found["caches"])
    for name in ("Baseline", "All (firm-paper)", "n = 3", "ours: firm", "nothing ahead", "an oracle"):
        axes[0].plot(caches, [found["caches"][cache][name]["tpot"] for cache in caches], marker="o", label=name)
    axes[0].set_title("FIRM-MoE, Figure 4")
    axes[0].set_xlabel("experts in the cache, of 1440")
    axes[0].set_ylabel("ms a token")
    axes[0].legend(fontsize=7)
    ks, ps = (sorted({int(key.split(",")[of]) for key in found["grid"]}) for of in (0, 1))
    image = [[found["grid"][f"{k},{p}"]["tpot"] for k in ks] for p in ps]
    shown = axes[1].imshow(image, cmap="viridis_r", aspect="auto", origin="lower")
    axes[1].set_xticks(range(len(ks)), map(str, ks))
    axes[1].set_yticks(range(len(ps)), map(str, ps))
    axes[1].set_title("Figure 6: ms a token by K and P, cache of 256")
    axes[1].set_xlabel("K")
    axes[1].set_ylabel("P")
    axes[1].figure.colorbar(shown, ax=axes[1])


def _dynaexq(found: Results, axes: Any) -> None:
    batches = [batch for batch, _ in _by_number(found["batches"])]
    for name in found["batches"]["1"]:
        axes[0].plot(batches, [found["batches"][b][name]["tokens_per_s"] for b in batches], marker="o", label=name)
    axes[0].set_title("DynaExq: throughput")
    axes[0].set_yscale("log")
    axes[0].set_xlabel("batch")
    axes[0].set_ylabel("tokens/s of eight layers")
    axes[0].legend(fontsize=7)
    lengths = sorted(found["lengths"], key=int)
    for name in found["lengths"][lengths[0]]:
        axes[1].plot(
            lengths, [float(np.mean(found["lengths"][n][name]["ttft"])) for n in lengths], marker="o", label=name
        )
    axes[1].set_title("Figure 10: TTFT")
    axes[1].set_xlabel("tokens of a prompt")
    axes[1].set_ylabel("ms")
