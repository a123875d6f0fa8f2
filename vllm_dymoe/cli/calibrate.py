"""``vllm-dymoe calibrate``: shows progress while the model reads.

Then it says how to use the result.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
import typer

import vllm_dymoe
from vllm_dymoe.cache.host_cache import HostCache
from vllm_dymoe.cache.store import FileStore, whole_host_cache
from vllm_dymoe.cache.store.pinning import CudaPinner
from vllm_dymoe.cli.display import byte_progress, count_progress
from vllm_dymoe.executor.rates import RATES
from vllm_dymoe.options import ConfigError, Options
from vllm_dymoe.plan.device import parse_rate
from vllm_dymoe.quantize.checkpoint import Checkpoint
from vllm_dymoe.resolve import resolve_options
from vllm_dymoe.server import ExpertServer
from vllm_dymoe.units import size


def run(model: Path, texts: list[Path], out: Path, *, tokens: int, length: int, high: int, expert_budget: str) -> None:
    options = {"high": high, "expert_budget": expert_budget}
    resolve_options(options, environment={})
    Checkpoint.open(model)  # refuses unsupported checkpoints before an engine starts
    words = list(_read(texts))
    try:
        with count_progress(f"Calibrating {model.name}, tokens") as progress:
            recording = vllm_dymoe.calibrate(
                model, words, out, tokens=tokens, length=length, progress=progress, **options
            )
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise ConfigError("calibration runs the model in vLLM, which is not installed.") from error
    typer.echo(
        f"The inputs of {len(recording.layers)} layers for {sum(recording.parts)} tokens, {size(recording.nbytes)}, "
        f"are recorded. To use them:\nvllm-dymoe quantize {model} -o OUT --calibration {out}"
    )


def measure(folder: Path, link: str | None) -> None:
    """Measure how fast this machine fetches and computes a store's experts.

    The rates are stored next to the store.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and link is None:
        raise ConfigError("a CPU has no link to measure; set the rate of an emulated one: --link 25GB/s.")
    files = FileStore(folder)
    bits = sorted(files.experts.formats, reverse=True)
    given = {"high": bits[0], "low": bits[1] if len(bits) > 1 else 0, "link_gbps": link and parse_rate(link) / 1e9}
    options = Options.model_validate({"misses": "share", "expert_budget": "100%", **given})
    with byte_progress(f"Reading {folder.name} into memory", files.experts.stored_nbytes) as progress:
        store = HostCache(files, whole_host_cache(files.experts), CudaPinner(device) if device.type == "cuda" else None)
        store.fill(progress)
    (folder / RATES).unlink(missing_ok=True)
    server = ExpertServer(store, options, device, rates=folder / RATES)
    typer.echo(f"Here {server.cpu_execution.describe()}; stored in {folder / RATES}.")
    server.close()


def _read(paths: list[Path]) -> Iterator[str]:
    for path in paths:
        try:
            content = path.read_text(encoding="utf-8")
            if path.suffix == ".jsonl":
                lines = content.split("\n")  # splitlines() would also split at U+2028, which JSON allows inside a text
                yield from [json.loads(line)["text"] for line in lines if line.strip()]
            else:
                yield content
        except OSError as error:
            raise ConfigError(f"{path} cannot be read ({error.strerror}).") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path} is not UTF-8 text.") from error
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f'{path} does not have an object with a "text" in each line ({error!r}).') from error
