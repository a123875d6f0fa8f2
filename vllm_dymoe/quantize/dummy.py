"""Random experts for ``--load-format dummy``.

Their bytes have the right layout, and nothing is quantized. What a kernel computes with them is finite and meaningless.
They differ from expert to expert, so that computing with the wrong one is visible.
"""

from collections.abc import Callable
from itertools import product

import torch

from vllm_dymoe.cache.pages import map_bytes
from vllm_dymoe.cache.store import FileStore, HostStore
from vllm_dymoe.cache.store.writer import StoreWriter
from vllm_dymoe.experts.format import EVERY_PROJECTION, ExpertFormat, ModelExperts, PackedExpert, SliceKey
from vllm_dymoe.experts.matrix import MatrixFormat

# Standard deviation with which models are initialised.
_SPREAD = 0.02
# 16-bit weights have one exponent, and a random sign and mantissa, so their size is between this and twice this.
_SMALLEST = 2.0**-6


def random_store(
    experts: ModelExperts, writer: StoreWriter, seed: int, progress: Callable[[], object] = lambda: None
) -> FileStore:
    """Fill a store with random experts.

    The same seed gives the same bytes. Raises StoreError if the store cannot be written.
    """
    generator = torch.Generator().manual_seed(seed)
    try:
        for layer in range(len(experts.layers)):
            for expert in range(experts.num_experts):
                for projection in experts.projections:
                    for bits, fmt in experts.of_layers[layer].items():
                        matrix = fmt.matrices[projection]
                        section = torch.empty(matrix.nbytes, dtype=torch.uint8)
                        fill_randomly(matrix, section, generator)
                        writer.write(SliceKey(layer, expert, bits), projection, section)
                    progress()
        return writer.finish()
    except BaseException:
        writer.discard()
        raise


def fill_randomly(matrix: MatrixFormat, section: torch.Tensor, generator: torch.Generator) -> None:
    """Overwrite a section with a random matrix of finite weights around zero.

    ``section`` is uint8 [matrix.nbytes].
    """
    section.view(torch.int64).random_(-(2**63), None, generator=generator)
    if matrix.nested:  # everything else is in the base
        return
    section[matrix.weight_bytes :].zero_()
    packed = matrix.view(section)
    if packed.scales is not None:
        book = matrix.encoding
        if book.bits == 8:
            # Clears the bit that only codes above the largest finite one have set together with all bits above it.
            packed.weight[:, 1].bitwise_and_(0xFF ^ 0x11 * (0x7F ^ book.largest))
        every = torch.arange(1 << book.bits, dtype=torch.uint8)
        size = float(book.levels(every).nan_to_num(0).square().mean().sqrt())
        if packed.factor is not None:
            packed.factor.copy_(torch.tensor([_SPREAD, size], dtype=torch.float32))
            size = _SPREAD
        scale = torch.tensor([_SPREAD / size], dtype=torch.float32).to(packed.scales.dtype)
        packed.scales.view(torch.uint8).view(*packed.scales.shape, -1).copy_(scale.view(torch.uint8))
    elif packed.scales_zeros is None:
        sign_and_mantissa = round(1 / torch.finfo(matrix.dtype).eps) - 1 - 2**15
        exponent = int(torch.tensor(_SMALLEST, dtype=matrix.dtype).view(torch.int16))
        packed.weight.view(torch.int16).bitwise_and_(sign_and_mantissa).bitwise_or_(exponent)
    elif matrix.encoding.lattice:  # points have about unit variance
        packed.scales_zeros[:, : matrix.rows] = _SPREAD
    else:
        scale = _SPREAD * 12**0.5 / 2 ** (matrix.encoding.upper_of or matrix.bits)  # codes are uniform
        packed.scales_zeros[:, : matrix.rows, 0] = scale
        # The mean of the codes is half a step below the middle.
        packed.scales_zeros[:, : matrix.rows, 1] = 0.5 if matrix.integer_zeros else scale / 2
    if packed.bias is not None:
        packed.bias.copy_(torch.randn(matrix.rows, generator=generator) * _SPREAD)
    if packed.order is not None:
        packed.order.copy_(torch.randperm(matrix.columns, generator=generator))


class RandomStore(HostStore):
    """Random experts in memory that share the bytes of ``distinct`` ones.

    Args:
        experts: their formats.
        distinct: number of different experts.
        pinned: memory is pinned for the device.
        readable: the device may read them directly; otherwise it has to ask for them, as if they were on a disk.
    """

    whole = True

    def __init__(self, experts: ModelExperts, distinct: int, *, pinned: bool = False, readable: bool = True) -> None:
        self.experts, self._distinct, self._readable = experts, distinct, readable
        generator = torch.Generator().manual_seed(0)
        self._slices: dict[tuple[int, int], torch.Tensor] = {}
        for number, (bits, fmt) in product(range(distinct), experts.formats.items()):
            packed = torch.empty(fmt.nbytes, dtype=torch.uint8, pin_memory=True) if pinned else map_bytes(fmt.nbytes)
            for projection in fmt.projections:
                fill_randomly(fmt.matrices[projection], packed[fmt.sections[projection]], generator)
            self._slices[number, bits] = packed

    @property
    def description(self) -> str:
        return "random experts"

    @property
    def readable(self) -> bool:
        return self._readable

    def packed(self, key: SliceKey) -> torch.Tensor:
        return self._slices[(key.layer * self.experts.num_experts + key.expert) % self._distinct, key.bits]

    def read_into(
        self, key: SliceKey, destination: torch.Tensor, projections: range = EVERY_PROJECTION, *, wait: bool = True
    ) -> None:
        destination.copy_(self.packed(key)[self.experts.formats[key.bits].span(projections)])

    def view(self, number: int, fmt: ExpertFormat) -> PackedExpert:
        """Return a random expert."""
        expert: PackedExpert | None = None
        named = {part: bits for bits, part in self.experts.formats.items()}
        for part in fmt.slices:
            expert = part.view(self._slices[number, named[part]], expert)
        assert expert is not None
        return expert

    def close(self) -> None:
        self._slices.clear()
