"""The plan of one layer's step: what is computed, from where, and what is kept.

It lists experts, their rows, bytes and precision. A planner writes it and executors carry it out; nothing else passes
between the two. With device-side planning every column is on the device, written by a GPU planner or its NumPy twin. A
plan made on the host says which bytes are missing, but gets their places only as slots are filled: a free slot is known
when its transfer starts.
"""

# ruff: noqa: RUF009
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_dymoe.experts.format import PackedExpert
from vllm_dymoe.planner.constants import LOW_VERSION, Action, scratch_size
from vllm_dymoe.planner.precision import Precision
from vllm_dymoe.planner.rule import CPU, FREE, HIGH, HIT, LOW, STREAM, Ints
from vllm_dymoe.planner.table import PRECISIONS

_NONE = torch.empty(0, dtype=torch.int32)
_ACTIONS = np.zeros(-CPU, np.int8)  # action of a slice, by its place, which is negative
_ACTIONS[[CPU, HIT, STREAM, FREE]] = Action.CPU, Action.HIT, Action.STREAM, Action.ADMIT


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
    """What a layer's step does: one item for each computed expert.

    With device-side planning all layers use one plan in turn. Its items are in ascending order of experts; rows after
    the last item are empty: expert and slot -1, everything else 0.

    A plan made on the host (:meth:`on_host`) has exactly its items: `experts`, `precisions` and `action` are NumPy
    arrays, `rows` and `pairs` are int64, and `victims`, `views` and `bounds` replace the other columns.
    """

    experts: Any = _column("items")
    work: Tensor = _column("items and one", 3)
    """The item's number, its first position and its last + 1; items that the CPU executes have no positions here. The
    last row, (-1, 0, tokens), asks for zeros for tokens without a computed pair.
    """
    rows: Tensor = _column("positions")
    """Row of the input of each (token, expert) pair, by item: the token's, or the pair's own where weights multiply the
    inputs."""
    pairs: Tensor = _column("positions")  # row of the output, token * top_k + k; ascending within an item
    count: Tensor = _column(1)  # number of items
    precisions: Any = _column("items")
    """LOW or HIGH, the version that is computed; with host-side planning the version that is wanted, since a better one
    may serve.
    """
    slots: Tensor = _column("slices", "items")
    """Slot in the pool of the precision, or of the slice, where the bytes are or are copied to; -1 for none."""
    action: Any = _column("slices", "items")  # an Action each; HIT if the slice is not computed
    bits: Tensor = _column("items", 3)  # encoding tags of gate, up and down
    addresses: Tensor = _column("slices", "items", 3, dtype=torch.int64)
    """Source addresses of gate, up and down; 0 if the slice is not computed."""
    destinations: Tensor = _column("slices", "items", 3, dtype=torch.int64)
    """Addresses to which the bytes are copied as well; 0 for none."""
    computed: Tensor = _column("tokens", "top_k")  # 1 for pairs computed by the device, 2 for those of the CPU, else 0
    weights: Tensor = _column("tokens", "top_k", dtype=torch.float32)
    """Of each pair's output; those of a token's skipped experts may have gone to its others. 0 for rows of padding."""
    scratch: Tensor = _column("scratch")  # memory of the GPU planner
    victims: Any = None  # int64 [slices, items], the expert that an admitted item evicts; -1 for a free slot
    views: list[PackedExpert | None] = field(default_factory=list)  # each item's bytes; None until they have a place
    bounds: list[int] = field(default_factory=list)  # as in Grouped, by item

    @classmethod
    def allocate(
        cls, tokens: int, top_k: int, experts: int, device: torch.device | str, *, slices: int = 1, scratch: int = 0
    ) -> Self:
        """Allocate a plan for up to ``tokens`` rows, padding included.

        ``scratch`` is needed for large batches.
        """
        sizes = _sizes(tokens, top_k, min(experts, tokens * top_k) + (scratch > 0)) | {"slices": slices}
        sizes["scratch"] = scratch or scratch_size(tokens, top_k, experts)
        made: dict[str, Any] = {}
        for column in filter(lambda column: column.metadata, fields(cls)):
            shape = [sizes[size] if isinstance(size, str) else size for size in column.metadata["shape"]]
            made[column.name] = torch.zeros(shape, dtype=column.metadata["dtype"], device=device)
        return cls(**made)

    @classmethod
    def on_host(
        cls, grouped: Grouped, experts: Ints, wanted: NDArray[np.int8], places: Ints, *, row_for_each_pair: bool = False
    ) -> Self:
        """Return the plan of a host-planned step.

        Items are in ascending order of experts.

        Args:
            grouped: all pairs of the step.
            experts: int64 [items], the experts that are computed, ascending.
            wanted: int8 [items], LOW or HIGH.
            places: int64 [slices, items], see :func:`~.rule.decide`.
            row_for_each_pair: the input has a row for each pair, not for each token.
        """
        rows, pairs, bounds = grouped.pairs if row_for_each_pair else grouped.rows, grouped.pairs, grouped.bounds
        if len(experts) < len(grouped.experts):  # the others are skipped
            bounds, (rows, pairs) = _some(bounds, np.searchsorted(grouped.experts, experts).tolist(), rows, pairs)
        decided = {"precisions": wanted, "action": _ACTIONS[np.minimum(places, FREE)], "victims": places.clip(FREE)}
        return cls(experts, rows=rows, pairs=pairs, views=[None] * len(experts), bounds=bounds, **decided)

    @classmethod
    def of_experts(cls, grouped: Grouped, views: Sequence[PackedExpert | None] = ()) -> Self:
        """Return a plan that computes all experts of a step high, without a planner.

        ``views`` are by item.
        """
        n = len(grouped.experts)
        plan = cls.on_host(grouped, np.array(grouped.experts), np.full(n, HIGH, np.int8), np.full((1, n), HIT))
        plan.views[: len(views)] = views
        return plan

    def select(self, items: Sequence[int]) -> Self:
        """Return the part of a host-made plan with some of its items, in the given order."""
        if list(items) == list(range(len(self.bounds) - 1)):
            return self
        bounds, (rows, pairs) = _some(self.bounds, items, self.rows, self.pairs)
        decided = {name: getattr(self, name)[..., items] for name in ("precisions", "action", "victims")}
        views = [self.views[item] for item in items]
        return type(self)(self.experts[items], rows=rows, pairs=pairs, views=views, bounds=bounds, **decided)

    @property
    def wanted(self) -> dict[int, Precision]:
        """The precision of each expert of a host-made plan, in the order of items."""
        return dict(zip(self.experts.tolist(), map(PRECISIONS.__getitem__, self.precisions.tolist()), strict=True))

    @property
    def on_cpu(self) -> list[int]:
        """The items of a host-made plan that the CPU executes."""
        return (self.action == Action.CPU).any(0).nonzero()[0].tolist()

    def place(self, item: int, expert: PackedExpert) -> None:
        """Set where an item's bytes are, or will be when it is computed.

        Called once per item.
        """
        self.views[item] = expert

    def actions(self, ids: Tensor, experts: int) -> Tensor:
        """Return the recorded actions, as :func:`~.rule.actions_of`; waits for nothing.

        The result is uint8 [tokens, top_k].

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
        """Return views of the part for steps of ``tokens`` rows.

        Layers have ``experts`` experts.
        """
        top_k = self.computed.shape[1]
        sizes = _sizes(tokens, top_k, min(experts, tokens * top_k))
        parts: dict[str, Any] = {}
        for column in filter(lambda column: column.metadata, fields(self)):
            part = tuple(slice(sizes.get(size)) for size in column.metadata["shape"])
            parts[column.name] = getattr(self, column.name)[part]
        return type(self)(**parts)


def _some(bounds: Sequence[int], items: Sequence[int], *columns: Tensor) -> tuple[list[int], list[Tensor]]:
    """Return the bounds and the positions of some items, in the order given."""
    parts = [slice(bounds[item], bounds[item + 1]) for item in items]
    some = [torch.cat([column[part] for part in parts]) if parts else column[:0] for column in columns]
    return [0, *accumulate(part.stop - part.start for part in parts)], some


def _sizes(tokens: int, top_k: int, items: int) -> dict[str | int, int]:
    positions = tokens * top_k
    return {"tokens": tokens, "top_k": top_k, "positions": positions, "items": items, "items and one": items + 1}
