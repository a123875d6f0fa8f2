"""What a launch is told: which sections experts have, and which tokens go to which expert. Device tensors only."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_dymoe.residency.checks import check_tensor
from vllm_dymoe.residency.code import NESTED, UPPER_HALVES, WHOLE
from vllm_dymoe.residency.format import Format
from vllm_dymoe.residency.matrix import DTYPES, GROUP_SIZES, MatrixFormat

ADDRESS_ALIGNMENT = 16


@dataclass(frozen=True)
class ExpertShape:
    """What all experts of a launch have in common.

    Attributes:
        hidden: H.
        intermediate: I.
        group_size: of every section below 16 bits.
        dtype: of activations, scales and 16-bit weights.
        bias: whether every projection has one.
        integer_zeros: bit-widths whose zeros count steps of their scale.
        act_order: bit-widths whose columns are stored in an order of their own.
        has_gate: whether experts have one.
        nested: bits of the codes that are two sections, of upper and of lower halves; half as many bits are the upper
            halves alone. 0 if there are none.

    Raises:
        ValueError: a size, a group size or a bit-width that the format does not have, 16 bits with integer zeros or an
            order, or codes that have no halves.
        TypeError: another dtype.
    """

    hidden: int
    intermediate: int
    group_size: int
    dtype: torch.dtype
    bias: bool = False
    integer_zeros: frozenset[int] = frozenset()
    act_order: frozenset[int] = frozenset()
    has_gate: bool = True
    nested: int = 0

    def __post_init__(self) -> None:
        if self.hidden < 1 or self.intermediate < 1:
            raise ValueError(f"hidden is {self.hidden} and intermediate {self.intermediate}, expected at least 1")
        if self.group_size not in GROUP_SIZES:
            raise ValueError(f"group_size is {self.group_size}, expected one of {', '.join(map(str, GROUP_SIZES))}")
        if self.dtype not in DTYPES:
            raise TypeError(f"dtype is {self.dtype}, expected torch.bfloat16 or torch.float16")
        for bits in self.integer_zeros | self.act_order | ({self.nested} - {0}):
            self.formats(bits)

    def formats(self, bits: int) -> tuple[MatrixFormat, MatrixFormat, MatrixFormat]:
        """Gate [I, H] or [0, H], up [I, H] and down [H, I] at some bits, or with the codebook of a tag."""
        code = WHOLE[bits]
        if self.nested:
            code = {self.nested: NESTED[self.nested], self.nested // 2: UPPER_HALVES[self.nested]}.get(bits, code)
        flags = self.bias, bits in self.integer_zeros, bits in self.act_order, self.has_gate
        return Format(self.hidden, self.intermediate, code, self.group_size, self.dtype, *flags).matrices


@dataclass(frozen=True, eq=False)
class ExpertTable:
    """Where experts are. The tensors may be rewritten between launches; only `tiers` and the shape are compiled in.

    Attributes:
        shape: of every expert.
        tiers: bit-widths, or codebooks' tags, that `bits` may hold.
        addresses: int64 [experts, 3], sections of gate, up and down, each a multiple of 16.
        bits: int32 [experts, 3].
        destinations: int64 [experts, 3], where decode stores the sections too, 0 for nowhere; None to fetch nothing.
        fine: int64 [experts, 3], sections of lower halves where bits are the shape's nested ones; None if it has none.
        fine_destinations: like destinations, if there are both.

    Raises:
        TypeError: a tensor of another dtype.
        ValueError: another shape, another device, or a bit-width that the format does not have.
    """

    shape: ExpertShape
    tiers: frozenset[int]
    addresses: Tensor
    bits: Tensor
    destinations: Tensor | None = None
    fine: Tensor | None = None
    fine_destinations: Tensor | None = None

    def __post_init__(self) -> None:
        check_tiers(self.tiers)
        check_tensor("addresses", self.addresses, shape=(None, 3), dtype=torch.int64)
        check_tensor("bits", self.bits, shape=(self.addresses.shape[0], 3), dtype=torch.int32)
        if self.bits.device != self.addresses.device:
            raise ValueError(f"bits is on {self.bits.device}, but addresses on {self.addresses.device}")
        for name in ("destinations", "fine", "fine_destinations"):
            tensor = getattr(self, name)
            if tensor is not None:
                check_tensor(name, tensor, shape=tuple(self.addresses.shape), dtype=torch.int64)
                if tensor.device != self.addresses.device:
                    raise ValueError(f"{name} is on {tensor.device}, addresses on {self.addresses.device}")
        if self.shape.nested:
            if self.fine is None:
                raise ValueError("fine is missing, but the shape has nested codes")
            if (self.fine_destinations is None) != (self.destinations is None):
                raise ValueError("destinations and fine_destinations go together where codes are nested")

    @property
    def mask(self) -> int:
        """The tiers' sum, as kernels want them."""
        return sum(self.tiers)

    @classmethod
    def of_blobs(
        cls,
        shape: ExpertShape,
        blobs: Sequence[int],
        bits: Sequence[int],
        device: torch.device | str,
        destinations: Sequence[int] | None = None,
        fine: Sequence[int] | None = None,
        fine_destinations: Sequence[int] | None = None,
    ) -> "ExpertTable":
        """The table of experts that are one blob each: gate, up and down behind one another.

        Args:
            blobs: addresses, multiples of 16.
            bits: tags of each expert's code.
            destinations: addresses of slots that decode fills as it reads, 0 for none.
            fine: addresses of the blobs' lower halves, 0 for none; only where the shape has nested codes.
            fine_destinations: like destinations, for them.
        """
        others = {"destinations": destinations, "fine": fine, "fine_destinations": fine_destinations}
        check_tiers(frozenset(bits))

        def sections(name: str, starts: Sequence[int]) -> Tensor:
            check_addresses(name, starts)
            of = fine_offsets if name.startswith("fine") else section_offsets
            offsets = {width: of(shape, width) for width in set(bits)}
            rows = [
                [start + offset if start else 0 for offset in offsets[width]]
                for start, width in zip(starts, bits, strict=True)
            ]
            return torch.tensor(rows, dtype=torch.int64).view(-1, 3).to(device)

        widths = torch.tensor([[width] * 3 for width in bits], dtype=torch.int32).view(-1, 3).to(device)
        optional = {name: None if starts is None else sections(name, starts) for name, starts in others.items()}
        return cls(shape, frozenset(bits), sections("blobs", blobs), widths, **optional)


@dataclass(frozen=True, eq=False)
class WorkList:
    """Tokens by expert.

    Attributes:
        items: int32 [items, 3]: expert of the table, first and last + 1 of its positions; empty ones are allowed.
        rows: int32 or int64 [positions], rows of x.
        pairs: int32 or int64 [positions], rows of the output, token * top_k + k.

    Raises:
        TypeError: a tensor of another dtype.
        ValueError: another shape.
    """

    items: Tensor
    rows: Tensor
    pairs: Tensor

    def __post_init__(self) -> None:
        check_tensor("items", self.items, shape=(None, 3), dtype=torch.int32)
        for name, tensor in (("rows", self.rows), ("pairs", self.pairs)):
            check_tensor(name, tensor, shape=(None,))
            if tensor.dtype not in (torch.int32, torch.int64):
                raise TypeError(f"{name} is {tensor.dtype}, expected torch.int32 or torch.int64")
        if self.rows.shape != self.pairs.shape:
            raise ValueError(f"rows has {self.rows.shape[0]} positions, but pairs {self.pairs.shape[0]}")

    @property
    def positions(self) -> int:
        """How many (token, expert) pairs there are."""
        return self.rows.shape[0]


def section_offsets(shape: ExpertShape, bits: int) -> tuple[int, int, int]:
    """Bytes from a blob's beginning to gate, up and down; to their upper halves where codes are nested."""
    gate, up, _ = (fmt.base if fmt.nested else fmt for fmt in shape.formats(bits))
    return 0, gate.nbytes, gate.nbytes + up.nbytes


def fine_offsets(shape: ExpertShape, bits: int) -> tuple[int, int, int]:
    """The same for lower halves; zeros where there are none."""
    gate, up, _ = shape.formats(bits)
    return (0, gate.nbytes, gate.nbytes + up.nbytes) if gate.nested else (0, 0, 0)


def check_tiers(tiers: frozenset[int]) -> None:
    """Refuse bit-widths that the format does not have.

    Raises:
        ValueError: there is one.
    """
    wrong = sorted(tiers - WHOLE.keys())
    if wrong:
        raise ValueError(f"tiers holds {wrong[0]} bits, expected some of 16, 8, 4, 2")


def check_addresses(name: str, addresses: Sequence[int]) -> None:
    """Refuse addresses that kernels cannot load 16 bytes from.

    Raises:
        ValueError: there is one.
    """
    for address in addresses:
        if address % ADDRESS_ALIGNMENT:
            raise ValueError(f"{name} holds address {address:#x}, expected multiples of {ADDRESS_ALIGNMENT}")
