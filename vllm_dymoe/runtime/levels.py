"""What steps tell a level in host memory: what a layer lacks, and what later layers may want from the disk."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

from vllm_dymoe.predict.gate import FAR
from vllm_dymoe.residency.format import BlobKey
from vllm_dymoe.residency.rule import HIT, Ints
from vllm_dymoe.residency.tier import Tier
from vllm_dymoe.runtime.memory import ExpertMemory
from vllm_dymoe.transfer import HostLevel

Guess = tuple[int, int, Tier]  # layer, expert, and the tier in which it may be wanted


def expect(level: HostLevel, memory: ExpertMemory, layer: int, wanted: Mapping[int, Tier], places: Ints) -> None:
    """Let all that the device lacks be read at once, in front of the link, which asks for one after the other."""
    keys: list[BlobKey] = []
    for (expert, tier), place in zip(wanted.items(), places.T.tolist(), strict=True):
        parts = zip(memory.parts[tier], place, strict=False)
        keys += [BlobKey(layer, expert, memory.bits[part]) for part, found in parts if found != HIT]
    level.reads.expect(layer, keys)


class ReadAhead:
    """Reads what guesses name into host memory; and for the layers behind these, what the last step used in them."""

    def __init__(self, level: HostLevel, memory: ExpertMemory, num_layers: int) -> None:
        self._level, self._memory, self._num_layers = level, memory, num_layers

    def offer(self, layer: int, guesses: Sequence[Guess]) -> None:
        """Guesses about the layers after one, the best first, in place of those before."""
        behind = 1 + max((guess[0] for guess in guesses), default=layer)
        later = range(behind, min(layer + 1 + 2 * FAR, self._num_layers))
        self._level.reads.prefetch(chain.from_iterable(map(self._lacking, chain(guesses, self._used_last(later)))))

    def has(self, guess: Guess) -> bool:
        """Whether the link could fetch it without waiting for the disk."""
        return all(map(self._level.reads.has, self._lacking(guess)))

    def _lacking(self, guess: Guess) -> Iterable[BlobKey]:
        layer, expert, tier = guess
        return [BlobKey(layer, expert, self._memory.bits[part]) for part in self._memory.lacking(layer, expert, tier)]

    def _used_last(self, layers: range) -> Iterator[Guess]:
        table, tier = self._memory.table, next(iter(self._memory.pools))
        for layer in layers:
            if table.step[layer]:
                used = (table.used_at[0, layer] == table.step[layer]).nonzero()[0].tolist()
                yield from ((layer, expert, tier) for expert in used)
