"""Prompts: files of serving benchmarks, the shipped set, and random tokens.

Formats are recognised by content:

- ShareGPT: a JSON list of objects with ``conversations``; a prompt is the first thing that a human says.
- vLLM's ``custom``: JSON lines, or a list, with ``prompt`` and optionally ``output_tokens`` and a ``domain``.
- ``spec_bench``: JSON lines with ``turns`` and a ``category``; a prompt is the first turn.
- anything else: a prompt in each line.
"""

import hashlib
import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from vllm_dymoe.options import ConfigError

SHIPPED = "shipped"
_FIRST_TOKEN = 2  # of random prompts: lower ids are often special tokens


@dataclass(frozen=True)
class Prompt:
    """One request."""

    text: str  # what is asked
    domain: str = ""  # kind of text; empty if unknown
    output_tokens: int | None = None  # length of the answer; None for the run's


@dataclass(frozen=True)
class PromptSet:
    """The prompts of a run."""

    name: str  # for reports
    prompts: tuple[Prompt, ...] = ()  # in the order of the file; empty if they are random
    random_length: int | None = None  # tokens of a random prompt; None for real ones

    @property
    def is_random(self) -> bool:
        """Whether tokens are random.

        Random tokens are routed almost evenly, so their hit rate says nothing about real use.
        """
        return self.random_length is not None

    @property
    def digest(self) -> str:
        texts = [[prompt.text, prompt.domain, prompt.output_tokens] for prompt in self.prompts]
        return hashlib.sha256(json.dumps([texts, self.random_length]).encode()).hexdigest()[:12]


def read_prompts(source: str) -> PromptSet:
    """Read prompts of a file, the ``shipped`` set, or ``random:LENGTH``.

    Raises:
        ConfigError: the source is anything else.
    """
    if (found := re.fullmatch(r"random:(\d+)", source)) and int(found[1]):
        return PromptSet(source, random_length=int(found[1]))
    path = resources.files("vllm_dymoe.bench").joinpath("prompts.json") if source == SHIPPED else Path(source)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{source} cannot be read as prompts ({error}); name a file, {SHIPPED}, or random:LENGTH with a length "
            "above 0."
        ) from error
    prompts = tuple(_prompts(text, source))
    if not prompts:
        raise ConfigError(f"{source} has no prompts.")
    return PromptSet(path.name if source != SHIPPED else SHIPPED, prompts)


def by_turns(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Interleave domains.

    So any number of prompts from the front covers all of them.
    """
    domains: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        domains.setdefault(prompt.domain, []).append(prompt)
    longest = max(map(len, domains.values()), default=0)
    return [group[place] for place in range(longest) for group in domains.values() if place < len(group)]


def random_tokens(vocabulary: int, length: int, count: int) -> list[list[int]]:
    """Return ``count`` random prompts of one length, the same ones each time."""
    chance = random.Random(0)
    return [[chance.randrange(_FIRST_TOKEN, vocabulary) for _ in range(length)] for _ in range(count)]


def _prompts(text: str, source: str) -> Iterator[Prompt]:
    begin = text.lstrip()[:1]
    if begin == "[" and text.rstrip()[-1:] == "]":
        entries = _parsed(text, f"{source} begins like a JSON list and")
        for number, entry in enumerate(entries, start=1):
            where = f"{source}, entry {number},"
            if not isinstance(entry, dict) or not {"conversations", "prompt", "turns"} & entry.keys():
                raise ConfigError(f"{where} has no list of conversations and no prompt.")
            if "conversations" not in entry:
                yield _prompt(entry, where)
                continue
            turns = [turn for turn in entry["conversations"] if isinstance(turn, dict)]
            said = [turn.get("value") for turn in turns if turn.get("from") in ("human", "user")]
            if said and isinstance(said[0], str) and said[0].strip():  # real files have empty conversations
                yield Prompt(said[0])
        return
    for number, line in enumerate(text.split("\n"), start=1):  # JSON allows other ends of lines, U+2028, inside a text
        if line.strip():
            where = f"{source}, line {number},"
            yield _prompt(_parsed(line, where), where) if begin == "{" else Prompt(line)


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON ({error}).") from error


def _prompt(entry: Any, where: str) -> Prompt:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} is not an object.")
    turns = entry.get("turns")
    text = turns[0] if isinstance(turns, list) and turns else entry.get("prompt")
    domain, tokens = entry.get("category") or entry.get("domain") or "", entry.get("output_tokens")
    if not isinstance(text, str) or not text or not isinstance(domain, str):
        raise ConfigError(f'{where} has neither a text as "prompt" nor texts as "turns", or its domain is not a text.')
    if tokens is not None and (not isinstance(tokens, int) or tokens < 1):
        raise ConfigError(f"{where} has output_tokens {tokens!r}, which is not a number of tokens.")
    return Prompt(text, domain, tokens)
