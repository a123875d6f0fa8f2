"""The plan of one layer's step: which experts are computed, on which rows, from which bytes, and what is kept.

A GPU planner or its NumPy twin fills in all of it. A host-planned step fills in experts and rows, and adds the bytes'
places as slots are filled.
"""

# ruff: noqa: RUF009
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from vllm_dymoe.experts.format import PackedExpert
from vllm_dymoe.planner.constants import LOW_VERSION, Action, scratch_size
from vllm_dymoe.planner.rule import LOW

_NONE = torch.empty(0, dtype=torch.int32)


class Grouped(NamedTuple):
    """The (token, expert) pairs of a step, grouped by expert."""

    experts: list[int]  # active experts, ascending
    bounds: list[int]  # first position of each expert, then the number of positions
    rows: Tensor  # int64 [positions], rows of the layer's input, ascending within an expert
    pairs: Tensor  # int64 [positions], rows of the unweighted output, token * top_k + k


def _column(*shape: str | int, dtype: torch.dtype = torch.int32) -> Any:
    return field(default=_NONE, metadata={"shape": shape, "dtype": dtype})


@dataclass(eq=False)
class LayerPlan:
    """What a layer's step does: one item for each expert that is computed.

    Rows after the last item are empty: expert and slot -1, everything else 0. With device-side planning all layers
    use one plan in turn, and its items are in ascending order of experts. A host-planned step fills in `experts`,
    `rows` and `pairs` (int64), `views` and `bounds` only.
    """

    experts: Tensor = _column("items")
    work: Tensor = _column("items and one", 3)
    """The item's number, its first position and its last + 1; an item that the CPU executes has no positions here. The
    last row, (-1, 0, tokens), asks for zeros for tokens without a computed pair."""
    rows: Tensor = _column("positions")  # row of the input of each (token, expert) pair, by item
    pairs: Tensor = _column("positions")  # row of the output, token * top_k + k; ascending within an item
    count: Tensor = _column(1)  # number of items
    precisions: Tensor = _column("items")  # LOW or HIGH, the version that is computed
    slots: Tensor = _column("slices", "items")
    """Slot in the pool of the precision, or of the slice, where the bytes are or are copied to; -1 for none."""
    action: Tensor = _column("slices", "items")  # an Action each; HIT if the slice is not computed
    bits: Tensor = _column("items", 3)  # encoding tags of gate, up and down
    addresses: Tensor = _column("slices", "items", 3, dtype=torch.int64)
    """Source addresses of gate, up and down; 0 if the slice is not computed."""
    destinations: Tensor = _column("slices", "items", 3, dtype=torch.int64)
    """Addresses to which the bytes are copied as well; 0 for none."""
    computed: Tensor = _column("tokens", "top_k")  # 1 for computed pairs, 2 for those of the CPU
    scratch: Tensor = _column("scratch")  # for the GPU planner
    views: list[PackedExpert | None] = field(default_factory=list)  # each item's bytes; None until they have a place
    bounds: list[int] = field(default_factory=list)  # as in Grouped, by item

    @classmethod
    def allocate(
        cls, tokens: int, top_k: int, experts: int, device: torch.device | str, *, slices: int = 1, scratch: int = 0
    ) -> Self:
        """Allocate for up to ``tokens`` rows, padding included; ``scratch`` is given for large batches."""
        sizes = _sizes(tokens, top_k, min(experts, tokens * top_k) + (scratch > 0)) | {"slices": slices}
        sizes["scratch"] = scratch or scratch_size(tokens, top_k, experts)
        made: dict[str, Any] = {}
        for column in filter(lambda column: column.metadata, fields(cls)):
            shape = [sizes[size] if isinstance(size, str) else size for size in column.metadata["shape"]]
            made[column.name] = torch.zeros(shape, dtype=column.metadata["dtype"], device=device)
        return cls(**made)

    @classmethod
    def of_routing(cls, grouped: Grouped, order: Sequence[int], *, row_for_each_pair: bool = False) -> Self:
        """Return a host-side plan for some of a step's experts, in the order in which they will be computed.

        ``row_for_each_pair``: the input has a row for each pair, not for each token.
        """
        rows, pairs, bounds = grouped.pairs if row_for_each_pair else grouped.rows, grouped.pairs, grouped.bounds
        if list(order) != grouped.experts:
            number = {expert: n for n, expert in enumerate(grouped.experts)}
            parts = [slice(bounds[n], bounds[n + 1]) for n in map(number.__getitem__, order)]
            bounds = [0]
            for part in parts:
                bounds.append(bounds[-1] + part.stop - part.start)
            rows, pairs = (torch.cat([of[part] for part in parts]) if parts else of[:0] for of in (rows, pairs))
        return cls(torch.tensor(order), _NONE, rows, pairs, views=[None] * len(order), bounds=bounds)

    def place(self, item: int, expert: PackedExpert) -> None:
        """Set where an item's bytes are, or will be when it is computed; once per item."""
        self.views[item] = expert

    def actions(self, ids: Tensor, experts: int) -> Tensor:
        """Return the recorded actions, uint8 [tokens, top_k], as in :func:`~.rule.actions_of`; waits for nothing.

        Args:
            ids: int [tokens, top_k], for which the device has planned.
            experts: number of experts of the layer.
        """
        counted = torch.arange(len(self.experts), device=ids.device) < self.count
        places = torch.where(counted, self.experts, experts).long()
        found = torch.full((experts + 1,), Action.SKIP, dtype=torch.uint8, device=ids.device)
        actions = self.action.amax(0) + LOW_VERSION * (self.precisions == LOW)  # of two slices the missing one decides
        found[places] = actions.to(torch.uint8)
        found[-1] = Action.SKIP  # also for experts of other ranks
        return found[ids.long()]

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def of(self, tokens: int, experts: int) -> Self:
        """Return views of the part for steps of ``tokens`` rows in layers of ``experts`` experts."""
        top_k = self.computed.shape[1]
        sizes = _sizes(tokens, top_k, min(experts, tokens * top_k))
        parts: dict[str, Any] = {}
        for column in filter(lambda column: column.metadata, fields(self)):
            part = tuple(slice(sizes.get(size)) for size in column.metadata["shape"])
            parts[column.name] = getattr(self, column.name)[part]
        return type(self)(**parts)


def _sizes(tokens: int, top_k: int, items: int) -> dict[str | int, int]:
    positions = tokens * top_k
    return {"tokens": tokens, "top_k": top_k, "positions": positions, "items": items, "items and one": items + 1}
