"""Traffic shifts to one domain, and dynaexq's high set follows over a link.

The result is compared with the best possible high set.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from bench import DOMAINS, GROUP_SIZE, Bench
from losses import Scores, losses

from vllm_dymoe.cache.migration import Migration
from vllm_dymoe.options import Options
from vllm_dymoe.planner.hotness import even_shares, swaps
from vllm_dymoe.planner.rule import HIGH

HIGH_SHARES = (0.125, 0.25, 0.5)
TEXTS = 4  # texts of a window
_FROZEN = 1e9  # uses of a window that never ends
# At this rate and a quarter of the link, half of the experts' residual slices take about as long as two windows of
# texts.
_LINK_GBPS = 0.03


class Shifts:
    """The loss of a high set on texts of a domain to which traffic has just shifted.

    Versions are nested, at 4 and 2 bits.
    """

    def __init__(self, bench: Bench, store: str = "nested rtn") -> None:
        self._bench, self._store, self._texts = bench, store, bench.domains
        self._reference: dict[str, Scores] = {}
        self._mass: dict[str, Any] = {}  # squared gates of a domain's texts, except the measured ones
        exact = {"high": 16, "policy": "exact", "policy_options": {"look_ahead": 0}}
        for domain, texts in self._texts.items():
            bench.serve("rtn", Options(group_size=GROUP_SIZE, expert_budget="100%", **exact))
            with bench.counted() as self._mass[domain]:
                bench.read(texts[:-TEXTS])
            self._reference[domain] = bench.read(texts[-TEXTS:])

    def rows(
        self, share: float, names: Sequence[str] = ("oracle", "dynaexq", "as before"), **options: Any
    ) -> Iterator[dict[str, Any]]:
        """Yield the loss of three high sets for every domain.

        One is an oracle's, which knows only the domain's other texts; one is dynaexq's, two windows after the shift;
        one is the old set. ``names`` selects some of these. ``share`` of the experts is high; options are dynaexq's.
        """
        for domain, texts in self._texts.items():
            before = [text for other in DOMAINS if other != domain for text in self._texts[other][:TEXTS]]
            for name in names:
                migration = self._serve(share, options)
                self._bench.read(before)
                if name == "dynaexq":
                    self._bench.read(texts[-3 * TEXTS : -TEXTS])
                else:
                    migration._least = _FROZEN
                if name == "oracle":
                    self._place(migration, even_shares(self._mass[domain]))
                migration.reset_stats()
                found = losses(self._bench.read(texts[-TEXTS:]), self._reference[domain], texts[-TEXTS:])
                yield {"high": share, "domain": domain, "experts": name, **found}

    def _serve(self, share: float, options: dict[str, Any]) -> Migration:
        """Serve with windows of TEXTS texts, however long they take."""
        top_k = self._bench.experts.top_k
        uses = TEXTS * len(self._texts[DOMAINS[0]][0]) * top_k / self._bench.experts.num_experts
        chosen = {"window_s": 0, "window_uses": uses, **options}
        nbytes = self._bench.nested_bytes(self._store, share)
        self._bench.serve(self._store, Options(
            high=4, low=2, group_size=GROUP_SIZE, policy="dynaexq", policy_options=chosen, expert_budget=nbytes,
            link_gbps=_LINK_GBPS,
        ))  # fmt: skip
        migration = self._bench.server.host_planned.migration
        assert migration is not None
        return migration

    def _place(self, migration: Migration, score: Any) -> None:
        """Make experts high at once, because an oracle waits for no link."""
        migration.stop()
        self._bench.server.host_planned.fetcher.settle_all()
        held = self._bench.server.cache.table.precision == HIGH
        migration._planned.extend(swaps(score * migration._worth, held, int(migration._places.sum()), 0.0))
        while migration._planned or migration._flying:
            migration._began = 0.0
            migration.turn()
            for fetch in list(migration.flying):
                self._bench.server.engine.wait(fetch.ticket)
        assert np.count_nonzero(self._bench.server.cache.table.precision == HIGH) == migration._places.sum()
