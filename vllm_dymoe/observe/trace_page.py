"""A trace as one page of pictures, each with a sentence that says how to read it and one that says what is seen."""

import html
import io
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from vllm_dymoe.observe import statistics
from vllm_dymoe.observe.pictures import new_figure
from vllm_dymoe.observe.trace import Trace

_MOST_LINES = 4
"""More domains than that are drawn as rows of a heat map."""
_MOST_TOKENS = 20_000
"""Tokens that the caches are worked out for: every use is looked at, one after the other."""
_INTRODUCTION = (
    "In each of its layers a Mixture-of-Experts model has many experts, and a router that chooses a few of them for "
    "every token. This page shows what the routers chose while a trace was recorded, and what that means for serving "
    "the model with a part of its experts on the device: which ones to keep there, how many, and which ones to fetch "
    "ahead. Layers and experts are counted from 0."
)
_STYLE = """
body{margin:0;background:#fbfaf8;color:#1d2429;font:16px/1.55 system-ui,sans-serif}
main{max-width:860px;margin:0 auto;padding:40px 20px 64px}h1{font-size:30px}h2{font-size:20px;margin:0}
p,dt,footer{color:#5d6970}.seen{color:inherit}dd{margin:0;font-weight:600;overflow-wrap:anywhere}
section{background:#fff;border:1px solid #e3e1dc;border-radius:12px;padding:24px;margin:0 0 24px}
dl{display:grid;grid-template-columns:repeat(auto-fit,minmax(220px,1fr));gap:14px 24px}svg{width:100%;height:auto}
"""


class Picture(NamedTuple):
    """One section of the page."""

    title: str  # what it is about
    reading: str  # how to read it
    seen: str  # what it says of this trace
    svg: str  # the picture


def page(trace: Trace) -> str:
    """HTML that needs nothing from anywhere else; ConfigError if there is no matplotlib."""
    sections = "".join(
        f"<section><h2>{html.escape(p.title)}</h2><p>{html.escape(p.reading)}</p>{p.svg}"
        f'<p class="seen">{html.escape(p.seen)}</p></section>'
        for p in _pictures(trace)
    )
    header = trace.header
    facts = {
        "model": header.model,
        "layers with experts": f"{header.num_layers}",
        "experts of a layer": f"{header.num_experts}, {header.top_k} for each token",
        "tokens": f"{trace.num_tokens:,}, {int(trace.prefill.sum()):,} of them in prompts",
        "requests": f"{trace.request.unique().numel():,}",
    }
    if trace.domain is not None:
        facts["domains"] = ", ".join(name or "without a name" for name in statistics.by_domain(trace))
    rows = "".join(f"<div><dt>{name}</dt><dd>{html.escape(value)}</dd></div>" for name, value in facts.items())
    name = html.escape(header.model.rstrip("/").rpartition("/")[2])
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Which experts {name} chooses</title><style>{_STYLE}</style></head><body><main>"
        f"<h1>Which experts {name} chooses</h1><p>{_INTRODUCTION}</p><dl>{rows}</dl>{sections}"
        "<footer>Made by vllm-dymoe report. What is counted, and how: docs/traces.md.</footer></main></body></html>\n"
    )


def _pictures(trace: Trace) -> Iterator[Picture]:
    yield from _popularity(trace)
    parts = {name or "without a name": part for name, part in statistics.by_domain(trace).items()}
    if len(parts) > 1:
        yield from _domains(trace, parts)
    yield _reuse(trace)
    yield _cache(trace)
    if trace.header.num_layers > 1:
        yield from _affinity(trace)
        if trace.router_inputs is not None or trace.next_gate is not None:
            yield _inputs(trace)


def _popularity(trace: Trace) -> Iterator[Picture]:
    shares, experts = statistics.popularity(trace), trace.header.num_experts
    layer, expert = divmod(int(shares.argmax()), experts)
    never = int((shares == 0).sum())
    unused = (
        f"{never} of {shares.numel()} experts were never chosen" if never else "Every expert was chosen at least once"
    )
    yield Picture(
        "Popular experts",
        "Each row is a layer, each column an expert: the stronger the colour, the larger its share of the choices.",
        f"The most popular is expert {expert} of layer {layer}, with {shares.max():.1%} of the choices; an even share "
        f"would be {1 / experts:.1%}. {unused}.",
        heat_map(shares, "expert", "layer"),
    )
    most = shares.sort(-1, descending=True).values.cumsum(-1)
    drawn = {"mean of the layers": most.mean(0), "if all were equally popular": _even(experts)}
    yield Picture(
        "How unequal they are",
        "How much of a layer's choices its n most popular experts have. The further the line is above the dashed one, "
        "the more a cache gains by keeping the popular ones.",
        f"Half of the choices go to {int((most.mean(0) < 0.5).sum()) + 1} of a layer's {experts} experts.",
        lines(drawn, "n most popular experts of a layer", "share of its choices", first=1, single=most),
    )


def _domains(trace: Trace, parts: Mapping[str, Trace]) -> Iterator[Picture]:
    shares = {name: statistics.popularity(part) for name, part in parts.items()}
    together = statistics.popularity(trace)
    different = {name: 0.5 * (share - together).abs().sum(-1) for name, share in shares.items()}
    furthest = max(different, key=lambda name: different[name].mean().item())
    rows = torch.stack(list(different.values()))
    yield Picture(
        "How domains differ",
        "For each layer, the share of a domain's choices that would have to go to other experts to look like those "
        "of all domains together: 0 where a domain is like the others.",
        f"Most different is {furthest}, by {different[furthest].mean():.0%} on average.",
        heat_map(rows, "layer", "domain", list(different))
        if len(parts) > _MOST_LINES
        else lines(different, "layer", "share that differs"),
    )
    layer = int(rows.sum(0).argmax())
    yield Picture(
        f"Domains in layer {layer}",
        "The layer where they differ most. Each row is a domain, each column an expert: the stronger the colour, "
        "the larger the expert's share.",
        "Experts that are strong in one row only are that domain's own.",
        heat_map(torch.stack([share[layer] for share in shares.values()]), "expert", "domain", list(shares)),
    )
    pairs = {
        f"{one} and {other}": statistics.overlap(parts[one], parts[other]).mean(0)
        for one, other in itertools.combinations(parts, 2)
    }
    least = min(pairs, key=lambda pair: pairs[pair].mean().item())
    experts = trace.header.num_experts
    quarter = max(1, experts // 4)
    mean = torch.stack(list(pairs.values())).mean(0)
    yield Picture(
        "Hot experts that domains share",
        "The share of a domain's n most popular experts that are among the n most popular of another one, too, over "
        "all layers. The lower it is, the less a set that is chosen once is worth when the traffic changes.",
        f"{least} share least: {pairs[least][quarter - 1]:.0%} of their {quarter} most popular experts of a layer.",
        lines(
            {"mean of all pairs": mean, least: pairs[least], "by chance": _even(experts)},
            "n most popular experts of a layer", "share that both have", first=1,
        ),
    )  # fmt: skip


def _reuse(trace: Trace) -> Picture:
    share, chance = statistics.reuse(trace), statistics.reuse_by_chance(trace)
    decoded = statistics.reuse(trace.select(~trace.prefill))
    return Picture(
        "From token to token",
        "The share of a token's experts that the token before it chose as well. What is above the dashed line is what "
        "recency tells beyond popularity.",
        f"On average {share.nanmean():.0%} of the experts are used again by the next token; by chance it would be "
        f"{chance.mean():.0%}."
        if share.isfinite().any()
        else "No two tokens of the trace follow each other.",
        lines(
            {"all tokens": share, "answers only": decoded, "by chance, from popularity": chance},
            "layer", "share used again",
        ),
    )  # fmt: skip


def _cache(trace: Trace) -> Picture:
    decoded = trace.select(~trace.prefill)
    part = decoded if decoded.num_tokens else trace
    part = part.select(part.in_order()[:_MOST_TOKENS])
    rates, top_k, experts = statistics.lru_hit_rates(part), trace.header.top_k, trace.header.num_experts
    mean, quarter = rates.mean(0), max(1, experts // 4)
    return Picture(
        "How large a cache has to be",
        "The share of experts that are found on the device if each layer keeps the n that it used most recently (an "
        f"LRU cache) and requests are {'answered' if decoded.num_tokens else 'read'} one after the other.",
        f"Keeping a quarter, {quarter} of {experts}, finds {mean[quarter - 1]:.0%}; keeping as "
        f"many as a token uses, {top_k}, finds {mean[top_k - 1]:.0%}. Counted on {part.num_tokens:,} tokens.",
        lines({"mean of the layers": mean}, "n experts that a layer keeps", "found on the device", first=1,
              single=rates, mark=(top_k, "experts of a token")),
    )  # fmt: skip


def _affinity(trace: Trace) -> Iterator[Picture]:
    by_rows, by_popularity = statistics.foreseen_by_affinity(trace)
    chance = trace.header.top_k / trace.header.num_experts
    yield Picture(
        "From layer to layer",
        "How many of the next layer's experts can be named from this layer's: those that followed them most often "
        "(affinity), against the next layer's most popular ones. As many are named as a token uses; counted on "
        "half of the requests and tried on the others.",
        f"Affinity names {by_rows.mean():.0%} of them on average, popularity {by_popularity.mean():.0%}, chance "
        f"{chance:.0%}.",
        lines(
            {"foreseen by affinity": by_rows, "foreseen by popularity": by_popularity,
             "by chance": torch.full_like(by_rows, chance)},
            "layer whose experts are known", "share of the next layer's experts",
        ),
    )  # fmt: skip
    layer = int((by_rows - by_popularity).argmax())
    yield Picture(
        f"Affinity of layers {layer} and {layer + 1}",
        f"Where affinity tells most beyond popularity. Each row is an expert of layer {layer}, each column one of "
        f"layer {layer + 1}: the stronger the colour, the likelier it follows.",
        "Vertical stripes are experts that are popular whatever was chosen before, single strong places are pairs.",
        heat_map(statistics.affinity(trace)[layer], f"expert of layer {layer + 1}", f"expert of layer {layer}"),
    )


def _inputs(trace: Trace) -> Picture:
    drawn, seen = {}, []
    if (similarity := statistics.activation_similarity(trace)) is not None:
        drawn["how alike the routers' inputs are"] = similarity
        seen.append(f"Inputs of neighbouring layers are {similarity.mean():.0%} alike on average.")
    if (accuracy := statistics.next_gate_accuracy(trace)) is not None:
        drawn["experts that the next gate names rightly"] = accuracy
        seen.append(f"The next layer's gate, asked one layer early, names {accuracy.mean():.0%} of its experts.")
    return Picture(
        "Looking ahead with the next gate",
        "How alike the inputs of a layer's router and the next one's are (their cosine), and how many of the "
        "next layer's experts its gate names from this layer's input. The higher, the better prefetch works.",
        " ".join(seen),
        lines(drawn, "layer whose input is known", "alike; right"),
    )


def _even(experts: int) -> torch.Tensor:
    return torch.arange(1, experts + 1) / experts


def lines(
    drawn: Mapping[str, torch.Tensor], x_label: str, y_label: str, *, first: int = 0,
    single: torch.Tensor | None = None, mark: tuple[int, str] | None = None,
) -> str:  # fmt: skip
    """Shares by name over whole numbers that begin with ``first``; what is by chance or even is dashed.

    ``single`` [layers, numbers] are faint lines behind them, and ``mark`` is a number with a word for it.
    """
    figure = new_figure(8, 3.2)
    axes = figure.subplots()
    if single is not None:
        numbers = range(first, first + single.shape[1])
        for place, row in enumerate(single):
            axes.plot(numbers, row.numpy(), color="#b9c4ca", linewidth=0.7, label=None if place else "single layers")
    for name, values in drawn.items():
        dashed = name.startswith(("by chance", "if all"))
        style: dict[str, Any] = {"linestyle": "--", "color": "#7a7f85"} if dashed else {}
        style |= {"marker": "."} if len(values) <= 64 and not dashed else {}
        axes.plot(range(first, first + len(values)), values.numpy(), label=_plain(name), **style)
    if mark is not None:
        axes.axvline(mark[0], color="#5d6970", linestyle=":", label=mark[1])
    axes.set(xlabel=x_label, ylabel=y_label, ylim=(0, None))
    axes.locator_params(axis="x", integer=True)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", frameon=False)
    return _svg(figure)


def heat_map(values: torch.Tensor, x_label: str, y_label: str, names: Sequence[str] | None = None) -> str:
    """Shares [rows, columns] from 0, rows from top to bottom; rows may have names in place of numbers."""
    figure = new_figure(8, min(6.0, max(1.6, 0.25 * len(values))))
    axes = figure.subplots()
    image = axes.imshow(values.numpy(), cmap="Blues", vmin=0, aspect="auto", interpolation="nearest")
    axes.set(xlabel=x_label, ylabel=y_label)
    if names is not None:
        axes.set_yticks(range(len(names)), [_plain(name if len(name) <= 24 else f"{name[:23]}…") for name in names])
    axes.locator_params(axis="both" if names is None else "x", integer=True)
    figure.colorbar(image, ax=axes, format=lambda value, _: f"{value:.1%}")
    return _svg(figure)


def _plain(name: str) -> str:
    """As a label of matplotlib, which would take dollars for formulas."""
    return name.replace("$", r"\$")


def _svg(figure: Any) -> str:
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "vllm-dymoe"}), io.StringIO() as stream:
        figure.savefig(stream, format="svg", metadata={"Date": None}, transparent=True)
        text = stream.getvalue()
    return text[text.index("<svg") :]
