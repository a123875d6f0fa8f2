"""What a store must look like to hold the numbers of a quantized checkpoint as they are, and what is said of it."""

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_dymoe.config import Options
from vllm_dymoe.quantize.readers.base import GROUP_SIZES, Reader
from vllm_dymoe.quantize.tensors import CheckpointError
from vllm_dymoe.residency.code import code_of
from vllm_dymoe.residency.format import nests
from vllm_dymoe.store.manifest import read_codes


def format_fields(reader: Reader | None, ours: Mapping[str, Any], bits: int) -> dict[str, Any]:
    """What makes the format of one bit-width hold what a checkpoint has: arguments of :class:`Format`.

    Only the checkpoint's own numbers have integer zero points, an order of columns or a codebook. Another tier is
    derived from the weights, with groups of neighbours: an order would cost a gather for every product and make nothing
    more exact.

    Args:
        reader: of the checkpoint; None for one of 16 bits.
        ours: quantization_config of a checkpoint that we wrote, which says it itself; empty for any other.
    """
    if reader is None or bits != reader.bits:
        return read_codes(ours, bits)
    code = code_of(bits, reader.codebook)
    return {"code": code, "integer_zeros": reader.asymmetric, "act_order": reader.act_order}


def store_group_sizes(reader: Reader, rank_columns: int, ranks: int) -> tuple[int, ...]:
    """Group sizes of a store in which no group would have two scales, the best first; none if ranks cut groups.

    Each of the ranks has ``rank_columns`` inputs of the down projection, which begin a group of their own. Where a
    codebook has groups of its own, the store's are those of what is derived from it.
    """
    fixed = reader.codebook.group_size if reader.codebook is not None else None
    if fixed is not None:
        whole = ranks == 1 or reader.ranks_take_groups or rank_columns % fixed == 0
        return (Options().group_size, *GROUP_SIZES) if whole else ()
    return tuple(
        size
        for size in GROUP_SIZES
        if reader.group_size is None or (reader.group_size % size == 0 and (ranks == 1 or rank_columns % size == 0))
    )


def check_compatible(reader: Reader, bits: Sequence[int], group_size: int, rank_columns: int, ranks: int) -> None:
    """Refuse a store that could not take the checkpoint's numbers as they are; bits have the high tier first.

    Raises:
        CheckpointError: it is such a store.
    """
    if bits[0] not in (reader.bits, 16):
        raise CheckpointError(
            f"hi = {bits[0]} was asked for, but the experts of this {reader.method} checkpoint have {reader.bits} "
            f"bits; set hi to {reader.bits}, which takes their numbers as they are, or to 16, which holds their "
            "dequantized weights."
        )
    if reader.bits not in bits:
        return
    if reader.act_order and ranks > 1:
        raise CheckpointError(
            f"--tensor-parallel-size {ranks} gives a rank some columns of the down projection, and in this "
            f"{reader.method} checkpoint each group is scattered over all of them (desc_act, or actorder group), so "
            "that a rank would hold no whole group; add --enable-expert-parallel, or set hi to 16 and lo to 0, which "
            "hold its dequantized weights."
        )
    sizes = store_group_sizes(reader, rank_columns, ranks)
    if not sizes:
        raise CheckpointError(
            f"--tensor-parallel-size {ranks} gives a rank {rank_columns} columns of the down projection, which cuts "
            f"the groups of this {reader.method} checkpoint; use another size or --enable-expert-parallel, or set hi "
            "to 16 and lo to 0, which hold its dequantized weights."
        )
    if group_size not in sizes:
        raise CheckpointError(
            f"group_size = {group_size} was asked for, but the groups of {reader.group_size} columns of this "
            f"{reader.method} checkpoint can only be held in groups of {' or '.join(map(str, sizes))}; leave "
            "group_size out."
        )


def quantizer_name(reader: Reader | None, bits: Sequence[int], quantizer: str) -> str:
    """How the bytes of a store were made: the checkpoint's method, and the quantizer of what is derived."""
    if reader is None:
        return quantizer
    source = f"{reader.method} checkpoint"
    derived = set() if nests(bits, reader.codebook) else set(bits) - {16, reader.bits}
    return f"{source}, {quantizer}" if derived else source


def describe(reader: Reader, bits: Sequence[int], quantizer: str) -> str:
    """What becomes of the checkpoint's numbers, in a few words."""
    kinds = {reader.bits: "as they are", 16: "dequantized"}
    if nests(bits, reader.codebook):
        kinds[bits[1]] = f"inside the {bits[0]}"
    versions = [f"{width} bits {kinds.get(width, f'derived with {quantizer}')}" for width in bits]
    return f"{reader.method} checkpoint, {', '.join(versions)}"
