"""A trace as one page of pictures, each with a sentence that says how to read it and one that says what is seen."""

from collections.abc import Iterator
from html import escape
from typing import NamedTuple

import torch

from vllm_dymoe.observe import statistics
from vllm_dymoe.observe.pictures import heat_map, lines
from vllm_dymoe.observe.trace import Trace

_MOST_TOKENS = 20_000  # tokens that the caches are worked out for: every use is looked at, one after the other
_PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body{{max-width:860px;margin:40px auto;padding:0 20px;color:#1d2429;font:16px/1.55 system-ui,sans-serif}}
section{{border-top:1px solid #e3e1dc;margin-top:32px}}svg{{width:100%;height:auto}}.seen{{font-weight:600}}
</style></head><body><h1>{title}</h1><p>{facts}</p>{sections}</body></html>
"""


class Picture(NamedTuple):
    """One section of the page."""

    title: str  # what it is about
    reading: str  # how to read it
    seen: str  # what it says of this trace
    svg: str  # the picture


def page(trace: Trace) -> str:
    """HTML that needs nothing from anywhere else; ConfigError if there is no matplotlib."""
    header = trace.header
    facts = (
        f"{header.model}: {header.num_layers} layers with {header.num_experts} experts, {header.top_k} for each token, "
        f"all counted from 0. {trace.num_tokens:,} tokens, {int(trace.prefill.sum()):,} of them in prompts, of "
        f"{trace.request.unique().numel():,} requests."
    )
    pictures = [*_uses(trace), *(_foresight(trace) if header.num_layers > 1 else ())]
    sections = (
        f"<section><h2>{escape(picture.title)}</h2><p>{escape(picture.reading)}</p>{picture.svg}"
        f'<p class="seen">{escape(picture.seen)}</p></section>'
        for picture in pictures
    )
    title = f"Which experts {header.model.rstrip('/').rpartition('/')[2]} chooses"
    return _PAGE.format(title=escape(title), facts=escape(facts), sections="".join(sections))


def _uses(trace: Trace) -> Iterator[Picture]:
    """What an expert's uses say of a cache."""
    experts, top_k = trace.header.num_experts, trace.header.top_k
    shares = statistics.popularity(trace)
    half = int((shares.sort(-1, descending=True).values.cumsum(-1).mean(0) < 0.5).sum()) + 1
    yield Picture(
        "Popular experts",
        "Each row is a layer, each column an expert: the stronger the colour, the larger its share of the choices. The "
        "more unequal they are, the more a cache gains by keeping the popular ones.",
        f"Half of the choices go to {half} of a layer's {experts} experts; {int((shares == 0).sum())} of "
        f"{shares.numel()} experts were never chosen.",
        heat_map(shares, "expert", "layer"),
    )
    decoded = trace.select(~trace.prefill)
    share, chance = statistics.reuse(trace), statistics.reuse_by_chance(trace)
    drawn = {"all tokens": share, "answers only": statistics.reuse(decoded), "by chance, from popularity": chance}
    yield Picture(
        "From token to token",
        "The share of a token's experts that the token before it chose as well. What is above the dashed line is what "
        "recency tells beyond popularity.",
        f"On average {share.nanmean():.0%} are used again by the next token; by chance it would be {chance.mean():.0%}."
        if share.isfinite().any()
        else "No two tokens of the trace follow each other.",
        lines(drawn, "layer", "share used again"),
    )
    read, part = ("answers", decoded) if decoded.num_tokens else ("prompts", trace)
    part = part.select(part.in_order()[:_MOST_TOKENS])
    rates, quarter = statistics.lru_hit_rates(part).mean(0), max(1, experts // 4)
    yield Picture(
        "How large a cache has to be",
        "The share of experts that are found on the device if each layer keeps the n that it used most recently (an "
        "LRU cache) and requests come one after the other; a mean of the layers.",
        f"Keeping a quarter, {quarter}, finds {rates[quarter - 1]:.0%}; as many as a token uses, {top_k}, "
        f"{rates[top_k - 1]:.0%}. Counted on {part.num_tokens:,} tokens of {read}.",
        lines({"found on the device": rates}, "n experts that a layer keeps", "found on the device", first=1,
              mark=(top_k, "experts of a token")),
    )  # fmt: skip


def _foresight(trace: Trace) -> Iterator[Picture]:
    """What tells a layer's experts before its router does."""
    affinity, popularity = statistics.foreseen_by_affinity(trace)
    chance = torch.full_like(affinity, trace.header.top_k / trace.header.num_experts)
    drawn = {"by affinity": affinity, "by popularity": popularity, "by chance": chance}
    yield Picture(
        "From layer to layer",
        "How many of the next layer's experts can be named from this layer's: those that followed them most often "
        "(affinity), against the next layer's most popular ones. As many are named as a token uses; counted on half of "
        "the requests and tried on the others.",
        ", ".join(f"{name} {values.mean():.0%}" for name, values in drawn.items()) + " on average.",
        lines(drawn, "layer whose experts are known", "share of the next layer's experts"),
    )
    ahead = {
        "how alike the routers' inputs are": statistics.activation_similarity(trace),
        "experts that the next gate names rightly": statistics.next_gate_accuracy(trace),
    }
    if found := {name: values for name, values in ahead.items() if values is not None}:
        yield Picture(
            "Looking ahead with the next gate",
            "How alike the inputs of a layer's router and the next one's are (their cosine), and how many of the next "
            "layer's experts its gate names from this layer's input. The higher, the better prefetch works.",
            ", ".join(f"{name}: {values.mean():.0%}" for name, values in found.items()) + " on average.",
            lines(found, "layer whose input is known", "alike; right"),
        )
