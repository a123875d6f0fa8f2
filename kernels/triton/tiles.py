"""The sizes of programs.

One function returns one record, from a small committed table. ``tiles.json`` has defaults for each architecture,
derived from its hardware, and may have records for shapes. A record never depends on the number of experts of a
launch: otherwise the last bits of one expert's result would depend on which others are resident.
"""

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

TABLE = Path(__file__).with_name("tiles.json")
EVERY = 1 << 30
"""More tokens than any expert has."""


@dataclass(frozen=True)
class DecodeTile:
    """Sizes of a decode program, which computes 64 rows.

    Raises ValueError for sizes that the kernels do not support.
    """

    warps: int  # each handles a strip of up to 64 columns at a time; 4 or 8
    split: int  # programs that share the columns of one block of rows
    registers: int | None = None
    """Limit of registers per thread, if warps is 4; None for the compiler's choice. Sometimes the compiler chooses
    too few and spills, in order to run more programs at a time than a launch has.
    """

    tensor_cores: int = 0
    """Positions that tensor cores compute at a time, 8 or 16 (``mma_decode``); 0 for the kernels of ``decode``, which
    compute two."""
    dependent: bool = False
    """On tensor cores: down begins while gate and up still run, and waits for their end itself (see ``start.Overlap``);
    nothing may be enqueued between the two launches."""

    def __post_init__(self) -> None:
        _check_warps(self.warps)
        if self.split < 1:
            raise ValueError(f"split is {self.split}, expected at least 1")
        if self.registers is not None and not 32 <= self.registers <= 255:
            raise ValueError(f"registers is {self.registers}, expected 32 to 255, or None")
        if self.tensor_cores not in (0, 8, 16):
            raise ValueError(f"tensor_cores is {self.tensor_cores}, expected 8 or 16, or 0 for none")

    @property
    def positions(self) -> int:
        """Positions of an item that has no expert to fetch: each reads the expert once."""
        return self.tensor_cores or 2

    @property
    def options(self) -> dict[str, int]:
        """Return options for Triton's compiler.

        With 8 warps the limit would leave room for a single program, so they have none.
        """
        limit = {} if self.registers is None or self.warps != 4 else {"maxnreg": self.registers}
        return {"num_warps": self.warps, **limit}


@dataclass(frozen=True)
class GroupedTile:
    """Sizes of a grouped program.

    It computes block_m positions and block_n rows, walking along the columns in steps of block_k.

    Raises ValueError for sizes that the kernels do not support.
    """

    block_m: int  # a power of two from 16 on
    block_n: int  # a power of two from 64 on
    block_k: int  # a power of two from 16 on; a group's size if that is smaller
    warps: int  # 4 or 8
    stages: int  # steps in flight
    in_registers: bool = False
    """Weights are dequantized in registers (``mma_grouped``), on a tile of 64 positions and 256 rows."""

    def __post_init__(self) -> None:
        _check_warps(self.warps)
        for name, least in (("block_m", 16), ("block_n", 64), ("block_k", 16)):
            size = getattr(self, name)
            if size < least or size & (size - 1):
                raise ValueError(f"{name} is {size}, expected a power of two from {least} on")
        if self.stages < 1:
            raise ValueError(f"stages is {self.stages}, expected at least 1")


@dataclass(frozen=True)
class Tiles:
    """All sizes that launches need for one shape on one architecture."""

    decode_tokens: int  # most tokens of an expert that is decoded; one with more is grouped; EVERY if none is
    gate_up: DecodeTile
    down: DecodeTile
    grouped_gate_up: tuple[GroupedTile, ...]  # by ascending block_m; the first that holds its tokens, or the last
    grouped_down: tuple[GroupedTile, ...]

    def on_tensor_cores(self, tokens: int, *, dependent: bool = False) -> "Tiles":
        """Return these sizes for decode on tensor cores.

        Args:
            tokens: most tokens of an expert; up to 8 the sizes are for 8 tokens, otherwise for 16.
        """
        most = 8 if tokens <= 8 else 16
        # Left alone, gate and up of 16 tokens take 249 registers, so that two programs share a processor and not three.
        gate_up, down = (
            replace(tile, tensor_cores=most, dependent=dependent, registers=None if most == 8 else 168)
            for tile in (self.gate_up, self.down)
        )
        return replace(self, decode_tokens=most, gate_up=gate_up, down=down)

    def of_large_batch(self, *, crowded: bool) -> "Tiles":
        """Return these sizes for a large batch.

        There is one class of experts if a single kernel suits all of them.

        Decode on tensor cores takes any number of tokens, 16 at a time; with weights in registers, tiles have 8 to 64
        tokens. Estimated by instructions: decode keeps more bytes in flight, so it is faster up to about eight tokens
        for each expert, and two launches of another kernel for a few experts of the batch do not pay.

        Args:
            crowded: experts have more than eight tokens on average.
        """
        if self.gate_up.tensor_cores and not crowded:
            return replace(self, decode_tokens=EVERY, grouped_gate_up=(), grouped_down=())
        if crowded and self.grouped_down[0].in_registers:
            return replace(self, decode_tokens=0)
        return self

    def in_registers(self) -> "Tiles":
        """Return these sizes for large batches whose weights are dequantized in registers."""
        tile = (GroupedTile(64, 256, 64, 4, 3, in_registers=True),)
        return replace(self, grouped_gate_up=tile, grouped_down=tile)

    def shared(self, hidden: int, intermediate: int, *, weighted: bool = False) -> tuple[int, int]:
        """Return what programs share per decoded position.

        Returns:
            the elements of partial sums, and the semaphores; 0 if programs share no sums. Programs always share the
            sums of `down` if these are weighted.
        """
        inner, outer = -(-intermediate // 64), -(-hidden // 64)
        up = 2 * self.gate_up.split * inner if self.gate_up.split > 1 else 0
        down = self.down.split * outer if self.down.split > 1 or weighted else 0
        return 64 * max(up, down), max(inner, outer) if up or down else 0


@cache
def choose_tiles(architecture: int, hidden: int, intermediate: int) -> Tiles:
    """Return the record for a shape.

    Args:
        architecture: compute capability times ten, such as 90; others use the newest known one that is not newer.
        hidden: H.
        intermediate: I.
    """
    table = json.loads(TABLE.read_text())
    known = sorted(int(name) for name in table)
    entry = table[str(max((a for a in known if a <= architecture), default=known[0]))]
    default, record = entry["default"], entry["shapes"].get(f"{hidden}x{intermediate}", {})
    gate_up, down = (
        DecodeTile(**{"warps": 4, "split": _split(rows, columns), **default.get(name, {}), **record.get(name, {})})
        for name, rows, columns in (("gate_up", intermediate, hidden), ("down", hidden, intermediate))
    )
    data = {**default, **record}
    grouped = (tuple(GroupedTile(**tile) for tile in data[f"grouped_{name}"]) for name in ("gate_up", "down"))
    return Tiles(data["decode_tokens"], gate_up, down, *grouped)


def _check_warps(warps: int) -> None:
    if warps not in (4, 8):
        raise ValueError(f"warps is {warps}, expected 4 or 8")


def _split(rows: int, columns: int) -> int:
    """Return the number of parts of the columns.

    One expert gets about 64 programs, each of at least two chunks of 256 columns.
    """
    split = 1
    while 2 * split * -(-rows // 64) <= 64 and 4 * split * 256 <= columns:
        split *= 2
    return split
