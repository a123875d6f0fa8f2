"""Fates that were recorded, in place of those that a rule decides: an answer that depends on them comes again."""

from torch import Tensor

from vllm_dymoe.residency.constants import LOW_VERSION, Fate
from vllm_dymoe.residency.routing import Routing
from vllm_dymoe.residency.table import Table
from vllm_dymoe.residency.tier import Tier


class Replayed:
    """Steps of the same tokens in the same order; what was fetched is now fetched or there already.

    Args:
        fates: uint8 [tokens, layers, top_k], as a trace has them.
        table: of the steps; from now on a better version that is there does not serve: the fates say where one did.
    """

    def __init__(self, fates: Tensor, table: Table) -> None:
        self._fates, self._done = fates.numpy(), [0] * fates.shape[1]
        table.reuse_high[:] = False

    def next(self, routing: Routing) -> tuple[dict[int, Tier], set[int]]:
        """The tier of each expert that a layer's next tokens chose, and which are computed where they lie; ValueError
        if so many were not recorded."""
        layer, ids = routing.layer, routing.host_ids
        fates = self._fates[self._done[layer] :, layer][: len(ids)]
        self._done[layer] += len(ids)
        if fates.shape != ids.shape:
            raise ValueError(f"{len(fates)} of {len(ids)} tokens of layer {layer} were recorded")
        found = dict(zip(ids[ids >= 0].tolist(), fates[ids >= 0].tolist(), strict=True))
        tiers = {expert: Tier.LO if fate & LOW_VERSION else Tier.HI for expert, fate in found.items()}
        tiers |= {expert: Tier.SKIP for expert, fate in found.items() if fate == Fate.SKIP}
        return tiers, {expert for expert, fate in found.items() if fate % LOW_VERSION == Fate.THERE}
