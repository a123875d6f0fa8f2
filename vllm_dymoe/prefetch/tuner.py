"""HEOP: hill climbing on K and P of Meeting of Layers while serving.

This is Algorithm 1 of FIRM-MoE. Each group of layers (shallow, middle, deep) has its own K and P and its own cost of a
decode step, averaged over its layers,

    L = alpha * n_unused + beta * (n_miss - n_hit)                                        (Eq. 11)

where n_unused experts were prefetched (predicted and not resident) and not used, n_miss were used and not predicted,
and n_hit were used and already resident. Every ``update_every`` steps either K or P moves by one. After ``patience``
moves without a new best the search returns to the best and turns: to the other direction first, then to the other
number. (The algorithm as printed turns both at once and does not return; then K could only ever move in its first
direction.) After ``rounds`` moves the group keeps the pair of the lowest average cost.

As in the paper the search ends there; another budget, which changes the hits, starts it again.
"""

import math
import random
from dataclasses import dataclass, field
from typing import NamedTuple


class Setting(NamedTuple):
    """K and P of Meeting of Layers."""

    k: int  # experts that each layer predicts
    p: int  # layers that have to agree


@dataclass
class _Average:
    """Running average of costs."""

    count: int = 0
    mean: float = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.count += times
        self.mean += times * (value - self.mean) / self.count


@dataclass
class _Group:
    """Search state of one group of layers."""

    setting: Setting
    dimension: int  # of the setting: the number that moves
    direction: int
    turned: bool = False  # the dimension's other direction has been tried before
    rounds: int = 0
    stale: int = 0
    fixed: bool = False
    recent: _Average = field(default_factory=_Average)
    costs: dict[Setting, _Average] = field(default_factory=dict)
    step_cost: float = 0.0
    step_layers: int = 0


@dataclass(eq=False)
class Heop:
    """Chooses K and P for each group of layers."""

    num_layers: int  # MoE layers
    start: Setting  # initial setting
    largest: Setting  # largest setting to try
    alpha: float = 0.5  # cost of predicting an expert that is not used
    beta: float = 0.5  # cost of not predicting one that is
    update_every: int = 10  # decode steps between two moves (N_update)
    patience: int = 2  # moves without a new best before the search turns (Pat)
    rounds: int = 20  # moves before the search ends
    seed: int = 0  # of the first direction
    as_printed: bool = False  # turn as the printed algorithm does

    def __post_init__(self) -> None:
        chance = random.Random(self.seed)
        self._groups = [_Group(self.start, chance.randrange(2), chance.choice((-1, 1))) for _ in range(3)]
        # As in the paper's Figure 6: of 16 layers the first five are shallow, and the last four deep.
        shallow, deep = math.ceil(self.num_layers * 0.3), self.num_layers - self.num_layers // 4
        self._group_of = [0 if i < shallow else 2 if i >= deep else 1 for i in range(self.num_layers)]

    @property
    def settled(self) -> bool:
        """Whether every group that has had work keeps its best setting."""
        return all(group.fixed for group in self._groups if group.costs or group.recent.count)

    def setting(self, layer: int) -> Setting:
        return self._groups[self._group_of[layer]].setting

    def record(self, layer: int, *, unused: int, missed: int, hits: int, steps: int = 1) -> None:
        """Add the outcomes of a layer's experts in one step, or the sums of several."""
        group = self._groups[self._group_of[layer]]
        group.step_cost += self.alpha * unused + self.beta * (missed - hits)
        group.step_layers += steps

    def end_step(self, steps: int = 1) -> None:
        """End one decode step or several: move, or keep the best."""
        for group in self._groups:
            if not group.step_layers:  # a model of few layers has an empty group
                continue
            # Per layer with a prediction: their number depends on how busy the link is.
            cost = group.step_cost / group.step_layers
            group.step_cost, group.step_layers = 0.0, 0
            if group.fixed:
                continue
            group.recent.add(cost, steps)
            if group.recent.count >= self.update_every:
                self._update(group)

    def restart(self) -> None:
        """Start the search again from the current settings.

        Hits belong to another cache from now on.
        """
        for group in self._groups:
            group.costs, group.recent, group.fixed = {}, _Average(), False
            group.rounds = group.stale = group.step_layers = 0
            group.step_cost = 0.0

    def _update(self, group: _Group) -> None:
        average = group.costs.setdefault(group.setting, _Average())
        best_before = min((cost.mean for cost in group.costs.values() if cost.count), default=math.inf)
        average.add(group.recent.mean)
        improved, group.recent = average.mean < best_before, _Average()
        group.stale = 0 if improved else group.stale + 1
        group.rounds += 1
        if group.rounds >= self.rounds:
            group.setting = self._best(group)
            group.fixed = True
            return
        if group.stale >= self.patience:
            self._turn(group)
        for _ in range(4):  # also turn at a bound
            if self._move(group):
                return
            self._turn(group)

    def _turn(self, group: _Group) -> None:
        """Continue from the best setting, in the next of the four directions.

        As printed, continue in the other number and direction.
        """
        if self.as_printed:
            group.stale, group.direction, group.dimension = 0, -group.direction, 1 - group.dimension
            return
        group.setting = self._best(group)
        group.stale = 0
        group.direction = -group.direction
        if group.turned:
            group.dimension = 1 - group.dimension
        group.turned = not group.turned

    def _move(self, group: _Group) -> bool:
        """Take one step; return False at a bound."""
        moved = list(group.setting)
        moved[group.dimension] += group.direction
        inside = 1 <= moved[group.dimension] <= self.largest[group.dimension]
        if inside:
            group.setting = Setting(*moved)
        return inside

    @staticmethod
    def _best(group: _Group) -> Setting:
        return min(group.costs, key=lambda setting: group.costs[setting].mean)
