"""What is fetched ahead in a step that needs no host, with NumPy: the plain twin of ``kernels/triton/ahead.py``.

While a layer is computed, the next one's experts are named, by its gate on this layer's input or by a trained network,
and those that it does not keep are copied to slots of no layer. Where the rule has one fetched, it is read from such a
slot in place of the host store, and that is all: a guess changes no bit, right or wrong.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from vllm_dymoe.residency.constants import scratch_size
from vllm_dymoe.residency.decode_rule import PROJECTIONS, bytes_ahead, slot_address, tiers_of
from vllm_dymoe.residency.importance import high_experts, importance
from vllm_dymoe.residency.rule import HIGH, LOW
from vllm_dymoe.residency.table import Counter, Table

MOST_AHEAD = 8  # experts that are fetched ahead for a layer at most


@dataclass(frozen=True, eq=False)
class Copies:
    """What is fetched ahead for one layer. The next layer's take their place once they are there."""

    spans: Tensor  # int64 [MOST_AHEAD, 3], where bytes lie, where they go, and how many they are: 0 for none
    scratch: Tensor  # int32, for the program that names them while another one decides the layer before

    @classmethod
    def allocate(cls, tokens: int, guesses: int, experts: int, device: torch.device | str) -> Self:
        """For steps of up to so many tokens, with so many guesses about each."""
        scratch = torch.zeros(scratch_size(tokens, guesses, experts), dtype=torch.int32, device=device)
        return cls(torch.zeros(MOST_AHEAD, 3, dtype=torch.int64, device=device), scratch)


def name_ahead_plain(table: Table, layer: int, ids: Tensor, scores: Tensor, rows: Tensor, copies: Copies) -> None:
    """Choose what is fetched ahead for a layer, and say in `copies` what has to be copied for that.

    Tiers are those that the layer would choose if guesses were its routing. Of what it neither keeps nor skips the most
    important experts come first, as many as there are slots and ``table.most_ahead`` projections; the last one of them
    may come in part.

    Args:
        table: on a CPU, like everything else; ``staged`` and ``staged_for`` of the layer's half are rewritten.
        ids: int32 or int64 [tokens, guesses]; negative where another rank has the expert.
        scores: float32 [tokens, guesses], 0 to 1.
        rows: int32 [1], how many tokens are real.
    """
    real, half, host = int(rows), layer % 2, table.on_host()
    copies.spans.zero_()
    staged = host.staged[half]
    staged.fill(0)
    host.staged_for[half] = layer
    _, named = importance(ids[:real], scores[:real], host.experts)
    active, sums, thresholds = named.used, named.sums, (host.threshold.copy(),) if host.threshold[1] >= 0 else ()
    wanted = tiers_of(active, high_experts((named,), thresholds, host.critical[layer].__getitem__))
    held = host.tier[layer, active]
    there = held >= wanted if host.reuse_high[0] else held == wanted
    missing = (~there & (host.bits[wanted] != 0)).nonzero()[0]
    counts = host.counters[layer]
    left, taken = int(host.most_ahead[0]), {LOW: 0, HIGH: 0}
    for place in missing[np.argsort(-sums[missing], kind="stable")].tolist():  # the most important first
        expert, code = int(active[place]), int(wanted[place])
        first, number = host.ahead[code].tolist()
        listed = sum(taken.values())
        if taken[code] == number or listed == MOST_AHEAD or left <= 0:
            continue
        slot, projections = first + half * number + taken[code], min(left, PROJECTIONS)
        nbytes = bytes_ahead(host, code, projections)
        staged[:, expert] = slot, code, projections
        copies.spans[listed] = torch.tensor(
            (int(host.source[layer, expert, code]), slot_address(host, code, slot), nbytes)
        )
        counts[[Counter.AHEAD, Counter.AHEAD_BYTES]] += 1, nbytes
        left -= PROJECTIONS
        taken[code] += 1
