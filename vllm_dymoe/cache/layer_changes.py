"""What high versions are worth in each layer beside the others, measured while serving.

An error of a layer's experts counts as much as their output does beside the residual stream, and that changes its
direction by as much: by 1 - cos^2 between the inputs of a layer's router and of the next one's (against KL of single
layers: benchmarks/LOG.md). The last layer is worth what the one before it is. A token of which an input is not finite
counts in no layer.
"""

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

_TOKENS = 512  # that are enough
_AT_ONCE = 256  # of a step
_UNIT = 1 << 20  # ranks agree on whole numbers


class LayerChanges:
    """Of a model's layers, but for a draft's."""

    def __init__(self, layers: int) -> None:
        self._sums = torch.zeros(max(1, layers - 1), dtype=torch.float64)
        self._counted = torch.zeros((), dtype=torch.int64)  # tokens that count, where they are computed
        self._tokens, self._before = 0, torch.empty(0)

    @property
    def enough(self) -> bool:
        """Whether so many tokens count; waits for the device as soon as so many have been seen."""
        if self._tokens >= _TOKENS:
            self._tokens = int(self._counted)
        return self._tokens >= _TOKENS

    def see(self, layer: int, x: Tensor) -> None:
        """Compare a router's input [tokens, hidden] with that of the layer before; layers come in their order."""
        if self._tokens >= _TOKENS or layer > len(self._sums):  # as far as the host knows
            return
        before, self._before = self._before, x[:_AT_ONCE].float()  # another layer may overwrite x
        self._sums, self._counted = self._sums.to(x.device), self._counted.to(x.device)
        finite = torch.ones(len(self._before), dtype=torch.bool, device=x.device)
        if layer and len(before) == len(self._before):
            changes = 1 - cosine_similarity(before, self._before, dim=1).square()
            finite = changes.isfinite()
            self._sums[layer - 1] += changes.where(finite, 0.0).sum()
        if layer == len(self._sums):
            self._tokens += len(self._before)
            self._counted += finite.sum()

    def parts(self) -> list[int]:
        """Of each layer but the last, in whole numbers; waits for the device."""
        return (self._sums * _UNIT).long().tolist()
