"""A device for the roofline.

It has the numbers of its data sheet, and the shares of them that our kernels reach. ``measured.json`` holds what
``make gpu`` measured on real cards. A card that was not measured is assumed to reach the same shares of its own data
sheet.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from vllm_dymoe.options import ConfigError

_PCIE4, _PCIE5 = 31.51e9, 63.02e9

# GiB of memory, its bytes per second, dense bf16 operations per second, bytes per second of the link.
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

# Number of weights of one expert, for the models in reports.
_WEIGHTS = {"Mixtral-8x7B": 3 * 4096 * 14336, "Qwen3-30B-A3B": 3 * 2048 * 768}
# Shares of bandwidth, and of operations in a prompt, that vLLM's dense kernels reach; an assumption.
_MEMORY_SHARE, _COMPUTE_SHARE = 0.75, 0.5
_SHARE_MEASURED = 0.9  # of a data sheet, that torch's sum and product reach; an assumption
_LINK_SHARE = 0.85  # share of the link that its protocol leaves


@dataclass(frozen=True)
class ExpertRate:
    """The rate of our kernels with resident experts of one size."""

    card: str  # card on which it was measured, a key of the data sheets
    weights: int  # weights of one expert
    tokens: int  # tokens of the step
    nested: bool  # 4/2 bits, else 4
    read: float  # bytes per second
    compute: float  # operations per second


@dataclass(frozen=True)
class DenseRate:
    """How fast a CPU multiplies tokens with weights outside of experts.

    The time of a call is part of the rate, so it holds for matrices of the size that was measured.
    """

    bits: float  # of a weight
    tokens: int  # of the step
    weights: float  # per second, each counted once for all tokens
    format: str = ""  # of the tool that quantized the checkpoint; empty for the option ``dense``
    kernel: str = ""  # vLLM's name of what multiplies that format


@dataclass(frozen=True)
class Device:
    """The capabilities of a device."""

    name: str  # as the user wrote it
    memory: int  # bytes
    bandwidth: float  # bytes per second that kernels read
    compute: float  # operations per second
    link: float  # bytes per second from the host
    decides: bool = False  # the device plans: decode steps are graphs, and prompts do not wait for the host
    host_memory: int | None = None  # bytes for experts; None if all of them fit
    disk: float = float("inf")  # bytes per second of the disk, for experts that are not in memory
    host: float = 0.0  # bytes per second of CPU execution; 0 if all misses are fetched
    rates: tuple[ExpertRate, ...] = ()  # of this device's kernels; if empty, experts are as fast as dense layers
    dense: tuple[DenseRate, ...] = ()  # of dense layers; if empty, by bandwidth and operations

    @property
    def key(self) -> str:
        """The device's name in data sheets and measurements."""
        return _key(self.name)

    @property
    def is_cpu(self) -> bool:
        """Whether experts are in the device's own memory."""
        return self.link == float("inf")

    def dense_seconds(self, nbytes: float, bits: float, tokens: int, format: str = "") -> float:
        """Return the seconds in which dense weights are multiplied with so many tokens.

        On a CPU a checkpoint's format that was not measured is as fast as 16 bits, weight by weight: its bytes alone
        say little, because kernels for fewer bits wait for arithmetic rather than for memory.

        Args:
            format: of the tool that quantized the checkpoint.
        """
        weights = 8 * nbytes / bits
        known = [rate for rate in self.dense if rate.format == format and (format or rate.bits == bits)]
        if not known and format and self.is_cpu:
            return self.dense_seconds(2 * weights, 16, tokens)
        if not known:
            return max(nbytes / self.bandwidth, 2 * weights * tokens / self.compute)
        places = [rate.tokens for rate in known]
        each = np.interp(tokens, places, [1 / rate.weights for rate in known])
        return float(weights * each * max(1.0, tokens / places[-1]))

    def expert_rate(self, weights: int, tokens: float, *, nested: bool) -> ExpertRate:
        """Return the measured rate that is nearest to a step.

        The nearest size of experts counts first, then the number of tokens.
        """

        def distance(rate: ExpertRate) -> tuple[bool, float, float]:
            return rate.nested != nested, abs(math.log(rate.weights / weights)), abs(math.log(rate.tokens / tokens))

        dense = ExpertRate(self.name, weights, 1, nested, self.bandwidth, self.compute)
        return min(self.rates, key=distance, default=dense)


def rates_of(report: Mapping[str, Any]) -> Iterator[ExpertRate]:
    """Yield the rates of the kernels in a report of ``make gpu``.

    Where several ways to compute were measured, the fastest counts, as a server takes it.

    Raises:
        ConfigError: the card has no data sheet.
    """
    card = _key(report["card"])
    if card not in _SHEETS:
        raise ConfigError(f"the report is for an unknown GPU, {report['card']}; known are {', '.join(_SHEETS)}.")
    fastest = dict[tuple[str, ...], ExpertRate]()
    for speed in (speed for part in report["parts"].values() for speed in part.get("speeds", ())):
        named = re.fullmatch(r"kernels, (.+), 4(/2)? bits, (\d+) tokens(?:, .+)?", speed["name"])
        reached = re.fullmatch(r"([\d.]+) GB/s, ([\d.]+) TFLOP/s", speed["remark"])
        if named and reached and named[1] in _WEIGHTS:
            rates = 1e9 * float(reached[1]), 1e12 * float(reached[2])
            rate = ExpertRate(card, _WEIGHTS[named[1]], int(named[3]), named[2] is not None, *rates)
            if named.groups() not in fastest or fastest[named.groups()].read < rate.read:
                fastest[named.groups()] = rate
    yield from fastest.values()


def _measured(card: str, report: Path | None) -> Iterator[ExpertRate]:
    """Yield the rates of a card.

    They come from a report of ``make gpu`` on it, or are the shares that measured cards reached.
    """
    if report is not None:
        try:
            found = list(rates_of(json.loads(report.read_text())))
        except (OSError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{report} is not a report of make gpu ({error}); run `make gpu` on the card.") from error
        if not found or found[0].card != card:
            raise ConfigError(f"{report} has no speeds for {card}; give the report that make gpu wrote on it.")
    else:
        found = _shipped()
        found = [rate for rate in found if rate.card == card] or found
    _, read, compute, _ = _SHEETS[card]
    yield from _scaled(found, read, compute)


def _scaled(rates: Iterable[ExpertRate], own_read: float, own_compute: float) -> Iterator[ExpertRate]:
    """Yield the rates of a card that reaches the same shares as measured cards.

    The shares are of the card's own rates of memory and multipliers.
    """
    for rate in rates:
        _, read, compute, _ = _SHEETS[rate.card]
        yield replace(rate, read=rate.read * own_read / read, compute=rate.compute * own_compute / compute)


def shares_of_cards(read: float, compute: float) -> tuple[ExpertRate, ...]:
    """Return the rates of a card without a data sheet.

    Args:
        read: bytes per second that it was measured to read.
        compute: operations per second that it was measured to compute.
    """
    return tuple(_scaled(_shipped(), read / _SHARE_MEASURED, compute / _SHARE_MEASURED))


def _shipped() -> list[ExpertRate]:
    found = resources.files("vllm_dymoe.plan").joinpath("measured.json").read_text()
    return TypeAdapter(list[ExpertRate]).validate_json(found)


def find_device(name: str, link: str | None, report: Path | None = None) -> Device:
    """Return a GPU by its name, such as "rtx4090" or "NVIDIA GeForce RTX 4090".

    Args:
        link: rate of its link; None for that of its data sheet.
        report: what ``make gpu`` has written on this card; None to use known measurements.

    Raises:
        ConfigError: the GPU is unknown, or the report is of another one.
    """
    if (key := _key(name)) not in _SHEETS:
        raise ConfigError(f"unknown GPU {name}; known are {', '.join(_SHEETS)}.")
    memory, bandwidth, compute, sheet = _SHEETS[key]
    return Device(
        name, int(memory * 2**30), bandwidth * _MEMORY_SHARE, compute * _COMPUTE_SHARE,
        sheet * _LINK_SHARE if link is None else parse_rate(link), decides=True,
        rates=tuple(_measured(key, report)),
    )  # fmt: skip


def _key(name: str) -> str:
    """Return the key of a GPU's name.

    The name is in the driver's spelling, such as "NVIDIA A100-SXM4-80GB", or a common one.
    """
    return re.sub(r"nvidia|geforce|rtx\s*(?=a\d)|sxm\d?|pcie|nvl|hbm\de?|\d+\s*gb|[^a-z0-9]", "", name.lower())


def parse_rate(text: str) -> float:
    """Return the bytes per second of "25GB/s", "25 GB/s" or "900MB/s".

    Raises:
        ConfigError: the text is anything else.
    """
    found = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([KMG])B/s\s*", text, re.IGNORECASE)
    rate = float(found[1]) * {"K": 1e3, "M": 1e6, "G": 1e9}[found[2].upper()] if found else 0.0
    if rate <= 0:
        raise ConfigError(f'{text} is not a rate; write it as "25GB/s".')
    return rate
