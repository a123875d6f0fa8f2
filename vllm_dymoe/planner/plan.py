"""The work list of one layer's step: which experts are computed, on which rows, from which bytes, and what becomes of
these bytes. The device's rule fills it, its plain twin, or the host, which has the bytes' places only as slots come."""

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
    """The (token, expert) pairs of a step by expert."""

    experts: list[int]  # that any token chose, ascending
    bounds: list[int]  # first position of each expert, and behind them the number of positions
    rows: Tensor  # int64 [positions], rows of the layer's input, ascending within an expert
    pairs: Tensor  # int64 [positions], rows of the unweighted output, token * top_k + k


def _column(*shape: str | int, dtype: torch.dtype = torch.int32) -> Any:
    return field(default=_NONE, metadata={"shape": shape, "dtype": dtype})


@dataclass(eq=False)
class LayerPlan:
    """What a layer's step does: one item for each expert that is computed, and nothing behind them.

    Rows behind the last item are empty: expert and slot -1, everything else 0. On a device one decision serves all
    layers, which are decided and computed in turn, and its items are ascending. The host fills in only `experts`,
    `rows` and `pairs`, int64, `views` and `bounds`.
    """

    experts: Tensor = _column("items")
    work: Tensor = _column("items and one", 3)
    """The item's own number, first and last + 1 of its positions; that of one computed CPU is empty. The last row,
    (-1, 0, tokens), asks for zeros where a token has no pair that is computed."""
    rows: Tensor = _column("positions")  # row of the input of each (token, expert) pair, by item
    pairs: Tensor = _column("positions")  # row of the output, token * top_k + k; ascending within an item
    count: Tensor = _column(1)  # number of items
    precisions: Tensor = _column("items")  # the version that is computed
    slots: Tensor = _column("slices", "items")
    """Of the precision's pool, or of the slice's: where the bytes are, or come to; -1 if they come to none, or the
    slice is not computed."""
    action: Tensor = _column("slices", "items")  # a Action each; HIT where the slice is not computed
    bits: Tensor = _column("items", 3)  # tags of the codes of gate, up and down
    addresses: Tensor = _column("slices", "items", 3, dtype=torch.int64)
    """Where their bytes are read; 0 where a slice is not computed."""
    destinations: Tensor = _column("slices", "items", 3, dtype=torch.int64)
    """Where they are stored as well; 0 for nowhere."""
    computed: Tensor = _column("tokens", "top_k")  # 1 for pairs of an item, 2 for those computed CPU
    scratch: Tensor = _column("scratch")  # for the program
    views: list[PackedExpert | None] = field(default_factory=list)  # each item's bytes, None until they have a place
    bounds: list[int] = field(default_factory=list)  # as in Grouped, by item

    @classmethod
    def allocate(
        cls, tokens: int, top_k: int, experts: int, device: torch.device | str, *, slices: int = 1, scratch: int = 0
    ) -> Self:
        """For steps of up to so many tokens, padding included; with more scratch for a large one, and an item more."""
        sizes = _sizes(tokens, top_k, min(experts, tokens * top_k) + (scratch > 0)) | {"slices": slices}
        sizes["scratch"] = scratch or scratch_size(tokens, top_k, experts)
        made: dict[str, Any] = {}
        for column in filter(lambda column: column.metadata, fields(cls)):
            shape = [sizes[size] if isinstance(size, str) else size for size in column.metadata["shape"]]
            made[column.name] = torch.zeros(shape, dtype=column.metadata["dtype"], device=device)
        return cls(**made)

    @classmethod
    def of_routing(cls, grouped: Grouped, order: Sequence[int], *, row_for_each_pair: bool = False) -> Self:
        """The host's: some of a step's experts, in the order in which they will be computed. The input may have a row
        for each pair, and not for each token."""
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
        """Say where an item's bytes are, or will be when it is computed; once."""
        self.views[item] = expert

    def actions(self, ids: Tensor, experts: int) -> Tensor:
        """uint8 [tokens, top_k], as :func:`~.rule.actions_of` says them, of a step that the device has planned for
        `ids`, experts of a layer of so many; enqueued behind the decision, waits for nothing."""
        counted = torch.arange(len(self.experts), device=ids.device) < self.count
        places = torch.where(counted, self.experts, experts).long()
        found = torch.full((experts + 1,), Action.SKIP, dtype=torch.uint8, device=ids.device)
        actions = self.action.amax(0) + LOW_VERSION * (
            self.precisions == LOW
        )  # of two slices the one that lacks decides
        found[places] = actions.to(torch.uint8)
        found[-1] = Action.SKIP  # what other ranks have, too
        return found[ids.long()]

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def of(self, tokens: int, experts: int) -> Self:
        """The part of it for steps of so many tokens, in layers of so many experts."""
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
