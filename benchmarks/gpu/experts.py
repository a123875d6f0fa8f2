"""Experts without a server: calls of a kernel, and the arguments of a launch."""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vllm_dymoe.experts.encoding import MXFP4
from vllm_dymoe.experts.format import PackedExpert
from vllm_dymoe.experts.matrix import MatrixFormat, PackedMatrix
from vllm_dymoe.kernels import Activation, ExpertKernel, pack, pack_floats, pack_nested
from vllm_dymoe.kernels.base import Receive
from vllm_dymoe.kernels.triton import ExpertShape, ExpertTable
from vllm_dymoe.planner.plan import Grouped, LayerPlan


class ExpertWork(NamedTuple):
    """One expert's part of one layer's step."""

    gate: PackedMatrix  # [intermediate, hidden], or [0, hidden] without a gate
    up: PackedMatrix  # [intermediate, hidden]
    down: PackedMatrix  # [hidden, intermediate]
    tokens: Tensor  # int64 [n], rows of x that are routed to the expert
    pairs: Tensor  # int64 [n], rows of out to write, token * top_k + k


def work_of_ids(experts: Mapping[int, PackedExpert], ids: Tensor) -> list[ExpertWork]:
    """Return the work of each expert that occurs in ids.

    Args:
        ids: int [tokens, top_k] on the experts' device.
    """
    pairs = ids.flatten().argsort(stable=True).split(ids.flatten().bincount().tolist())
    return [ExpertWork(*experts[expert], rows // ids.shape[1], rows) for expert, rows in enumerate(pairs) if len(rows)]


def compute_experts(
    kernel: ExpertKernel,
    x: Tensor,
    work: Sequence[ExpertWork],
    out: Tensor,
    activation: Activation,
    receive: Receive | None = None,
) -> None:
    """Begin a step of some experts and compute all of them in one call."""
    kernel.compute(begin_experts(kernel, x, work, out, activation), receive)


def begin_experts(
    kernel: ExpertKernel, x: Tensor, work: Sequence[ExpertWork], out: Tensor, activation: Activation
) -> list[int]:
    """Begin a step of some experts; return its items."""
    bounds = [0, *accumulate(len(expert.tokens) for expert in work)]
    rows, pairs = (
        torch.cat([getattr(expert, name).cpu() for expert in work]) if work else torch.empty(0, dtype=torch.int64)
        for name in ("tokens", "pairs")
    )
    items = list(range(len(work)))
    plan = LayerPlan.of_experts(Grouped(items, bounds, rows, pairs), [PackedExpert(*expert[:3]) for expert in work])
    kernel.begin(x, plan, out, activation)
    return items


def random_packed(format: MatrixFormat, seed: int = 0) -> PackedMatrix:
    """Return a random matrix in a format, written over poisoned bytes.

    Weights and biases have the size that is usual in models.
    """
    generator = torch.Generator().manual_seed(seed)
    section = torch.full((format.nbytes,), 0xEE, dtype=torch.uint8)
    base = torch.full((format.base.nbytes,), 0xEE, dtype=torch.uint8) if format.nested else None
    if format.rows:
        _fill(format, section, base, generator)
    packed = format.view(section, None if base is None else format.base.view(base))
    if packed.bias is not None and format.rows:
        packed.bias.copy_(torch.randn(format.rows, generator=generator))
    return packed


def _fill(format: MatrixFormat, section: Tensor, base: Tensor | None, generator: torch.Generator) -> None:
    size, encoding = format.columns**-0.5, format.encoding
    if not format.quantized:
        weights = torch.randn(format.rows, format.columns, generator=generator) * size
        format.view(section).weight.copy_(weights)
        return
    shape = format.padded_rows if encoding.lattice else format.rows, format.columns
    codes = torch.randint(0, 1 << format.bits, shape, generator=generator, dtype=torch.uint8)
    if encoding.floats:
        _pack_floats(format, codes, size, section, generator)
        return
    if encoding.lattice:
        scales, zeros = ((torch.rand(2, format.rows, 1, generator=generator) + 0.5) * size).to(format.dtype)
        zeros = zeros if format.nested else scales
    else:
        scales = (torch.rand(format.rows, format.groups, generator=generator) + 0.5) * size * 4 / (1 << format.bits)
        zeros = torch.randn(scales.shape, generator=generator) * size / 4
        if format.integer_zeros:
            zeros = torch.randint(-encoding.midpoint, encoding.midpoint + 1, scales.shape, generator=generator)
    order = torch.randperm(format.columns, generator=generator) if format.act_order else None
    scales, zeros = scales.to(format.dtype), zeros.to(format.dtype)
    if base is None:
        pack(format, codes, scales, zeros, section, order)
    else:
        pack_nested(format, codes, scales, zeros, base, section, order)


def _pack_floats(format: MatrixFormat, codes: Tensor, size: float, section: Tensor, generator: torch.Generator) -> None:
    codes[~format.encoding.levels(codes).isfinite()] = 1
    scales, factor = torch.rand(format.rows, format.groups, generator=generator) + 0.5, (1.0, 1.0)
    if format.encoding is MXFP4:
        exponents = 124 + scales.mul(4).to(torch.int32) - format.columns.bit_length() // 2
        scales = exponents.to(torch.uint8).view(torch.float8_e8m0fnu)
    elif format.encoding.has_factor:
        scales, factor = (scales * 200).to(torch.float8_e4m3fn), (size, 800.0)
    else:
        scales = scales * size / 100
    pack_floats(format, codes, scales, section, factor)


def section_of(packed: PackedMatrix) -> Tensor:
    """Return the bytes of the section of which a packed matrix is a view."""
    return torch.empty(0, dtype=torch.uint8, device=packed.weight.device).set_(packed.weight.untyped_storage())


def table_of_slices(
    shape: ExpertShape,
    slices: Sequence[int],
    bits: Sequence[int],
    device: torch.device | str,
    destinations: Sequence[int] | None = None,
    residual: Sequence[int] | None = None,
    residual_destinations: Sequence[int] | None = None,
) -> ExpertTable:
    """Return the table of packed experts: gate, up, down of each.

    Args:
        shape: common to all experts.
        slices: addresses of packed experts, multiples of 16.
        bits: tags of each expert's encoding.
        device: where the table is created.
        destinations: addresses of slots that decode fills as it reads, 0 for none.
        residual: addresses of residual slices, 0 for none; only if the shape has nested codes.
        residual_destinations: like destinations, for residual slices.
    """

    def sections(starts: Sequence[int] | None, lower: bool = False) -> Tensor | None:
        if starts is None:
            return None
        rows = []
        for start, width in zip(starts, bits, strict=True):
            offsets = (residual_offsets if lower else section_offsets)(shape, width)
            rows.append([start + offset if start else 0 for offset in offsets])
        return torch.tensor(rows, dtype=torch.int64).view(-1, 3).to(device)

    widths = torch.tensor([[width] * 3 for width in bits], dtype=torch.int32).view(-1, 3).to(device)
    addresses = sections(slices)
    assert addresses is not None
    lower = sections(residual, True), sections(residual_destinations, True)
    return ExpertTable(shape, frozenset(bits), addresses, widths, sections(destinations), *lower)


def section_offsets(shape: ExpertShape, bits: int) -> tuple[int, int, int]:
    """Return the offsets of gate, up and down in a packed expert.

    For nested codes, these are offsets in the base slice.
    """
    gate, up, _ = (fmt.base if fmt.nested else fmt for fmt in shape.formats(bits))
    return 0, gate.nbytes, gate.nbytes + up.nbytes


def residual_offsets(shape: ExpertShape, bits: int) -> tuple[int, int, int]:
    """Return the same for the residual slices; zeros if there are none."""
    gate, up, _ = shape.formats(bits)
    return (0, gate.nbytes, gate.nbytes + up.nbytes) if gate.nested else (0, 0, 0)


def captured(function: Callable[[], Any]) -> Any:
    """Return a graph of launches, captured as in vLLM.

    The launches run once before on the capture's stream, which compiles them. Any thread that disturbs the capture
    makes it fail.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="global"):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    return graph
