"""How much of dynaexq's loss ``adaptive`` avoids, and the bytes it fetches.

Both are compared with uniform 4 bits.
"""

from collections.abc import Iterator
from typing import Any

import torch
from bench import DOMAINS, GROUP_SIZE, Bench
from losses import Scores, losses

from vllm_dymoe.options import Options

SHARES = (0.5, 0.25)
THRESHOLDS = (1.6, 2.0)
QUANTIZERS = ("gptq", "e8")
_WARM = 4  # texts of a domain that choose the high set; none of the measured ones


class Rescues:
    """Prompts and decoded tokens of each domain, under several budgets.

    Each budget holds every base slice and a share of the residual slices.

    The high set is chosen by other texts of the domain.
    """

    def __init__(self, bench: Bench, reference: dict[bool, Scores]) -> None:
        self._bench, self._reference = bench, reference
        self._texts = {False: bench.prompts, True: bench.decoded}
        measured = {tuple(text[:64]) for text in bench.prompts}
        self._warm = {
            domain: [text for text in texts if tuple(text[:64]) not in measured][:_WARM]
            for domain, texts in bench.domains.items()
        }

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield each policy at each share of residual slices.

        There are rows for each quantizer, in both phases.
        """
        kinds = {"dynaexq": ("dynaexq", {}), "uniform 4": ("exact", {"look_ahead": 0})}
        kinds |= {f"adaptive, {at:g}": ("adaptive", {"threshold": at}) for at in THRESHOLDS}
        for quantizer in QUANTIZERS:
            for share in SHARES:
                for name, (policy, parameters) in kinds.items():
                    place = {"residuals": share, "quantizer": quantizer, "experts": name}
                    for phase, found in self._read(quantizer, share, policy, parameters).items():
                        yield {**place, "phase": phase, **found}

    def _read(self, quantizer: str, share: float, policy: str, parameters: dict[str, Any]) -> dict[str, dict[str, Any]]:
        scores: dict[bool, list[torch.Tensor]] = {True: [], False: []}
        missed = dict.fromkeys(scores, 0)
        for domain in DOMAINS:
            self._serve(f"nested {quantizer}", share, policy, parameters, self._warm[domain])
            for decode, found in scores.items():
                self._bench.server.reset_stats()
                texts = self._texts[decode]
                each = len(texts) // len(DOMAINS)
                first = DOMAINS.index(domain) * each
                found += self._bench.read_each(texts[first : first + each], decode=decode)
                missed[decode] += self._bench.server.stats().misses
        return {
            "decode" if decode else "prompt": {
                **losses(Scores(found), self._reference[decode], self._texts[decode]),
                "fetched_per_token": missed[decode] / sum(map(len, self._texts[decode])),
            }
            for decode, found in scores.items()
        }

    def _serve(self, store: str, share: float, policy: str, parameters: dict[str, Any], warm: list[list[int]]) -> None:
        """Serve after one window of the domain's traffic.

        All moves that followed from it are done.
        """
        bench, moves = self._bench, policy != "exact"
        uses = 0.9 * sum(map(len, warm)) * bench.experts.top_k / bench.experts.num_experts
        chosen = {"window_s": 0, "window_uses": uses, **parameters} if moves else parameters
        bench.serve(store, Options(
            high=4, low=2 if moves else 0, group_size=GROUP_SIZE, policy=policy, policy_options=chosen,
            expert_budget=bench.nested_bytes(store, share),
        ))  # fmt: skip
        bench.read_each(warm, decode=False)
        if (migration := bench.server.host_planned.migration) is not None:
            migration.turn()
            while migration._planned or migration._flying:
                migration._began = 0.0
                migration.turn()
                for fetch in list(migration.flying):
                    bench.server.engine.wait(fetch.ticket)
            assert migration.stats.windows == 1
