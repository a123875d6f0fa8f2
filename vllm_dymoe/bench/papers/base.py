"""A paper's table: its rows, its numbers, and where ours come from."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vllm_dymoe.bench.cases import Case, Subject, Workload
from vllm_dymoe.bench.rows import Row

Number = float | str | None
TRAINED = "trained here"
"""In place of a predictor's file: DuoServe-MoE's network, trained on the run's prompts that are not measured."""


@dataclass(frozen=True)
class At:
    """Where a system is measured.

    Attributes:
        budget: of experts.
        batch: requests at once.
        prompt_tokens: of each prompt; None takes the run's prompts as they are.
        max_tokens: of each answer; None for those of the run.
    """

    budget: str
    batch: int = 1
    prompt_tokens: int | None = None
    max_tokens: int | None = None

    def case(self, subject: Subject, model: str, workload: Workload, engine: Mapping[str, Any]) -> Case:
        """Of a run's workload: at least as many requests as the batch has, at the lengths that are asked for."""
        asked = replace(
            workload, requests=max(workload.requests, self.batch), prompt_tokens=self.prompt_tokens,
            max_tokens=self.max_tokens or workload.max_tokens,
        )  # fmt: skip
        return Case(model, subject, self.budget, self.batch, asked, engine)


@dataclass(frozen=True)
class Speed:
    """Ours come from rows of one system.

    Attributes:
        subject: which.
        columns: for each column of the table where it is measured, and what of the row it shows.
    """

    subject: Subject
    columns: Mapping[str, tuple[At, Callable[[Row], Number]]]


@dataclass(frozen=True)
class Routed:
    """Ours come from a trace of the model.

    Attributes:
        measure: from what was recorded to a number for each column.
    """

    measure: Callable[["Recorded"], Mapping[str, Number]]


@dataclass(frozen=True)
class Quality:
    """Ours come from tasks of lm-eval.

    Attributes:
        options: of the plugin.
        tasks: for each column, the task of the paper.
    """

    options: Mapping[str, Any]
    tasks: Mapping[str, str]


@dataclass(frozen=True)
class Missing:
    """There is no such row here.

    Attributes:
        why: a sentence.
    """

    why: str


@dataclass(frozen=True)
class Line:
    """One row of a table.

    Attributes:
        label: as the paper has it.
        ours: where our numbers come from.
        paper: its numbers, by column; those it draws and does not print are missing.
    """

    label: str
    ours: Speed | Routed | Quality | Missing
    paper: Mapping[str, Number] = field(default_factory=dict)


@dataclass(frozen=True)
class PaperTable:
    """A table, or a figure as a table.

    Attributes:
        name: as the paper has it.
        about: what it shows, and on what the paper measured it.
        columns: in their order.
        lines: in theirs.
    """

    name: str
    about: str
    columns: Sequence[str]
    lines: Sequence[Line]


@dataclass(frozen=True)
class Recorded:
    """What is known of a model's routers.

    Attributes:
        trace: of prompts, with the routers' inputs.
        gates: [experts, hidden] of each layer; empty where they are not known.
        shape: sizes of the model by name, as its config.json has them.
    """

    trace: Any
    gates: Sequence[Any]
    shape: Mapping[str, Number]


def ttft(row: Row) -> float:
    """Seconds to the first token, median."""
    return float(row["measured"]["ttft_ms"]["median"]) / 1e3


def tpot(row: Row) -> float:
    """Seconds for each later token, mean."""
    return float(row["measured"]["tpot_ms"]["mean"]) / 1e3


def request(row: Row) -> float:
    """Seconds of a whole request, mean."""
    return float(row["measured"]["request_ms"]["mean"]) / 1e3


def rate(row: Row) -> float:
    """Tokens per second behind the first."""
    return float(row["measured"]["decode_tokens_per_second"])


def peak(row: Row) -> float:
    """The most device memory of experts, in MB."""
    return float(row["measured"]["decode"]["peak_expert_bytes"]) / 1e6
