"""Moves of experts between versions while steps run, so that no step waits.

The method is DynaExq's (3.2 to 3.5). Every expert is resident before the first request, in some version. Between two
steps :meth:`Migration.turn` publishes moves that have arrived, and at the end of a window it plans anew. Copies have
the lowest priority; the number of concurrent moves and their share of the link's time are bounded; each move has its
slot before it begins. A copy that fails, is slow or hangs costs only its move.

A residual slice is copied into the slot of the one that it replaces, whose expert is low from then on. Separate
versions are copied into spare slots, and both rows of a pair change in one turn.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from vllm_dymoe.cache.budget import expert_worth
from vllm_dymoe.cache.device_cache import DeviceCache
from vllm_dymoe.cache.device_table import DeviceCounts
from vllm_dymoe.cache.expert_cache import Fetch, Fetcher
from vllm_dymoe.cache.layer_changes import LayerChanges
from vllm_dymoe.cache.transfer import Reason, TransferError
from vllm_dymoe.cache.transfer.ticket import State
from vllm_dymoe.options import ConfigError
from vllm_dymoe.planner.hotness import Swap, averaged, hottest, layer_swaps, swaps
from vllm_dymoe.planner.precision import Precision
from vllm_dymoe.planner.routing import Routing
from vllm_dymoe.planner.rule import HIGH
from vllm_dymoe.policies.base import Migrating

Agree = Callable[[Sequence[int]], Sequence[int]]
"""Returns the minimum of each number over all ranks that compute the same experts together."""

FAILED, UNDER_WAY, ARRIVED = 0, 1, 2  # states of a move on a rank; the minimum over ranks counts
OUTCOMES = ("published", "failed", "late", "refused", "outdated")
_LOADING = 8  # concurrent transfers before the first request
_LOOK = 16  # turns between two checks of several ranks' clocks: each check costs a message


@dataclass
class MigrationStats:
    """Outcomes of moves, and the routers' choices that they serve."""

    moves: Counter[str] = field(default_factory=Counter)
    """Moves by outcome: published; failed; late, not finished after a whole window; refused, no slot; outdated, not
    begun before the next plan.
    """
    choices: Counter[Precision] = field(default_factory=Counter)  # routers' choices, by the precision that served them
    windows: int = 0  # number of windows that have ended
    link_seconds: float = 0.0  # seconds that the link worked for moves


@dataclass(eq=False, slots=True)
class _Move:
    """A swap with its copies in flight; without copies if it found no slot."""

    swap: Swap  # which experts change
    # The slice or version that makes one expert high, and, for separate versions, the other's low one.
    fetches: list[Fetch]
    window: int  # window in which it began


class Migration:
    """Moves versions, and is the only writer of one rank's rows.

    ConfigError if an expert cannot be read.

    Args:
        fetcher: of a cache whose slots are all free.
        hotness: initial hotness, float64 [layers, experts]; None if unknown.
        agree: exchanges numbers with other ranks.
        decoded: counts of routers' choices in device-planned steps; None if there are none.
    """

    def __init__(
        self,
        fetcher: Fetcher[DeviceCache],
        migrating: Migrating,
        hotness: NDArray[np.float64] | None = None,
        agree: Agree = list,
        decoded: DeviceCounts | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        cache = fetcher.cache
        self._memory, self._fetcher, self._engine, self._migrating = cache, fetcher, fetcher.engine, migrating
        self._agree, self._clock, self._decoded = agree, clock, decoded
        # Number of windows that have ended, which a reset of statistics does not change.
        self._stats, self._windows = MigrationStats(), 0
        shape = cache.table.precision.shape
        places = cache.table.quotas[:, HIGH]
        self._places = places.astype(np.int64)
        self._worth = expert_worth(cache.experts, migrating, [1.0] * shape[0])
        compared = migrating.high_set == "model"  # whether layers are compared with each other
        self._changes = LayerChanges(shape[0] - cache.experts.draft_layers) if compared else None
        self._counts = np.zeros((2, *shape), np.int64)  # uses, and squared gates
        self.uses = np.zeros_like(self._counts)  # the same since rows last changed
        self._seen, self._least = 0, migrating.window_uses * self._counts[0].size
        self.hotness = np.zeros(shape) if hotness is None else hotness  # of the last window, in even shares
        self._planned: deque[Swap] = deque()
        self._flying: list[_Move] = []
        self._began, self._busy = clock(), 0.0
        self._moved = 0, 0.0  # moves since the start, and the link's seconds for them
        self._turns, self._look = 0, 1 if agree is list else _LOOK
        self._closing = False
        # Without knowledge of traffic, the experts whose low versions lose most are high.
        _bring_all(fetcher, hottest(self._worth * (1.0 if hotness is None else hotness), places))
        for layer in range(shape[0]):
            cache.rows_changed(layer)

    # -- in a step --------------------------------------------------------------------------------

    def count(self, routing: Routing, experts: NDArray[np.int64], uses: NDArray[np.int64]) -> None:
        """Count a layer's routing in a step of requests.

        ``experts``, int64 [n], contains each expert once; ``uses`` is the number of tokens that chose it.
        """
        self.uses[0, routing.layer, experts] += uses
        self.uses[1, routing.layer, experts] += routing.squared_gates[experts]
        self.see(routing)

    @property
    def measuring(self) -> bool:
        """Whether :meth:`see` still has something to measure."""
        return self._changes is not None

    def see(self, routing: Routing) -> None:
        """Measure how much a layer changes its input, until that is known.

        For layers whose routing is already counted in ``uses``.
        """
        if self._changes is not None:
            self._changes.see(routing.layer, routing.x)

    def _count(self) -> None:
        """Count the choices made since rows last changed."""
        counts = self.uses[0]
        total = int(counts.sum())
        if not total:
            return
        self._counts += self.uses
        high = int(counts[self._memory.table.precision == HIGH].sum())
        self._seen += total
        self._stats.choices[Precision.HIGH] += high
        self._stats.choices[Precision.LOW] += total - high
        self.uses.fill(0)

    def count_decoded(self, tokens: int) -> None:
        """Count all layers' routing after a step without the host.

        Layers of large batches have been counted already.
        """
        assert self._decoded is not None
        self._decoded.add()
        self._seen += tokens * self._memory.experts.top_k * len(self._memory.experts.layers)

    # -- between steps ----------------------------------------------------------------------------

    @property
    def stats(self) -> MigrationStats:
        self._count()
        return self._stats

    def reset_stats(self) -> None:
        self._count()
        self._stats = MigrationStats()

    @property
    def flying(self) -> Iterator[Fetch]:
        return (fetch for move in self._flying for fetch in move.fetches)

    @property
    def window_age(self) -> float:
        return self._clock() - self._began

    def turn(self) -> None:
        """Publish moves that have arrived on all ranks, and begin others; never waits.

        Moves begin as far as there is room. Ranks that have parts of the same experts call this between the same two
        steps. Whether they exchange numbers depends only on values that all of them have, so either all do, or none.
        Their clocks differ, so they agree that a window is over before any of them closes its counts; otherwise the
        counts would differ.
        """
        self._count()
        self._turns += 1
        looks = self._seen >= self._least and self._turns % self._look == 0
        if not (self._flying or self._planned or self._closing or looks):
            return
        now = self._clock()
        if self._closing:
            assert self._decoded is not None
            over = self._decoded.ready()
        else:
            over = looks and now - self._began >= self._migrating.window_s
        share = self._migrating.link_share * (now - self._began)
        working = self._busy + sum(fetch.ticket.link_seconds(now) for fetch in self.flying)
        each = self._moved[1] / self._moved[0] if self._memory.nested and self._moved[0] else 0.0
        most = 0 if working > share else self._migrating.at_once(share - self._busy, each)
        over_, limit, *states = self._agree([over, most, *map(self._state, self._flying)])
        for move, state in zip(list(self._flying), states, strict=True):
            if state == ARRIVED:
                self._publish(move)
            elif state == FAILED:
                self._give_up(move, "failed" if move.fetches else "refused")
        if over_ and self._decoded is not None and not self._closing:
            self._decoded.ask()
            self._closing = True
        elif over_:
            self._end_window(now)
        while self._planned and len(self._flying) < limit:
            swap, precision = self._planned.popleft(), self._memory.table.precision
            if precision[swap.up] == HIGH or (
                swap.down and precision[swap.down] != HIGH
            ):  # because a move of an earlier plan has failed
                self.stats.moves["outdated"] += 1
                continue
            self._flying.append(_Move(swap, self._begin(swap), self._windows))

    def stop(self) -> None:
        """Give up all moves; waits for copies that are moving, as long as the engine does."""
        self._planned.clear()
        for move in list(self._flying):
            self._fetcher.give_up(move.fetches, wait=True)
            self._end(move, "outdated")

    def _state(self, move: _Move) -> int:
        if not move.fetches or any(f.ticket.state in (State.FAILED, State.CANCELLED) for f in move.fetches):
            return FAILED
        return ARRIVED if all(self._engine.arrived(fetch.ticket) for fetch in move.fetches) else UNDER_WAY

    def _begin(self, swap: Swap) -> list[Fetch]:
        start, cache, (_, up, down) = self._fetcher.start, self._memory, swap
        if cache.nested:
            if down is not None:
                cache.evict(*down, Precision.HIGH)
                cache.rows_changed(down[0])
            residual = start(*up, Precision.HIGH, Reason.MIGRATION, kept=True)
            return [] if residual is None else [residual]
        assert down is not None, "places for high versions are never left empty"
        pair = start(*up, Precision.HIGH, Reason.MIGRATION), start(*down, Precision.LOW, Reason.MIGRATION)
        found = [fetch for fetch in pair if fetch is not None]
        if len(found) < len(pair):
            self._fetcher.give_up(found)
            return []
        return found

    def _publish(self, move: _Move) -> None:
        _, up, down = move.swap
        for fetch in move.fetches:
            self._fetcher.complete(fetch)  # from here on rows name a residual slice
        if not self._memory.nested:
            assert down is not None
            self._memory.evict(*up)
            self._memory.evict(*down)
            for fetch in move.fetches:
                self._fetcher.keep(fetch)
        for layer in {fetch.layer for fetch in move.fetches}:
            self._memory.rows_changed(layer)
        self._end(move, "published")

    def _give_up(self, move: _Move, outcome: str) -> None:
        """Abandon a move and keep the rows as they are.

        A slot that is still written stays out of use until that ends.
        """
        for fetch in move.fetches:
            self._engine.abandon(fetch.ticket)
        self._fetcher.give_up(move.fetches)
        self._end(move, outcome)
        down = move.swap.down
        if outcome == "failed" and down is not None and self._memory.nested:  # its slot was given up for nothing
            self._planned.appendleft(Swap(move.swap.gain, down, None))

    def _end(self, move: _Move, outcome: str) -> None:
        self._flying.remove(move)
        self.stats.moves[outcome] += 1
        spent = sum(fetch.ticket.link_seconds(time.perf_counter()) for fetch in move.fetches)
        self._busy += spent
        if outcome == "published":
            self._moved = self._moved[0] + 1, self._moved[1] + spent
        self.stats.link_seconds += spent

    def _end_window(self, now: float) -> None:
        """Plan anew; abandon moves that have taken more than a whole window."""
        for move in [move for move in self._flying if move.window < self._windows]:
            self._give_up(move, "late")
        self._windows += 1
        self.stats.windows += 1
        self.stats.moves["outdated"] += len(self._planned)
        if self._decoded is not None:
            low, high, gates = self._decoded.take()
            self._counts += (low + high, gates)
            self.stats.choices[Precision.LOW] += int(low.sum())
            self.stats.choices[Precision.HIGH] += int(high.sum())
        migrating = self._migrating
        self.hotness = averaged(self.hotness, self._counts[int(migrating.by_gates)], migrating.alpha)
        self._counts.fill(0)
        self._seen, self._began, self._busy, self._closing = 0, now, 0.0, False
        held = self._memory.table.precision == HIGH
        for _, up, down in (move.swap for move in self._flying):
            held[up] = True
            if down is not None:
                held[down] = False
        if self._changes is not None and self._changes.enough:
            parts = self._agree(self._changes.parts())
            rest = [min(parts)] * (len(self._worth) - len(parts) - 1)  # a draft does not decide tokens
            layers = np.maximum([*parts, parts[-1], *rest], 1) / max(1.0, np.mean(parts))
            self._worth, self._changes = expert_worth(self._memory.experts, migrating, layers), None
        score = self.hotness * self._worth
        if migrating.high_set == "model":
            self._planned = deque(swaps(score, held, int(self._places.sum()), migrating.margin))
        else:
            self._planned = deque(layer_swaps(score, held, self._places, migrating.margin))


def _bring_all(fetcher: Fetcher[DeviceCache], high: NDArray[np.bool_]) -> None:
    """Fetch every expert before the first request.

    Those in ``high``, bool [layers, experts], are fetched at their high version. ConfigError if one cannot be read.
    """
    engine, parts = fetcher.engine, fetcher.cache.parts
    pending: deque[Fetch] = deque()
    with engine.uncounted():
        try:
            for layer, expert in np.ndindex(high.shape):
                for part in parts[Precision.HIGH if high[layer, expert] else Precision.LOW]:
                    fetch = fetcher.start(layer, expert, part, Reason.DEMAND, kept=True)
                    assert fetch is not None, "the plan has a slot for every expert"
                    pending.append(fetch)
                    if len(pending) == _LOADING:
                        fetcher.complete(pending[0])
                        pending.popleft()
            while pending:
                fetcher.complete(pending[0])
                pending.popleft()
        except TransferError as error:
            fetcher.give_up(pending, wait=True)
            raise ConfigError(f"vllm-dymoe: an expert could not be fetched to the device: {error}") from error
