"""How much of dynaexq's loss does ``adaptive`` avoid, and at which cost?

Both are compared with uniform 4 bits: fetching every missing residual slice of the same high set, and ``exact`` with as
many bytes. The engine computes on an emulated card, so that what is fetched crosses a link. The texts that choose high
sets and thresholds are not those that are measured.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from bench import DOMAINS, GROUP_SIZE, Bench
from losses import Scores, losses

from vllm_dymoe.options import Options
from vllm_dymoe.planner.routing import Routing
from vllm_dymoe.planner.rule import HIGH

SHARES = (0.5, 0.25)
FETCHED = 0.2  # most slices to fetch, of those that uniform 4 bits fetches
MARGIN = 0.75  # part of FETCHED that a threshold lets through on the texts that choose it, because others differ
QUANTIZERS = ("gptq", "e8")
_WARM = 4  # texts of a domain that choose the high set
_CHOOSING = 2  # further texts of a domain, whose first tokens choose the threshold
_PATIENCE = 5.0  # seconds for the end of a window
_FAST_GBPS = 1000.0  # of a link whose time does not matter


@dataclass(frozen=True)
class Kind:
    """A policy with its parameters."""

    name: str  # for the tables
    policy: str
    parameters: dict[str, Any]
    high: int = 4
    low: int = 2  # of a policy that moves versions; nested in 4 bits


class Rescues:
    """Prompts and decoded tokens of each domain, under several budgets.

    Each budget holds every base slice and a share of the residual slices. The high set is chosen by other texts of the
    domain.
    """

    def __init__(self, bench: Bench, reference: dict[bool, Scores]) -> None:
        self._bench, self._reference = bench, reference
        self._texts = {False: bench.prompts, True: bench.decoded}
        measured = {tuple(text[:64]) for text in bench.prompts}
        others = {
            domain: [text for text in texts if tuple(text[:64]) not in measured]
            for domain, texts in bench.domains.items()
        }
        self._warm = {domain: texts[:_WARM] for domain, texts in others.items()}
        tokens = len(bench.decoded[0])
        self._choosing = {
            domain: [text[:tokens] for text in texts[_WARM : _WARM + _CHOOSING]] for domain, texts in others.items()
        }

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield each policy at each share of residual slices.

        There are rows for each quantizer, in both phases.
        """
        for quantizer in QUANTIZERS:
            for share in SHARES:
                for kind in self.kinds(quantizer, share):
                    place = {"residuals": share, "quantizer": quantizer, "experts": kind.name}
                    for phase, found in self.read(quantizer, share, kind).items():
                        del found["ms"]
                        yield {**place, "phase": phase, **found}

    def kinds(self, quantizer: str, share: float) -> list[Kind]:
        """Return the policies, ``adaptive`` with the threshold that other texts choose."""
        threshold = self.threshold(quantizer, share)
        return [
            Kind("dynaexq", "dynaexq", {}),
            Kind("uniform 4", "adaptive", {"wait_share": 1}),
            Kind("exact", "exact", {"look_ahead": 0}),
            Kind(f"adaptive, {threshold:g}", "adaptive", {"threshold": threshold}),
        ]

    def threshold(self, quantizer: str, share: float) -> float:
        """Return the lowest threshold that fetches only the allowed share.

        It is found in decode, in hundredths.
        """
        missing: list[float] = []
        for domain in DOMAINS:
            self._serve(quantizer, share, Kind("", "dynaexq", {}), self._warm[domain])
            serving, precision = self._bench.server.host_planned, self._bench.server.cache.table.precision
            forward = serving.forward

            def seen(routing: Routing, *arguments: Any, forward: Any = forward, precision: Any = precision) -> Any:
                lacks = precision[routing.layer, routing.host_ids[0]] != HIGH
                shares = routing.host_weights[0] / routing.host_weights[0].sum()
                missing.extend((shares * len(shares))[lacks].tolist())
                return forward(routing, *arguments)

            serving.forward = seen  # type: ignore[method-assign]
            self._bench.read_each(self._choosing[domain], decode=True)
            del serving.forward
        return math.ceil(100 * float(np.quantile(missing, 1 - FETCHED * MARGIN))) / 100

    def read(
        self, quantizer: str, share: float, kind: Kind, *, phases: Sequence[bool] = (True, False),
        link_gbps: float | None = _FAST_GBPS, settles: bool = False,
    ) -> dict[str, dict[str, Any]]:  # fmt: skip
        """Return losses, and slices, bytes and milliseconds for each token, by phase.

        Args:
            phases: whether texts are decoded, in order.
            link_gbps: rate of an emulated card's link; None for a CPU, which fetches nothing.
            settles: decode other texts before, so that a threshold that follows the link has moved.
        """
        scores: dict[bool, list[torch.Tensor]] = {decode: [] for decode in phases}
        slices, nbytes, seconds = dict.fromkeys(phases, 0), dict.fromkeys(phases, 0), dict.fromkeys(phases, 0.0)
        for number, domain in enumerate(DOMAINS):
            self._serve(quantizer, share, kind, self._warm[domain], link_gbps)
            if settles:
                self._bench.read_each(self._choosing[domain], decode=True)
            for decode in phases:
                each = len(self._texts[decode]) // len(DOMAINS)
                self._bench.server.reset_stats()
                begun = time.perf_counter()
                texts = self._texts[decode][number * each : (number + 1) * each]
                scores[decode] += self._bench.read_each(texts, decode=decode)
                seconds[decode] += time.perf_counter() - begun
                stats = self._bench.server.stats()
                slices[decode] += stats.transfers["demand"]
                nbytes[decode] += stats.bytes_moved["demand"]
        found = {}
        for decode in phases:
            texts, tokens = self._texts[decode], sum(map(len, self._texts[decode]))
            found["decode" if decode else "prompt"] = {
                **losses(Scores(scores[decode]), self._reference[decode], texts),
                "fetched_per_token": slices[decode] / tokens,
                "kib_per_token": nbytes[decode] / 1024 / tokens,
                "ms": 1e3 * seconds[decode] / tokens,
            }
        return found

    def _serve(
        self, quantizer: str, share: float, kind: Kind, warm: list[list[int]], link_gbps: float | None = None
    ) -> None:
        """Serve after one window of the domain's traffic, when all its moves are done.

        ``share`` is that of the residual slices, or, where versions are not nested, that of the bytes of all experts at
        high.
        """
        bench, moves = self._bench, kind.policy != "exact"
        if kind.high == 4:
            store = f"nested {quantizer}"
            budget = bench.nested_bytes(store, share)
        else:
            store = quantizer
            budget = bench.server.kernel.workspace_bytes + int(share * bench.experts.nbytes(kind.high))
        uses = 0.9 * sum(map(len, warm)) * bench.experts.top_k / bench.experts.num_experts
        chosen = {"window_s": 0, "window_uses": uses, **kind.parameters} if moves else kind.parameters
        card = {} if link_gbps is None else {"link_gbps": link_gbps, "misses": "fetch"}
        bench.serve(store, Options(
            high=kind.high, low=kind.low if moves else 0, group_size=GROUP_SIZE, policy=kind.policy,
            policy_options=chosen, expert_budget=budget, **card,
        ))  # fmt: skip
        bench.read_each(warm, decode=False)
        if (migration := bench.server.host_planned.migration) is not None:
            deadline = time.monotonic() + _PATIENCE  # counts of device-planned steps come later
            while not migration.stats.windows and time.monotonic() < deadline:
                migration.turn()
            while migration._planned or migration._flying:
                migration._began = 0.0
                migration.turn()
                for fetch in list(migration.flying):
                    bench.server.engine.wait(fetch.ticket)
            assert migration.stats.windows == 1
