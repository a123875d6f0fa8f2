"""Which experts are on the device: the hottest of each layer within its share, two precisions, pins.

The rules of DyMoE 4.4.2 hold across both tiers:

- *no duplication*: an expert is cached in one version;
- *promotion*: high wanted, low cached is a miss that replaces the low version;
- *conservative reuse*: low wanted, high cached uses the high version. It makes what is computed
  depend on what is cached; without it the high version is replaced like the low one above.

Two more come from what such caches got wrong elsewhere:

- What a step has acquired is pinned until the step releases it, so no miss of
  the same step can evict an expert which the step still has to read.
- Each layer keeps to its own share of the slots. A step that needs more experts
  than its layer may keep streams the rest through a few staging slots and leaves
  the kept ones alone; one cache over all layers would be emptied by a prefill.

Whom a layer gives up, and whom it keeps, is ``residency``'s to say.

The cache decides and counts. It moves no bytes: who acquires a version that is
not ``resident`` fills its slot and then publishes it, or abandons it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from typing import Any

import numpy as np

from vllm_dymoe.experts.handles import HandleTable, Version
from vllm_dymoe.experts.residency import admits, coldest, record_uses
from vllm_dymoe.experts.slots import Slot, SlotPool
from vllm_dymoe.experts.tier import Tier


@dataclass
class CacheStats:
    """Counts of acquired experts; a hit needs no transfer, a miss needs one."""

    hits: int = 0
    misses: int = 0
    promotions: int = 0
    reuses: int = 0
    evictions: int = 0

    @property
    def hit_rate(self) -> float:
        """Hits among all acquired experts; 0 before the first."""
        return self.hits / max(1, self.hits + self.misses)


@dataclass
class _Shelf:
    """The slots of one tier: what each layer keeps, and what is only passing through."""

    pool: SlotPool
    quotas: list[int]
    kept: list[dict[int, Version]]
    passing: set[Version] = field(default_factory=set)
    unfilled: int = 0  # slots that layers are entitled to but do not use yet

    def __post_init__(self) -> None:
        self.unfilled = sum(self.quotas)


def layer_quotas(slots: int, weights: Sequence[float], staging: int, most: int) -> list[int]:
    """Slots that each layer may keep, in proportion to its weight; among equals the first layers get the remainder.

    Args:
        slots: of one tier.
        weights: for each layer; one of weight 0 keeps none.
        staging: slots that no layer keeps.
        most: slots that one layer has a use for.
    """
    quotas = [0] * len(weights)
    # The next slot goes where it is worth most (d'Hondt): ordered by what one more means to a layer.
    claims = [(-weight, layer) for layer, weight in enumerate(weights) if weight > 0 and most > 0]
    heapify(claims)
    for _ in range(slots - staging):
        if not claims:
            break
        _, layer = claims[0]
        quotas[layer] += 1
        if quotas[layer] == most:
            heappop(claims)
        else:
            heapreplace(claims, (-weights[layer] / (quotas[layer] + 1), layer))
    return quotas


class ExpertCache:
    """Residency of experts in slot pools.

    Args:
        pools: one per tier in use.
        quotas: experts that each layer may keep, for every tier; the slots that they leave are for staging.
        num_experts: of each layer.
        stats: counts to go on with; new ones if None.
        reuse_high: whether a high version serves where a low one is wanted.
    """

    def __init__(
        self,
        pools: Mapping[Tier, SlotPool],
        quotas: Mapping[Tier, Sequence[int]],
        num_experts: int,
        stats: CacheStats | None = None,
        *,
        reuse_high: bool = True,
    ) -> None:
        self._reuse_high = reuse_high
        self.stats = stats or CacheStats()
        num_layers = len(next(iter(quotas.values())))
        self.handles = HandleTable(num_layers)
        self._heat = np.zeros((num_layers, num_experts), np.int64)
        self._used_at = np.zeros((num_layers, num_experts), np.int64)
        self._steps = [0] * num_layers
        self._shelves = {
            tier: _Shelf(pool, list(quotas[tier]), [{} for _ in range(num_layers)]) for tier, pool in pools.items()
        }

    def quota(self, layer: int, tier: Tier) -> int:
        """Experts of one tier that ``layer`` may keep."""
        return self._shelves[tier].quotas[layer]

    def acquire_held(self, layer: int, wanted: Mapping[int, Tier]) -> tuple[list[Version], list[tuple[int, Tier]]]:
        """Begin a layer's step: count what it uses, and pin what the cache holds before a miss can evict it.

        Args:
            layer: position of the MoE layer.
            wanted: tier by expert.

        Returns:
            Pinned versions, resident or arriving, and the experts that are to be acquired one by one.
        """
        self._steps[layer] += 1
        record_uses(self._heat[layer], self._used_at[layer], list(wanted), self._steps[layer])
        row, held, missing = self.handles.row(layer), [], []
        for expert, tier in wanted.items():
            version = row.get(expert)
            if version is not None and self._serves(version, tier):
                held.append(self._hit(version, tier))
            else:
                missing.append((expert, tier))
        return held, missing

    def acquire(
        self, layer: int, expert: int, tier: Tier, *, stream: bool = False, must_keep: bool = False
    ) -> Version | None:
        """Pin a version of an expert that serves ``tier``.

        Args:
            layer: position of the MoE layer.
            expert: local index.
            tier: HI or LO.
            stream: the step needs more experts than the layer may keep, so what
                is kept stays and this one passes through a staging slot.
            must_keep: no staging slot can be had for now, so that even an expert
                colder than those which are kept takes the place of one.

        Returns:
            A pinned version. Where it is not ``resident`` and carries no ticket,
            the caller fills the slot and calls ``publish`` or ``abandon``.
            None if every slot that could be used is pinned: release one first.
        """
        version = self.handles.get(layer, expert)
        if version is not None and self._serves(version, tier):
            return self._hit(version, tier)

        shelf = self._shelves[tier]
        keeps = self._make_room(shelf, layer, expert, stream, must_keep) and shelf.pool.free > 0
        if not keeps and shelf.pool.free <= shelf.unfilled:
            return None
        if version is not None:
            self.stats.promotions += tier is Tier.HI
            self._detach(version)
        self.stats.misses += 1
        fresh = Version(layer, expert, tier, shelf.pool.allocate(), pins=1, transient=not keeps)
        if keeps:
            shelf.kept[layer][expert] = fresh
            shelf.unfilled -= 1
        else:
            shelf.passing.add(fresh)
        self.handles.put(fresh)
        return fresh

    def acquire_ahead(self, layer: int, expert: int, tier: Tier) -> Version | None:
        """Pin a staging slot for an expert that a coming layer will probably want.

        Nothing is evicted for a guess: what layers keep is the same whatever is fetched ahead.

        Returns:
            A pinned version that is dropped with its last pin unless ``adopt`` keeps it. None if the expert has a
            version already, or no staging slot is free.
        """
        shelf = self._shelves[tier]
        if self.handles.get(layer, expert) is not None or shelf.pool.free <= shelf.unfilled:
            return None
        ahead = Version(layer, expert, tier, shelf.pool.allocate(), pins=1, transient=True)
        shelf.passing.add(ahead)
        self.handles.put(ahead)
        return ahead

    def adopt(self, version: Version, *, stream: bool = False) -> None:
        """Keep a pinned version that was fetched ahead, if ``acquire`` would have kept it after a miss."""
        shelf = self._shelves[version.tier]
        if version.transient and self._make_room(shelf, version.layer, version.expert, stream):
            shelf.passing.remove(version)
            shelf.kept[version.layer][version.expert] = version
            shelf.unfilled -= 1
            version.transient = False

    def publish(self, version: Version) -> None:
        """Declare the bytes of a version complete: from now on its handle resolves."""
        version.resident = True
        version.ticket = None

    def abandon(self, version: Version) -> None:
        """Forget a version whose bytes will not arrive; its slot is free after the last ``release``."""
        self._detach(version)

    def release(self, version: Version, last_read: Any = None) -> None:
        """Unpin a version.

        Args:
            version: what ``acquire`` returned.
            last_read: fence of the computation that reads the slot, for whoever fills it next.
        """
        assert version.pins > 0, f"expert {version.expert} of layer {version.layer} is released more than acquired"
        version.pins -= 1
        if last_read is not None:
            version.slot.last_read = last_read
        if version.pins == 0 and version.transient:
            self._drop(version)

    def clear(self) -> None:
        """Empty the cache, which then knows nothing of earlier steps.

        Raises:
            AssertionError: something is pinned.
        """
        for version in self.handles.versions():
            assert version.pins == 0, "the cache cannot be cleared in the middle of a step"
            self._detach(version)
        self._heat.fill(0)
        self._used_at.fill(0)

    def resident_experts(self, tier: Tier) -> int:
        """Experts of all layers that are complete in one tier."""
        return sum(version.resident and version.tier is tier for version in self.handles.versions())

    def check_integrity(self) -> None:
        """Every slot is free, kept or passing, exactly once, and every handle points at one of them.

        Raises:
            AssertionError: it is not so.
        """
        for tier, shelf in self._shelves.items():
            held = [version for kept in shelf.kept for version in kept.values()]
            for layer, kept in enumerate(shelf.kept):
                assert len(kept) <= shelf.quotas[layer], f"layer {layer} keeps more than its {shelf.quotas[layer]}"
            assert shelf.unfilled == sum(shelf.quotas) - len(held)
            assert all(version.pins > 0 and version.transient for version in shelf.passing)
            held += shelf.passing
            assert all(version.tier is tier for version in held)
            shelf.pool.check_integrity([version.slot for version in held])
        held_anywhere = {v for s in self._shelves.values() for k in s.kept for v in k.values()}
        held_anywhere |= {v for s in self._shelves.values() for v in s.passing}
        for version in self.handles.versions():
            assert version in held_anywhere, f"a handle points at a slot given away: {version}"
            assert version.resident or version.pins > 0, f"nobody fills {version}"

    def _serves(self, version: Version, tier: Tier) -> bool:
        return version.tier is tier or (version.tier is Tier.HI and self._reuse_high)

    def _hit(self, version: Version, tier: Tier) -> Version:
        self.stats.hits += version.resident
        self.stats.misses += not version.resident  # fetched ahead, and not there yet
        self.stats.reuses += version.tier is not tier
        version.pins += 1
        return version

    def _make_room(self, shelf: _Shelf, layer: int, expert: int, stream: bool, must_keep: bool = False) -> bool:
        """Whether the layer is to keep one more; evicts its coldest unpinned expert if need be."""
        kept = shelf.kept[layer]
        if len(kept) < shelf.quotas[layer]:
            return True
        if stream:
            return False
        unpinned = sorted(number for number, version in kept.items() if version.pins == 0)
        if not unpinned:
            return False
        heat = self._heat[layer]
        victim = coldest(heat, self._used_at[layer], unpinned)
        if not must_keep and not admits(heat, expert, victim):
            return False
        self.stats.evictions += 1
        self._detach(kept[victim])
        return True

    def _detach(self, version: Version) -> None:
        """Take a version out of the table; its slot stays with whoever has it pinned."""
        if not self.handles.remove(version):
            return
        shelf = self._shelves[version.tier]
        if not version.transient:
            del shelf.kept[version.layer][version.expert]
            shelf.unfilled += 1
            version.transient = True
            shelf.passing.add(version)
        if version.pins == 0:
            self._drop(version)

    def _drop(self, version: Version) -> None:
        shelf = self._shelves[version.tier]
        self.handles.remove(version)
        shelf.passing.remove(version)
        shelf.pool.give_back(version.slot)


__all__ = ["CacheStats", "ExpertCache", "Slot", "Version", "layer_quotas"]
