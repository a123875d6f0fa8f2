"""``vllm-dymoe bench``: measures one model.

Policies, budgets and batches are compared side by side.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import typer

from vllm_dymoe.bench.cases import ENGINES, EVERYTHING, PEERS, Case, Subject, Workload, digest, grid, subject_of
from vllm_dymoe.bench.prefixes import cells as prefix_cells
from vllm_dymoe.bench.prefixes import measure_prefixes
from vllm_dymoe.bench.prompts import PromptSet
from vllm_dymoe.bench.rows import ROWS, Row, check_outputs, read_rows
from vllm_dymoe.bench.run import machine_key, measure
from vllm_dymoe.bench.table import Bounds, bits_of, cells, for_terminals, markdown, numbers, options_of
from vllm_dymoe.cli.display import count_progress, print_table
from vllm_dymoe.cli.figures import Panel, draw, require
from vllm_dymoe.durable import replace_file
from vllm_dymoe.options import ConfigError, ExpertBudget, store_root
from vllm_dymoe.plan.device import parse_rate
from vllm_dymoe.plan.machine import Probe
from vllm_dymoe.plan.model import ModelShape, config_folder, read_shape
from vllm_dymoe.quantize.checkpoint import content_fingerprint
from vllm_dymoe.quantize.model_config import read_config
from vllm_dymoe.resolve import ENVIRONMENT_PREFIX, resolve_options


@dataclass
class Bench:
    """A model, its prompts, and where rows are written."""

    model: str  # as for ``vllm serve``
    asked: PromptSet  # prompts
    workload: Workload  # of every case
    options: Mapping[str, Any]  # common to all policies
    engine: Mapping[str, Any]  # arguments of vLLM's LLM
    out: Path  # folder of rows
    figure: Path | None = None  # picture of the rows, if requested

    @cached_property
    def shape(self) -> ModelShape:
        return read_shape(self.model)

    @cached_property
    def conditions(self) -> str:
        """A digest of what rows depend on in addition to their cases.

        It is of the versions, the machine with its cards and drivers, the model's files, and the variables of the
        plugin and of vLLM.
        """
        folder = config_folder(self.model)
        content = content_fingerprint(folder) if Path(self.model).is_dir() else str(folder)  # which names a commit
        variables = {name: os.environ[name] for name in os.environ if name.startswith((ENVIRONMENT_PREFIX, "VLLM_"))}
        return digest([Probe.of(store_root(None), self.shape).key, read_config(folder), content, variables])

    def measure(self, cases: Sequence[Case]) -> list[Row]:
        """Return the rows of all cases; those measured before are not measured again."""
        with count_progress(lines=True) as advance:
            expert_bytes = self.shape.packed((16,)).nbytes(16)
            return measure(cases, self.asked, self.out, expert_bytes=expert_bytes, progress=advance)

    def compare(
        self, policies: Sequence[str], peers: Sequence[str], budgets: Sequence[str], batches: Sequence[int],
        links: Sequence[str], misses: Sequence[str] = (),
    ) -> None:  # fmt: skip
        if self.figure is not None:
            require(self.figure)
        for budget in budgets:
            ExpertBudget.parse(budget)
        asked, requests, warm_up = self.asked, self.workload.requests, self.workload.warm_up
        if not asked.is_random and len(asked.prompts) < requests + warm_up:
            raise ConfigError(
                f"{asked.name} has {len(asked.prompts)} prompts, but {requests} requests and {warm_up} to warm up were "
                "asked for; lower --requests."
            )
        if requests < (together := max(batches) * self.engine.get(ENGINES, 1)):
            raise ConfigError(
                f"{requests} requests do not fill a batch of {together}; raise --requests or lower --batch."
            )
        subjects = [*(subject_of(policy, self.options) for policy in policies), *self._peers(peers)]
        if misses:
            subjects = [_with_misses(way, subject) for way in misses for subject in subjects]
        if links:
            subjects = [_behind(parse_rate(link), subject) for link in links for subject in subjects]
        cases = grid(self.model, subjects, budgets, batches, self.workload, self.engine, self.conditions)
        self.report(self.measure(cases))

    def prefixes(self, policies: Sequence[str], budgets: Sequence[str], length: int) -> None:
        """Measure first tokens of prompts.

        They are cold prompts, cached prefixes, and prompts while other requests decode.
        """
        if self.asked.is_random:
            raise ConfigError("random prompts say nothing about prefixes; give a file, or leave --prompts out.")
        for policy in policies:
            subject = subject_of(policy, self.options)
            rows = measure_prefixes(
                self.model, self.asked, budgets, subject.options or {}, self.engine, length, self.out, self.conditions
            )
            body = [prefix_cells(row) for row in rows]
            title = f"{self.model}, {subject.label}: first tokens"
            print_table(title, list(body[0]), [list(row.values()) for row in body])
        typer.echo(f"Written: {self.out / ROWS}")

    def _peers(self, names: Sequence[str]) -> Iterator[Subject]:
        """Yield the peers that can run here; print why others cannot."""
        for name in names:
            if (offloads := PEERS.get(name)) is None:
                raise ConfigError(f"{name} is not a known peer; known are {', '.join(PEERS)}.")
            if offloads and not torch.cuda.is_available():
                typer.echo(f"{name} is left out: it needs a GPU, and there is none.")
            else:
                yield Subject(name, peer=name, budgets=None if offloads else (EVERYTHING,))

    def report(self, rows: Sequence[Row]) -> None:
        compared, workload = check_outputs(rows), self.workload
        title = (
            f"{self.model}: {workload.requests} requests of {workload.max_tokens} tokens, prompts: {workload.name}, "
            f"warm-up: {workload.warm_up} requests"
            + ("; prompts are random, so hit rates would mean nothing and are left out" if workload.random else "")
        )
        found = numbers(rows, self._bounds(rows))
        body = [cells(row) for row in found]
        for heading, columns in zip((title, "Bytes"), for_terminals(body), strict=True):
            print_table(heading, columns, [[line[name] for name in columns] for line in body])
        if compared:
            typer.echo(f"{compared} answers of equal precision are equal, token by token.")
        page = self.out / "table.md"
        replace_file(page, f"{title}\n\n{markdown(list(body[0]), (line.values() for line in body))}\n".encode())
        table = self.out / "table.json"
        replace_file(table, (json.dumps(found, indent=1) + "\n").encode())
        written = [self.out / ROWS, page, table]
        if self.figure is not None:
            written.append(draw(self.figure, [speeds(self.model, found)]))
        typer.echo(f"Written: {', '.join(map(str, written))}")

    def _bounds(self, rows: Sequence[Row]) -> Bounds:
        """Return the reference values for a table.

        They are the machine's rates before anything ran on it, and the bytes that a token has to read.
        """
        rates = machine_key(self.conditions)
        (found,) = [row for row in read_rows(self.out / ROWS) if row["key"] == rates]
        bits = {width for row in rows for width in (bits_of(row), options_of(row).get("low", 0)) if width}
        slices = {width: fmt.whole_nbytes for width, fmt in self.shape.packed(tuple(sorted(bits))).formats.items()}
        tokens = {
            (width, dense): self.shape.token_bytes(nbytes, dense)
            for width, nbytes in slices.items() for dense in (8, 16)
        }  # fmt: skip
        return Bounds(found["link_bytes_per_second"], found["memory_bytes_per_second"], tokens, slices)


def speeds(model: str, found: Sequence[Mapping[str, Any]]) -> Panel:
    """Return a chart of tokens per second by memory for experts.

    It has one line per policy and batch, and a level for servers without such a budget.
    """
    panel = Panel(model, "memory for experts, MB", "tokens per second")
    batches = len({row["batch"] for row in found}) > 1
    for row in found:
        label = row["policy"] + (f", batch {row['batch']}" if batches else "")
        label += f", {row['link MB/s']:.4g} MB/s" if row["link MB/s"] else ""
        if row["tokens/s"] is None:
            continue
        if row["experts peak MB"] is None:
            panel.levels[label] = row["tokens/s"]
        else:
            panel.lines.setdefault(label, []).append((row["experts peak MB"], row["tokens/s"]))
    return panel


def _behind(rate: float, subject: Subject) -> Subject:
    """Return a subject with an emulated link; a peer has none."""
    if subject.options is None:
        return subject
    return replace(subject, options={**subject.options, "link_gbps": rate / 1e9})


def _with_misses(way: str, subject: Subject) -> Subject:
    """Return a subject with the option ``misses``; peers are returned unchanged."""
    if subject.options is None:
        return subject
    options = {**subject.options, "misses": way}
    resolve_options(options, environment={})
    return replace(subject, label=f"{subject.label}, misses {way}", options=options)
