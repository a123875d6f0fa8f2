"""A device as the roofline sees it: from its data sheet, or from what ``vllm-dymoe bench`` measured on it.

What a data sheet promises is not what programs get. The shares of it below are what the best kernels are reported to
reach; a folder of measured rows replaces them all.
"""

import json
import re
import statistics
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vllm_dymoe.bench.cases import FULL
from vllm_dymoe.bench.rows import Row, is_full_load, read_rows
from vllm_dymoe.config import ConfigError, Options
from vllm_dymoe.plan.model import ModelShape
from vllm_dymoe.systems import System, make_system

_GIB, _PCIE3, _PCIE4, _PCIE5 = 2**30, 15.75e9, 31.51e9, 63.02e9

# GiB of memory, bytes per second of it, dense bf16 operations per second, bytes per second of its link.
_SHEETS: dict[str, tuple[float, float, float, float]] = {
    "rtx3060": (12, 360e9, 25e12, _PCIE4),
    "rtx3090": (24, 936e9, 71e12, _PCIE4),
    "rtx4060ti": (16, 288e9, 44e12, _PCIE4 / 2),
    "rtx4070": (12, 504e9, 58e12, _PCIE4),
    "rtx4080": (16, 717e9, 97e12, _PCIE4),
    "rtx4090": (24, 1008e9, 165e12, _PCIE4),
    "rtx5070ti": (16, 896e9, 88e12, _PCIE5),
    "rtx5080": (16, 960e9, 113e12, _PCIE5),
    "rtx5090": (32, 1792e9, 210e12, _PCIE5),
    "a5000": (24, 768e9, 111e12, _PCIE4),
    "a6000": (48, 768e9, 155e12, _PCIE4),
    "l4": (24, 300e9, 121e12, _PCIE4),
    "l40s": (48, 864e9, 362e12, _PCIE4),
    "a100": (80, 2039e9, 312e12, _PCIE4),
    "h100": (80, 3350e9, 989e12, _PCIE5),
    "h200": (141, 4800e9, 989e12, _PCIE5),
}

_MEMORY_SHARE = 0.8  # of the bandwidth, at a few tokens
_COMPUTE_SHARE = 0.5  # of the operations, in a prompt
_LINK_SHARE = 0.85  # of the link, behind its protocol
_LAYER_SECONDS = 300e-6  # of the host, which decides every layer; by count of its work


@dataclass(frozen=True)
class Measured:
    """What a run says of steps with every expert on the device, and of misses.

    Attributes:
        step: seconds of a decode step, by bit-width and batch.
        own_step: the same where a system chooses tiers and names experts ahead, by `serving` and batch.
        prompt: seconds to the first token, by bit-width and batch.
        prompt_tokens: mean length of these prompts, together in a batch.
        miss: seconds of the host for each miss, beside the time of its bytes.
    """

    step: dict[tuple[int, int], float] = field(default_factory=dict)
    own_step: dict[tuple[str, int], float] = field(default_factory=dict)
    prompt: dict[tuple[int, int], float] = field(default_factory=dict)
    prompt_tokens: dict[tuple[int, int], float] = field(default_factory=dict)
    miss: float = 0.0


@dataclass(frozen=True)
class Device:
    """What it can do.

    Attributes:
        name: for people.
        memory: bytes.
        bandwidth: bytes per second that kernels read.
        compute: operations per second.
        link: bytes per second from the host.
        layer_seconds: of the host, for each layer with experts.
        measured: in place of the roofline, where it was.
    """

    name: str
    memory: int
    bandwidth: float
    compute: float
    link: float
    layer_seconds: float = _LAYER_SECONDS
    measured: Measured = field(default_factory=Measured)


def find_device(name: str, link: str | None) -> Device:
    """By the name of a GPU, or by the folder of a run of ``vllm-dymoe bench``.

    Args:
        name: as people write it: "RTX 4090", "rtx-4090".
        link: as ``25GB/s``; that of the data sheet or of the run if None.

    Raises:
        ConfigError: it is not known, or the link is no rate.
    """
    key = _key(name)
    if key in _SHEETS:
        memory, bandwidth, compute, sheet_link = _SHEETS[key]
        device = Device(name, int(memory * _GIB), bandwidth * _MEMORY_SHARE, compute * _COMPUTE_SHARE,
                        sheet_link * _LINK_SHARE)  # fmt: skip
    elif (Path(name) / "rows.jsonl").is_file():
        device = measured_device(read_rows(Path(name) / "rows.jsonl"), name)
    else:
        raise ConfigError(
            f"{name} is neither a GPU that is known ({', '.join(_SHEETS)}) nor a folder that `vllm-dymoe bench` wrote."
        )
    return device if link is None else replace(device, link=parse_rate(link))


def emulated_rate(gpu: str, shape: ModelShape, bits: int, layer_seconds: float) -> float:
    """A link as slow beside this machine's computation as a GPU's is beside its own.

    Both are the data sheet's bounds: decode that uses all of the memory's bandwidth, and a copy all of the link's.

    Args:
        gpu: its name.
        shape: of the model.
        bits: of its experts.
        layer_seconds: of a decode step of one token here, with every expert on the device.

    Returns:
        Bytes per second.

    Raises:
        ConfigError: the GPU is not known.
    """
    key = _key(gpu)
    if key not in _SHEETS:
        raise ConfigError(f"{gpu} is no rate such as 25GB/s and no GPU that is known: {', '.join(_SHEETS)}.")
    _, bandwidth, _, link = _SHEETS[key]
    blob = shape.packed((bits,)).formats[bits].nbytes
    there = (2 * shape.attention_weights + shape.top_k * blob) / bandwidth
    return link * there / layer_seconds


def _key(name: str) -> str:
    return re.sub(r"nvidia|geforce|[^a-z0-9]", "", name.lower())


def measured_device(rows: list[Row], name: str) -> Device:
    """What a run of ``vllm-dymoe bench`` saw in the rows that plans begin with; its others are predicted from that.

    Raises:
        ConfigError: the run has no full load.
    """
    machine = next((row for row in rows if row["kind"] == "machine"), None)
    full = Measured()
    for row in rows:
        measured: dict[str, Any] = row.get("measured", {})
        if is_full_load(row):
            at = _options_of(row).hi, row["batch"]
            full.step[at] = measured["tpot_ms"]["mean"] / 1e3
            full.prompt[at] = measured["ttft_ms"]["median"] / 1e3
            lengths = measured["prompt_tokens"]
            full.prompt_tokens[at] = row["batch"] * sum(lengths) / len(lengths)
        elif _is_resident(row):
            full.own_step[serving(_options_of(row)), row["batch"]] = measured["tpot_ms"]["mean"] / 1e3
    if machine is None or not full.step:
        raise ConfigError(f"{name} has no row of full load; let `vllm-dymoe bench` finish first.")
    link = machine["link_bytes_per_second"]
    on_demand = [row for row in rows if _is_on_demand(row)]
    misses = [_miss_seconds(row, full, link) for row in on_demand if (_options_of(row).hi, row["batch"]) in full.step]
    if misses:
        full = replace(full, miss=max(0.0, statistics.fmean(misses)))
    return Device(
        name, machine.get("memory_bytes", 0), machine["memory_bytes_per_second"], float("inf"), link, measured=full
    )


def is_beginning(row: Row) -> bool:
    """Whether plans begin with this row of the plugin, so that they cannot be compared with it."""
    return is_full_load(row) or _is_resident(row) or _is_on_demand(row)


def _is_resident(row: Row) -> bool:
    """Whether it says what a step takes with every expert resident in one system, which keeps them."""
    return _is_ours(row) and row["budget"] == FULL and _system_of(row).residency.keeps


def _is_on_demand(row: Row) -> bool:
    """Whether it says what misses cost: nothing is kept, nothing fetched ahead, and bytes travel beside computation."""
    if not _is_ours(row):
        return False
    system = _system_of(row)
    return not system.residency.keeps and system.foresight is None and system.residency.overlaps


def serving(options: Options) -> str:
    """The same for options that serve alike if every expert is resident."""
    return json.dumps([options.system, options.system_options, options.hi, options.lo], sort_keys=True)


def _is_ours(row: Row) -> bool:
    return row["kind"] == "speed" and row["options"] is not None


def _options_of(row: Row) -> Options:
    return Options.model_validate(row["options"])


def _system_of(row: Row) -> System:
    return make_system(_options_of(row))


def _miss_seconds(row: Row, full: Measured, link: float) -> float:
    """What is left of a step for each of its misses, without computation and the time of all bytes."""
    measured, options = row["measured"], _options_of(row)
    decode, steps = measured["decode"], measured["decode_steps"]
    rate = link if options.link_gbps is None else options.link_gbps * 1e9
    travelling = sum(decode["bytes_moved"].values()) / steps / rate
    computing = full.step[options.hi, row["batch"]]
    return float((measured["tpot_ms"]["mean"] / 1e3 - computing - travelling) * steps / decode["misses"])


def parse_rate(text: str) -> float:
    """Bytes per second of "25GB/s", "25 GB/s" or "900MB/s".

    Raises:
        ConfigError: it is no rate.
    """
    found = re.fullmatch(r"\s*([\d.]+)\s*([KMG])B/s\s*", text, re.IGNORECASE)
    try:
        rate = float(found[1]) * {"K": 1e3, "M": 1e6, "G": 1e9}[found[2].upper()] if found else 0.0
    except ValueError:
        rate = 0.0
    if rate <= 0:
        raise ConfigError(f'{text} is no rate of a link; write it as "25GB/s".')
    return rate
