"""``vllm-dymoe quantize``: progress while it runs, a table at the end."""

import time
from pathlib import Path
from typing import Any

import torch
import typer
from pydantic import ValidationError
from rich.markup import escape

from vllm_dymoe.cache.store import Manifest
from vllm_dymoe.cli.display import byte_progress, print_table
from vllm_dymoe.options import CALIBRATED, ConfigError, Options
from vllm_dymoe.quantize.calibration import Calibration
from vllm_dymoe.quantize.checkpoint import Checkpoint
from vllm_dymoe.quantize.convert import convert
from vllm_dymoe.quantize.packer import FALLBACK
from vllm_dymoe.quantize.readers.base import describe, store_group_sizes
from vllm_dymoe.units import size


def run(
    model: Path, out: Path, asked: dict[str, Any], calibration: Path | None, dtype: str, *, overwrite: bool
) -> None:
    """Write a checkpoint with the given options.

    Options that are None follow from the others.
    """
    quantizer = asked["quantizer"] or ("rtn" if calibration is None else "gptq")
    given = asked | {"quantizer": quantizer, "group_size": asked["group_size"] or Options().group_size}
    try:
        options = Options.model_validate(given)
    except ValidationError as error:
        raise ConfigError(error.errors()[0]["msg"].removeprefix("Value error, ") + ".") from None
    if quantizer in CALIBRATED and calibration is None:
        raise ConfigError(
            f"{quantizer} needs --calibration, a folder that `vllm-dymoe calibrate MODEL --texts FILE --out FOLDER` "
            "writes."
        )
    if quantizer not in CALIBRATED and calibration is not None:
        raise ConfigError(f"--quantizer {quantizer} does not use --calibration; leave one of them out.")
    recorded = None if calibration is None else Calibration(calibration)
    checkpoint = Checkpoint.open(model)
    reader = checkpoint.reader
    if asked["group_size"] is None and reader.held:
        options = Options.model_validate(given | {"group_size": store_group_sizes(reader, 0, 1)[0]})
    kind = None if dtype == "auto" else getattr(torch, dtype)
    with byte_progress(f"Quantizing {escape(model.name)}", checkpoint.dense_bytes + checkpoint.expert_bytes) as advance:
        began = time.perf_counter()
        manifest = convert(checkpoint, out, options, kind, recorded, overwrite=overwrite, progress=advance)
    _print_summary(checkpoint, out.absolute(), manifest, time.perf_counter() - began)
    if reader.held or reader.mixed:
        typer.echo(f"Experts: {describe(reader, options.stored_bits, quantizer)}.")


def _print_summary(checkpoint: Checkpoint, folder: Path, manifest: Manifest, seconds: float) -> None:
    experts = manifest.experts
    count = len(experts.layers) * experts.num_experts
    dense, before = checkpoint.dense_bytes, checkpoint.expert_bytes
    rows = [("dense", size(dense), size(dense), "")]
    for position, (bits, fmt) in enumerate(experts.formats.items()):
        name = f"{count} experts, {'low' if position else 'high'} precision, {bits} bits"
        packed = size(experts.nbytes(bits)) if not fmt.encoding.upper_of else "inside"
        rows.append((name, "" if position else size(before), packed, size(fmt.whole_nbytes)))
    rows.append(("in all", size(dense + before), size(dense + experts.stored_nbytes), ""))
    print_table(escape(str(folder)), ("", "before", "after", "an expert"), rows)
    fallbacks = manifest.errors.fallbacks if manifest.errors else ()
    if rare := sum(map(len, fallbacks)):
        width = next(iter(experts.formats.values())).hidden
        typer.echo(
            f"{rare} of {count} experts saw too few tokens in the calibration (fewer than {width}), and were quantized "
            f"with {'what their layers read' if manifest.quantizer == 'e8' else FALLBACK}:"
        )
        for layer, numbers in zip(experts.layers, fallbacks, strict=True):
            if numbers:
                typer.echo(f"  layer {layer}: {', '.join(map(str, numbers))}")
    typer.echo(f"Written in {seconds:.1f} s. To serve it:\nvllm serve {folder}")
