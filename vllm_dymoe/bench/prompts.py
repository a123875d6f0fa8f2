"""Prompts for measurements: files in the formats that serving benchmarks use, the set that ships, and random tokens.

Formats, told apart by what a file holds:

- ShareGPT: a JSON list of objects with ``conversations``; a prompt is the first thing that a human says.
- vLLM's ``custom``: JSON lines with ``prompt`` and, if given, ``output_tokens`` and a ``domain``.
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

from vllm_dymoe.config import ConfigError

SHIPPED = "shipped"
_FIRST_TOKEN = 2  # of random prompts: what is below is often special
_RANDOM = re.compile(r"random:(\d+)")


@dataclass(frozen=True)
class Prompt:
    """One request.

    Attributes:
        text: what is asked.
        domain: what kind of text it is; empty if nothing says so.
        output_tokens: length of the answer; None for that of the run.
    """

    text: str
    domain: str = ""
    output_tokens: int | None = None


@dataclass(frozen=True)
class PromptSet:
    """What a run asks.

    Attributes:
        name: for people.
        prompts: in the order of the file; empty if they are random.
        random_length: tokens of a random prompt; None for real ones.
    """

    name: str
    prompts: tuple[Prompt, ...] = ()
    random_length: int | None = None

    @property
    def is_random(self) -> bool:
        """Random tokens are routed almost evenly: how often a cache hits on them says nothing about its use."""
        return self.random_length is not None

    @property
    def digest(self) -> str:
        """Changes with any prompt."""
        texts = [[prompt.text, prompt.domain, prompt.output_tokens] for prompt in self.prompts]
        return hashlib.sha256(json.dumps([texts, self.random_length]).encode()).hexdigest()[:12]


def read_prompts(source: str) -> PromptSet:
    """Prompts of a file, ``shipped`` for the set that ships, or ``random:LENGTH``.

    Raises:
        ConfigError: it cannot be read, has no prompt, or has something else among them.
    """
    if source == SHIPPED:
        text = resources.files("vllm_dymoe.bench").joinpath("prompts.json").read_text()
        return PromptSet(SHIPPED, tuple(_conversations(text, SHIPPED)))
    if (found := _RANDOM.fullmatch(source)) and int(found[1]):
        return PromptSet(source, random_length=int(found[1]))
    path = Path(source)
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{source} cannot be read as prompts ({error}); name a file, {SHIPPED}, or random:LENGTH with a length "
            "above 0."
        ) from error
    prompts = tuple(_conversations(text, source) if _is_list(text) else _lines(text.splitlines(), source))
    if not prompts:
        raise ConfigError(f"{source} has no prompts.")
    return PromptSet(path.name, prompts)


def by_turns(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Domains in turn, so that any number of prompts from the front has all of them."""
    domains: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        domains.setdefault(prompt.domain, []).append(prompt)
    longest = max(map(len, domains.values()), default=0)
    return [group[place] for place in range(longest) for group in domains.values() if place < len(group)]


def random_tokens(vocabulary: int, length: int, count: int) -> list[list[int]]:
    """So many prompts of one length, the same ones each time."""
    chance = random.Random(0)
    return [[chance.randrange(_FIRST_TOKEN, vocabulary) for _ in range(length)] for _ in range(count)]


def windows(tokens: Sequence[int], length: int, count: int) -> list[list[int]]:
    """Pieces of one length from all over a text; they overlap where it is short.

    Raises:
        ConfigError: it is shorter than one of them.
    """
    room = len(tokens) - length
    if room < 0:
        raise ConfigError(f"all prompts together have {len(tokens)} tokens, but one of {length} was asked for.")
    starts = [number * room // max(1, count - 1) for number in range(count)]
    return [list(tokens[start : start + length]) for start in starts]


def _is_list(text: str) -> bool:
    return text.lstrip()[:1] == "[" and text.rstrip()[-1:] == "]"


def _conversations(text: str, source: str) -> Iterator[Prompt]:
    try:
        entries = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{source} begins like a JSON list and is none ({error}).") from error
    for number, entry in enumerate(entries, start=1):
        if isinstance(entry, dict) and "conversations" not in entry and "prompt" in entry:
            yield _prompt(entry, f"{source}, entry {number},")
            continue
        said = entry.get("conversations") if isinstance(entry, dict) else None
        if not isinstance(said, list):
            raise ConfigError(f"{source}, entry {number}, has no list of conversations and no prompt.")
        first = next((turn for turn in said if isinstance(turn, dict) and turn.get("from") in ("human", "user")), None)
        if first is not None and isinstance(first.get("value"), str) and first["value"].strip():
            yield Prompt(first["value"])  # real files have empty conversations


def _lines(lines: Sequence[str], source: str) -> Iterator[Prompt]:
    objects = next((line for line in lines if line.strip()), "").lstrip().startswith("{")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if not objects:
            yield Prompt(line)
            continue
        where = f"{source}, line {number},"
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{where} is not JSON ({error}).") from error
        yield _prompt(entry, where)


def _prompt(entry: Any, where: str) -> Prompt:
    """One object of ``custom`` or ``spec_bench``."""
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} is not an object.")
    turns = entry.get("turns")
    text = turns[0] if isinstance(turns, list) and turns else entry.get("prompt")
    domain, tokens = entry.get("category") or entry.get("domain") or "", entry.get("output_tokens")
    if not isinstance(text, str) or not text or not isinstance(domain, str):
        raise ConfigError(f'{where} has neither a text as "prompt" nor texts as "turns".')
    if tokens is not None and (not isinstance(tokens, int) or tokens < 1):
        raise ConfigError(f"{where} has output_tokens {tokens!r}, which are no number of tokens.")
    return Prompt(text, domain, tokens)
