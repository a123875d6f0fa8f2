"""Stable handles: one entry per expert that says which version of it is on the device."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_dymoe.experts.slots import Slot
from vllm_dymoe.experts.tier import Tier


@dataclass(eq=False, slots=True)
class Version:
    """One expert's bytes at one tier, in one slot.

    Attributes:
        layer: position of the MoE layer among the model's MoE layers.
        expert: local index.
        tier: HI or LO.
        slot: where the bytes are, or are arriving.
        resident: the bytes are complete; false while they arrive.
        pins: users that need the slot to stay as it is; who fills a version pins it too.
        transient: to be dropped with the last pin instead of being kept.
        ticket: the transfer that fills the slot, kept for whoever else comes to wait on it.
    """

    layer: int
    expert: int
    tier: Tier
    slot: Slot
    resident: bool = False
    pins: int = 0
    transient: bool = False
    ticket: Any = None


@dataclass
class HandleTable:
    """At most one version for each expert of each layer ("no duplication", DyMoE 4.4.2)."""

    num_layers: int
    _rows: list[dict[int, Version]] = field(init=False)

    def __post_init__(self) -> None:
        self._rows = [{} for _ in range(self.num_layers)]

    def get(self, layer: int, expert: int) -> Version | None:
        """The expert's version, complete or arriving; None if there is none."""
        return self._rows[layer].get(expert)

    def row(self, layer: int) -> Mapping[int, Version]:
        """Every version of one layer, by expert."""
        return self._rows[layer]

    def resolve(self, layer: int, expert: int) -> Version | None:
        """The expert's version if its bytes are complete."""
        version = self._rows[layer].get(expert)
        return version if version is not None and version.resident else None

    def put(self, version: Version) -> None:
        """Enter a version.

        Raises:
            AssertionError: the expert has one already.
        """
        row = self._rows[version.layer]
        assert version.expert not in row, f"expert {version.expert} of layer {version.layer} would be there twice"
        row[version.expert] = version

    def remove(self, version: Version) -> bool:
        """Take the version out; False if the handle points elsewhere by now."""
        row = self._rows[version.layer]
        if row.get(version.expert) is not version:
            return False
        del row[version.expert]
        return True

    def versions(self) -> list[Version]:
        """Every version in the table."""
        return [version for row in self._rows for version in row.values()]
