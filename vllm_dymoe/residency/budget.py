"""The hard byte budget: nothing expert-sized is allocated on the device without asking here first."""

from dataclasses import dataclass


class BudgetError(ValueError):
    """A reservation that would exceed the budget; the message is a sentence for the user."""


@dataclass
class BudgetTracker:
    """Counts the device bytes that experts take (slots and expert-sized workspaces)."""

    limit: int  # bytes that reservations together never exceed
    reserved: int = 0

    def reserve(self, name: str, nbytes: int) -> None:
        """Take ``nbytes`` for ``name``, before the allocation; BudgetError if the budget has less than that left."""
        left = self.limit - self.reserved
        if nbytes > left:
            raise BudgetError(
                f"{name} needs {nbytes} bytes, but only {left} of the expert budget of {self.limit} bytes are left; "
                "raise expert_budget."
            )
        self.reserved += nbytes
