"""Measures, while serving, how much high versions matter in each layer.

An error in a layer's experts matters as much as their output does relative to the residual stream, and the output
changes the stream's direction as much: by 1 - cos^2 between the inputs of a layer's router and the next one's (compared
with the KL of single layers in benchmarks/LOG.md). The last layer counts like the one before it. Tokens with non-finite
inputs are ignored.
"""

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

_TOKENS = 512  # number of tokens that suffice
_AT_ONCE = 256  # most tokens of a step
_UNIT = 1 << 20  # changes are counted as integers in 1 / _UNIT, so that ranks agree


class LayerChanges:
    """The changes that the layers of a model, without its draft, make."""

    def __init__(self, layers: int) -> None:
        self._sums = torch.zeros(max(1, layers - 1), dtype=torch.float64)
        self._counted = torch.zeros((), dtype=torch.int64)  # number of counted tokens, on the device
        self._tokens, self._before = 0, torch.empty(0)

    @property
    def enough(self) -> bool:
        """Whether enough tokens were counted.

        Waits for the device once, when that many have been seen.
        """
        if self._tokens >= _TOKENS:
            self._tokens = int(self._counted)
        return self._tokens >= _TOKENS

    def see(self, layer: int, x: Tensor) -> None:
        """Compare a router's input with that of the layer before.

        ``x`` is [tokens, hidden]. Call it for layers in order.
        """
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
        """Return the change of each layer but the last, as integers; waits for the device."""
        return (self._sums * _UNIT).long().tolist()
