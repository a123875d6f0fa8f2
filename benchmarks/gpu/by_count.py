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
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # an installed package takes precedence

from layers import LAYERS, Model, route

HERE = Path(__file__).parent
MEASURED = HERE / "gpu-NVIDIA-H200-2026-11-26.json"
ALONE, TWO = 502, 729
"""Instructions without tensor cores, for one token and for two at a time; experts are read again for every two."""
TOKENS, MANY = (1, 16), (512, 2048)
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


def decode(speeds: dict[str, dict]) -> None:
    """Print the table of decode, in Markdown."""
    print("| 4 bits | bound | measured without | of the bound | by count | of the bound |")
    print("| --- | --- | --- | --- | --- | --- |")
    for tokens in TOKENS:
        for layer in LAYERS[:2]:
            counts = counts_of(layer, tokens)
            before = sum(count // 2 * TWO + count % 2 * ALONE for count in counts)
            after = sum(map(on_tensor_cores, counts))
            speed = speeds[f"kernels, {layer.name}, 4 bits, {tokens} tokens"]
            bound, measured = speed["bound"], speed["measured"]
            expected = max(measured * after / before, bound)
            print(
                f"| {layer.name}, {tokens} token{'s' * (tokens > 1)} | {bound:.3g} us | {measured:.3g} us | "
                f"{bound / measured:.0%} | {expected:.3g} us | {bound / expected:.0%} |"
            )


def large_batches(speeds: dict[str, dict]) -> None:
    """Print the table of large batches, in Markdown."""
    loops = in_registers()
    print("| 4 bits | measured without | rows with padding | issue | products | ", end="")
    print("of the matrix rate, one after the other | at the same time |\n" + "| --- " * 7 + "|")
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
            issue, bound = 1e6 * strips * instructions / ISSUE, 1e6 * 2 * strips * STRIP * sum(counts) / FLOPS
            products = bound * FLOPS / SYNCHRONOUS * rows / sum(counts)
            measured = speeds.get(f"kernels, {layer.name}, 4 bits, {tokens} tokens", {}).get("measured")
            print(
                f"| {layer.name}, {tokens} tokens | {'' if measured is None else f'{measured:.4g} us'} | "
                f"{rows / sum(counts):.2f} | {issue:.0f} us | {products:.0f} us | "
                f"{issue + products:.0f} us, {bound / (issue + products):.0%} | {bound / max(issue, products):.0%} |"
            )


def main() -> None:
    """Print both tables."""
    speeds = {speed["name"]: speed for speed in json.loads(MEASURED.read_text())["parts"]["speeds"]["speeds"]}
    decode(speeds)
    print()
    large_batches(speeds)


if __name__ == "__main__":
    main()
