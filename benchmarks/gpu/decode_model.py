"""What would a decode step take, by count: with the host in every layer, and decided on the device?

Counts launches and bytes of one token of one request at a share of resident experts, with the hit rates of the
residency rule on a trace, and prints what they cost on a card. Nothing here is measured: every number of a card or a
host is an assumption with a name, and stands in a table of its own. Without ``--trace`` hits are those of made-up
routing (traces/synthetic.py) of each model's size. Writes the README's table.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "cache")]

from checkout import find_package  # noqa: E402

find_package()

from layers import Layer, expert_bytes  # noqa: E402
from readme import markdown, put  # noqa: E402
from replay import heat  # noqa: E402

from vllm_dymoe.traces import Trace  # noqa: E402
from vllm_dymoe.traces.files import TraceHeader  # noqa: E402
from vllm_dymoe.traces.synthetic import synthetic_trace  # noqa: E402

SHARES = (0.1, 0.25, 0.5, 0.75, 1.0)
"""Resident experts of all."""
BITS = 4
LAUNCHES = 3
"""Of ours, in a layer that is decided on the device: decide, gate and up, down."""
AHEAD_LAUNCHES = 2
"""That a layer waits for where the next one's experts are fetched ahead: its names, and the copies."""
MOST_AHEAD = 24
SAMPLED_LAYERS = 2
"""Of a made-up trace; all layers of one are alike."""


@dataclass(frozen=True)
class Model:
    """What decode of one token reads.

    Attributes:
        layer: an MoE layer.
        layers: how many.
        attention_weights: of one layer, from the model's config.json.
        head_weights: of the output projection.
    """

    layer: Layer
    layers: int
    attention_weights: int
    head_weights: int

    @property
    def dense_weights(self) -> int:
        """Weights outside of routed experts that a token reads; routers are too small to count."""
        return self.layers * self.attention_weights + self.head_weights


@dataclass(frozen=True)
class Card:
    """Assumed of a card and its link.

    Attributes:
        name: of the card.
        memory_gb: of its data sheet.
        memory_gbps: of its data sheet, GB/s.
        link_gbps: what copies from pinned memory reach on its PCIe generation with 16 lanes, GB/s.
    """

    name: str
    memory_gb: float
    memory_gbps: float
    link_gbps: float


@dataclass(frozen=True)
class Assumptions:
    """What is neither a card's nor a model's.

    Attributes:
        memory_share: of the data sheet's bandwidth that a kernel reaches which reads weights once.
        link_share: of the link's that a kernel reaches which reads pinned memory.
        launch_us: from one kernel of a graph to the next that depends on it.
        decide_us: of the program that decides, without misses.
        decide_miss_us: more for each miss, which takes a turn.
        host_layer_us: host time of a layer that Python decides, by count of its work.
        host_miss_us: more for each miss: a transfer, a launch, and two events.
        dense_bits: of weights outside of routed experts.
        right_share: of what is fetched ahead, what is then wanted and missing.
        name_us: of the launches that name the next layer's experts, beside a layer's own.
    """

    memory_share: float = 0.85
    link_share: float = 0.92
    launch_us: float = 2.0
    decide_us: float = 5.0
    decide_miss_us: float = 0.3
    host_layer_us: float = 300.0
    host_miss_us: float = 40.0
    dense_bits: int = 16
    right_share: float = 0.7
    name_us: float = 25.0


MODELS = (
    Model(Layer("Qwen3-30B-A3B", 2048, 768, 128, 8), 48, 2 * 2048 * 4096 + 2 * 2048 * 512, 151936 * 2048),
    Model(Layer("gpt-oss-120b", 2880, 2880, 128, 4), 36, 2 * 2880 * 4096 + 2 * 2880 * 512, 201088 * 2880),
    Model(Layer("Qwen3-235B-A22B", 4096, 1536, 128, 8), 94, 2 * 4096 * 8192 + 2 * 4096 * 512, 151936 * 4096),
)
CARDS = (Card("RTX 4090", 24, 1008, 25), Card("RTX 5090", 32, 1792, 50), Card("H200", 141, 4800, 50))


@dataclass(frozen=True)
class Token:
    """One token of decode.

    Attributes:
        misses: experts that cross the link, of all layers.
        link_bytes: theirs.
        memory_bytes: that the card reads: active experts and what is dense.
        bound_ms: whichever of link and memory takes longer, both at their best.
        device_ms: decided on the device: the link idles outside of a layer's experts.
        ahead_ms: the same with as many projections fetched ahead, while attention runs, as make it shortest.
        ahead: these, for each layer.
        host_ms: decided by the host; its time does not overlap with a miss that it has yet to name.
    """

    misses: float
    link_bytes: float
    memory_bytes: float
    bound_ms: float
    device_ms: float
    ahead_ms: float
    ahead: int
    host_ms: float


def token(model: Model, card: Card, hit_rate: float, assumed: Assumptions) -> Token:
    """Count one token.

    Args:
        model: that decodes.
        card: where.
        hit_rate: of its experts, 0 to 1.
        assumed: the rest.
    """
    layer = model.layer
    nbytes = expert_bytes(layer, BITS)
    missed = layer.top_k * (1 - hit_rate)
    memory, link = card.memory_gbps * 1e9, card.link_gbps * 1e9
    active, dense = layer.top_k * nbytes, model.dense_weights * assumed.dense_bits / 8
    link_bytes, memory_bytes = model.layers * missed * nbytes, model.layers * active + dense
    dense_seconds = dense / (memory * assumed.memory_share)
    fetching, reading = missed * nbytes / (link * assumed.link_share), active / (memory * assumed.memory_share)
    deciding = 1e-6 * (assumed.decide_us + assumed.decide_miss_us * missed + LAUNCHES * assumed.launch_us)
    ahead = [_layer_ahead(model, card, missed, count, assumed) for count in range(MOST_AHEAD + 1)]
    best = min(range(len(ahead)), key=ahead.__getitem__)
    head_seconds = model.head_weights * assumed.dense_bits / 8 / (memory * assumed.memory_share)
    hosting = 1e-6 * (assumed.host_layer_us + assumed.host_miss_us * missed)
    return Token(
        model.layers * missed,
        link_bytes,
        memory_bytes,
        1e3 * max(link_bytes / link, memory_bytes / memory),
        1e3 * (dense_seconds + model.layers * (deciding + max(fetching, reading))),
        1e3 * (head_seconds + model.layers * ahead[best]),
        best,
        1e3 * (dense_seconds + model.layers * (hosting + max(fetching, reading))),
    )


def _layer_ahead(model: Model, card: Card, missed: float, projections: int, assumed: Assumptions) -> float:
    """Seconds of a layer and of the attention before it, in which so many of its projections are fetched.

    What was fetched ahead and is wanted need not be fetched again; what is not wanted has only taken time. A step that
    fetches nothing ahead still asks for names, and waits for the branch.
    """
    nbytes, active = expert_bytes(model.layer, BITS), model.layer.top_k * expert_bytes(model.layer, BITS)
    memory, link = card.memory_gbps * 1e9 * assumed.memory_share, card.link_gbps * 1e9 * assumed.link_share
    attention, copying = model.attention_weights * assumed.dense_bits / 8 / memory, projections / 3 * nbytes / link
    fetching = max(0.0, missed - assumed.right_share * projections / 3) * nbytes / link
    launches = (LAUNCHES + AHEAD_LAUNCHES) * assumed.launch_us
    deciding = 1e-6 * (assumed.decide_us + assumed.decide_miss_us * missed + launches)
    return max(attention, copying) + deciding + max(fetching, active / memory, 1e-6 * assumed.name_us)


def hit_rates(layer: Layer, trace: Trace | None) -> dict[float, float]:
    """Of the residency rule, by share of resident experts: one request after the other, each layer with its share."""
    if trace is None:
        size = SAMPLED_LAYERS, layer.experts, layer.top_k, layer.hidden
        trace = synthetic_trace(TraceHeader(layer.model, "synthetic", *size), requests=4, prompt=1, decode=200)
    decoded = trace.select(~trace.prefill)
    routing = decoded.experts.numpy()[np.concatenate([tokens.numpy() for tokens in decoded.by_request()])].astype(int)
    experts, layers = trace.header.num_experts, range(routing.shape[1])
    hits = {
        share: sum(heat(routing[:, number], experts, round(share * experts), admission=True) for number in layers)
        for share in SHARES
        if share < 1
    }
    return {share: count / routing.size for share, count in hits.items()} | {1.0: 1.0}


def rows(assumed: Assumptions, trace: Trace | None) -> Iterator[dict[str, float | str]]:
    """Every model, card and share whose weights fit the card."""
    for model in MODELS:
        rates = hit_rates(model.layer, trace)
        for card in CARDS:
            for share, rate in rates.items():
                held = share * model.layers * model.layer.experts * expert_bytes(model.layer, BITS)
                if held + model.dense_weights * assumed.dense_bits / 8 > card.memory_gb * 1e9:
                    continue
                counted = asdict(token(model, card, rate, assumed))
                yield {"model": model.layer.model, "card": card.name, "resident": share, "hit_rate": rate, **counted}


def table(found: list[dict], assumed: Assumptions) -> str:
    """Assumptions first, then the models."""
    names = [[name, f"{value:g}"] for name, value in asdict(assumed).items()]
    names += [
        [f"{card.name}: memory, link", f"{card.memory_gb:g} GB, {card.memory_gbps:g} GB/s, {card.link_gbps:g} GB/s"]
        for card in CARDS
    ]
    head = [
        "model",
        "card",
        "resident",
        "hits",
        "GB over the link",
        "bound ms",
        "device ms",
        "of the bound",
        "ahead ms",
        "of the bound",
        "projections",
        "host ms",
    ]
    lines = (
        [
            row["model"], row["card"], f"{row['resident']:.0%}", f"{row['hit_rate']:.2f}",
            f"{row['link_bytes'] / 1e9:.2f}", f"{row['bound_ms']:.1f}", f"{row['device_ms']:.1f}",
            f"{row['device_ms'] / row['bound_ms']:.2f}", f"{row['ahead_ms']:.1f}",
            f"{row['ahead_ms'] / row['bound_ms']:.2f}", str(row["ahead"]), f"{row['host_ms']:.1f}",
        ]
        for row in found
    )  # fmt: skip
    return "\n\n".join((markdown(["assumed", ""], names), markdown(head, lines)))


def main() -> None:
    """Count, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, help="of hit rates, for all models; made-up routing without")
    parser.add_argument("--no-readme", action="store_true", help="leave the README as it is")
    for name, value in asdict(Assumptions()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    arguments = vars(parser.parse_args())
    path, keep = arguments.pop("trace"), arguments.pop("no_readme")
    assumed = Assumptions(**arguments)
    found = list(rows(assumed, Trace.load(path) if path else None))
    text = table(found, assumed)
    print(text)
    if not keep:
        put(HERE / "README.md", "counted", text)
    print(json.dumps({"unit": "ms", "assumed": asdict(assumed), "rows": found}))


if __name__ == "__main__":
    main()
