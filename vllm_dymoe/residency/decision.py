"""What was decided about a layer's step where a device decides: tensors that kernels read."""

from dataclasses import dataclass, fields
from typing import Self

import torch
from torch import Tensor

from vllm_dymoe.residency.constants import scratch_size

STAYED, KEPT, PASSED = 0, 1, 2
"""What becomes of an expert's bytes: they are there; fetched to be kept; fetched for this step alone."""


@dataclass(frozen=True, eq=False)
class Decision:
    """What a layer's step does: one item for each expert that is computed, ascending, and nothing behind them.

    Rows behind the last item are empty: expert and slot -1, everything else 0. One decision serves all layers, which
    are decided and computed in turn.

    Attributes:
        count: int32 [1], number of items.
        experts: int32 [items].
        tiers: int32 [items], the version that is computed.
        slots: int32 [items], of that tier's pool: where the bytes are, or come to; -1 if they come to none.
        fate: int32 [items], STAYED, KEPT or PASSED.
        bits: int32 [items, 3], of gate, up and down, or a codebook's tag.
        addresses: int64 [items, 3], where their bytes are read.
        destinations: int64 [items, 3], where they are stored as well; 0 for nowhere.
        fine_slots: int32 [items], like slots for the fine slice, -1 where it is not computed; [0] if nothing is nested.
        fine_fate: int32 like fine_slots, STAYED where it is not computed.
        fine: int64 like addresses, 0 where it is not computed.
        fine_destinations: int64 like destinations.
        work: int32 [items + 1, 3], the item's own number, first and last + 1 of its positions. The last row, (-1, 0,
            tokens), asks for zeros where a token has no pair that is computed.
        rows: int32 [positions], row of the input of each (token, expert) pair, by item.
        pairs: int32 [positions], row of the output, token * top_k + k; ascending within an item.
        computed: int32 [tokens, top_k], 1 for the pairs that some item has.
        scratch: int32, for the program.
    """

    count: Tensor
    experts: Tensor
    tiers: Tensor
    slots: Tensor
    fate: Tensor
    bits: Tensor
    addresses: Tensor
    destinations: Tensor
    fine_slots: Tensor
    fine_fate: Tensor
    fine: Tensor
    fine_destinations: Tensor
    work: Tensor
    rows: Tensor
    pairs: Tensor
    computed: Tensor
    scratch: Tensor

    @classmethod
    def allocate(
        cls, tokens: int, top_k: int, experts: int, device: torch.device | str, *, nested: bool = False
    ) -> Self:
        """For steps of up to so many tokens, padding included."""
        positions, items = tokens * top_k, min(experts, tokens * top_k)
        halves = items if nested else 0

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            count=zeros(1),
            experts=zeros(items),
            tiers=zeros(items),
            slots=zeros(items),
            fate=zeros(items),
            bits=zeros(items, 3),
            addresses=zeros(items, 3, dtype=torch.int64),
            destinations=zeros(items, 3, dtype=torch.int64),
            fine_slots=zeros(halves),
            fine_fate=zeros(halves),
            fine=zeros(halves, 3, dtype=torch.int64),
            fine_destinations=zeros(halves, 3, dtype=torch.int64),
            work=zeros(items + 1, 3),
            rows=zeros(positions),
            pairs=zeros(positions),
            computed=zeros(tokens, top_k),
            scratch=zeros(scratch_size(tokens, top_k, experts)),
        )

    def of(self, tokens: int, experts: int) -> Self:
        """The same memory for steps of fewer tokens."""
        top_k = self.computed.shape[1]
        positions, items = tokens * top_k, min(experts, tokens * top_k)
        sizes = {"count": 1, "work": items + 1, "rows": positions, "pairs": positions, "computed": tokens}
        sizes["scratch"] = len(self.scratch)
        names = [field.name for field in fields(self)]
        return type(self)(**{name: getattr(self, name)[: sizes.get(name, items)] for name in names})
