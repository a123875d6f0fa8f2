"""The hard byte budget: nothing expert-sized is allocated on the device without asking here first."""

from dataclasses import dataclass, field


class BudgetError(ValueError):
    """A reservation that would exceed the budget; the message is a sentence for the user."""


@dataclass
class BudgetTracker:
    """Counts the device bytes that experts take (slots and expert-sized workspaces).

    Attributes:
        limit: bytes that reservations together may reach, never exceed.
        peak: the most bytes ever reserved at once.
    """

    limit: int
    peak: int = 0
    _reservations: dict[str, int] = field(default_factory=dict)

    @property
    def reserved(self) -> int:
        """Bytes reserved now."""
        return sum(self._reservations.values())

    @property
    def available(self) -> int:
        """Bytes that can still be reserved."""
        return self.limit - self.reserved

    def can_reserve(self, nbytes: int) -> bool:
        """Whether ``reserve`` would succeed."""
        return nbytes <= self.available

    def reserve(self, name: str, nbytes: int) -> None:
        """Take ``nbytes`` for ``name``, before the allocation.

        Raises:
            BudgetError: the budget has less than that left, or ``name`` holds a reservation already.
        """
        if nbytes < 0:
            raise ValueError(f"cannot reserve {nbytes} bytes for {name}")
        if name in self._reservations:
            raise BudgetError(f"{name} holds {self._reservations[name]} bytes of the expert budget already.")
        if not self.can_reserve(nbytes):
            raise BudgetError(
                f"{name} needs {nbytes} bytes, but only {self.available} of the expert budget of "
                f"{self.limit} bytes are left; raise expert_budget."
            )
        self._reservations[name] = nbytes
        self.peak = max(self.peak, self.reserved)

    def release(self, name: str) -> None:
        """Give back what ``name`` reserved, after its memory is gone.

        Raises:
            KeyError: ``name`` holds no reservation.
        """
        del self._reservations[name]
