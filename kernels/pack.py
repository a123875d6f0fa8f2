"""Packs codes into sections and unpacks them.

It writes, reads and dequantizes what :class:`MatrixFormat` describes.
"""

import torch
from torch import Tensor

from vllm_dymoe.experts.checks import check_tensor
from vllm_dymoe.experts.matrix import BLOCK_ROWS, PAIR_BYTES, MatrixFormat, PackedMatrix
from vllm_dymoe.kernels.lattice import numbers, rotate


def pack(
    format: MatrixFormat,  # 8, 4 or 2 bits
    codes: Tensor,
    scales: Tensor,  # [rows, groups], exact in the format's dtype; for a lattice, those of the low version
    zeros: Tensor,  # [rows, groups], exact in the format's dtype; for a lattice, the scales of the high version
    section: Tensor,  # uint8 [nbytes], overwritten
    order: Tensor | None = None,
) -> None:
    """Write a quantized matrix into a section.

    Padding is zero, and so is a bias until it is copied to view(section).bias.

    Args:
        codes: uint8 [rows, columns], each below 2**bits, in the order of the inputs, which :func:`unpack` restores.
            Lattice codes are [padded_rows, columns], because rows share points.
        order: int64 [columns], the columns in stored order, group by group; only for formats with act order.

    Raises TypeError if codes or section is not uint8, and ValueError for a 16-bit or nested format, a wrong shape, a
    code out of range, or an order that is missing, not a permutation, or not supported by the format.
    """
    if not format.quantized:
        raise ValueError("format has 16 bits: such a matrix has no codes, copy its weights into view(section).weight")
    if format.encoding.floats:
        raise ValueError(f"format is {format.encoding.name}, which has no zeros: use pack_floats")
    if format.nested:
        raise ValueError("format is nested: pack_nested writes its two sections")
    _check_codes(format, codes)
    check_tensor("scales", scales, shape=(format.rows, format.groups), contiguous=False)
    check_tensor("zeros", zeros, shape=(format.rows, format.groups), contiguous=False)
    if (order is not None) != format.act_order:
        raise ValueError(f"order is {'missing' if format.act_order else 'given'}, but act_order is {format.act_order}")
    packed = format.view(section)
    assert packed.scales_zeros is not None
    section.zero_()
    if order is not None and packed.order is not None:
        if not torch.equal(order.sort().values, torch.arange(format.columns)):
            raise ValueError(f"order does not name each of the {format.columns} columns once")
        packed.order.copy_(order)
        codes = codes[:, order]

    _store(codes, packed.weight, format)
    packed.scales_zeros[:, : format.rows, 0].copy_(scales.t())
    packed.scales_zeros[:, : format.rows, 1].copy_(zeros.t())


def pack_floats(
    format: MatrixFormat, codes: Tensor, scales: Tensor, section: Tensor, factor: tuple[float, float] = (1.0, 1.0)
) -> None:
    """Write a matrix with published float codes into a section.

    Padding and bias are zero.

    Codes are uint8 [rows, columns], scales [rows, groups] in the encoding's scale dtype. Scales are multiplied with
    one factor and divided by another. Raises TypeError and ValueError for other dtypes, shapes and codes, a format
    without floats, or a factor that the format does not have.
    """
    if not format.encoding.floats:
        raise ValueError("format has no codebook: use pack")
    _check_codes(format, codes)
    shape, dtype = (format.rows, format.groups), format.encoding.scale_dtype
    check_tensor("scales", scales, dtype=dtype, shape=shape, contiguous=False)
    packed = format.view(section)
    assert packed.scales is not None
    section.zero_()
    if packed.factor is not None:
        packed.factor.copy_(torch.tensor(factor, dtype=torch.float32))
    elif factor != (1.0, 1.0):
        raise ValueError(f"factor is {factor}, and {format.encoding.name} has none")
    _store(codes, packed.weight, format)
    # As bytes, of which padding is 0: not every dtype of scales can be padded.
    raw = scales.contiguous().view(torch.uint8).view(format.rows, format.groups, -1)
    raw = torch.nn.functional.pad(raw, (0, 0, 0, 0, 0, format.padded_rows - format.rows))
    raw = raw.view(format.padded_rows // BLOCK_ROWS, BLOCK_ROWS, format.groups, -1).transpose(1, 2)
    packed.scales.view(torch.uint8).view(raw.shape).copy_(raw)


def pack_nested(
    format: MatrixFormat,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor,
    base: Tensor,
    residual: Tensor,
    order: Tensor | None = None,
) -> None:
    """Write a nested matrix into its base section and residual section.

    Both are uint8, [format.base.nbytes] and [format.nbytes].

    Both are overwritten; otherwise as `pack`.
    """
    half = format.bits // 2
    check_tensor("residual", residual, dtype=torch.uint8, shape=(format.nbytes,))
    pack(format.base, codes >> half, scales, zeros, base, order)
    lower = codes & (1 << half) - 1
    _store(lower if order is None else lower[:, order], residual.view(format.weight_shape), format)


def _check_codes(format: MatrixFormat, codes: Tensor) -> None:
    rows = format.padded_rows if format.encoding.lattice else format.rows
    check_tensor("codes", codes, dtype=torch.uint8, shape=(rows, format.columns), contiguous=False)
    highest = int(codes.max())
    if highest >> format.bits:
        raise ValueError(f"codes contains {highest}, which does not fit into {format.bits} bits")


def _store(codes: Tensor, weight: Tensor, format: MatrixFormat) -> None:
    """Write codes, or their halves, in stored order into a section.

    Args:
        codes: uint8 [rows, columns].
        weight: uint8 [format.weight_shape], overwritten.
    """
    padding = (0, format.padded_columns - format.columns, 0, format.padded_rows - codes.shape[0])
    if any(padding):
        codes = torch.nn.functional.pad(codes, padding)
    first, second = codes.view(-1, 2, PAIR_BYTES, format.padded_columns).unbind(1)  # [blocks, 32, columns]
    if format.encoding.stored_bits == 8:
        weight[:, 0].copy_((first >> 4 | second & 0xF0).transpose(1, 2))
        weight[:, 1].copy_((first & 15 | second << 4).transpose(1, 2))
        return
    pairs = (first | second << 4).transpose(1, 2)
    if format.encoding.stored_bits == 2:
        halves = pairs.reshape(-1, 2, format.fold // 2 * PAIR_BYTES)
        pairs = (halves[:, 0] | halves[:, 1] << 2).view(format.weight_shape)
    weight.copy_(pairs)


def unpack(packed: PackedMatrix) -> Tensor:
    """Return a quantized matrix's codes in the order of the inputs.

    They are uint8 [rows, columns]. ValueError at 16 bits.
    """
    if not packed.format.quantized:
        raise ValueError("the matrix has 16 bits: it holds weights, not codes")
    return _in_input_order(packed, stored_codes(packed)[:, : packed.format.columns])


def stored_codes(packed: PackedMatrix) -> Tensor:
    """Return the codes in stored order: uint8 [rows, padded_columns]."""
    format = packed.format
    codes = _loaded(packed.weight, format)
    if packed.residual is not None:
        codes = codes << format.encoding.stored_bits | _loaded(packed.residual, format)
    return codes if format.encoding.lattice else codes[: format.rows]


def _loaded(stored: Tensor, format: MatrixFormat) -> Tensor:
    """Undo :func:`_store`: uint8 [padded_rows, padded_columns]."""
    if format.encoding.stored_bits == 8:
        return _codes(stored[:, 0]) << 4 | _codes(stored[:, 1])
    if format.encoding.stored_bits == 4:
        return _codes(stored)
    halves = stored.view(-1, 1, format.fold // 2 * PAIR_BYTES)
    pairs = torch.cat((halves & 0x33, halves >> 2 & 0x33), 1)
    return _codes(pairs.view(format.padded_rows // BLOCK_ROWS, format.padded_columns, PAIR_BYTES))


def dequantize(packed: PackedMatrix, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a packed matrix's weights: `dtype` [rows, columns].

    Columns are in the order of the inputs. Computes in float32, or in float64 if `dtype` is; narrower dtypes are
    rounded at the end. Codebooks are dequantized as by the tools that publish them: scale times factor first, then
    level times that.
    """
    format = packed.format
    precise = torch.float64 if dtype == torch.float64 else torch.float32
    if not format.quantized:
        return packed.weight.to(dtype)
    if format.encoding.lattice:
        return rotate(rotated_weights(packed, precise), format.rotation, back=True).to(dtype)
    groups = stored_codes(packed).view(format.rows, format.groups, format.group_size)
    if packed.scales is not None:
        scales = packed.scales.to(precise).transpose(1, 2).reshape(-1, format.groups, 1)[: format.rows]
        if packed.factor is not None:
            multiplier, divisor = packed.factor.to(precise)
            scales = scales * multiplier / divisor
        weights = format.encoding.levels(groups).to(precise).mul_(scales)
    else:
        assert packed.scales_zeros is not None
        scales, zeros = packed.scales_zeros.to(precise).permute(2, 1, 0).unsqueeze(3)[:, : format.rows].contiguous()
        if format.integer_zeros:
            zeros = zeros * scales
        weights = groups.to(precise).mul_(format.encoding.step).sub_(format.encoding.center).mul_(scales).add_(zeros)
    return _in_input_order(packed, weights.flatten(1)[:, : format.columns].to(dtype))


def rotated_weights(packed: PackedMatrix, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the weights of a lattice matrix for rotated inputs.

    They are `dtype` [rows, columns].
    """
    format, nested = packed.format, packed.residual is not None
    assert packed.scales_zeros is not None
    found = numbers(stored_codes(packed), nested=nested)[: format.rows, : format.columns].to(dtype)
    return found * packed.scales_zeros[0, : format.rows, int(nested), None].to(dtype)


def _in_input_order(packed: PackedMatrix, stored: Tensor) -> Tensor:
    """Return columns [rows, columns] in the order of their inputs."""
    return stored if packed.order is None else stored[:, packed.order.long().argsort()]


def _codes(pairs: Tensor) -> Tensor:
    """Return the 4-bit codes of pairs [blocks, columns, 32] as uint8 [rows, columns]."""
    blocks, columns, _ = pairs.shape
    return torch.cat((pairs & 15, pairs >> 4), 2).transpose(1, 2).reshape(blocks * BLOCK_ROWS, columns)
