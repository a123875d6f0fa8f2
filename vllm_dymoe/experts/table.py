"""The table: (layer, expert) -> where. Integers only; a row names complete bytes, or nothing."""

from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heapreplace

import numpy as np
from numpy.typing import NDArray

from vllm_dymoe.experts.residency import HIGH, LOW, NOWHERE, coldest, decide, record_uses
from vllm_dymoe.experts.tier import Tier

CODES = {Tier.SKIP: NOWHERE, Tier.LO: LOW, Tier.HI: HIGH}
"""How the table writes a tier."""


class ResidencyTable:
    """Every expert that layers keep on the device ("no duplication": at most one version each, DyMoE 4.4.2).

    Args:
        num_experts: of each layer.
        shares: experts that each layer may keep, for every tier in use.
        reuse_high: whether a high version serves where a low one is wanted. It makes what is computed depend on what is
            held; without it the high version is replaced like a low one where a high one is wanted.

    Attributes:
        tier: int8 [layers, experts], NOWHERE, LOW or HIGH.
        slot: int32 [layers, experts], index in the tier's pool.
        heat: int64 [layers, experts].
        used_at: int64 [layers, experts], the layer's step in which an expert was last used.
        shares: int64 [layers, 3], experts that a layer may keep, by code of the tier.
        steps: of each layer, the number of its last one.
    """

    def __init__(self, num_experts: int, shares: Mapping[Tier, Sequence[int]], *, reuse_high: bool = True) -> None:
        layers = len(next(iter(shares.values())))
        self.tier = np.zeros((layers, num_experts), np.int8)
        self.slot = np.full((layers, num_experts), -1, np.int32)
        self.heat = np.zeros((layers, num_experts), np.int64)
        self.used_at = np.zeros((layers, num_experts), np.int64)
        self.shares = np.zeros((layers, 3), np.int64)
        for tier, share in shares.items():
            self.shares[:, CODES[tier]] = share
        self.reuse_high = reuse_high
        self.steps = [0] * layers
        self._shares: list[list[int]] = self.shares.tolist()

    def begin_step(self, layer: int, active: NDArray[np.int64], wanted: NDArray[np.int8]) -> NDArray[np.int64]:
        """Count what a layer's step uses, and decide what it keeps; see :func:`~.residency.decide`."""
        self.steps[layer] += 1
        heat, used_at = self.heat[layer], self.used_at[layer]
        record_uses(heat, used_at, active, self.steps[layer])
        return decide(active, wanted, self.tier[layer], heat, used_at, self._shares[layer], reuse_high=self.reuse_high)

    def holds(self, layer: int, expert: int) -> bool:
        """Whether an expert is on the device in some version."""
        return bool(self.tier[layer, expert])

    def coldest(self, layer: int, tier: Tier, spared: set[int]) -> int | None:
        """Whom a layer misses least among those that it keeps in a tier; None if all of these are spared."""
        kept = (self.tier[layer] == CODES[tier]).nonzero()[0]
        among = np.array([expert for expert in kept.tolist() if expert not in spared], dtype=np.int64)
        return coldest(self.heat[layer], self.used_at[layer], among) if len(among) else None

    def publish(self, layer: int, expert: int, tier: Tier, slot: int) -> None:
        """The bytes of an expert are complete: from now on its row names them.

        Raises:
            AssertionError: the row names others.
        """
        assert not self.tier[layer, expert], f"expert {expert} of layer {layer} would be there twice"
        self.tier[layer, expert], self.slot[layer, expert] = CODES[tier], slot

    def remove(self, layer: int, expert: int) -> tuple[Tier, int] | None:
        """Empty a row. Returns the tier and slot that it named; None if it named none."""
        code = self.tier[layer, expert]
        if code == NOWHERE:
            return None
        slot = int(self.slot[layer, expert])
        self.tier[layer, expert], self.slot[layer, expert] = NOWHERE, -1
        return Tier.HI if code == HIGH else Tier.LO, slot

    def residents(self, tier: Tier) -> set[tuple[int, int]]:
        """(layer, expert) of all that are held in one tier."""
        return {(int(layer), int(expert)) for layer, expert in np.argwhere(self.tier == CODES[tier])}

    def slots(self, tier: Tier) -> list[int]:
        """Slots of one tier that rows name."""
        return self.slot[self.tier == CODES[tier]].tolist()

    def forget(self) -> None:
        """Begin anew: no expert was ever used.

        Raises:
            AssertionError: a row names a slot.
        """
        assert not self.tier.any(), "the table still names slots"
        self.heat.fill(0)
        self.used_at.fill(0)

    def check_integrity(self) -> None:
        """No layer keeps more than its share, no slot is named twice.

        Raises:
            AssertionError: it is not so.
        """
        for code in (LOW, HIGH):
            kept = np.count_nonzero(self.tier == code, axis=1)
            assert (kept <= self.shares[:, code]).all(), f"layers keep {kept}, more than {self.shares[:, code]}"
            slots = self.slot[self.tier == code]
            assert len(np.unique(slots)) == len(slots), "two rows name one slot"
        assert (self.slot[self.tier == NOWHERE] == -1).all(), "an empty row names a slot"


def layer_shares(slots: int, weights: Sequence[float], staging: int, most: int) -> list[int]:
    """Slots that each layer may keep, in proportion to its weight; among equals the first layers get the remainder.

    Args:
        slots: of one tier.
        weights: for each layer; one of weight 0 keeps none.
        staging: slots that no layer keeps.
        most: slots that one layer has a use for.
    """
    shares = [0] * len(weights)
    # The next slot goes where it is worth most (d'Hondt): ordered by what one more means to a layer.
    claims = [(-weight, layer) for layer, weight in enumerate(weights) if weight > 0 and most > 0]
    heapify(claims)
    for _ in range(slots - staging):
        if not claims:
            break
        _, layer = claims[0]
        shares[layer] += 1
        if shares[layer] == most:
            heappop(claims)
        else:
            heapreplace(claims, (-weights[layer] / (shares[layer] + 1), layer))
    return shares
