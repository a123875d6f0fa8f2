"""Does precision that follows traffic keep the quality that fixed sets lose? DynaExq's Figures 2 and 3, as KL.

The shipped model reads held-out text of one domain after the other, in windows. At the end of each window the high set
is chosen anew, by the functions that serve (``vllm_dymoe/residency/hotness.py``), and the next window is read with it:
experts in the set have their 4 bits, the others the 2 bits that lie inside. Sets that do not move stand beside it, and
the set of the domain's own loads, which nobody can know beforehand. Writes results.json and README.md's tables.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from readme import markdown, put  # noqa: E402
from texts import DOMAINS, MODEL, pieces  # noqa: E402

from vllm_dymoe.kernels.pack import dequantize  # noqa: E402
from vllm_dymoe.quantize import make_quantizer  # noqa: E402
from vllm_dymoe.quantize.checkpoint import Checkpoint  # noqa: E402
from vllm_dymoe.quantize.packer import ExpertPacker  # noqa: E402
from vllm_dymoe.residency.format import BlobKey  # noqa: E402
from vllm_dymoe.residency.hotness import Hotness, even_shares, hottest, share_out, swaps  # noqa: E402
from vllm_dymoe.residency.tier import Tier  # noqa: E402
from vllm_dymoe.store import HostStore, Manifest  # noqa: E402
from vllm_dymoe.store.writer import StoreWriter  # noqa: E402
from vllm_dymoe.systems.dynaexq import DynaExq  # noqa: E402

SHARES = (0.125, 0.25, 0.5)
GROUP_SIZE = 64
AFTER = 2  # windows behind a shift; what comes then counts
Sets = NDArray[np.bool_]


class Reader:
    """The model, its experts in both versions, and how it reads.

    Args:
        work: folder for packed experts.
        length: tokens of a text.
        texts: that a window has.
    """

    def __init__(self, work: Path, length: int, texts: int) -> None:
        self._length, self._texts = length, texts
        self._tokenizer = AutoTokenizer.from_pretrained(MODEL)
        self._model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
        self._stacks = [layer.mlp.experts for layer in self._model.model.layers]
        self._full = [(stack.gate_up_proj.data, stack.down_proj.data) for stack in self._stacks]
        self._store = packed(work)
        self._versions = {Tier.HI: list(self._dequantized((2, 4))), Tier.LO: list(self._dequantized((2,)))}
        self.shape = len(self._stacks), self._store.experts.num_experts
        fine, base = (self._store.experts.formats[bits].nbytes for bits in (4, 2))
        self.bytes_share = {share: (base + share * fine) / (base + fine) for share in (0.0, *SHARES, 1.0)}
        self._references: dict[str, torch.Tensor] = {}

    def _dequantized(self, slices: tuple[int, ...]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Gate and up, and down of each layer, as kernels see them."""
        experts = self._store.experts
        for layer in range(len(experts.layers)):
            found = []
            for expert in range(experts.num_experts):
                view = None
                for bits in slices:
                    blob = torch.empty(experts.formats[bits].nbytes, dtype=torch.uint8)
                    self._store.read_into(BlobKey(layer, expert, bits), blob)
                    view = experts.formats[bits].view(blob, view)
                found.append([dequantize(matrix) for matrix in view or ()])
            yield torch.stack([torch.cat(parts[:2]) for parts in found]), torch.stack([parts[2] for parts in found])

    def windows(self, domain: str) -> list[list[list[int]]]:
        """Texts of a domain, by window, none twice."""
        rows = pieces(domain, self._tokenizer, self._length)
        return [rows[first : first + self._texts] for first in range(0, len(rows) - self._texts + 1, self._texts)]

    @torch.no_grad()
    def read(self, name: str, window: list[list[int]], high: Sets | None) -> tuple[float, NDArray[np.int64]]:
        """The KL divergence from 16 bits in millinats, and what routers chose.

        Args:
            name: of the window, whose answers at 16 bits are remembered.
            window: token numbers of each text.
            high: bool [layers, experts]; None for 16 bits.
        """
        for layer, stack in enumerate(self._stacks):
            if high is None:
                stack.gate_up_proj.data, stack.down_proj.data = self._full[layer]
                continue
            chosen = torch.from_numpy(high[layer])[:, None, None]
            pairs = zip(self._versions[Tier.HI][layer], self._versions[Tier.LO][layer], strict=True)
            stack.gate_up_proj.data, stack.down_proj.data = (torch.where(chosen, fine, base) for fine, base in pairs)
        output = self._model(torch.tensor(window), output_router_logits=True, use_cache=False)
        logprobs = output.logits[:, :-1].float().log_softmax(-1)
        counts, top_k = np.zeros(self.shape, np.int64), self._store.experts.top_k
        for layer, logits in enumerate(output.router_logits):
            counts[layer] = torch.bincount(logits.topk(top_k).indices.flatten(), minlength=self.shape[1]).numpy()
        if high is None:
            self._references[name] = logprobs
            return 0.0, counts
        reference = self._references[name]
        return 1e3 * float((reference.exp() * (reference - logprobs)).sum(-1).double().mean()), counts


def packed(work: Path) -> HostStore:
    """The model's experts at 4 bits, with the 2 that lie inside."""
    checkpoint = Checkpoint(MODEL)
    experts, quantizer = checkpoint.model_experts((4, 2), GROUP_SIZE, torch.bfloat16), make_quantizer("rtn")
    packer = ExpertPacker(experts, quantizer, StoreWriter(work / "store", Manifest(experts, "rtn", "measured")))
    for layer in range(len(checkpoint.layers)):
        for expert in range(checkpoint.num_experts):
            for projection, (weight, _) in checkpoint.expert(layer, expert).items():
                packer.put(layer, expert, projection, weight)
    return packer.finish()


class Follows:
    """What ``dynaexq`` does, with its own functions and defaults; every move has landed when the next window begins."""

    def __init__(self, shape: tuple[int, int], places: NDArray[np.int64], parameters: dict[str, Any]) -> None:
        self._rule, self._places = DynaExq(**parameters).migrating.rule, places
        self._hotness = Hotness.of(np.zeros(shape, np.int64))
        self.high = hottest(np.zeros(shape), places)
        self.moves: list[int] = []

    def end_window(self, counts: NDArray[np.int64]) -> None:
        """Choose the set of the next window."""
        self._hotness = self._hotness.after(counts, self._rule)
        plan = swaps(self._hotness, self.high, self._places, self._rule)
        for _, layer, up, down in plan:
            self.high[layer, up] = True
            if down is not None:
                self.high[layer, down] = False
        self.moves.append(len(plan))


class Measurement:
    """Windows of one domain after the other, read with every kind of set."""

    def __init__(self, reader: Reader, windows: int, parameters: dict[str, Any]) -> None:
        self._reader, self._parameters = reader, parameters
        texts = {domain: reader.windows(domain) for domain in DOMAINS}
        fewest = min(map(len, texts.values()))
        if fewest < windows + 1:
            raise SystemExit(f"a domain has {fewest} windows where {windows + 1} are asked for; take fewer or shorter")
        self.stream = [(domain, texts[domain][number]) for domain in DOMAINS for number in range(windows)]
        rows = [row for number in range(windows, fewest) for domain in DOMAINS for row in texts[domain][number]]
        size = len(self.stream[0][1])
        mixed = [rows[first : first + size] for first in range(0, len(rows) - size + 1, size)][:windows]
        self.calibration = [row for domain in DOMAINS for row in texts[domain][-1]]
        self.stream += [("mixed", rows) for rows in mixed]
        self.loads = [reader.read(str(place), rows, None)[1] for place, (_, rows) in enumerate(self.stream)]
        self.static = reader.read("calibration", self.calibration, None)[1]

    def layer_worth(self) -> list[float]:
        """Millinats that each layer takes away if it alone is high, on text of all domains that does not count."""
        layers, experts = self._reader.shape
        sets = np.concatenate([np.zeros((1, layers, 1), bool), np.eye(layers, dtype=bool)[:, :, None]])
        low, *found = (self._reader.read("calibration", self.calibration, high.repeat(experts, 1))[0] for high in sets)
        return [low - millinats for millinats in found]

    def run(self, share: float, worth: list[float]) -> dict[str, list[float]]:
        """Millinats of each window, by who chose the high set; and the moves that followed it."""
        layers, experts = self._reader.shape
        places = np.full(layers, round(share * experts))
        by_worth = share_out(even_shares(self.static) * np.array(worth)[:, None], int(places.sum()))
        ours = {
            "dynaexq": Follows((layers, experts), places, self._parameters),
            "dynaexq, layer_worth": Follows((layers, experts), by_worth, self._parameters),
        }
        chance = hottest(np.random.default_rng(0).random((layers, experts)), places)
        fixed = hottest(self.static.astype(float), places)
        own = {domain: hottest(self._load(domain).astype(float), places) for domain in dict(self.stream)}
        found: dict[str, list[float]] = {name: [] for name in ("random", "static", *ours, "own")}
        for place, (domain, rows) in enumerate(self.stream):
            for name, high in (("random", chance), ("static", fixed), ("own", own[domain])):
                found[name].append(self._reader.read(str(place), rows, high)[0])
            for name, follows in ours.items():
                millinats, counts = self._reader.read(str(place), rows, follows.high)
                found[name].append(millinats)
                follows.end_window(counts)
        return found | {"moves": [float(moves) for moves in ours["dynaexq"].moves]}

    def uniform(self, high: bool) -> list[float]:
        """The same with all experts in one version."""
        sets = np.full(self._reader.shape, high)
        return [self._reader.read(str(place), rows, sets)[0] for place, (_, rows) in enumerate(self.stream)]

    def _load(self, domain: str) -> NDArray[np.int64]:
        return np.sum([load for load, (name, _) in zip(self.loads, self.stream, strict=True) if name == domain], 0)

    def overlap(self, share: float) -> dict[str, float]:
        """Figure 2: the share of a domain's hottest experts that are another's as well, by pair."""
        places = np.full(self._reader.shape[0], round(share * self._reader.shape[1]))
        sets = {domain: hottest(self._load(domain).astype(float), places) for domain in DOMAINS}
        pairs = [(one, other) for place, one in enumerate(DOMAINS) for other in DOMAINS[place + 1 :]]
        return {f"{one}-{other}": float((sets[one] & sets[other]).sum() / places.sum()) for one, other in pairs}


def settled(values: list[float], windows: int) -> list[float]:
    """The mean of each domain's windows behind the first AFTER."""
    return [statistics.mean(values[first + AFTER : first + windows]) for first in range(0, len(values), windows)]


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=256, help="tokens of a text")
    parser.add_argument("--texts", type=int, default=4, help="of a window")
    parser.add_argument("--windows", type=int, default=5, help="of each domain")
    parser.add_argument("--parameters", type=json.loads, default={}, help="system_options of dynaexq")
    parser.add_argument("--no-readme", action="store_true", help="leave README.md and results.json as they are")
    arguments = parser.parse_args()
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as work:
        reader = Reader(Path(work), arguments.length, arguments.texts)
    measurement = Measurement(reader, arguments.windows, arguments.parameters)
    names, windows = [*DOMAINS, "mixed"], arguments.windows
    results: dict[str, Any] = {
        "model": MODEL.name,
        "tokens_per_window": arguments.length * arguments.texts,
        "windows_per_domain": windows,
        "bytes_share": {str(share): part for share, part in reader.bytes_share.items()},
        "domains": names,
        "overlap_of_hottest": {str(share): measurement.overlap(share) for share in SHARES},
        "millinats": {"0.0": {"uniform": measurement.uniform(False)}, "1.0": {"uniform": measurement.uniform(True)}},
    }
    results["layer_worth_millinats"] = worth = measurement.layer_worth()
    for share in SHARES:
        results["millinats"][str(share)] = measurement.run(share, worth)
        print(share, json.dumps(results["millinats"][str(share)]), file=sys.stderr, flush=True)
    results["worst_above_own"] = worst(results, windows)
    if not arguments.no_readme:
        (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n")
        put(HERE / "README.md", "quality", table(results, windows))
        put(HERE / "README.md", "overlap", overlaps(results))
    rest = {name: value for name, value in results.items() if name not in ("millinats", "bytes_share")}
    print(json.dumps(rest | {"seconds": round(time.perf_counter() - begin)}))


def worst(results: dict[str, Any], windows: int) -> dict[str, dict[str, float]]:
    """By share and set: by how much the domain that suffers most is above its own set, from AFTER windows on."""
    found: dict[str, dict[str, float]] = {}
    for share in map(str, SHARES):
        rows = results["millinats"][share]
        own = settled(rows["own"], windows)
        found[share] = {
            name: max(ours / best for ours, best in zip(settled(rows[name], windows), own, strict=True)) - 1
            for name in rows
            if name not in ("own", "moves")
        }
    return found


def table(results: dict[str, Any], windows: int) -> str:
    """Millinats of each domain behind a shift, by share and set."""
    lines = []
    for share, rows in sorted(results["millinats"].items(), key=lambda row: float(row[0])):
        for name, values in rows.items():
            if name == "moves":
                continue
            numbers = settled(values, windows)
            above = results["worst_above_own"].get(share, {}).get(name)
            label = {"uniform": "", "own": "the domain's own loads"}.get(name, name)
            lines.append(
                [f"{float(share):.1%}", f"{results['bytes_share'][share]:.0%}", label, *(f"{n:.1f}" for n in numbers),
                 "" if above is None else f"{above:+.0%}"]
            )  # fmt: skip
    return markdown(["high", "bytes", "high set by", *results["domains"], "worst beside own"], lines)


def overlaps(results: dict[str, Any]) -> str:
    """Figure 2 as a table."""
    found = results["overlap_of_hottest"]
    pairs = list(next(iter(found.values())))
    lines = [[f"{float(share):.1%}", *(f"{row[pair]:.0%}" for pair in pairs)] for share, row in found.items()]
    return markdown(["hottest", *pairs], lines)


if __name__ == "__main__":
    main()
