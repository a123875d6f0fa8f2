"""``vllm-dymoe trace``: prompts through a model, and what its routers chose into a folder."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

import vllm_dymoe
from vllm_dymoe.config import ConfigError
from vllm_dymoe.units import size


def run(
    model: str,
    prompts: Path,
    out: Path,
    *,
    max_tokens: int,
    inputs: bool,
    limit: str,
    options: str,
    engine: str,
) -> None:
    """Record a trace and say what it became.

    Raises:
        ConfigError: the prompts cannot be read, or an option is wrong.
    """
    texts = read_prompts(prompts)
    report = vllm_dymoe.record_trace(
        model,
        texts,
        out,
        max_tokens=max_tokens,
        limit=limit,
        inputs=inputs,
        options=json_object("--options", options),
        engine=json_object("--engine", engine),
    )
    console = Console()
    console.print(
        f"{report['tokens']} tokens of {len(texts)} prompts, {size(report['bytes'])} in {out}.", soft_wrap=True
    )
    if not report["recording"]:
        console.print(f"It ends early: --limit {limit} was reached.", soft_wrap=True)
    console.print("To see what it shows:", soft_wrap=True)
    console.print(f"vllm-dymoe report {out}", soft_wrap=True, markup=False)


def read_prompts(path: Path) -> list[tuple[str, str]]:
    """Prompts of a file, each with its domain: its lines, or in a .jsonl file objects with ``prompt`` and ``domain``.

    Raises:
        ConfigError: there is none, or a line is not what it should be.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} cannot be read as text ({error}); give a file with a prompt in each line."
        ) from error
    prompts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if path.suffix != ".jsonl":
            prompts.append((line, ""))
            continue
        try:
            entry = json.loads(line)
            text, domain = entry["prompt"], entry.get("domain") or ""
        except (ValueError, TypeError, KeyError, AttributeError):
            text, domain = None, ""
        if not isinstance(text, str) or not text or not isinstance(domain, str):
            raise ConfigError(
                f'{path}, line {number}, is not an object with a text as "prompt" and, if wanted, one as "domain".'
            )
        prompts.append((text, domain))
    if not prompts:
        raise ConfigError(f"{path} has no prompts; give a file with one in each line.")
    return prompts


def write_prompts(path: Path, prompts: Sequence[tuple[str, str]]) -> None:
    """The opposite of :func:`read_prompts`, as objects."""
    path.write_text("".join(json.dumps({"prompt": text, "domain": domain}) + "\n" for text, domain in prompts))


def json_object(option: str, text: str) -> dict[str, Any]:
    """An option that is a JSON object.

    Raises:
        ConfigError: it is none.
    """
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{option} is not JSON ({error}).") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{option} has to be a JSON object, such as '{{\"hi\": 16}}'.")
    return value
