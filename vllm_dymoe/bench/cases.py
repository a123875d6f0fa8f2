"""Cases to measure: one policy at one budget and batch size.

Cases that one engine can answer are a group.
"""

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from vllm_dymoe.options import ConfigError, Options
from vllm_dymoe.policies import POLICIES
from vllm_dymoe.resolve import resolve_options

FULL = "100%"  # the budget at which nothing is ever transferred
EVERYTHING = "its own"  # instead of a budget, for a peer that takes none
ENGINES = "data_parallel_size"  # the engine argument for the number of engines
PEERS = {"vllm": False, "vllm-offload": True}
"""The peer vLLM; with ``--cpu-offload-gb`` it reads what the budget leaves out from the GPU's host."""


@dataclass(frozen=True)
class Subject:
    """A serving system: this plugin with options, or a peer."""

    label: str  # unique name in a run, for tables
    options: Mapping[str, Any] | None = None  # of the plugin, without the budget; None for a peer
    peer: str = ""  # name of the peer; empty for the plugin
    budgets: tuple[str, ...] | None = None  # budgets at which it is measured; the run's if None


@dataclass(frozen=True)
class Workload:
    """The requests of every case."""

    prompts: str  # digest of the set
    name: str  # of the set
    random: bool  # whether it is random tokens
    requests: int  # measured answers per case
    warm_up: int  # unmeasured answers before them
    max_tokens: int  # length of each answer


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    model: str  # as for ``vllm serve``
    subject: Subject  # what serves
    budget: str  # the option ``expert_budget``, or what it means for a peer
    batch: int  # requests at once
    workload: Workload  # its requests
    engine: Mapping[str, Any] = field(default_factory=dict)  # arguments of vLLM's ``LLM``
    conditions: str = ""  # digest of all else that its numbers depend on, such as the machine

    @property
    def key(self) -> str:
        """Identifies the case in another run."""
        return digest(asdict(self) | {"subject": {"options": self.subject.options, "peer": self.subject.peer}})

    @property
    def group(self) -> str:
        """Key that is equal for cases that one engine can answer in sequence."""
        budget = self.budget if self.subject.options is None else ""
        return digest([self.model, self.subject.options, self.subject.peer, budget, dict(self.engine)])

    @property
    def fixed_precision(self) -> str | None:
        """Key that is equal for cases whose answers must be the same.

        They must be the same token by token; None if precision may vary.
        """
        if self.subject.options is None:
            return None
        options = Options.model_validate(self.subject.options)
        precisions = POLICIES[options.policy](**options.policy_options).precision.precisions
        if precisions != POLICIES["exact"]().precision.precisions:
            return None
        packed = [options.high, options.group_size, options.quantizer, options.dense]
        return digest([self.model, packed, self.batch, asdict(self.workload), dict(self.engine)])


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def grid(
    model: str, subjects: Sequence[Subject], budgets: Sequence[str], batches: Sequence[int], workload: Workload,
    engine: Mapping[str, Any], conditions: str = "",
) -> list[Case]:  # fmt: skip
    """Return every combination once, with the full loads to compare with.

    There is a full load for each precision and batch; it is the reference for speeds.
    """
    cases = []
    for subject, batch in itertools.product(subjects, batches):
        for budget in subject.budgets or budgets:
            cases.append(Case(model, subject, budget, batch, workload, engine, conditions))
        if subject.options is not None:
            cases.append(Case(model, full_load(subject.options), FULL, batch, workload, engine, conditions))
    return list({case.key: case for case in cases}.values())


def full_load(options: Mapping[str, Any]) -> Subject:
    kept = {name: options[name] for name in ("high", "group_size", "quantizer", "dense") if name in options}
    asked = Options.model_validate(options)
    dense = f", dense {asked.dense}" if "dense" in kept else ""
    return Subject(
        f"full load, {asked.high} bits{dense}", {**kept, "policy": "exact", "policy_options": {"look_ahead": 0}}
    )


def groups(cases: Iterable[Case]) -> Iterator[list[Case]]:
    """Yield cases by engine.

    The full load comes first, because others are compared with it.
    """
    ordered = sorted(cases, key=lambda case: (not case.subject.label.startswith("full load"), case.group))
    for _, group in itertools.groupby(ordered, key=lambda case: case.group):
        yield list(group)


def subject_of(text: str, common: Mapping[str, Any]) -> Subject:
    """Parse a subject: a policy, or options as JSON with a ``label``.

    Raises:
        ConfigError: it is invalid.
    """
    options, label = {"policy": text}, text
    if text.lstrip().startswith("{"):
        try:
            options = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"--policy {text} is not JSON ({error}).") from error
        label = options.pop("label", None) or ", ".join(f"{name} {value}" for name, value in options.items())
    if "expert_budget" in options:
        raise ConfigError("--policy contains expert_budget; use --budget instead.")
    options = {**common, **options}
    default = resolve_options(options, environment={}).expert_budget.slots
    return Subject(label, options, budgets=(default,) if default else None)
