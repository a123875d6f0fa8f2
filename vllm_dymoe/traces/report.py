"""A trace as one page of pictures, each with a sentence that says how to read it and one that says what is seen."""

import html
import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from vllm_dymoe.traces import statistics
from vllm_dymoe.traces.charts import Line, heat_map, lines
from vllm_dymoe.traces.trace import Trace

_MOST_LINES = 4
"""More domains than that are drawn as rows of a heat map: there are no more colours to tell apart."""

_MOST_TOKENS = 20_000
"""Tokens that the caches are worked out for: every use is looked at, one after the other."""


@dataclass(frozen=True)
class Picture:
    """One section of the page.

    Attributes:
        title: what it is about.
        reading: how to read it.
        seen: what it says of this trace.
        svg: the picture.
    """

    title: str
    reading: str
    seen: str
    svg: str


def page(trace: Trace) -> str:
    """The page: HTML that needs nothing from anywhere else."""
    pictures = [
        _popularity(trace),
        _inequality(trace),
        *_domains(trace),
        _reuse(trace),
        _cache(trace),
        *_affinity(trace),
        *_inputs(trace),
    ]
    sections = "".join(
        f"<section><h2>{html.escape(p.title)}</h2><p>{html.escape(p.reading)}</p>{p.svg}"
        f'<p class="seen">{html.escape(p.seen)}</p></section>'
        for p in pictures
    )
    name = html.escape(trace.header.model.rstrip("/").rpartition("/")[2])
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Which experts {name} chooses</title><style>{_STYLE}</style></head><body><main>"
        f"<h1>Which experts {name} chooses</h1><p>{_INTRODUCTION}</p>{_facts(trace)}{sections}"
        "<footer>Made by vllm-dymoe report. What is counted, and how: docs/traces.md.</footer></main></body></html>\n"
    )


_INTRODUCTION = (
    "In each of its layers a Mixture-of-Experts model has many experts, and a router that chooses a few of them for "
    "every token. This page shows what the routers chose while a trace was recorded, and what that means for serving "
    "the model with a part of its experts on the device: which ones to keep there, how many, and which ones to fetch "
    "ahead. Layers and experts are counted from 0."
)


def _facts(trace: Trace) -> str:
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
    return f"<dl>{rows}</dl>"


def _popularity(trace: Trace) -> Picture:
    shares = statistics.popularity(trace)
    even = 1 / trace.header.num_experts
    layer, expert = divmod(int(shares.argmax()), trace.header.num_experts)
    never = int((shares == 0).sum())
    unused = (
        f"{never} of {shares.numel()} experts were never chosen" if never else "Every expert was chosen at least once"
    )
    return Picture(
        "Popular experts",
        "Each row is a layer, each column an expert: the stronger the colour, the larger its share of the choices.",
        f"The most popular is expert {expert} of layer {layer}, with {shares.max():.1%} of the choices; an even share "
        f"would be {even:.1%}. {unused}.",
        heat_map(shares.tolist(), "expert", "layer", "of a layer's choices"),
    )


def _inequality(trace: Trace) -> Picture:
    shares = statistics.cumulative_share(trace)
    mean = shares.mean(0)
    experts = trace.header.num_experts
    half = int((mean < 0.5).sum()) + 1
    even = [(n + 1) / experts for n in range(experts)]
    drawn = _single_layers(shares)
    drawn += [Line("mean of the layers", mean.tolist(), 1), Line("if all were equally popular", even, 2, dashed=True)]
    return Picture(
        "How unequal they are",
        "How much of a layer's choices its n most popular experts have. The further the line is above the dashed one, "
        "the more a cache gains by keeping the popular ones.",
        f"Half of the choices go to {half} of a layer's {experts} experts.",
        lines(drawn, "n most popular experts of a layer", "share of its choices", first=1),
    )


def _domains(trace: Trace) -> list[Picture]:
    parts = statistics.by_domain(trace)
    if len(parts) < 2:
        return []
    shares = {name or "without a name": statistics.popularity(part) for name, part in parts.items()}
    everybody = statistics.popularity(trace)
    different = {name: 0.5 * (share - everybody).abs().sum(-1) for name, share in shares.items()}
    furthest = max(different, key=lambda name: different[name].mean().item())
    if len(parts) > _MOST_LINES:
        table = [value.tolist() for value in different.values()]
        picture = heat_map(table, "layer", "domain", "of a domain's choices", list(different))
    else:
        drawn = [Line(name, value.tolist(), 1 + number) for number, (name, value) in enumerate(different.items())]
        picture = lines(drawn, "layer", "share that differs")
    layer = int(torch.stack(list(different.values())).sum(0).argmax())
    rows = torch.stack([share[layer] for share in shares.values()])
    return [
        Picture(
            "How domains differ",
            "For each layer, the share of a domain's choices that would have to go to other experts to look like those "
            "of all domains together: 0 where a domain is like the others.",
            f"Most different is {furthest}, by {different[furthest].mean():.0%} on average.",
            picture,
        ),
        Picture(
            f"Domains in layer {layer}",
            "The layer where they differ most. Each row is a domain, each column an expert: the stronger the colour, "
            "the larger the expert's share.",
            "Experts that are strong in one row only are that domain's own.",
            heat_map(rows.tolist(), "expert", "domain", "of a domain's choices", list(shares)),
        ),
        _shared(dict(zip(shares, parts.values(), strict=True))),
    ]


def _shared(parts: Mapping[str, Trace]) -> Picture:
    """DynaExq Figure 2, over all layers and every n."""
    pairs = {
        f"{one} and {other}": statistics.overlap(parts[one], parts[other]).mean(0)
        for one, other in itertools.combinations(parts, 2)
    }
    least = min(pairs, key=lambda pair: pairs[pair].mean().item())
    experts = len(pairs[least])
    quarter = max(1, experts // 4)
    drawn = [
        Line("mean of all pairs", torch.stack(list(pairs.values())).mean(0).tolist(), 1),
        Line(least, pairs[least].tolist(), 2),
        Line("by chance", [(n + 1) / experts for n in range(experts)], 3, dashed=True),
    ]
    return Picture(
        "Hot experts that domains share",
        "The share of a domain's n most popular experts that are among the n most popular of another one, too, over "
        "all layers. The lower it is, the less a set that is chosen once is worth when the traffic changes.",
        f"{least} share least: {pairs[least][quarter - 1]:.0%} of their {quarter} most popular experts of a layer.",
        lines(drawn, "n most popular experts of a layer", "share that both have", first=1),
    )


def _reuse(trace: Trace) -> Picture:
    share, chance = statistics.reuse(trace), statistics.reuse_by_chance(trace)
    decoded = statistics.reuse(trace.select(~trace.prefill))
    drawn = [
        Line("all tokens", share.tolist(), 1),
        Line("answers only", decoded.tolist(), 2),
        Line("by chance, from popularity", chance.tolist(), 3, dashed=True),
    ]
    return Picture(
        "From token to token",
        "The share of a token's experts that the token before it chose as well. What is above the dashed line is what "
        "recency tells beyond popularity.",
        f"On average {share.nanmean():.0%} of the experts are used again by the next token; by chance it would be "
        f"{chance.mean():.0%}.",
        lines(drawn, "layer", "share used again"),
    )


def _cache(trace: Trace) -> Picture:
    decoded = trace.select(~trace.prefill)
    part = decoded if decoded.num_tokens else trace
    part = part.select(part.in_order()[:_MOST_TOKENS])
    rates = statistics.lru_hit_rates(part)
    mean, top_k = rates.mean(0), trace.header.top_k
    quarter = max(1, trace.header.num_experts // 4)
    drawn = _single_layers(rates)
    drawn.append(Line("mean of the layers", mean.tolist(), 1))
    return Picture(
        "How large a cache has to be",
        "The share of experts that are found on the device if each layer keeps the n that it used most recently (an "
        f"LRU cache) and requests are {'answered' if decoded.num_tokens else 'read'} one after the other.",
        f"Keeping a quarter, {quarter} of {trace.header.num_experts}, finds {mean[quarter - 1]:.0%}; keeping as "
        f"many as a token uses, {top_k}, finds {mean[top_k - 1]:.0%}. Counted on {part.num_tokens:,} tokens.",
        lines(
            drawn, "n experts that a layer keeps", "found on the device", first=1, mark=(top_k, "experts of a token")
        ),
    )


def _affinity(trace: Trace) -> list[Picture]:
    if trace.header.num_layers < 2:
        return []
    by_rows, by_popularity = statistics.foreseen_by_affinity(trace)
    chance = trace.header.top_k / trace.header.num_experts
    drawn = [
        Line("foreseen by affinity", by_rows.tolist(), 1),
        Line("foreseen by popularity", by_popularity.tolist(), 2),
        Line("by chance", [chance] * len(by_rows), 3, dashed=True),
    ]
    gain = by_rows - by_popularity
    layer = int(gain.argmax())
    return [
        Picture(
            "From layer to layer",
            "How many of the next layer's experts can be named from this layer's: those that followed them most often "
            "(affinity), against the next layer's most popular ones. As many are named as a token uses; counted on "
            "half of the requests and tried on the others.",
            f"Affinity names {by_rows.mean():.0%} of them on average, popularity {by_popularity.mean():.0%}, chance "
            f"{chance:.0%}.",
            lines(drawn, "layer whose experts are known", "share of the next layer's experts"),
        ),
        Picture(
            f"Affinity of layers {layer} and {layer + 1}",
            f"Where affinity tells most beyond popularity. Each row is an expert of layer {layer}, each column one of "
            f"layer {layer + 1}: the stronger the colour, the likelier it follows.",
            "Vertical stripes are experts that are popular whatever was chosen before, single strong places are pairs.",
            heat_map(
                statistics.affinity(trace)[layer].tolist(),
                f"expert of layer {layer + 1}",
                f"expert of layer {layer}",
                f"of what follows an expert of layer {layer}",
            ),
        ),
    ]


def _inputs(trace: Trace) -> list[Picture]:
    similarity, accuracy = statistics.activation_similarity(trace), statistics.next_gate_accuracy(trace)
    drawn = [] if similarity is None else [Line("how alike the routers' inputs are", similarity.tolist(), 1)]
    if accuracy is not None:
        drawn.append(Line("experts that the next gate names rightly", accuracy.tolist(), 2))
    if not drawn or trace.header.num_layers < 2:
        return []
    seen = []
    if similarity is not None:
        seen.append(f"Inputs of neighbouring layers are {similarity.mean():.0%} alike on average.")
    if accuracy is not None:
        seen.append(f"The next layer's gate, asked one layer early, names {accuracy.mean():.0%} of its experts.")
    return [
        Picture(
            "Looking ahead with the next gate",
            "How alike the inputs of a layer's router and the next one's are (their cosine), and how many of the "
            "next layer's experts its gate names from this layer's input. The higher, the better prefetch works.",
            " ".join(seen),
            lines(drawn, "layer whose input is known", "alike; right"),
        )
    ]


def _single_layers(values: torch.Tensor) -> list[Line]:
    """A faint line for each layer, of which the legend has one."""
    return [Line("" if number else "single layers", row.tolist(), 0) for number, row in enumerate(values)]


_STYLE = """
:root{color-scheme:light dark;--paper:#fbfaf8;--card:#fff;--ink:#1d2429;--soft:#5d6970;--rule:#e3e1dc;
--c1:#0b6e99;--c2:#c8553d;--c3:#7a7f85;--c4:#5b8c5a;--faint:#b9c4ca}
@media(prefers-color-scheme:dark){:root{--paper:#14181b;--card:#1c2226;--ink:#e8ebed;--soft:#9aa6ad;--rule:#2f383e;
--c1:#5bb8e0;--c2:#f0917c;--c3:#a2a9ae;--c4:#93c692;--faint:#3d4a52}}
*{box-sizing:border-box}body{margin:0;background:var(--paper);color:var(--ink);
font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",sans-serif}
main{max-width:860px;margin:0 auto;padding:40px 20px 64px}h1{font-size:30px;line-height:1.2;margin:0 0 20px}
h2{font-size:20px;margin:0 0 6px}p{margin:0 0 14px;color:var(--soft)}.seen{color:var(--ink);margin:14px 0 0}
section{background:var(--card);border:1px solid var(--rule);border-radius:12px;padding:24px;margin:0 0 24px}
dl{display:grid;grid-template-columns:repeat(auto-fit,minmax(220px,1fr));gap:14px 24px;margin:0 0 28px}
dt{color:var(--soft);font-size:13px}dd{margin:0;font-weight:600;overflow-wrap:anywhere}
.wide{overflow-x:auto}svg{display:block;width:100%;min-width:600px;height:auto}
@media(max-width:560px){main{padding:24px 12px 40px}section{padding:18px 14px}}
.grid{stroke:var(--rule)}.tick,.label{fill:var(--soft);font-size:12px}
.line{fill:none;stroke:currentColor;stroke-width:2.2;stroke-linejoin:round}.line.c0{stroke-width:1}
.dashed{stroke-dasharray:5 4}circle{fill:currentColor}.mark{stroke:var(--soft);stroke-dasharray:2 3}
.ground{fill:var(--c1);fill-opacity:.04}.cells{fill:none;stroke:var(--c1)}
.c0{color:var(--faint)}.c1{color:var(--c1)}.c2{color:var(--c2)}.c3{color:var(--c3)}.c4{color:var(--c4)}
.legend{display:flex;flex-wrap:wrap;gap:4px 20px;font-size:13px;color:var(--soft);margin:0 0 6px}
.key{display:inline-flex;align-items:center;gap:8px}.key i{width:22px;border-top:3px solid currentColor}
.key i.dashed{border-top-style:dashed}.key i.scale{width:96px;height:12px;border:0;border-radius:3px;
background:linear-gradient(90deg,color-mix(in srgb,var(--c1) 4%,transparent),var(--c1))}
footer{color:var(--soft);font-size:13px}
"""
