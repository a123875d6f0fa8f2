"""What the policy ``adaptive`` wins back of dynaexq's loss, and what it fetches for it, beside uniform 4 bits."""

from collections.abc import Iterator
from typing import Any

from bench import GROUP_SIZE, Bench
from losses import Scores, losses

from vllm_dymoe.options import Options

SHARES = (0.5, 0.25)
THRESHOLDS = (1.6,)
QUANTIZERS = ("gptq", "e8")
_WARM = 4  # texts of each domain, by which the high set is chosen; none of those that are measured


class Rescues:
    """Prompts and decoded tokens under budgets that hold every base slice and a share of the residual ones."""

    def __init__(self, bench: Bench, reference: dict[bool, Scores]) -> None:
        self._bench, self._reference = bench, reference
        self._texts = {False: bench.prompts, True: bench.decoded}
        measured = {tuple(text[:64]) for text in bench.prompts}
        self._warm: list[list[int]] = []
        for texts in bench.domains.values():
            self._warm += [text for text in texts if tuple(text[:64]) not in measured][:_WARM]

    def rows(self) -> Iterator[dict[str, Any]]:
        """Each policy at each share of residual slices, by quantizer, in both phases."""
        options = {
            "dynaexq": {"policy": "dynaexq"},
            **{f"adaptive, {at:g}": {"policy": "adaptive", "threshold": at} for at in THRESHOLDS},
            "uniform 4": {"policy": "exact", "look_ahead": 0},
        }
        for quantizer in QUANTIZERS:
            for share in SHARES:
                for name, of in options.items():
                    parameters = {key: value for key, value in of.items() if key != "policy"}
                    for decode in (True, False):
                        place = {"residuals": share, "quantizer": quantizer, "experts": name}
                        phase = "decode" if decode else "prompt"
                        yield {
                            **place,
                            "phase": phase,
                            **self._read(quantizer, share, of["policy"], parameters, decode),
                        }

    def _read(
        self, quantizer: str, share: float, policy: str, parameters: dict[str, Any], decode: bool
    ) -> dict[str, Any]:
        bench, store, texts = self._bench, f"nested {quantizer}", self._texts[decode]
        moves = policy != "exact"
        uses = sum(map(len, self._warm)) * bench.experts.top_k / bench.experts.num_experts / 4
        chosen = {"window_s": 0, "window_uses": uses, **parameters} if moves else parameters
        bench.serve(store, Options(
            high=4, low=2 if moves else 0, group_size=GROUP_SIZE, policy=policy, policy_options=chosen,
            expert_budget=bench.nested_bytes(store, share),
        ))  # fmt: skip
        bench.read(self._warm)
        bench.server.reset_stats()
        found = Scores(bench.read_each(texts, decode=decode))
        stats = bench.server.stats()
        tokens = sum(map(len, texts))
        return {**losses(found, self._reference[decode], texts), "fetched_per_token": stats.misses / tokens}
