"""What does precision cost in quality, and which bytes buy it back? DyMoE's Tables 1 and 2, Figures 3 and 5.

The shipped model reads its held-out texts through the real vLLM engine, as prompts and one token at a time, with
experts of every precision, system and quantizer, and is compared with itself at 16 bits. Writes results.json,
quality.png and the tables of README.md. Nothing here is a time, so that --only SECTION... may measure a part anew.
"""

import argparse
import contextlib
import json
import os
import platform
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import report
import torch
from bench import GROUP_SIZE, Bench, Variant
from losses import Scores, losses

from vllm_dymoe.bench.systems import Chosen, OneLayerLow
from vllm_dymoe.vllm_adapter import step as prompt_tap

HERE = Path(__file__).resolve().parent
RETENTIONS = (0.9, 0.75, 0.5)
QUANTIZERS = ("rtn", "hqq", "gptq")
BUDGETS = (0.25, 0.5, 0.75)
LOW_WEIGHTS = (0, 2, 3, 4, 6, 8)
EXACT = Variant("16", {"hi": 16})


def uniform(bits: int, quantizer: str = "rtn") -> Variant:
    """Every expert at one width; 3 is only there as weights that were rounded to it."""
    if bits == 3:
        return Variant("3", {"hi": 16}, f"3 bits {quantizer}")
    return Variant(f"{bits}", {"hi": bits}, quantizer)


def dymoe(retention: float, lo: int, quantizer: str = "rtn", rounding: str = "up", **options: Any) -> Variant:
    """DyMoE at 4/lo bits."""
    parameters = {"retention": retention, "rounding": rounding, **options}
    return Variant(
        f"4/{lo}, r = {retention:g}" + (", nearest" if rounding == "nearest" else ""),
        {"hi": 4, "lo": lo, "system": "dymoe", "system_options": parameters},
        quantizer,
    )


def nested(variant: Variant) -> Variant:
    """With the low version inside the high one."""
    return replace(variant, name=f"{variant.name}, nested", quantizer=f"nested {variant.quantizer}")


class Measurement:
    """One run: the engine, the texts, and what 16 bits make of them.

    Args:
        windows: texts of each domain that are read as prompts.
        decoded: tokens of each text, one for each domain, that are read one by one.
    """

    def __init__(self, windows: int, decoded: int) -> None:
        self.bench = Bench(windows, decoded)
        self.texts = {False: self.bench.prompts, True: self.bench.decoded}
        self._reference: dict[bool, Scores] = {}

    def read(self, variant: Variant, *, decode: bool = False, share: float | None = None) -> dict[str, float]:
        """What a variant loses, and the bytes that it computed and moved."""
        texts = self.texts[decode]
        if decode not in self._reference:
            self._reference[decode] = self.bench.score(EXACT, texts, decode=decode)
        scores = self.bench.score(variant, texts, decode=decode, share=share)
        found = losses(scores, self._reference[decode], texts)
        found["planned_bytes_per_step"] = self.bench.planned_bytes(scores, variant)
        if share is not None:
            found["moved_bytes_per_token"] = scores.moved / sum(map(len, texts))
            found["hit_rate"] = scores.hit_rate
        return found

    # -- sections: one table each -----------------------------------------------------------------

    def uniform(self) -> Iterator[dict[str, Any]]:
        """The paper's Table 1: every expert at one width, by quantizer."""
        yield {"bits": 16, "quantizer": "", **self.read(EXACT)}
        for bits in (8, 4, 3, 2):
            for quantizer in QUANTIZERS[: 2 if bits == 3 else 3]:  # GPTQ packs only what the runtime reads
                yield {"bits": bits, "quantizer": quantizer, **self.read(uniform(bits, quantizer))}

    def tiers(self) -> Iterator[dict[str, Any]]:
        """The paper's Table 2, in both phases; what becomes of the weights of skipped experts, and of rounding."""
        rows = [uniform(4), uniform(2), *(dymoe(r, 2) for r in RETENTIONS), dymoe(0.75, 2, rounding="nearest")]
        rows += [dymoe(0.75, 2, quantizer) for quantizer in QUANTIZERS if quantizer != "rtn"]
        for rule in ("renormalize", "keep"):
            rows += [dymoe(r, 0, skipped_weights=rule) for r in RETENTIONS]
            rows += [dymoe(0.75, 0, rounding="nearest", skipped_weights=rule)]
        for row in rows:
            rule = row.options.get("system_options", {}).get("skipped_weights", "")
            for decode in (False, True):
                phase = "decode" if decode else "prompt"
                place = {"experts": row.name, "quantizer": row.quantizer, "skipped_weights": rule, "phase": phase}
                yield {**place, **self.read(row, decode=decode)}

    def choices(self) -> Iterator[dict[str, Any]]:
        """The paper's Figure 3: as many experts, chosen and spread over the layers in other ways."""
        for lo in (0, 2):
            for retention in RETENTIONS:
                for by_importance, by_depth in ((True, True), (True, False), (False, True), (False, False)):
                    row = dymoe(retention, lo, rounding="nearest")
                    parameters = {"retention": retention, "rounding": "nearest", "reuse_high": False}
                    system = Chosen(by_importance=by_importance, by_depth=by_depth, **parameters)
                    chosen = Variant(row.name, row.options, row.quantizer, system)
                    place = {"lo": lo, "retention": retention, "by_importance": by_importance, "by_depth": by_depth}
                    for decode in (False, True) if retention == 0.75 else (False,):
                        yield {**place, "phase": "decode" if decode else "prompt", **self.read(chosen, decode=decode)}

    def layers(self) -> Iterator[dict[str, Any]]:
        """The paper's Figure 5: one layer at 2 bits, the others at 16."""
        for quantizer in ("rtn", "hqq"):
            for layer in range(len(self.bench.experts.layers)):
                variant = Variant("16/2", {"hi": 16, "lo": 2}, quantizer, OneLayerLow(layer=layer))
                yield {"layer": layer, "quantizer": quantizer, **self.read(variant)}

    def tokens(self) -> Iterator[dict[str, Any]]:
        """Which tokens of a prompt say which experts matter, at r = 0.5, where it matters most."""
        asked = [("the top 20 %, by the last 32 queries", 0.2, 32), ("the top 20 %, by all queries (Eq. 1)", 0.2, 512)]
        asked += [(f"the top {share:.0%}, by the last 32 queries", share, 32) for share in (0.1, 0.4)]
        asked += [("every token, which stands in for MLA", 1.0, 32), ("20 %, at random", 0.2, 0)]
        for name, share, window in asked:
            for lo in (2, 0):
                variant = dymoe(0.5, lo)
                variant.options["system_options"]["heavy_share"] = share
                with listening_to(window):
                    yield {"tokens": name, "lo": lo, **self.read(variant)}

    def budgets(self) -> Iterator[dict[str, Any]]:
        """Quality against bytes moved, decoding one request under budgets that are the same in bytes for all."""
        rows = [uniform(4), uniform(2), dymoe(0.75, 2), dymoe(0.75, 2, rounding="nearest")]
        rows += [*map(nested, rows[2:]), nested(dymoe(0.5, 2)), dymoe(0.75, 0), dymoe(0.75, 0, rounding="nearest")]
        rows += [uniform(4, "gptq"), nested(dymoe(0.75, 2, "gptq", "nearest"))]
        for share in BUDGETS:
            for row in rows:
                place = {"budget": share, "experts": row.name, "quantizer": row.quantizer.removeprefix("nested ")}
                yield {**place, **self.read(row, decode=True, share=share)}

    def both(self) -> Iterator[dict[str, Any]]:
        """Both readings of codes of 4 bits, by quantizer, and by what the low one counts when GPTQ chooses them."""
        for quantizer in ("rtn", "hqq", *(f"gptq {weight:g}" for weight in LOW_WEIGHTS)):
            for bits in (4, 2):
                variant = Variant(f"{bits}, nested", {"hi": bits}, f"nested {quantizer}")
                yield {"bits": bits, "quantizer": quantizer, **self.read(variant)}

    def sizes(self) -> Iterator[dict[str, Any]]:
        """Bytes of an expert by how its versions are stored."""
        for bits in ((4,), (2,), (4, 2)):
            formats = self.bench.checkpoint.model_experts(bits, GROUP_SIZE, torch.bfloat16).formats
            yield {
                "stored_bits": list(bits),
                "expert_bytes": sum(form.nbytes for form in formats.values()),
                "promotion_bytes": formats[bits[0]].nbytes if len(bits) > 1 else None,
            }


SECTIONS = ("uniform", "both", "sizes", "tiers", "choices", "layers", "tokens", "budgets")


@contextlib.contextmanager
def listening_to(window: int) -> Iterator[None]:
    """Let that many last queries of a prompt choose the heavy hitters; 0 leaves it to chance."""
    before = prompt_tap.WINDOW, prompt_tap.attention_mass
    if window == 0:
        generator = torch.Generator().manual_seed(0)
        prompt_tap.attention_mass = lambda query, *_: torch.rand(query.shape[0], generator=generator)
    else:
        prompt_tap.WINDOW = window
    try:
        yield
    finally:
        prompt_tap.WINDOW, prompt_tap.attention_mass = before


def main() -> None:
    """Measure, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=3, help="texts of 512 tokens from each of three domains")
    parser.add_argument("--decoded", type=int, default=96, help="tokens of each domain that are read one by one")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--out", type=Path, default=HERE, help="where results.json and quality.png go")
    arguments = parser.parse_args()
    try:
        os.getcwd()
    except FileNotFoundError:
        parser.error("the working directory was removed, and oneMKL ends a process that has none; change to another")
    torch.set_num_threads(1)
    begin = time.perf_counter()
    measurement = Measurement(arguments.windows, arguments.decoded)
    path = arguments.out / "results.json"
    texts = {"prompt": sum(map(len, measurement.texts[False])), "decode": sum(map(len, measurement.texts[True]))}
    before: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if before.get("tokens") != texts:
        before = {"sections": {}, "seconds": {}}
    results: dict[str, Any] = {
        "machine": f"{platform.machine()} CPU, {os.cpu_count()} cores",
        "tokens": texts,
        "seconds": {**before["seconds"], "start": round(time.perf_counter() - begin)},
        "sections": before["sections"],
    }
    if not 1 < measurement.read(EXACT)["perplexity"] < 100:
        raise SystemExit("the model's own perplexity is not that of a trained model; nothing reported")
    for section in arguments.only:
        begin, rows = time.perf_counter(), []
        for row in getattr(measurement, section)():
            rows.append(row)
            print(section, json.dumps(row), flush=True)
        results["sections"][section] = rows
        results["seconds"][section] = round(time.perf_counter() - begin)
        arguments.out.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=1) + "\n")
    report.show(results)
    if results["sections"].keys() == set(SECTIONS):
        report.draw(results, arguments.out / "quality.png")
        if arguments.out == HERE:
            report.write_readme(results, HERE / "README.md")
    print(json.dumps({"seconds": round(sum(results["seconds"].values())), "tokens": results["tokens"]}))


if __name__ == "__main__":
    main()
