"""Estimates how fast Gluon kernels are on the measured card, by instructions.

Decode: times measured without tensor cores are scaled by the instructions of both kernels' loops over a warp's strip.
This is right if issuing instructions bounds the measured kernel, as its share of memory's bound suggests, and if only
memory bounds the other one.

Large batches: one time is that of issuing the loops' instructions, one a clock for each of a multiprocessor's four
parts; the other is that of the products, padding included, at the rate that mma.sync can reach. If the two overlap, a
layer takes the longer one; otherwise their sum.

Estimates are no measurements; `gpu.py --parts decode` and `--parts prompts` are.
"""

import json
import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # an installed package takes precedence

from layers import LAYERS, Model, route

HERE = Path(__file__).parent
MEASURED = HERE / "gpu-NVIDIA-H200-2026-11-26.json"
ALONE, TWO = 502, 729
"""Instructions without tensor cores, for one token and for two at a time; experts are read again for every two."""
TOKENS, MANY = (1, 16), (512, 2048)
ALONE_QWEN3 = LAYERS[1].name, 1
PARTS = 8.4, 10.2, 7.6
"""us of planning, gate and up, and down in a decode layer of Qwen3-30B-A3B's, all resident, on that card (LOG.md)."""
QUEUE = 102
"""us of a trip through the CPU queue there, with threads that sleep (LOG.md)."""
ISSUE = 132 * 4 * 1.755e9
"""Instructions of a warp that an H200 issues in a second, at its boost clock."""
FLOPS, SYNCHRONOUS = 684e12, 0.629 * 989e12
"""Of dense products in bfloat16 in a second: measured on that card; and by mma.sync, whose share of the peak is from
"Benchmarking and Dissecting the Nvidia Hopper GPU Architecture via Microbenchmarking" (arXiv 2402.13499)."""
STRIP = 64 * 64
"""Weights of a warp's strip at 4 bits."""
DECODED = 16
"""Most tokens of an expert that the decode kernels compute in a large batch."""


def rows_of(kernel: str, triton: str = "3.6.0", architecture: int = 90) -> Iterator[dict]:
    """Yield the rows of compiled.json at 4 bits for kernels with this prefix."""
    for row in json.loads((HERE / "compiled.json").read_text()):
        of_card = row["triton"], row["architecture"], row["precisions"]
        if row["kernel"].startswith(kernel) and of_card == (triton, architecture, "4"):
            yield row


def on_tensor_cores(tokens: int) -> int:
    """Return the instructions for one expert with up to this number of tokens.

    The larger of the numbers for gate and up and for down counts.
    """
    note = f"device, {8 if tokens <= 8 else 16} tokens"
    return max(row["instructions"] for row in rows_of("mma") if row["note"] == note)


def in_registers() -> dict[int, int]:
    """Return the instructions of large batches, by the number of positions of a tile.

    The larger of the numbers for gate and up and for down counts.
    """
    found: dict[int, int] = {}
    for row in rows_of("mma_grouped"):
        for products, instructions in row["loops"]:  # of 16 x 8 x 16
            positions = products * 16 * 8 * 16 // STRIP
            found[positions] = max(found.get(positions, 0), instructions)
    return found


def tiles_of(tokens: int, sizes: list[int]) -> Iterator[int]:
    """Yield the tile sizes with which an expert's tokens are computed; sizes ascend."""
    for first in range(0, tokens, sizes[-1]):
        yield next(size for size in sizes if size >= min(tokens - first, sizes[-1]))


def counts_of(layer: Model, tokens: int) -> list[int]:
    """Return the number of tokens of each active expert."""
    counts: dict[int, int] = {}
    for expert in (expert for row in route(layer, tokens) for expert in row):
        counts[expert] = counts.get(expert, 0) + 1
    return list(counts.values())


@dataclass(frozen=True)
class Count:
    """One layer's time, measured without tensor cores and counted with them.

    Attributes:
        measured: in us; None if it was not measured.
        bound: of memory in decode, of the matrix rate in large batches; in us.
        steps: what the count adds up if nothing overlaps; in us.
        padding: rows with those that fill up tiles, for each row.
    """

    layer: str
    tokens: int
    measured: float | None
    bound: float
    steps: tuple[float, ...]
    padding: float = 1.0

    @property
    def expected(self) -> float:
        """Time without overlap, in us."""
        return max(sum(self.steps), self.bound)


def decode(speeds: dict[str, dict]) -> Iterator[Count]:
    """Yield the counts of decode."""
    for tokens in TOKENS:
        for layer in LAYERS[:2]:
            counts = counts_of(layer, tokens)
            before = sum(count // 2 * TWO + count % 2 * ALONE for count in counts)
            after = sum(map(on_tensor_cores, counts))
            speed = speeds[f"kernels, {layer.name}, 4 bits, {tokens} tokens"]
            yield Count(layer.name, tokens, speed["measured"], speed["bound"], (speed["measured"] * after / before,))


def large_batches(speeds: dict[str, dict]) -> Iterator[Count]:
    """Yield the counts of large batches; their steps are to issue and to multiply."""
    loops = in_registers()
    for tokens in MANY:
        for layer in LAYERS[:2]:
            strips = 3 * layer.hidden * layer.intermediate / STRIP
            instructions = rows = 0
            counts = counts_of(layer, tokens)
            for count in counts:
                if count <= DECODED:
                    tile = 8 if count <= 8 else 16
                    instructions, rows = instructions + on_tensor_cores(count), rows + tile
                else:
                    for tile in tiles_of(count, sorted(loops)):
                        instructions, rows = instructions + loops[tile], rows + tile
            padding = rows / sum(counts)
            issue, bound = 1e6 * strips * instructions / ISSUE, 1e6 * 2 * strips * STRIP * sum(counts) / FLOPS
            products = bound * FLOPS / SYNCHRONOUS * padding
            measured = speeds.get(f"kernels, {layer.name}, 4 bits, {tokens} tokens", {}).get("measured")
            yield Count(layer.name, tokens, measured, bound, (issue, products), padding)


def print_table(head: list[str], rows: Iterable[list[str]]) -> None:
    """Print a table in Markdown, and an empty line."""
    for cells in (head, ["---"] * len(head), *rows):
        print(f"| {' | '.join(cells)} |")
    print()


def _named(count: Count) -> str:
    return f"{count.layer}, {count.tokens} token{'s' * (count.tokens > 1)}"


def _aims(counts: list[Count], speeds: dict[str, dict]) -> Iterator[list[str]]:
    """Yield a row for each aim: measured, by count without overlap, and the aim."""
    for count in counts:
        if count.measured is not None:
            least = speeds[f"kernels, {count.layer}, 4 bits, {count.tokens} tokens"]["bound"]
            aim = "50%" if count.tokens in MANY or (count.layer, count.tokens) == ALONE_QWEN3 else "75%"
            cells = (f"{time:.0f} us, {least / time:.0%}" for time in (count.measured, count.expected))
            yield [_named(count), *cells, f"{aim} of the bound"]
    decoded = next(count for count in counts if (count.layer, count.tokens) == ALONE_QWEN3)
    products = sum(PARTS[1:]) * decoded.steps[0] / (decoded.measured or math.nan)
    yield ["a decode layer, all resident, ours alone", f"{sum(PARTS):.0f} us", f"{PARTS[0] + products:.0f} us", "14 us"]
    resident = speeds["prefill decided on the device, misses fetch, 100%, 0 projections ahead, a layer"]["measured"]
    yield ["2,048 tokens, all resident", f"{resident:.0f} us", f"{counts[-1].expected:.0f} us and planning", "550 us"]
    yield ["the CPU queue, there and back", f"{QUEUE} us", "no count", "20 us"]


def main() -> None:
    """Print the tables of decode, of large batches, and of the aims."""
    speeds = {speed["name"]: speed for speed in json.loads(MEASURED.read_text())["parts"]["speeds"]["speeds"]}
    few, many = list(decode(speeds)), list(large_batches(speeds))
    print_table(
        ["4 bits", "bound", "measured without", "of the bound", "by count", "of the bound"],
        ([_named(one), f"{one.bound:.3g} us", f"{one.measured:.3g} us", f"{one.bound / one.measured:.0%}",
          f"{one.expected:.3g} us", f"{one.bound / one.expected:.0%}"] for one in few),
    )  # fmt: skip
    print_table(
        ["4 bits", "measured without", "rows with padding", "issue", "products",
         "of the matrix rate, one after the other", "at the same time"],
        ([_named(one), "" if one.measured is None else f"{one.measured:.4g} us", f"{one.padding:.2f}",
          *(f"{step:.0f} us" for step in one.steps), f"{one.expected:.0f} us, {one.bound / one.expected:.0%}",
          f"{one.bound / max(one.steps):.0%}"] for one in many),
    )  # fmt: skip
    print_table(["4 bits", "measured", "by count, without overlap", "aim"], _aims([*few, *many], speeds))


if __name__ == "__main__":
    main()
