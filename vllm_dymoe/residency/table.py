"""The table: (layer, expert) -> where. Integers only; a row names complete bytes, or nothing."""

from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heapreplace

import numpy as np
from numpy.typing import NDArray

from vllm_dymoe.residency.rule import HIGH, LOW, NOWHERE, coldest, decide, decide_slices, record_uses
from vllm_dymoe.residency.tier import Tier

CODES = {Tier.SKIP: NOWHERE, Tier.LO: LOW, Tier.HI: HIGH}
"""How the table writes a tier."""


class ResidencyTable:
    """Every expert that layers keep on the device ("no duplication": at most one version each, DyMoE 4.4.2).

    Where the low version lies inside the high one a row names two slots: HIGH has a base and a fine slice, LOW a base.

    Args:
        num_experts: of each layer.
        shares: experts that each layer may keep, for every tier in use.
        reuse_high: whether a high version serves where a low one is wanted. It makes what is computed depend on what is
            held; without it the high version is replaced like a low one where a high one is wanted.
        nested: whether the low version lies inside the high one; shares are then of base and of fine slices.

    Attributes:
        tier: int8 [layers, experts], NOWHERE, LOW or HIGH.
        slot: int32 [layers, experts], index in the tier's pool; in that of bases, if nested.
        fine: int32 [layers, experts], index in the pool of fine slices; -1 everywhere if not nested.
        heat: int64 [layers, experts].
        used_at: int64 [layers, experts], the layer's step in which an expert was last used.
        fine_heat: int64 [layers, experts], of uses of the high version, if nested.
        fine_used_at: int64 [layers, experts], the same.
        shares: int64 [layers, 3], experts that a layer may keep, by code of the tier.
        steps: of each layer, the number of its last one.
    """

    def __init__(
        self,
        num_experts: int,
        shares: Mapping[Tier, Sequence[int]],
        *,
        reuse_high: bool = True,
        nested: bool = False,
    ) -> None:
        layers = len(next(iter(shares.values())))
        self.tier = np.zeros((layers, num_experts), np.int8)
        self.slot = np.full((layers, num_experts), -1, np.int32)
        self.heat = np.zeros((layers, num_experts), np.int64)
        self.used_at = np.zeros((layers, num_experts), np.int64)
        self.fine = np.full((layers, num_experts), -1, np.int32)
        self.fine_heat = np.zeros((layers, num_experts), np.int64)
        self.fine_used_at = np.zeros((layers, num_experts), np.int64)
        self.nested = nested
        self.shares = np.zeros((layers, 3), np.int64)
        for tier, share in shares.items():
            self.shares[:, CODES[tier]] = share
        self.reuse_high = reuse_high
        self.steps = [0] * layers
        self._shares: list[list[int]] = self.shares.tolist()

    def begin_step(self, layer: int, active: NDArray[np.int64], wanted: NDArray[np.int8]) -> NDArray[np.int64]:
        """Count what a layer's step uses, and decide what it keeps.

        Returns:
            int64 [n], see :func:`~.rule.decide`; if nested int64 [2, n], see :func:`~.rule.decide_slices`.
        """
        self.steps[layer] += 1
        heat, used_at = self.heat[layer], self.used_at[layer]
        record_uses(heat, used_at, active, self.steps[layer])
        if self.nested:
            fine_heat, fine_used_at = self.fine_heat[layer], self.fine_used_at[layer]
            record_uses(fine_heat, fine_used_at, active[wanted == HIGH], self.steps[layer])
            heats, uses = (heat, fine_heat), (used_at, fine_used_at)
            return np.stack(decide_slices(active, wanted, self.tier[layer], heats, uses, self._shares[layer]))
        return decide(active, wanted, self.tier[layer], heat, used_at, self._shares[layer], reuse_high=self.reuse_high)

    def holds(self, layer: int, expert: int) -> bool:
        """Whether an expert is on the device in some version."""
        return bool(self.tier[layer, expert])

    def coldest(self, layer: int, tier: Tier, spared: set[int]) -> int | None:
        """Whom a layer misses least among those that it keeps in a tier; None if all of these are spared."""
        kept = self._holders(tier)[layer].nonzero()[0]
        among = np.array([expert for expert in kept.tolist() if expert not in spared], dtype=np.int64)
        if not len(among):
            return None
        if self.nested and tier is Tier.HI:
            return coldest(self.fine_heat[layer], self.fine_used_at[layer], among)
        return coldest(self.heat[layer], self.used_at[layer], among)

    def publish(self, layer: int, expert: int, tier: Tier, slot: int) -> None:
        """The bytes of an expert are complete: from now on its row names them.

        Raises:
            AssertionError: the row names others, or a fine slice comes without its base.
        """
        if self.nested and tier is Tier.HI:
            assert self.tier[layer, expert] == LOW, f"the base of expert {expert} of layer {layer} is not there"
            self.tier[layer, expert], self.fine[layer, expert] = HIGH, slot
            return
        assert not self.tier[layer, expert], f"expert {expert} of layer {layer} would be there twice"
        self.tier[layer, expert], self.slot[layer, expert] = CODES[tier], slot

    def remove(self, layer: int, expert: int) -> list[tuple[Tier, int]]:
        """Empty a row. Returns the tier and index of each slot that it named."""
        code = self.tier[layer, expert]
        if code == NOWHERE:
            return []
        slots = self.remove_fine(layer, expert)
        tier = Tier.HI if code == HIGH and not self.nested else Tier.LO
        slots.append((tier, int(self.slot[layer, expert])))
        self.tier[layer, expert], self.slot[layer, expert] = NOWHERE, -1
        return slots

    def remove_fine(self, layer: int, expert: int) -> list[tuple[Tier, int]]:
        """Leave an expert its base alone. Returns the slot of its fine slice, if it has one."""
        fine = int(self.fine[layer, expert])
        if fine < 0:
            return []
        self.tier[layer, expert], self.fine[layer, expert] = LOW, -1
        return [(Tier.HI, fine)]

    def _holders(self, tier: Tier) -> NDArray[np.bool_]:
        """bool [layers, experts]: whose row names a slot of a tier's pool."""
        if self.nested and tier is Tier.LO:
            return self.tier != NOWHERE
        return self.tier == CODES[tier]

    def residents(self, tier: Tier) -> set[tuple[int, int]]:
        """(layer, expert) of all that are held in one tier."""
        return {(int(layer), int(expert)) for layer, expert in np.argwhere(self.tier == CODES[tier])}

    def slots(self, tier: Tier) -> list[int]:
        """Slots of one tier's pool that rows name."""
        named = self.fine if self.nested and tier is Tier.HI else self.slot
        return named[self._holders(tier)].tolist()

    def forget(self) -> None:
        """Begin anew: no expert was ever used.

        Raises:
            AssertionError: a row names a slot.
        """
        assert not self.tier.any(), "the table still names slots"
        self.heat.fill(0)
        self.used_at.fill(0)
        self.fine_heat.fill(0)
        self.fine_used_at.fill(0)

    def check_integrity(self) -> None:
        """No layer keeps more than its share, no slot is named twice.

        Raises:
            AssertionError: it is not so.
        """
        for tier in (Tier.LO, Tier.HI):
            kept, share = np.count_nonzero(self._holders(tier), axis=1), self.shares[:, CODES[tier]]
            assert (kept <= share).all(), f"layers keep {kept}, more than {share}"
            slots = self.slots(tier)
            assert len(set(slots)) == len(slots), "two rows name one slot"
        assert (self.slot[self.tier == NOWHERE] == -1).all(), "an empty row names a slot"
        fine = self.tier == HIGH if self.nested else np.zeros_like(self.tier, dtype=bool)
        assert ((self.fine >= 0) == fine).all(), "a fine slice without its base, or a high expert without a fine slice"


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
