"""Lattice codes: codebook, bytes, rotation, and the kernels' results."""

from dataclasses import replace

import pytest
import torch

from tests.kernels.matrices import random_packed
from vllm_dymoe.experts.encoding import LATTICES
from vllm_dymoe.experts.format import ExpertFormat
from vllm_dymoe.kernels import dequantize
from vllm_dymoe.kernels.lattice import nearest, points, rotate, signs

CODES = (torch.arange(1 << 16)[:, None] >> torch.arange(0, 16, 2) & 3).to(torch.uint8)


def test_every_eight_codes_are_a_point_of_their_own_of_a_moved_e8():
    """A point minus a quarter has half-integers of even sum, or integers of odd sum."""
    found = points(CODES)
    left = found - 0.25
    doubled = (2 * left).round()
    assert torch.equal(doubled, 2 * left)
    halves = doubled.long() % 2
    assert bool((halves.sum(1) % 8 == 0).all())
    assert torch.equal((left.sum(1) + halves[:, 0]) % 2, torch.ones(len(left)))
    # Neighbours at E8's smallest distance are in the codebook, so it is no coarser lattice.
    smallest = torch.cdist(found[:512].double(), found.double()).sort(1).values[:, 1]
    torch.testing.assert_close(smallest, torch.full_like(smallest, 2**0.5))


def test_the_nearest_point_is_the_nearest():
    wanted = torch.randn(300, 8, generator=torch.Generator().manual_seed(1)) * 1.3
    best = torch.cdist(wanted.double(), points(CODES).double()).min(1).values
    got = (points(nearest(wanted)) - wanted).double().norm(dim=1)
    torch.testing.assert_close(got, best, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [64, 96, 150, 2880])
def test_rotations_change_no_product(size):
    x = torch.randn(3, size, dtype=torch.float64, generator=torch.Generator().manual_seed(size))
    block = size & -size
    matrix = rotate(torch.eye(size, dtype=torch.float64), block)
    torch.testing.assert_close(matrix @ matrix.t(), torch.eye(size, dtype=torch.float64))
    torch.testing.assert_close(rotate(x, block), x @ matrix)
    torch.testing.assert_close(rotate(rotate(x, block), block, back=True), x)
    signs = matrix[:block, 0].sign()
    assert size < 64 or 0.3 < (signs > 0).double().mean() < 0.7 or block < 32


def number(section, width, r, c):
    """Return the value of a section's code at a row and column.

    It includes the parity of the code's point.
    """

    def encoding(row):
        half, q, e = row % 64 // 32, c % 64 // 32, row % 32
        return section[16 * width * (row // 64) + 16 * 64 * (c // 64) + 32 * (c % 32) + e] >> 4 * half + 2 * q & 3

    first = r // 64 * 64 + r % 32 // 4 * 4
    parity = sum(encoding(first + i + half) for i in range(4) for half in (0, 32)) % 2
    return encoding(r) - 1.25 - parity / 2


def test_bytes_are_those_of_the_format_page():
    """docs/format.md in plain Python, at random places of both versions."""
    wide, _, down = ExpertFormat(96, 80, LATTICES["e8+e8"], 64, torch.bfloat16).matrices
    for format, block in ((wide, 32), (down, 16)):
        packed = random_packed(format)
        low = dequantize(replace(packed, format=format.base, residual=None), torch.float64)
        high = dequantize(packed, torch.float64)
        sections = packed.weight.flatten().tolist(), packed.residual.flatten().tolist()
        columns, width = format.columns, format.padded_columns
        places = torch.arange(columns).tolist()
        turned = rotate(torch.eye(columns, dtype=torch.float64), block)

        for r in (0, 37, 79):
            scales = packed.scales_zeros[0, r].double()
            base = torch.tensor([number(sections[0], width, r, c) for c in places], dtype=torch.float64)
            residual = torch.tensor([number(sections[1], width, r, c) for c in places], dtype=torch.float64)
            torch.testing.assert_close(low[r] @ turned, scales[0] * base)
            torch.testing.assert_close(high[r] @ turned, scales[1] * (base + residual / 4))
        number_of = [sum(1 << i for i in range(block) if turned[i, j] * turned[i, 0] < 0) for j in range(block)]
        assert number_of == [sum(1 << i for i in range(block) if (i & j).bit_count() % 2) for j in range(block)]
    hashed = [((h := c * 2654435761 % 2**32) ^ h >> 15) * 2246822519 % 2**32 for c in range(96)]
    assert signs(96).tolist() == [-1.0 if (h ^ h >> 13) & 1 else 1.0 for h in hashed]
