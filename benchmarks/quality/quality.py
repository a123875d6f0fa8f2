"""What does precision cost in quality, and which bytes buy it back?

These are DyMoE's Tables 1 and 2. The shipped model reads its held-out texts through the real vLLM engine, as prompts
and one token at a time, with experts of every precision, policy and quantizer, and is compared with itself at 16 bits.
Results go into results.json and into the tables of README.md. Nothing here is a time, so --only SECTION... may measure
a part again.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import observations
import report
import torch
from bench import DOMAINS, Bench, Variant, planned_bytes
from losses import Scores, losses
from rescues import Kind, Rescues
from shifts import HIGH_SHARES, Shifts

from vllm_dymoe.cli.figures import draw, require

HERE = Path(__file__).resolve().parent
RETENTIONS = (0.9, 0.75, 0.5)
QUANTIZERS = ("rtn", "hqq", "gptq")
BUDGETS = (0.25, 0.5, 0.75)
EXACT = Variant("16", {"high": 16})


def uniform(bits: int, quantizer: str = "rtn") -> Variant:
    """Return the variant with every expert at one width."""
    return Variant(f"{bits}", {"high": bits}, quantizer)


def dymoe(retention: float, low: int, quantizer: str = "rtn", high_by: str = "threshold", **options: Any) -> Variant:
    """Return DyMoE at 4/low bits."""
    parameters = {"retention": retention, "high_by": high_by, **options}
    chosen = {"threshold": "", "depth": ", Eq. 4", "equal": ", equal"}[high_by]
    return Variant(
        f"4/{low}, r = {retention:g}{chosen}",
        {"high": 4, "low": low, "policy": "dymoe", "policy_options": parameters},
        quantizer,
    )


def nested(variant: Variant) -> Variant:
    """Return a variant with nested versions."""
    return replace(variant, name=f"{variant.name}, nested", quantizer=f"nested {variant.quantizer}")


class Measurement:
    """One run: the engine, texts as in `Bench`, and their scores at 16 bits.

    Known rows of a section are not measured again.
    """

    def __init__(self, windows: int, decoded: int, known: dict[str, Any] | None = None) -> None:
        self.bench, self._known = Bench(windows, decoded), known or {}
        self.texts = {False: self.bench.prompts, True: self.bench.decoded}
        self._reference: dict[bool, Scores] = {}

    def read(self, variant: Variant, *, decode: bool = False, share: float | None = None) -> dict[str, float]:
        """Return a variant's losses, and the bytes that it computed and moved."""
        texts = self.texts[decode]
        if decode not in self._reference:
            self._reference[decode] = self.bench.score(EXACT, texts, decode=decode)
        scores = self.bench.score(variant, texts, decode=decode, share=share)
        found = losses(scores, self._reference[decode], texts)
        bytes_of = self.bench.store(variant.quantizer) if "e8" in variant.quantizer else self.bench
        found["planned_bytes_per_step"] = planned_bytes(scores, variant, bytes_of.experts.formats)
        if share is not None:
            found["moved_bytes_per_token"] = scores.moved / sum(map(len, texts))
            found["hit_rate"] = scores.hit_rate
        return found

    def row(self, section: str, place: dict[str, Any], variant: Variant, **how: Any) -> dict[str, Any]:
        """Return one row, measured unless it is known."""
        return report.find(self._known.get(section, []), **place) or {**place, **self.read(variant, **how)}

    def uniform(self) -> Iterator[dict[str, Any]]:
        """Yield the paper's Table 1: every expert at one width, by quantizer."""
        yield self.row("uniform", {"bits": 16, "quantizer": ""}, EXACT)
        for bits in (8, 4, 2):
            for quantizer in QUANTIZERS:
                yield self.row("uniform", {"bits": bits, "quantizer": quantizer}, uniform(bits, quantizer))
            if bits < 8:
                yield self.row(
                    "uniform", {"bits": bits, "quantizer": "awq"}, Variant("16", {"high": 16}, f"awq {bits}")
                )
        eight = Variant("4", {"high": 4, "activations": 8})
        yield self.row("uniform", {"bits": "4, activations of 8", "quantizer": "rtn"}, eight)

    def readings(self) -> Iterator[dict[str, Any]]:
        """Yield both readings of nested versions, by quantizer, and lattice codes alone."""
        rows = [nested(uniform(bits, quantizer)) for quantizer in ("rtn", "gptq", "e8") for bits in (4, 2)]
        for row in [*rows, uniform(2, "e8")]:
            place = {"reading": row.name, "quantizer": row.quantizer.removeprefix("nested ")}
            yield {**self.row("readings", place, row), "bits_per_weight": self.bench.bits_per_weight(row)}

    def precisions(self) -> Iterator[dict[str, Any]]:
        """Yield the paper's Table 2, in both phases.

        There are also rows for ways to choose precisions, and for skipped experts' weights.
        """
        rows = [uniform(4), uniform(2), *(dymoe(r, 2) for r in RETENTIONS)]
        rows += [dymoe(r, 2, high_by=way) for r in (0.75, 0.5) for way in ("depth", "equal")]
        rows += [*(dymoe(r, 2, "gptq") for r in (0.75, 0.5)), nested(dymoe(0.75, 2, "e8"))]
        rows += [dymoe(0.75, 0, skipped_weights=rule) for rule in ("renormalize", "keep")]
        for row in rows:
            rule = row.options.get("policy_options", {}).get("skipped_weights", "")
            for decode in (False, True):
                phase = "decode" if decode else "prompt"
                quantizer = row.quantizer.removeprefix("nested ")
                place = {"experts": row.name, "quantizer": quantizer, "skipped_weights": rule, "phase": phase}
                yield self.row("precisions", place, row, decode=decode)

    def budgets(self) -> Iterator[dict[str, Any]]:
        """Yield quality by bytes moved, decoding one request under budgets of equal bytes."""
        rows = [uniform(4), uniform(2), dymoe(0.75, 2), *(nested(dymoe(r, 2)) for r in (0.75, 0.5, 0.4))]
        rows += [nested(dymoe(r, 2, high_by="depth")) for r in (0.75, 0.5)]
        rows += [dymoe(0.75, 0), uniform(4, "gptq"), *(nested(dymoe(r, 2, "gptq")) for r in (0.5, 0.45, 0.4))]
        rows += [nested(dymoe(r, 2, "e8")) for r in (0.5, 0.4)]
        for share in BUDGETS:
            for row in rows:
                place = {"budget": share, "experts": row.name, "quantizer": row.quantizer.removeprefix("nested ")}
                yield self.row("budgets", place, row, decode=True, share=share)

    def shifts(self) -> Iterator[dict[str, Any]]:
        """Yield DynaExq after a shift of traffic."""
        shifts = Shifts(self.bench)
        for share in HIGH_SHARES:
            yield from shifts.rows(share)

    def sets(self) -> Iterator[dict[str, Any]]:
        """Yield high sets of dynaexq that were chosen by other texts of the domain.

        Each domain is measured alone.
        """
        for quantizer in ("rtn", "gptq", "e8"):
            shifts = Shifts(self.bench, f"nested {quantizer}")
            high, low = (self.bench.bits_per_weight(nested(uniform(bits, quantizer))) for bits in (4, 2))
            for share in (0.25, 0.5, 1.0):
                found = [row["kl_nats"] for row in shifts.rows(share, ("oracle",))]
                place = {"high": share, "quantizer": quantizer, "bits_per_weight": low + share * (high - low)}
                yield {**place, "kl_nats": sum(found) / len(found), "by_domain": dict(zip(DOMAINS, found, strict=True))}

    def papers(self) -> Iterator[dict[str, Any]]:
        """Yield the papers' own policies, and ours for comparison.

        Their options are those of benchmarks/papers.
        """
        own = {"policy": "dymoe-paper", "high": 4}
        rows = [
            Variant("dymoe-paper, 4/2", {**own, "low": 2, "policy_options": {"reuse_high": False}}),
            Variant("dymoe-paper, 4/0", {**own, "low": 0, "policy_options": {"reuse_high": False}}),
            dymoe(0.75, 2),
            uniform(4),
            uniform(2),
        ]
        for row in rows:
            for decode in (False, True):
                place = {"experts": row.name, "quantizer": row.quantizer, "phase": "decode" if decode else "prompt"}
                yield self.row("papers", place, row, decode=decode)
        for policy in ("dynaexq-paper", "dynaexq"):
            kind = Kind(f"{policy}, 16/4, 70 % of the bytes", policy, {}, 16, 4)
            for phase, found in self._rescues().read("rtn", 0.7, kind, link_gbps=None).items():
                del found["ms"]
                yield {"experts": kind.name, "quantizer": "rtn", "phase": phase, **found}

    def pruning(self) -> Iterator[dict[str, Any]]:
        """Yield DyMoE's Figure 3: prompts in which a part of the experts is skipped."""
        for place, options in observations.pruned():
            yield self.row("pruning", place, Variant("16/0", options))

    def sensitivity(self) -> Iterator[dict[str, Any]]:
        """Yield DyMoE's Figure 5: prompts with one layer at 2 bits."""
        for layer in range(len(self.bench.experts.layers)):
            for decode in (False, True):
                place = {"layer": layer, "phase": "decode" if decode else "prompt"}
                variant = Variant("16", {"high": 16}, f"layer {layer}")
                yield self.row("sensitivity", place, variant, decode=decode)

    def rescues(self) -> Iterator[dict[str, Any]]:
        """Yield the policy adaptive, and for comparison dynaexq and uniform 4 bits.

        Uniform 4 bits has the same bytes.
        """
        yield from self._rescues().rows()

    def _rescues(self) -> Rescues:
        for decode, texts in self.texts.items():
            if decode not in self._reference:
                self._reference[decode] = self.bench.score(EXACT, texts, decode=decode)
        return Rescues(self.bench, self._reference)


SECTIONS = (
    "uniform", "readings", "precisions", "budgets", "sets", "shifts", "papers", "pruning", "sensitivity", "rescues"
)  # fmt: skip


def show(results: dict[str, Any], out: Path, figure: Path | None) -> None:
    """Print the tables, and draw the picture if requested.

    The tables are written into README.md if all sections exist.
    """
    for section, table in report.tables(results).items():
        print(f"\n{section}\n\n{table}")
    if results["sections"].keys() == set(SECTIONS) and out == HERE:
        report.write_readme(results, HERE / "README.md")
    if figure and "budgets" in results["sections"]:
        print(f"Written: {draw(figure, report.panels(results['sections']['budgets']))}")


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=3, help="texts of 512 tokens from each of three domains")
    parser.add_argument("--decoded", type=int, default=96, help="tokens of each domain that are read one by one")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--missing", action="store_true", help="only rows that results.json lacks")
    parser.add_argument("--out", type=Path, default=HERE, help="where results.json goes")
    parser.add_argument("--report", action="store_true", help="measure nothing; write the tables from results.json")
    parser.add_argument("--figure", type=Path, help="picture to write, a .png or .svg file: quality against bytes")
    arguments = parser.parse_args()
    if arguments.figure:
        require(arguments.figure)
    if arguments.report:
        show(json.loads((arguments.out / "results.json").read_text()), arguments.out, arguments.figure)
        return
    try:
        os.getcwd()
    except FileNotFoundError:
        parser.error("the working directory was removed, and oneMKL ends a process that has none; change to another")
    torch.set_num_threads(1)
    begin = time.perf_counter()
    path = arguments.out / "results.json"
    before: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    known = before.get("sections", {}) if arguments.missing else {}
    measurement = Measurement(arguments.windows, arguments.decoded, known)
    texts = {"prompt": sum(map(len, measurement.texts[False])), "decode": sum(map(len, measurement.texts[True]))}
    if before.get("tokens") != texts:
        before = {"sections": {}, "seconds": {}}
    results: dict[str, Any] = {
        "machine": f"{platform.machine()} CPU, {os.cpu_count()} cores",
        "tokens": texts,
        "seconds": {**before["seconds"], "start": round(time.perf_counter() - begin)},
        "sections": before["sections"],
    }
    if not 1 < measurement.read(EXACT)["perplexity"] < 100:
        raise SystemExit("the model's own perplexity is not that of a trained model; no report was written")
    for section in arguments.only:
        begin, rows = time.perf_counter(), []
        for row in getattr(measurement, section)():
            rows.append(row)
            print(section, json.dumps(row), flush=True)
        results["sections"][section] = rows
        results["seconds"][section] = round(time.perf_counter() - begin)
        arguments.out.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=1) + "\n")
    show(results, arguments.out, arguments.figure)
    print(json.dumps({"seconds": round(sum(results["seconds"].values())), "tokens": results["tokens"]}))


if __name__ == "__main__":
    main()
