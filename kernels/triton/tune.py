"""Measure tiles on this machine's GPU and write the best to tiles.json: ``python -m vllm_dymoe.kernels.triton.tune``.

Decode is tuned at one token, grouped tiles at as many tokens as their block_m holds, each at 4 bits: the tile of a
shape must not depend on the bits, because experts of different bits share a launch.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import date
from functools import partial
from typing import Any

import torch

from vllm_dymoe.kernels.activation import Activation
from vllm_dymoe.kernels.triton.launch import (
    DOWN,
    Scratch,
    decode_down,
    decode_gate_up,
    grouped_gate_up,
    grouped_linear,
)
from vllm_dymoe.kernels.triton.start import Start, compile_kernel, compiling_together, run_kernel
from vllm_dymoe.kernels.triton.table import ExpertShape, ExpertTable, WorkList
from vllm_dymoe.kernels.triton.tiles import TABLE, DecodeTile, GroupedTile, Tiles, choose_tiles

_EXPERTS = 8


def decode_candidates(tile: DecodeTile) -> Iterator[DecodeTile]:
    """Tiles of the same limit of registers worth trying in place of one."""
    for warps in (4, 8):
        for split in (1, 2, 4, 8):
            yield replace(tile, warps=warps, split=split)


def grouped_candidates(tile: GroupedTile) -> Iterator[GroupedTile]:
    """Tiles of the same block_m worth trying in place of one."""
    for block_n in (64, 128):
        for block_k in (32, 64):
            for warps in (4, 8):
                for stages in (2, 3, 4):
                    yield replace(tile, block_n=block_n, block_k=block_k, warps=warps, stages=stages)


def best(
    candidates: Iterable[Any], run: Callable[[Any, Start], None], time: Callable[[Callable[[], None]], float]
) -> Any:
    """The fastest candidate; one that the card cannot run is passed over, aloud.

    Raises:
        RuntimeError: the card can run none of them.
    """
    times, tiles = {}, list(candidates)
    # Compiling takes longer than measuring. What the compiler refuses fails again below, and is named there.
    with suppress(Exception), compiling_together():
        for tile in tiles:
            run(tile, compile_kernel)
    for tile in tiles:
        try:
            times[tile] = time(partial(run, tile, run_kernel))
        except Exception as error:  # too much shared memory, above all; Triton has no common class for that
            print(f"  {tile}: {type(error).__name__}")
            continue
        print(f"  {tile}: {times[tile] * 1e6:.1f} us")
    if not times:
        raise RuntimeError("no tile could be run")
    return min(times, key=lambda tile: times[tile])


def tune(shape: ExpertShape, architecture: int, time: Callable[[Callable[[], None]], float]) -> Tiles:
    """The best tiles of a shape on this machine."""
    hidden, inner, device = shape.hidden, shape.intermediate, "cuda"
    size = sum(fmt.nbytes for fmt in shape.formats(4))
    blobs = torch.zeros(_EXPERTS, size, dtype=torch.uint8, device=device)  # zero scales: every sum is finite
    table = ExpertTable.of_blobs(shape, [blob.data_ptr() for blob in blobs], [4] * _EXPERTS, device)
    scratch = Scratch(torch.empty(1 << 24, device=device), torch.zeros(1 << 16, dtype=torch.int32, device=device))

    def lists(count: int, step: int) -> tuple[torch.Tensor, WorkList, torch.Tensor, torch.Tensor]:
        x = torch.zeros(count, hidden, dtype=shape.dtype, device=device)
        items = [
            [e, e * count + i, e * count + min(i + step, count)] for e in range(_EXPERTS) for i in range(0, count, step)
        ]
        rows = torch.arange(count, device=device).repeat(_EXPERTS)
        pairs = torch.arange(_EXPERTS * count, device=device)
        work = WorkList(torch.tensor(items, dtype=torch.int32, device=device), rows, pairs)
        states = torch.empty(len(pairs), inner, dtype=shape.dtype, device=device)
        return x, work, states, torch.empty(len(pairs), hidden, dtype=shape.dtype, device=device)

    tiles = choose_tiles(architecture, hidden, inner)
    silu = Activation.SILU
    x, work, states, out = lists(1, 2)
    gate_up = best(
        decode_candidates(tiles.gate_up),
        lambda t, start: decode_gate_up(x, states, table, work, silu, t, scratch, start=start),
        time,
    )
    down = best(
        decode_candidates(tiles.down),
        lambda t, start: decode_down(states, out, table, work, t, scratch, start=start),
        time,
    )
    both: list[tuple[GroupedTile, GroupedTile]] = []
    for one, other in zip(tiles.grouped_gate_up, tiles.grouped_linear, strict=True):
        x, work, states, out = lists(4 * one.block_m if one.block_m == 128 else one.block_m, one.block_m)

        def first(t: GroupedTile, start: Start, x=x, states=states, work=work) -> None:  # type: ignore[no-untyped-def]
            grouped_gate_up(x, states, table, work, silu, t, start=start)

        def second(t: GroupedTile, start: Start, states=states, out=out, work=work) -> None:  # type: ignore[no-untyped-def]
            grouped_linear(states, out, table, work, DOWN, t, scatter=True, start=start)

        both.append((best(grouped_candidates(one), first, time), best(grouped_candidates(other), second, time)))
    return Tiles(tiles.decode_tokens, gate_up, down, tuple(a for a, _ in both), tuple(b for _, b in both))


def main() -> int:
    """Tune one shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("hidden", type=int)
    parser.add_argument("intermediate", type=int)
    parser.add_argument("--group-size", type=int, default=64)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("tune: torch finds no CUDA device here, so there is nothing to measure.", file=sys.stderr)
        return 1
    tune_and_store(ExpertShape(arguments.hidden, arguments.intermediate, arguments.group_size, torch.bfloat16))
    return 0


def tune_and_store(shape: ExpertShape) -> None:
    """Measure one shape on this machine's GPU, and write what is best into tiles.json."""
    from triton.testing import do_bench

    major, minor = torch.cuda.get_device_capability()
    architecture = 10 * major + minor
    # do_bench clears the second-level cache between calls: weights come from memory.
    tiles = tune(shape, architecture, lambda run: do_bench(run, return_mode="median") / 1e3)
    store(architecture, shape, tiles, torch.cuda.get_device_name())
    choose_tiles.cache_clear()


def store(architecture: int, shape: ExpertShape, tiles: Tiles, card: str) -> None:
    """Write a record into tiles.json; an architecture that is not there gets its neighbour's defaults."""
    table = json.loads(TABLE.read_text())
    known = sorted(int(name) for name in table)
    neighbour = str(max((a for a in known if a <= architecture), default=known[0]))
    entry = table.setdefault(str(architecture), {"default": table[neighbour]["default"], "shapes": {}})
    measured = {"measured": f"{card}, {date.today().isoformat()}"}
    entry["shapes"][f"{shape.hidden}x{shape.intermediate}"] = {**asdict(tiles), **measured}
    TABLE.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
