"""Integers with scales and zero points: AWQ, GPTQ and compressed-tensors.

Most are in 32-bit words, with a scale and a zero point for each group.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vllm_dymoe.experts.encoding import STEPS
from vllm_dymoe.quantize.held import Held, blocks, integers
from vllm_dymoe.quantize.readers.base import (
    BYTES,
    FLOATS,
    WORDS,
    Reader,
    check_shape,
    choose_bits,
    choose_group_size,
    count_groups,
    ignore,
    unreadable,
)
from vllm_dymoe.quantize.tensors import CheckpointError

_WORD_BITS = 32
# In AutoAWQ's words of eight numbers, bits 4 i to 4 i + 3 belong to output _AWQ_ORDER[i] (awq/modules/linear/gemm.py,
# ``WQLinear_GEMM.from_linear``).
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_AWQ_PLACE = tuple(_AWQ_ORDER.index(output) for output in range(8))
_ZERO_POINT_OFFSETS = {"gptq": 1, "gptq_v2": 0}


def awq(config: Mapping[str, Any]) -> Reader:
    """Return the reader for AutoAWQ, "gemm" packing.

    Weights are transposed, and eight outputs share a word, in AutoAWQ's order. ``qweight`` int32 [columns, rows / 8],
    ``qzeros`` int32 [groups, rows / 8], ``scales`` [groups, rows].
    """
    version = str(config.get("version", "gemm")).lower()
    if version != "gemm":
        raise unreadable(f'awq, version "{version}"', '"gemm"', 'quantize it again with version "GEMM"')
    if not config.get("zero_point", True):
        raise CheckpointError(
            "the checkpoint is quantized with awq without zero points, which gemm packing does not have; quantize "
            "it again with zero_point true."
        )
    bits = choose_bits("awq", config.get("bits", config.get("w_bit")), (4,))
    group_size = choose_group_size("awq", config.get("group_size", config.get("q_group_size")))
    make = partial(_make_awq, group_size)
    dtypes = {"qweight": WORDS, "qzeros": WORDS, "scales": FLOATS}
    return Reader("awq", STEPS[bits], group_size, dtypes, make, asymmetric=True)


def _make_awq(group_size: int | None, parts: Mapping[str, Tensor], rows: int, columns: int) -> Held:
    if rows % 8:
        raise ValueError(f"qweight cannot hold {rows} outputs, which is not a multiple of 8.")
    groups = count_groups(columns, group_size)
    check_shape("qweight", parts["qweight"], columns, rows // 8)
    check_shape("qzeros", parts["qzeros"], groups, rows // 8)
    check_shape("scales", parts["scales"], groups, rows)
    codes, zero_points = _in_awq_order(parts["qweight"]), _in_awq_order(parts["qzeros"])
    return integers(4, codes, parts["scales"].t(), zero_points, blocks(columns, group_size))


def _in_awq_order(words: Tensor) -> Tensor:
    numbers = unpack_words(words, 4)
    return numbers.view(-1, 8)[:, _AWQ_PLACE].reshape(numbers.shape).t()


def gptq(config: Mapping[str, Any]) -> Reader:
    """Return the reader for AutoGPTQ and GPTQModel.

    Weights are transposed, and adjacent inputs share a word. ``qweight`` int32 [columns * bits / 32, rows], ``qzeros``
    int32 [groups, rows * bits / 32], ``scales`` [groups, rows], and ``g_idx`` int32 [columns], the group of each
    column. The first version of the format stores zero points minus one, which dequantizing adds and masks again
    (AutoGPTQ, nn_modules/qlinear/qlinear_cuda_old.py: a stored 15 is 0 at 4 bits; other code of AutoGPTQ makes 16 of
    it, which its quantizer never chooses); "gptq_v2" stores them unchanged. With desc_act only ``g_idx`` has the groups
    of columns.
    """
    version = _gptq_version(config)
    bits = choose_bits("gptq", config.get("bits"), (8, 4, 2))
    group_size = choose_group_size("gptq", config.get("group_size"))
    asymmetric = not config.get("sym", True)
    # With one group for all columns their order has no effect, and static groups contain adjacent columns.
    act_order = bool(config.get("desc_act")) and group_size is not None and not config.get("static_groups")
    make = partial(_make_gptq, bits, group_size, _ZERO_POINT_OFFSETS[version] if asymmetric else None)
    dtypes = {"qweight": WORDS, "qzeros": WORDS, "scales": FLOATS}
    check = partial(_check_neighbours, group_size, "config.json says desc_act false or static_groups true")
    dtypes, checks = (dtypes | {"g_idx": WORDS}, {}) if act_order else (dtypes, {"g_idx": check})
    return Reader("gptq", STEPS[bits], group_size, dtypes, make, checks, asymmetric, act_order)


def _make_gptq(
    bits: int, group_size: int | None, offset: int | None, parts: Mapping[str, Tensor], rows: int, columns: int
) -> Held:
    """Return a matrix whose zero points are the stored values plus ``offset``.

    With ``offset`` None all of them are the middle code.
    """
    each = _WORD_BITS // bits
    if rows % each or columns % each:
        raise ValueError(f"qweight cannot hold {rows} x {columns} codes, which are not multiples of {each}.")
    groups = count_groups(columns, group_size)
    check_shape("qweight", parts["qweight"], columns // each, rows)
    check_shape("qzeros", parts["qzeros"], groups, rows // each)
    check_shape("scales", parts["scales"], groups, rows)
    zeros, middle = unpack_words(parts["qzeros"], bits), 2 ** (bits - 1)
    if offset is not None:
        zeros = (zeros + offset) & (2**bits - 1)
    elif bool(((zeros == middle) | (zeros == middle - 1)).all()):
        zeros = torch.full_like(zeros, middle)  # tools disagree about the version if it has no effect
    else:
        raise ValueError(f"qzeros has zero points other than {middle}, although config.json says sym true.")
    order = _order("g_idx", parts, columns, group_size)
    return integers(bits, unpack_words(parts["qweight"].t(), bits), parts["scales"].t(), zeros.t(), order)


def _gptq_version(config: Mapping[str, Any]) -> str:
    version = "marlin" if config.get("is_marlin_format") else str(config.get("checkpoint_format") or "gptq")
    if version not in _ZERO_POINT_OFFSETS:
        known = " and ".join(_ZERO_POINT_OFFSETS)
        raise unreadable(f'gptq, checkpoint_format "{version}"', known, "save it in one of them")
    return version


def pack_quantized(weights: Mapping[str, Any], unreadable: Any) -> Reader:
    """Return the reader for compressed-tensors' "pack-quantized".

    Weights are not transposed, and adjacent inputs share a word. ``weight_packed`` int32 [rows, columns * bits / 32,
    rounded up], ``weight_scale`` [rows, groups], for asymmetric weights ``weight_zero_point`` int32 [rows * bits / 32,
    rounded up, groups], and ``weight_shape`` int64 [2]. Signed numbers are stored plus half their range, codes and zero
    points alike (compressed_tensors/compressors/pack_quantized). With actorder "group", ``weight_g_idx`` int32
    [columns] is the group of each column. ``unreadable`` makes an error from what is found and what is supported.
    """
    method = "compressed-tensors"
    bits = choose_bits(method, weights.get("num_bits"), (8, 4, 2))
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "channel")
    if weights.get("type", "int") != "int" or strategy not in ("group", "channel"):
        raise unreadable(f'{weights.get("type")} weights by "{strategy}"', 'integers by "group" or "channel"')
    group_size = choose_group_size(method, weights.get("group_size") if strategy == "group" else None)
    asymmetric = not weights.get("symmetric", True)
    act_order = weights.get("actorder") in ("group", "dynamic") and group_size is not None  # two names of the same
    dtypes = {"weight_packed": WORDS, "weight_scale": FLOATS}
    dtypes |= {"weight_zero_point": WORDS} if asymmetric else {}
    dtypes |= {"weight_g_idx": ("I32", "I64")} if act_order else {}
    check_order = partial(_check_neighbours, group_size, "config.json has no such actorder")
    checks = {"weight_shape": _check_shape} | ({} if act_order else {"weight_g_idx": check_order})
    make = partial(_make_packed, bits, group_size)
    return Reader(method, STEPS[bits], group_size, dtypes, make, checks, asymmetric, act_order)


def _make_packed(bits: int, group_size: int | None, parts: Mapping[str, Tensor], rows: int, columns: int) -> Held:
    each, groups = _WORD_BITS // bits, count_groups(columns, group_size)
    check_shape("weight_packed", parts["weight_packed"], rows, -(-columns // each))
    check_shape("weight_scale", parts["weight_scale"], rows, groups)
    codes = unpack_words(parts["weight_packed"], bits)[:, :columns]
    zero_points = torch.full((rows, groups), 2 ** (bits - 1), dtype=torch.uint8)
    if (words := parts.get("weight_zero_point")) is not None:
        check_shape("weight_zero_point", words, -(-rows // each), groups)
        zero_points = unpack_words(words.t(), bits).t()[:rows]
    order = _order("weight_g_idx", parts, columns, group_size)
    return integers(bits, codes, parts["weight_scale"], zero_points, order)


def int_quantized(weights: Mapping[str, Any], unreadable: Any) -> Reader:
    """Return the reader for compressed-tensors' "int-quantized".

    Weights are signed bytes, with a scale for each row or group. ``weight`` int8 [rows, columns], ``weight_scale``
    [rows, groups], and for asymmetric weights ``weight_zero_point`` int8 of the same shape.
    """
    method, strategy = "compressed-tensors", weights.get("strategy") or "channel"
    bits = choose_bits(method, weights.get("num_bits"), (8,))
    if weights.get("type", "int") != "int" or strategy not in ("tensor", "channel", "group"):
        raise unreadable(f'{weights.get("type")} weights by "{strategy}"', 'integers by "channel" or "group"')
    group_size = choose_group_size(method, weights.get("group_size") if strategy == "group" else None)
    asymmetric = not weights.get("symmetric", True)
    dtypes = {"weight": BYTES, "weight_scale": FLOATS} | ({"weight_zero_point": BYTES} if asymmetric else {})
    checks = {"input_scale": ignore, "input_zero_point": ignore}
    make = partial(_make_bytes, group_size)
    return Reader(method, STEPS[bits], group_size, dtypes, make, checks, asymmetric)


def _make_bytes(group_size: int | None, parts: Mapping[str, Tensor], rows: int, columns: int) -> Held:
    groups, scales, middle = count_groups(columns, group_size), parts["weight_scale"], 128
    if scales.numel() == 1:
        scales = scales.reshape(1, 1).expand(rows, groups)
    elif scales.dim() == 1:
        scales = scales.unsqueeze(1)
    check_shape("weight", parts["weight"], rows, columns)
    check_shape("weight_scale", scales, rows, groups)
    zero_points = torch.full((rows, groups), middle, dtype=torch.uint8)
    if (given := parts.get("weight_zero_point")) is not None:
        check_shape("weight_zero_point", given, rows, groups)
        zero_points = (given.short() + middle).to(torch.uint8)
    codes = (parts["weight"].short() + middle).to(torch.uint8)
    return integers(8, codes, scales, zero_points, blocks(columns, group_size))


def _check_shape(part: str, tensor: Tensor, rows: int, columns: int) -> None:
    if tensor.tolist() != [rows, columns]:
        raise ValueError(f"{part} is {tensor.tolist()}, expected {[rows, columns]}.")


def _check_neighbours(group_size: int | None, said: str, part: str, tensor: Tensor, rows: int, columns: int) -> None:
    if not torch.equal(tensor.long(), blocks(columns, group_size)):
        raise ValueError(f"{part} reorders columns, although {said}.")


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """Return the numbers in int32 words [n, m]: uint8 [n, m * 32 / bits].

    The lowest bits come first; numbers have at most 8 bits.
    """
    # Bytes in memory have this order, too, so they are taken four at a time instead of one number at a time.
    octets = words.contiguous().view(torch.uint8).view(words.shape[0], -1)
    if bits == 8:
        return octets
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    return ((octets.unsqueeze(2) >> shifts) & (2**bits - 1)).view(words.shape[0], -1)


def _order(part: str, parts: Mapping[str, Tensor], columns: int, group_size: int | None) -> Tensor:
    """Return the group of each column: int64 [columns].

    A tensor names the groups if there is one; otherwise they are contiguous.
    """
    if part not in parts:
        return blocks(columns, group_size)
    check_shape(part, parts[part], columns)
    named, groups = parts[part].long(), count_groups(columns, group_size)
    if bool(((named < 0) | (named >= groups)).any()):
        raise ValueError(f"{part} names groups that do not exist: there are {groups}.")
    return named
