"""``vllm-dymoe calibrate``: a bar while the model reads, and what to do with the result."""

import json
from collections.abc import Iterator
from pathlib import Path

import typer

import vllm_dymoe
from vllm_dymoe.cli.display import count_progress
from vllm_dymoe.config import ConfigError
from vllm_dymoe.quantize.checkpoint import Checkpoint
from vllm_dymoe.resolve import resolve_options
from vllm_dymoe.units import size


def run(model: Path, texts: list[Path], out: Path, *, tokens: int, length: int, hi: int, expert_budget: str) -> None:
    options = {"hi": hi, "expert_budget": expert_budget}
    resolve_options(options, environment={})
    Checkpoint.open(model)  # refuses what cannot be quantized before an engine starts
    words = list(_read(texts))
    try:
        with count_progress(f"Calibrating {model.name}, tokens") as progress:
            recording = vllm_dymoe.calibrate(
                model, words, out, tokens=tokens, length=length, progress=progress, **options
            )
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise ConfigError("a model is calibrated while vLLM runs it, and vLLM is not installed.") from error
    typer.echo(
        f"The inputs of {len(recording.layers)} layers for {sum(recording.parts)} tokens, {size(recording.nbytes)}, "
        f"are recorded. To use them:\nvllm-dymoe quantize {model} -o OUT --calibration {out}"
    )


def _read(paths: list[Path]) -> Iterator[str]:
    for path in paths:
        try:
            content = path.read_text()
            yield from (
                [json.loads(line)["text"] for line in content.splitlines()] if path.suffix == ".jsonl" else [content]
            )
        except OSError as error:
            raise ConfigError(f"{path} cannot be read ({error.strerror}).") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path} is not a text in UTF-8.") from error
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f'{path} does not have an object with a "text" in each line ({error!r}).') from error
