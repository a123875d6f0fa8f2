"""A small random model, for tests that need experts but no language."""

import torch

from tests.support.memory_writer import MemoryStore, MemoryWriter
from vllm_dymoe.experts.encoding import encoding_of
from vllm_dymoe.experts.format import ExpertFormat, ModelExperts, Projection, stored_formats
from vllm_dymoe.quantize import QUANTIZERS
from vllm_dymoe.quantize.packer import ExpertPacker


def make_experts(
    *,
    layers=2,
    num_experts=6,
    top_k=2,
    hidden=64,
    intermediate=32,
    bits=(4, 2),
    group_size=32,
    dtype=torch.bfloat16,
    bias=False,
    nested=False,
) -> ModelExperts:
    """Describe a small model's experts.

    With ``nested``, the low version is a part of the high one.
    """
    formats = {b: ExpertFormat(hidden, intermediate, encoding_of(b), group_size, dtype, bias) for b in bits}
    if nested:
        formats = stored_formats(bits, formats.__getitem__)
    return ModelExperts(tuple(range(1, layers + 1)), num_experts, top_k, formats)


def random_weight(experts: ModelExperts, layer: int, expert: int, projection: Projection) -> torch.Tensor:
    fmt = next(iter(experts.formats.values()))
    matrix = fmt.matrices[projection]
    generator = torch.Generator().manual_seed(layer * 1000 + expert * 10 + projection)
    return (torch.randn(matrix.rows, matrix.columns, generator=generator) * matrix.columns**-0.5).to(fmt.dtype)


def fill(packer: ExpertPacker) -> None:
    for layer in range(len(packer.experts.layers)):
        for expert in range(packer.experts.num_experts):
            for projection in packer.experts.projections:
                packer.put(layer, expert, projection, random_weight(packer.experts, layer, expert, projection))


def make_store(experts: ModelExperts) -> MemoryStore:
    packer = ExpertPacker(experts, QUANTIZERS["rtn"], MemoryWriter(experts))
    fill(packer)
    return packer.finish()
