"""Measures, while serving, what high versions are worth in each layer.

An error of a layer's experts matters as much as their output does relative to the residual stream, and the output
changes the stream's direction as much: by 1 - cos^2 between the inputs of a layer's router and the next one's (compared
with the KL of single layers in benchmarks/LOG.md). The last layer is worth what the one before it is. A token with an
input that is not finite is ignored.
"""

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

_TOKENS = 512  # that are enough
_AT_ONCE = 256  # of a step
_UNIT = 1 << 20  # ranks agree on whole numbers


class LayerChanges:
    """The changes of a model's layers, without a draft's."""

    def __init__(self, layers: int) -> None:
        self._sums = torch.zeros(max(1, layers - 1), dtype=torch.float64)
        self._counted = torch.zeros((), dtype=torch.int64)  # tokens that count, where they are computed
        self._tokens, self._before = 0, torch.empty(0)

    @property
    def enough(self) -> bool:
        """Whether enough tokens were counted; waits for the device once so many have been seen."""
        if self._tokens >= _TOKENS:
            self._tokens = int(self._counted)
        return self._tokens >= _TOKENS

    def see(self, layer: int, x: Tensor) -> None:
        """Compare a router's input [tokens, hidden] with that of the layer before; layers come in order."""
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
        """Return the change of each layer but the last, in whole numbers; waits for the device."""
        return (self._sums * _UNIT).long().tolist()
