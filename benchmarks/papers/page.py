"""Writes the papers' page and its pictures, from results.json alone.

For each claim the page has the paper's number, ours, and the verdict.
"""

# ruff: noqa: E501 (sentences of the page)
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))
from readme import markdown

Results = dict[str, Any]
_QUALITY = Path(__file__).resolve().parents[1] / "quality" / "results.json"
_CARD = Path(__file__).with_name("emulated_card.json")
_TABLE_3 = {  # the paper's seconds, Mixtral-8x7B: TTFT and TPOT by memory
    "1. load on demand": {"16 GB": (1.0193, 0.2795), "24 GB": (1.0193, 0.2795)},
    "2. cache": {"16 GB": (0.5922, 0.1489), "24 GB": (0.4893, 0.1273)},
    "3. cache, prefetch": {"16 GB": (0.5159, 0.1315), "24 GB": (0.3954, 0.1108)},
    "4. cache, 4/2": {"16 GB": (0.5431, 0.1307), "24 GB": (0.2423, 0.0796)},
    "5. cache, prefetch, 4/2": {"16 GB": (0.4269, 0.1150), "24 GB": (0.2121, 0.0754)},
    "6. cache, prefetch, 4/0": {"16 GB": (0.3921, 0.1048), "24 GB": (0.1877, 0.0656)},
}
_TABLE_2 = {"Mixtral 8x7B": (4.24, 3.63, 3.91, 25.14), "Mixtral 8x22B": (9.13, 8.06, 8.44, 138.0)}  # the paper's GB
_HEAD = """# Four papers, side by side

    make bench-papers                          # or: python benchmarks/papers/papers.py duoserve

Times are simulated if nothing else is said; none is from a GPU. The simulator ([simulator.py](../../vllm_dymoe/plan/simulator.py)) runs the real planner, policies
and predictors on recorded routing, and charges time for copies, kernels and the host:

| what | from |
| --- | --- |
| routing | the small model (32 experts, 4 for each token), recorded on 12 prompts of three domains: 32 to 400 tokens, 24 tokens of each answer |
| sizes of experts | the papers' models |
| rates of link, memory and kernels | the data sheets of the papers' devices |
| the host's work | measurements of this plugin ([costs.json](../../vllm_dymoe/plan/costs.json)); 0 in rows with *no host*, because each paper measured another host |

Times are those of the trace's eight layers, so compare ratios. ± is the spread over prompts. Two rows are bounds: *an oracle* knows what the next
router will choose, and with *everything resident* nothing moves. Users can choose the papers' own settings as the policies `"dymoe-paper"`,
`"duoserve-paper"`, `"firm-paper"` and `"dynaexq-paper"`.

If a claim depends on routers (hits, predictions, quality) and is not reproduced with the small model, that does not refute it for Mixtral or Qwen3.
"""


def _ratio(results: Results, *path: str, slow: str, fast: str, of: str = "tpot") -> float:
    at = results
    for name in path:
        at = at[name]
    return float(at[slow][of] / at[fast][of])


def claims(results: Results) -> list[tuple[str, str, str, str, str]]:
    """Return for each claim: paper, claim, the paper's number, ours, and the verdict."""
    rows: list[tuple[str, str, str, str, str]] = []

    def say(paper: str, claim: str, theirs: str, ours: str, holds: bool | None, why: str = "") -> None:
        verdict = {True: "reproduced", False: "not reproduced", None: "in part"}[holds]
        rows.append((paper, claim, theirs, ours, f"**{verdict}**" + (f": {why}" if why and holds is not True else "")))

    if (found := results.get("dymoe")) is not None:
        for memory, table in found["Mixtral"].items():
            for number, of in enumerate(("ttft", "tpot")):
                gains = {name: table["1. load on demand"][of] / table[name][of] for name in _TABLE_3}
                paper = {
                    name: _TABLE_3["1. load on demand"][memory][number] / row[memory][number]
                    for name, row in _TABLE_3.items()
                }
                parts = [
                    (gains[one], gains[other])
                    for one, other in (
                        ("2. cache", "3. cache, prefetch"),
                        ("2. cache", "4. cache, 4/2"),
                        ("5. cache, prefetch, 4/2", "6. cache, prefetch, 4/0"),
                    )
                ]
                lost = [
                    said
                    for said, (before, after) in zip(("prefetch", "4/2", "4/0 in place of 4/2"), parts, strict=True)
                    if after < before * 0.995
                ]
                say("DyMoE", f"Table 3, {memory}, {of.upper()}: each part gains (rows 2 to 6 over row 1)",
                    " ".join(f"{gain:.2f}" for gain in list(paper.values())[1:]), " ".join(f"{gain:.2f}" for gain in list(gains.values())[1:]),
                    not lost or None, f"not {', '.join(lost)}; with 4 active experts Eq. 5's ceiling leaves nearly all high")  # fmt: skip
        for of, theirs in (("ttft", 3.44), ("tpot", 2.86)):
            gains = [
                table["Accelerate"][of] / table["5. cache, prefetch, 4/2"][of]
                for table in (found["budgets"]["50%"], found["no host, 50%"])
            ]
            say("DyMoE", f"{of.upper()} against Accelerate, 4/2 (Qwen3-30B, 12 GB; here 50 % of the bytes)", f"{theirs:.2f}",
                f"{gains[0]:.2f}, without a host {gains[1]:.2f}", gains[0] > 0.8 * theirs or None, "only where the host costs nothing" if max(gains) > 0.8 * theirs else "the order, not the size")  # fmt: skip
        share = found["budgets"]["25%"]
        say("DyMoE", "4/0 is faster than 4/2", "yes", f"{share['6. cache, prefetch, 4/0']['ttft']:.1f} and {share['5. cache, prefetch, 4/2']['ttft']:.1f} ms TTFT at 25 %",
            share["6. cache, prefetch, 4/0"]["ttft"] < share["5. cache, prefetch, 4/2"]["ttft"])  # fmt: skip
        pruned = _pruned()
        say("DyMoE", "Figure 3: experts of heavy hitters are those to keep", "above random ones at every ratio",
            "; ".join(f"r = {r}: KL {1000 * of['heavy hitters', 'equal']:.0f} against {1000 * of['random', 'equal']:.0f}" for r, of in pruned.items()),
            all(of["heavy hitters", "equal"] < of["random", "equal"] for of in pruned.values()), "not at every ratio")  # fmt: skip
        deeper = {r: of["heavy hitters", "depth"] < of["heavy hitters", "equal"] for r, of in pruned.items()}
        say("DyMoE", "Figure 3: fewer experts in deeper layers (Eq. 4) is better than equally many", "yes",
            "; ".join(f"r = {r}: KL {1000 * of['heavy hitters', 'depth']:.0f} against {1000 * of['heavy hitters', 'equal']:.0f}" for r, of in pruned.items()),
            all(deeper.values()) or (None if any(deeper.values()) else False), f"not at {', '.join(r for r, held in deeper.items() if not held)}")  # fmt: skip
        layers = [1000 * row["kl_nats"] for row in _quality_rows("sensitivity") if row["phase"] == "prompt"]
        say("DyMoE", "Figure 5: shallow layers suffer from 2 bits, deep ones do not", "accuracy falls in shallow layers alone",
            "KL by layer " + " ".join(f"{kl:.1f}" for kl in layers), max(layers[len(layers) // 2 :]) < min(layers[: len(layers) // 4]) or (None if layers[0] == max(layers) else False),
            "the first layer suffers most, but the last ones come next, and the fewest suffer in between")  # fmt: skip
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
    if (found := results.get("memory")) is not None:
        for name, of in found.items():
            moesys, acc, own, everything = _TABLE_2[name]
            more = of["rest of a layer"] / 1e9, of["network"] / 1e9, of["all experts but two"] / 1e9
            say("DuoServe-MoE", f"Table 2, {name}: memory in addition to ACC's (MoESys; DuoServe-MoE; GPU only)",
                f"{moesys - acc:.2f}; {own - acc:.2f}; {everything - acc:.1f} GB", f"{more[0]:.2f}; {more[1]:.3f}; {more[2]:.1f} GB",
                more[1] < more[0] < more[2])  # fmt: skip
    if (found := results.get("firm")) is not None:
        theirs = {"128": 1.65, "256": 1.62, "512": 1.29, "768": 1.54}
        for cache in theirs:
            table = found["caches"][cache]
            ours = {row: table["Baseline"]["tpot"] / of["tpot"] for row, of in table.items()}
            said = ", ".join(f"{row} {ours[row]:.2f}" for row in ("+ FG", "+ MoL", "+ FG + MoL", "All (firm-paper)"))
            say("FIRM-MoE", f"Table 1, cache of {cache}: all parts against the baseline", f"{theirs[cache]:.2f}",
                f"{said}; an oracle {ours['an oracle']:.2f}", ours["All (firm-paper)"] > 1.1,
                "" if ours["All (firm-paper)"] > 1.1 else "what is fetched ahead whole hides three times what one projection does")  # fmt: skip
        best = {
            cache: min(of["All (firm-paper)"]["tpot"], of["n = 2"]["tpot"], of["n = 3"]["tpot"])
            for cache, of in found["caches"].items()
        }
        least, most = best["128"], best["768"]
        say("FIRM-MoE", "Figure 4: a sixth of the cache costs little (128 of 1440 experts beside 768)", "less than 30 %", f"{least / most - 1:.0%}",
            least / most < 1.3, "what is missing has to cross the link, whoever names it: an oracle loses "
            f"{found['caches']['128']['an oracle']['tpot'] / found['caches']['768']['an oracle']['tpot'] - 1:.0%}")  # fmt: skip
        lengths = results.get("lengths", {})
        rates = {
            model: {system: float(np.mean(list(of.values()))) for system, of in systems.items()}
            for model, systems in lengths.items()
        }
        for model, of in rates.items():
            gain = of["All (firm-paper)"] / of["CPU execution (Fiddler)"]
            say("FIRM-MoE", f"Figure 5, {model}: throughput against Fiddler, over prompts of {min(_prompts(lengths))} to {max(_prompts(lengths))} tokens and answers of 8 to 24", "1.31 on average",
                f"{gain:.2f}, ours {of['ours: firm'] / of['CPU execution (Fiddler)']:.2f}, against fetching on demand {of['All (firm-paper)'] / of['load on demand']:.2f}",
                gain > 1.15, "a CPU that executes misses at 40 GB/s hides more than what is fetched ahead" if gain < 1 else "less than the paper's")  # fmt: skip
        grid = {key: of["tpot"] for key, of in found["grid"].items()}
        fastest = min(grid, key=lambda key: grid[key])
        say("FIRM-MoE", "Figure 6: the best K and P, with a cache of 256", "K = 4 to 8, P = 3 (by HEOP's cost)", f"K, P = {fastest}: {grid[fastest]:.2f} ms; 3,3 {grid['3,3']:.2f} ms; 8,3 {grid['8,3']:.2f} ms",
            int(fastest.split(",")[1]) >= 3, "fewer layers that have to agree name more, and the link has time for it")  # fmt: skip
        named = {name: (of["utilization"], of["accuracy"]) for name, of in found["named"].items()}
        say("FIRM-MoE", "Figure 7: utilisation and accuracy: MoL; top 4; the union", "90.5 and 59.8 %; 78.8 %; lower than top 4",
            "; ".join(f"{name} {used:.1%} and {right:.1%}" for name, (used, right) in named.items()),
            named["MoL"][0] > named["top 4"][0] > named["union"][0], "the order differs")  # fmt: skip
        table = found["caches"]["256"]
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
        tails = {
            batch: {name: of[name]["p99"] / of["static 4"]["p99"] for name in ("dynaexq-paper, 16/4", "offloading, 16")}
            for batch, of in _by_number(found["batches"])
        }
        say("DynaExq", "p99 of a step stays near static 4 bits, that of offloading does not", "near; widening",
            ", ".join(f"{b}: {of['dynaexq-paper, 16/4']:.2f} and {of['offloading, 16']:.2f}" for b, of in tails.items()),
            all(of["dynaexq-paper, 16/4"] < 1.5 and of["dynaexq-paper, 16/4"] < of["offloading, 16"] for of in tails.values()), "see the table")  # fmt: skip
        longest = {
            name: [float(np.mean(of[name]["ttft"])) for _, of in _by_number(found["lengths"])]
            for name in ("dynaexq-paper, 16/4", "offloading, 16", "static 4")
        }
        say("DynaExq", "Figure 10: TTFT by prompt grows slowly; offloading's grows fast", "between static and offloading",
            "; ".join(f"{name} {times[0]:.1f} to {times[-1]:.1f} ms" for name, times in longest.items()),
            longest["static 4"][-1] < longest["dynaexq-paper, 16/4"][-1] < 0.7 * longest["offloading, 16"][-1], "not between them")  # fmt: skip
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


def _quality_rows(section: str) -> list[dict[str, Any]]:
    """Return what benchmarks/quality has measured."""
    return list(json.loads(_QUALITY.read_text())["sections"].get(section, []))


def _pruned() -> dict[str, dict[tuple[str, str], float]]:
    """Return KL in nats, by retention, kept experts, and how layers differ."""
    found: dict[str, dict[tuple[str, str], float]] = {}
    for row in _quality_rows("pruning"):
        found.setdefault(f"{row['retention']:g}", {})[row["kept"], row["layers"]] = row["kl_nats"]
    return found


def _prompts(found: Results) -> list[int]:
    return [int(key.split(",")[0]) for key in next(iter(next(iter(found.values())).values()))]


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
        for memory, rows in found["Mixtral"].items():
            yield f"\nMixtral-8x7B's experts, {memory} of which 5 GB are for everything else:\n\n{_table(rows, _TIMES)}"
        yield f"\nWithout a host, 50%:\n\n{_table(found['no host, 50%'], _TIMES)}"
    if (found := results.get("duoserve")) is not None:
        yield "\n## DuoServe-MoE: Mixtral-8x7B's experts (Figures 5 and 6)\n\n![](duoserve.png)\n"
        for key, rows in found.items():
            columns = _TIMES | {
                "named whole": lambda of: f"{of['named_whole']:.0%}" if "named_whole" in of else "",
                "peak, GB": lambda of: f"{of['peak'] / 1e9:.2f}",
            }
            yield f"\n{key}:\n\n{_table(rows, columns)}"
        yield (
            "\nMoESys is simulated as in its paper: the whole next layer is fetched, and nothing of it is cancelled when the router has chosen."
        )
    if (found := results.get("firm")) is not None:
        yield "\n## FIRM-MoE: Qwen1.5-MoE-A2.7B's experts at 16 bits on an RTX 3090 (Tables 1 and 2, Figures 4, 6 and 7)\n\n![](firm.png)\n"
        columns = _TIMES | {
            "accuracy (Eq. 7)": lambda of: f"{of['accuracy']:.0%}" if "accuracy" in of else "",
            "utilisation (Eq. 8)": lambda of: f"{of['utilization']:.0%}" if "utilization" in of else "",
        }
        for cache, rows in found["caches"].items():
            yield f"\nA cache of {cache} of 1440 experts:\n\n{_table(rows, columns)}"
        head = ["experts named by", "utilisation (Eq. 8)", "accuracy (Eq. 7)", "TPOT, ms", "moved, GB"]
        lines = [
            [name, f"{of['utilization']:.1%}", f"{of['accuracy']:.1%}", f"{of['tpot']:.2f}", f"{of['moved'] / 1e9:.2f}"]
            for name, of in found["named"].items()
        ]
        yield f"\nWho names experts (Figure 7), a cache of 256, K = 3 and P = 3, one projection:\n\n{markdown(head, lines)}"
        for model, systems in results.get("lengths", {}).items():
            lines = [
                [*key.split(", "), *(f"{systems[name][key]:.2f}" for name in systems)]
                for key in next(iter(systems.values()))
            ]
            yield f"\nTokens/s of whole requests, {model}, 256 experts in the cache (Figure 5):\n\n{markdown(['prompt', 'answer', *systems], lines)}"
        yield (
            "\nFiddler is `exact` with a CPU that executes misses at 40 GB/s where that is sooner. llama.cpp is not simulated; it is measured in "
            "[memory_tiers](../memory_tiers/README.md)."
        )
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
    yield "\n" + _quality()
    if (found := results.get("adaptive")) is not None:
        yield from _adaptive(found)


def _adaptive(found: Results) -> Iterable[str]:
    """Yield the time, copies and quality of the policy adaptive."""
    yield (
        "\n## And a policy that takes from two: `adaptive`\n\nAs in DynaExq, every base slice is resident (4/2, on an A6000 that plans its own steps), and some residual "
        "slices.\nAs in DyMoE, a step fetches the residual slices of its most important experts. Slices fetched are those of decode and prompts together."
    )
    aims = _aims()
    yield f"\n{markdown(['aim', 'here', 'verdict'], aims)}"
    if any("missed" in verdict for *_, verdict in aims):
        yield "\nBecause aims are missed, `dynaexq` stays the recommended policy if all low versions fit ([policies](../../docs/policies.md))."
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
    if (card := _card()) is not None:
        head = ["residual slices", "policy", "ms a token", "of dynaexq's", "slices a token", "KL, millinats"]
        lines = []
        for row in card["rows"]:
            base = _of_card(card, row["residuals"], "dynaexq")["ms"]
            cells = [f"{row['ms']:.2f}", f"{row['ms'] / base:.2f}", f"{row['fetched_per_token']:.2f}", _kl(row)]
            lines.append([f"{row['residuals']:.0%}", row["policy"], *cells])
        yield (
            "\nIn vLLM's engine, one request on an emulated card, on whose link an expert takes as long as a layer is computed (`python "
            "benchmarks/papers/emulated_card.py`). *adaptive* without a number follows `wait_share`, its default; *uniform 4* fetches every missing residual "
            f"slice{card.get('note', '')}:\n\n{markdown(head, lines)}"
        )
    lines = [
        [
            f"{row['residuals']:.0%}", row["experts"], row["quantizer"], row["phase"], _kl(row),
            _number(row["fetched_per_token"], 2), _number(row["kib_per_token"], 1),
        ]
        for row in _quality_rows("rescues")
    ]  # fmt: skip
    head = ["residual slices", "policy", "quantizer", "phase", "KL, millinats", "slices a token", "KiB a token"]
    yield (
        "\nQuality in the engine (`benchmarks/quality/quality.py --only rescues`), on texts that did not choose the high set. *exact* has as many "
        f"bytes and keeps what it used most:\n\n{markdown(head, lines)}"
    )


def _card() -> Results | None:
    if not _CARD.exists():
        return None
    found: Results = json.loads(_CARD.read_text())
    return found


def _of_card(card: Results, residuals: float, policy: str) -> Results:
    return next(row for row in card["rows"] if row["residuals"] == residuals and row["policy"].startswith(policy))


def _kl(row: Results) -> str:
    return f"{1000 * row['kl_nats']:.2f} ± {1000 * row['kl_error']:.2f}"


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _aims() -> list[list[str]]:
    """Return each aim for ``adaptive``, the measurement, and whether the aim is met."""
    lines = []

    def say(aim: str, here: str, holds: bool, why: str = "") -> None:
        lines.append([aim, here, "**holds**" if holds else f"**missed**{why and ': ' + why}"])

    aims = {0.5: 3.0, 0.25: 4.2}
    rows, card = [row for row in _quality_rows("rescues") if row["phase"] == "decode"], _card()
    for residuals, most in aims.items():
        for quantizer in ("gptq", "e8"):
            of = [row for row in rows if row["residuals"] == residuals and row["quantizer"] == quantizer]
            ours = next(row for row in of if row["experts"].startswith("adaptive,"))
            say(f"KL at most {most} with {residuals:.0%} of the residual slices ({quantizer}, one token a step)",
                f"{_kl(ours)} ({ours['experts']})", 1000 * ours["kl_nats"] <= most)  # fmt: skip
            uniform = [row for row in of if row["experts"] == "uniform 4"]
            if not uniform and card is not None and quantizer == card["quantizer"]:
                uniform = [row for row in card["rows"] if (row["residuals"], row["policy"]) == (residuals, "uniform 4")]
            for four in uniform:
                share = ours["fetched_per_token"] / four["fetched_per_token"]
                say(f"at most 0.2 of the slices that uniform 4 bits fetches ({residuals:.0%}, {quantizer})", f"{share:.2f} ({ours['experts']})", share <= 0.2)  # fmt: skip
    for residuals in sorted({row["residuals"] for row in card["rows"]}, reverse=True) if card else ():
        assert card is not None
        base, four = _of_card(card, residuals, "dynaexq"), _of_card(card, residuals, "uniform 4")
        by_threshold = _of_card(card, residuals, "adaptive,")
        (dial,) = (row for row in card["rows"] if row["residuals"] == residuals and row["policy"] == "adaptive")
        share = by_threshold["fetched_per_token"] / four["fetched_per_token"]
        say(f"at most 0.2 of the slices that uniform 4 bits fetches ({residuals:.0%}, gptq, emulated card)",
            f"{share:.2f} ({by_threshold['policy']}, KL {_kl(by_threshold)})", share <= 0.2, "the texts that chose the threshold lack others")  # fmt: skip
        for row in (by_threshold, dial):
            each = (row["ms"] - base["ms"]) / max(row["fetched_per_token"], 1e-9)
            say(f"time per token within 1.1 of dynaexq's ({residuals:.0%}, {row['policy']})", f"{row['ms'] / base['ms']:.2f}, KL {_kl(row)} beside {_kl(base)}",
                row["ms"] <= 1.1 * base["ms"], f"a slice costs {each:.1f} ms there, more than its bytes at the rate of the link, which the dial counts")  # fmt: skip
        share = dial["fetched_per_token"] / four["fetched_per_token"]
        say(f"the same with the dial's default ({residuals:.0%}, emulated card): KL at most {aims[residuals]}, and 0.2 of the slices",
            f"{_kl(dial)}, {share:.2f}", 1000 * dial["kl_nats"] <= aims[residuals] and share <= 0.2,
            "a time of waiting that is held for each text fetches too little where a text needs more")  # fmt: skip
    return lines


def _quality() -> str:
    """Return the KL of the options in all papers' rows, from benchmarks/quality."""
    lines = [
        [row["experts"], row["phase"], row["quantizer"], f"{1000 * row['kl_nats']:.2f} ± {1000 * row['kl_error']:.2f}"]
        for row in _quality_rows("papers")
    ]
    said = (
        "## Quality of these rows\n\nKL from 16 bits with each row's own options (`benchmarks/quality/quality.py --only papers`). Rows with one precision "
        "(`exact`, on demand, DuoServe-MoE, Accelerate, static) have the KL of that precision; FIRM-MoE's and offloading's rows compute at 16 bits and lose nothing."
    )
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

    for name, draw, rows in (
        ("dymoe", _dymoe, 2),
        ("duoserve", _duoserve, 1),
        ("firm", _firm, 2),
        ("dynaexq", _dynaexq, 2),
    ):
        if name in results:
            figure, axes = pyplot.subplots(rows, 2, figsize=(11, 4 * rows))
            lengths = {"lengths": results.get("lengths", {})} if name == "firm" else {}
            draw(results[name] | lengths, axes.flatten())
            figure.tight_layout()
            figure.savefig(folder / f"{name}.png", dpi=80, metadata={"Software": None})
            pyplot.close(figure)


def _chart(at: Any, labels: tuple[str, str, str], places: Sequence[Any], lines: Results, *, log: bool = False) -> None:
    """Draw a line for each name; ``labels`` are the title, and those of x and y."""
    for name, values in lines.items():
        at.plot(places, values, marker="o", label=name)
    title, x, y = labels
    at.set(title=title, xlabel=x, ylabel=y, yscale="log" if log else "linear")
    at.legend(fontsize=7)


def _dymoe(found: Results, axes: Any) -> None:
    for at, (of, said) in zip(axes[:2], (("ttft", "TTFT, ms"), ("tpot", "TPOT, ms")), strict=True):
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
    pruned = _pruned()
    lines = {
        f"{kept}, {layers}": [1000 * of[kept, layers] for of in pruned.values()]
        for kept in ("random", "heavy hitters")
        for layers in ("equal", "depth")
    }
    labels = ("Figure 3: experts of a prompt that are kept", "retention", "KL, millinats")
    _chart(axes[2], labels, list(pruned), lines, log=True)
    rows = _quality_rows("sensitivity")
    for number, phase in enumerate(("prompt", "decode")):
        kls = [1000 * row["kl_nats"] for row in rows if row["phase"] == phase]
        errors = [1000 * row["kl_error"] for row in rows if row["phase"] == phase]
        axes[3].bar(np.arange(len(kls)) + 0.4 * number, kls, 0.4, yerr=errors, label=phase)
    axes[3].set_title("Figure 5: one layer at 2 bits, the others at 16")
    axes[3].set_xlabel("layer")
    axes[3].set_ylabel("KL, millinats")
    axes[3].legend(fontsize=7)


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
    lines = {
        name: [found["caches"][cache][name]["tpot"] for cache in caches]
        for name in ("Baseline", "All (firm-paper)", "n = 3", "ours: firm", "nothing ahead", "an oracle")
    }
    _chart(axes[0], ("FIRM-MoE, Figure 4", "experts in the cache, of 1440", "ms a token"), caches, lines)
    models = list(found["lengths"])
    for number, system in enumerate(found["lengths"][models[0]] if models else ()):
        rates = [list(found["lengths"][model][system].values()) for model in models]
        means, spread = [float(np.mean(of)) for of in rates], [float(np.std(of)) for of in rates]
        axes[1].bar(np.arange(len(models)) + 0.2 * number, means, 0.19, yerr=spread, label=system)
    axes[1].set_xticks(np.arange(len(models)) + 0.3, models)
    axes[1].tick_params(axis="x", labelsize=7)
    axes[1].set_title("Figure 5: mean over 12 lengths of prompt and answer")
    axes[1].set_ylabel("tokens/s of eight layers")
    if models:
        axes[1].legend(fontsize=7)
    ks, ps = (sorted({int(key.split(",")[of]) for key in found["grid"]}) for of in (0, 1))
    image = [[found["grid"][f"{k},{p}"]["tpot"] for k in ks] for p in ps]
    shown = axes[2].imshow(image, cmap="viridis_r", aspect="auto", origin="lower")
    axes[2].set_xticks(range(len(ks)), map(str, ks))
    axes[2].set_yticks(range(len(ps)), map(str, ps))
    axes[2].set_title("Figure 6: ms a token by K and P, cache of 256")
    axes[2].set_xlabel("K")
    axes[2].set_ylabel("P")
    axes[2].figure.colorbar(shown, ax=axes[2])
    names = list(found["named"])
    for number, (of, said) in enumerate((("utilization", "utilisation"), ("accuracy", "accuracy"))):
        axes[3].bar(np.arange(len(names)) + 0.4 * number, [found["named"][n][of] for n in names], 0.4, label=said)
    axes[3].set_xticks(np.arange(len(names)) + 0.2, names, rotation=20)
    axes[3].tick_params(axis="x", labelsize=7)
    axes[3].set_title("Figure 7: who names experts")
    axes[3].legend(fontsize=7)


def _dynaexq(found: Results, axes: Any) -> None:
    for at, number, rows, labels in (
        (axes[0], "tokens_per_s", "batches", ("DynaExq: throughput", "batch", "tokens/s of eight layers")),
        (axes[1], "ttft", "lengths", ("Figure 10: TTFT", "tokens of a prompt", "ms")),
        (axes[2], "p99", "batches", ("Tail of decode steps", "batch", "p99 of a step, ms")),
    ):
        places, systems = zip(*_by_number(found[rows]), strict=True)
        lines = {name: [float(np.mean(of[name][number])) for of in systems] for name in systems[0]}
        _chart(at, labels, places, lines, log=rows == "batches")
    for number, (name, shares) in enumerate(found["high after a shift"].items()):
        axes[3].bar(np.arange(len(shares)) + 0.2 * number, list(shares.values()), 0.19, label=name)
    axes[3].set_xticks(np.arange(len(shares)) + 0.3, list(shares))
    axes[3].set_title("Choices served high, as traffic moves from domain to domain")
    axes[3].legend(fontsize=7)
