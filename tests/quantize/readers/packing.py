"""Random quantized matrices, packed into the tensors of each format by plain loops over its description.

The readers are proven against tensors that the formats' own tools packed (golden/); these packers are proven there too,
and then make whole checkpoints.
"""

from dataclasses import dataclass

import torch

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass
class Prequantized:
    """What a matrix was quantized to: codes and zero points uint8, scales float, groups of neighbours."""

    bits: int
    group_size: int
    codes: torch.Tensor  # [rows, columns]
    zero_points: torch.Tensor  # [rows, groups]
    scales: torch.Tensor  # [rows, groups]
    column_groups: torch.Tensor  # [columns]

    def dequantize(self):
        """(code - zero point) * scale, in the scales' dtype."""
        steps = self.codes.int() - self.zero_points.int()[:, self.column_groups]
        return steps.to(self.scales.dtype) * self.scales[:, self.column_groups]


def random_prequantized(
    rows, columns, group_size, *, bits=4, symmetric=False, dtype=torch.float16, seed=0, shuffled=False
):
    generator = torch.Generator().manual_seed(seed)
    group_size = group_size or columns
    groups = -(-columns // group_size)
    middle = 1 << bits - 1
    codes = torch.randint(0, 1 << bits, (rows, columns), generator=generator, dtype=torch.uint8)
    zero_points = torch.randint(0, 1 << bits, (rows, groups), generator=generator, dtype=torch.uint8)
    if symmetric:
        zero_points.fill_(middle)
    scales = (torch.rand(rows, groups, generator=generator) + 0.5) * 2 * columns**-0.5 / middle
    column_groups = torch.arange(columns) // group_size
    if shuffled:
        column_groups = column_groups[torch.randperm(columns, generator=generator)]
    return Prequantized(bits, group_size, codes, zero_points, scales.to(dtype), column_groups)


def words(numbers, bits):
    """[n, m] numbers below 2**bits as int32 [n, m * bits / 32], the first in the lowest bits."""
    each = 32 // bits
    numbers = numbers.long()
    assert numbers.shape[1] % each == 0
    packed = torch.zeros(numbers.shape[0], numbers.shape[1] // each, dtype=torch.int64)
    for place in range(each):
        packed |= numbers[:, place::each] << bits * place
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).int()


def awq(matrix):
    def in_order(numbers):
        return numbers.reshape(numbers.shape[0], -1, 8)[:, :, AWQ_ORDER].reshape(numbers.shape)

    return {
        "qweight": words(in_order(matrix.codes.t()), 4),
        "qzeros": words(in_order(matrix.zero_points.t()), 4),
        "scales": matrix.scales.t().contiguous(),
    }


def gptq(matrix, *, version="gptq"):
    """AutoGPTQ's packing; its first version stores zero points less one."""
    stored = (matrix.zero_points.int() - int(version == "gptq")) & 2**matrix.bits - 1
    return {
        "qweight": words(matrix.codes, matrix.bits).t().contiguous(),
        "qzeros": words(stored.t(), matrix.bits),
        "scales": matrix.scales.t().contiguous(),
        "g_idx": matrix.column_groups.int(),
    }


def compressed_tensors(matrix, *, symmetric=True):
    """compressed-tensors' pack-quantized, which fills the last word up."""

    def filled(numbers):
        return torch.nn.functional.pad(numbers, (0, -numbers.shape[1] % (32 // matrix.bits)))

    parts = {
        "weight_packed": words(filled(matrix.codes), matrix.bits),
        "weight_scale": matrix.scales,
        "weight_shape": torch.tensor(matrix.codes.shape),
    }
    if not symmetric:
        parts["weight_zero_point"] = words(filled(matrix.zero_points.t()), matrix.bits).t().contiguous()
    return parts
