"""Reads from disk into a host cache.

It reads the misses of this layer, and predictions for later layers.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from vllm_dymoe.cache.device_cache import DeviceCache
from vllm_dymoe.cache.host_cache import HostCache
from vllm_dymoe.experts.format import SliceKey
from vllm_dymoe.planner.constants import Action
from vllm_dymoe.planner.plan import LayerPlan
from vllm_dymoe.planner.precision import Precision
from vllm_dymoe.prefetch.gate import FAR

Prediction = tuple[int, int, Precision]  # layer, expert, and its likely precision


def expect(host_cache: HostCache, cache: DeviceCache, layer: int, plan: LayerPlan) -> None:
    """Start the disk reads of all misses of a layer at once.

    Otherwise the link would ask for them one by one.
    """
    keys: list[SliceKey] = []
    for (expert, precision), actions in zip(plan.wanted.items(), plan.action.T.tolist(), strict=True):
        parts = zip(cache.parts[precision], actions, strict=False)
        keys += [SliceKey(layer, expert, cache.bits[part]) for part, action in parts if action != Action.HIT]
    host_cache.expect(layer, keys)


class ReadAhead:
    """Reads predicted experts into host memory.

    For layers beyond the predictions it reads the experts that the last step used there.
    """

    def __init__(self, host_cache: HostCache, cache: DeviceCache, num_layers: int) -> None:
        self._host_cache, self._memory, self._num_layers = host_cache, cache, num_layers

    def offer(self, layer: int, predictions: Sequence[Prediction]) -> None:
        """Replace the predictions by new ones about the layers after ``layer``.

        Args:
            predictions: the best first.
        """
        behind = 1 + max((prediction[0] for prediction in predictions), default=layer)
        later = range(behind, min(layer + 1 + 2 * FAR, self._num_layers))
        self._host_cache.prefetch(chain.from_iterable(map(self._lacking, chain(predictions, self._used_last(later)))))

    def has(self, prediction: Prediction) -> bool:
        """Return whether the link could fetch a predicted expert at once.

        False if the link would have to wait for the disk.
        """
        return all(map(self._host_cache.has, self._lacking(prediction)))

    def _lacking(self, prediction: Prediction) -> Iterable[SliceKey]:
        layer, expert, precision = prediction
        return [
            SliceKey(layer, expert, self._memory.bits[part]) for part in self._memory.lacking(layer, expert, precision)
        ]

    def _used_last(self, layers: range) -> Iterator[Prediction]:
        table, precision = self._memory.table, next(iter(self._memory.pools))
        for layer in layers:
            if table.step[layer]:
                used = (table.used_at[0, layer] == table.step[layer]).nonzero()[0].tolist()
                yield from ((layer, expert, precision) for expert in used)
