"""Writes experts' addresses and bit-widths into a table on the device.

They are passed as a launch's own arguments. A copy would do the same, but copies from the host queue behind the
experts that occupy the link.
"""

from collections.abc import Sequence
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from vllm_dymoe.kernels.triton.section import DESCRIPTIONS
from vllm_dymoe.kernels.triton.start import Start, run_kernel

AT_ONCE = 4


class Place(NamedTuple):
    """A row of the table.

    Attributes:
        row: its index.
        sections: addresses of gate, up and down.
        widths: bits of each.
    """

    row: int
    sections: tuple[int, int, int]
    widths: tuple[int, int, int]


def place_experts(addresses: Tensor, bits: Tensor, places: Sequence[Place], *, start: Start = run_kernel) -> None:
    """Write some rows: one launch for every four.

    Args:
        addresses: int64 [experts, 3].
        bits: int32 [experts, 3].
        places: the rows.
        start: launch, or only compile.
    """
    for first in range(0, len(places), AT_ONCE):
        some = places[first : first + AT_ONCE]
        some = [*some, *[some[-1]] * (AT_ONCE - len(some))]  # repeats the last one, which changes nothing
        numbers: list[int] = []
        for row, sections, (gate, up, down) in some:
            numbers += row, *sections, gate | up << 16 | down << 32
        start(place_kernel, (1,), (addresses, bits, *numbers), {}, {"num_warps": 1})


_NUMBERS = [f"{name}{number}" for number in range(AT_ONCE) for name in ("row", "gate", "up", "down", "widths")]


@triton.jit(do_not_specialize_on_alignment=DESCRIPTIONS, do_not_specialize=_NUMBERS)
def place_kernel(
    addresses,
    bits,
    row0: tl.int64, gate0: tl.int64, up0: tl.int64, down0: tl.int64, widths0: tl.int64,
    row1: tl.int64, gate1: tl.int64, up1: tl.int64, down1: tl.int64, widths1: tl.int64,
    row2: tl.int64, gate2: tl.int64, up2: tl.int64, down2: tl.int64, widths2: tl.int64,
    row3: tl.int64, gate3: tl.int64, up3: tl.int64, down3: tl.int64, widths3: tl.int64,
):  # fmt: skip
    """Write four rows of two tables.

    ``widths`` has the bits of gate, up and down in two bytes each, gate in the lowest.

    Args:
        addresses: int64 [experts, 3].
        bits: int32 [experts, 3].
    """
    _place(addresses, bits, row0, gate0, up0, down0, widths0)
    _place(addresses, bits, row1, gate1, up1, down1, widths1)
    _place(addresses, bits, row2, gate2, up2, down2, widths2)
    _place(addresses, bits, row3, gate3, up3, down3, widths3)


@triton.jit
def _place(addresses, bits, row, gate, up, down, widths):
    """Write one row."""
    tl.store(addresses + 3 * row, gate)
    tl.store(addresses + 3 * row + 1, up)
    tl.store(addresses + 3 * row + 2, down)
    tl.store(bits + 3 * row, (widths & 65535).to(tl.int32))
    tl.store(bits + 3 * row + 1, (widths >> 16 & 65535).to(tl.int32))
    tl.store(bits + 3 * row + 2, (widths >> 32 & 65535).to(tl.int32))
