"""``vllm-dymoe quantize``: progress while it runs, a table at the end."""

import time
from pathlib import Path

import torch
from pydantic import ValidationError
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vllm_dymoe.cli.display import byte_progress
from vllm_dymoe.config import CALIBRATED, ConfigError, Options
from vllm_dymoe.quantize.calibration import Calibration
from vllm_dymoe.quantize.checkpoint import Checkpoint
from vllm_dymoe.quantize.convert import convert
from vllm_dymoe.quantize.packer import FALLBACK
from vllm_dymoe.quantize.readers.base import describe, store_group_sizes
from vllm_dymoe.store import Manifest
from vllm_dymoe.units import size


def run(
    model: Path,
    out: Path,
    *,
    hi: int,
    lo: int,
    group_size: int | None,
    quantizer: str | None,
    calibration: Path | None,
    dtype: str,
    tensor_parallel_size: int,
    overwrite: bool,
) -> None:
    if tensor_parallel_size > 1:
        raise ConfigError(
            f"--tensor-parallel-size {tensor_parallel_size} is not supported yet: a checkpoint holds the experts of "
            "one rank; serve the original with --quantization dymoe, which cuts the experts while it loads."
        )
    quantizer = quantizer or ("rtn" if calibration is None else "gptq")
    given = {"hi": hi, "lo": lo, "group_size": group_size or Options().group_size, "quantizer": quantizer}
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
        raise ConfigError(f"--quantizer {quantizer} does not use a --calibration; leave one of the two out.")
    recorded = None if calibration is None else Calibration(calibration)
    checkpoint = Checkpoint.open(model)
    reader = checkpoint.reader
    if group_size is None and reader.held:
        options = Options.model_validate(given | {"group_size": store_group_sizes(reader, 0, 1)[0]})
    kind = None if dtype == "auto" else getattr(torch, dtype)
    with byte_progress(f"Quantizing {escape(model.name)}", checkpoint.dense_bytes + checkpoint.expert_bytes) as advance:
        began = time.perf_counter()
        manifest = convert(checkpoint, out, options, kind, recorded, overwrite=overwrite, progress=advance)
    _print_summary(checkpoint, out.absolute(), manifest, time.perf_counter() - began)
    if reader.held:
        Console().print(f"Experts: {describe(reader, options.stored_bits, quantizer)}.", soft_wrap=True)


def _print_summary(checkpoint: Checkpoint, folder: Path, manifest: Manifest, seconds: float) -> None:
    experts = manifest.experts
    count = len(experts.layers) * experts.num_experts
    dense, before = checkpoint.dense_bytes, checkpoint.expert_bytes
    table = Table("", title=escape(str(folder)), title_justify="left")
    for column in ("before", "after", "an expert"):
        table.add_column(column, justify="right")
    table.add_row("dense", size(dense), size(dense), "")
    for position, (bits, fmt) in enumerate(experts.formats.items()):
        name = f"{count} experts, {'low' if position else 'high'} tier, {bits} bits"
        packed = size(experts.nbytes(bits)) if not fmt.code.upper_of else "inside"
        table.add_row(name, "" if position else size(before), packed, size(fmt.whole_nbytes))
    after = dense + experts.stored_nbytes
    table.add_section()
    table.add_row("in all", size(dense + before), size(after), "")
    console = Console()
    console.print(table)
    fallbacks = manifest.errors.fallbacks if manifest.errors else ()
    if rare := sum(map(len, fallbacks)):
        width = next(iter(experts.formats.values())).hidden
        console.print(
            f"{rare} of {count} experts saw too few tokens in the calibration (fewer than {width}), and were quantized "
            f"with {'what their layers read' if manifest.quantizer == 'e8' else FALLBACK}:",
            soft_wrap=True,
        )
        for layer, numbers in zip(experts.layers, fallbacks, strict=True):
            if numbers:
                console.print(f"  layer {layer}: {', '.join(map(str, numbers))}", soft_wrap=True)
    if left_out := len(checkpoint.left_out):
        console.print(f"{left_out} tensors of multi-token prediction layers were left out.", soft_wrap=True)
    console.print(f"Written in {seconds:.1f} s. To serve it:", soft_wrap=True)
    console.print(f"vllm serve {folder}", soft_wrap=True, markup=False)
