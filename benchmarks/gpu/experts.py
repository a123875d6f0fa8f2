"""Experts without a server: the launches of a step, and the arguments of a launch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vllm_dymoe.experts.encoding import MXFP4
from vllm_dymoe.experts.format import PackedExpert
from vllm_dymoe.experts.matrix import MatrixFormat, PackedMatrix
from vllm_dymoe.kernels import Activation, pack, pack_floats, pack_nested
from vllm_dymoe.kernels.triton import (
    ExpertShape,
    ExpertTable,
    Scratch,
    TritonKernel,
    WorkList,
    decode_down,
    decode_gate_up,
    grouped_down,
    grouped_gate_up,
)
from vllm_dymoe.kernels.triton.launch import Formats
from vllm_dymoe.kernels.triton.rotate import rotated_inputs
from vllm_dymoe.kernels.triton.tiles import EVERY, Tiles
from vllm_dymoe.planner.constants import SMALL_BATCH_ROWS
from vllm_dymoe.planner.large_batch import crowded_tokens


class Products:
    """The launches of one layer's device-planned step with all experts resident.

    A small batch is decoded; in a larger one, experts are in classes by their tokens (``Tiles.of_large_batch``).

    Args:
        kernel: knows which ways to compute this card uses.
        experts: packed experts by their number, on the device.
        formats: of gate, up and down, all that occur.
        ids: int [tokens, top_k], negative for no expert.
        num_experts: how many the layer has, whether ``experts`` has them or not.
    """

    def __init__(
        self, kernel: TritonKernel, experts: Mapping[int, PackedExpert], formats: Sequence[Formats], ids: Tensor,
        num_experts: int, activation: Activation,
    ) -> None:  # fmt: skip
        step, device, (tokens, top_k) = kernel.small_batch_step(formats, activation), kernel.device, ids.shape
        shape, crowded = step.shape, tokens >= crowded_tokens(top_k, num_experts)
        self._tiles = tiles = _tiles_for(step.tiles, tokens, crowded=crowded)
        most = tiles.decode_tokens, *(tile.block_m for tile in tiles.grouped_down)  # tokens of an expert, by class
        positions = tiles.gate_up.positions, *most[1:]  # of an item, by class
        numbers = ids.flatten().cpu().long() + 1
        pairs = dict(enumerate(numbers.argsort(stable=True).split(numbers.bincount().tolist()), -1))
        classes = {
            expert: next((place for place, count in enumerate(most) if len(rows) <= count), len(most) - 1)
            for expert, rows in pairs.items()
            if expert >= 0 and len(rows)
        }
        active = sorted(classes, key=classes.__getitem__)
        items: list[list[list[int]]] = [[] for _ in most]
        end = self._decoded = 0
        for row, expert in enumerate(active):
            begin, end, place = end, end + len(pairs[expert]), classes[expert]
            step_size = positions[place]
            items[place] += [[row, at, min(at + step_size, end)] for at in range(begin, end, step_size)]
            self._decoded = end if place == 0 else self._decoded
        self._items = [torch.tensor(some, dtype=torch.int32).view(-1, 3).to(device) for some in items]
        self._pairs = torch.cat([pairs[expert] for expert in active]).int().to(device)
        self._rows = self._pairs // top_k
        base, residual, tags = (
            torch.tensor([[of(matrix) for matrix in experts[expert]] for expert in active]).to(device)
            for of in (lambda m: m.addresses[0], lambda m: m.addresses[-1], lambda m: m.format.encoding.tag)
        )
        nested = residual if shape.nested else None
        self._table = ExpertTable(shape, step.precisions, base, tags.int(), residual=nested)
        self._hidden = torch.empty(end, shape.intermediate, dtype=shape.dtype, device=device)
        partials, counts = (self._decoded * each for each in tiles.shared(shape.hidden, shape.intermediate))
        semaphores = torch.zeros(counts, dtype=torch.int32, device=device)
        self._scratch = Scratch(torch.empty(partials, device=device), semaphores)
        self._activation, self._held = activation, experts  # their memory, which the table addresses

    def launch(self, x: Tensor, out: Tensor) -> None:
        """Write unweighted outputs: x [tokens, hidden] to out [tokens * top_k, hidden]."""
        tiles, table, activation, hidden = self._tiles, self._table, self._activation, self._hidden
        x = rotated_inputs(x, table.shape.rotation(table.precisions))
        decoded, *grouped = self._items
        if len(decoded):
            rows, pairs, inner = (of[: self._decoded] for of in (self._rows, self._pairs, hidden))
            work = WorkList(decoded, rows, pairs)
            decode_gate_up(x, inner, table, work, activation, tiles.gate_up, self._scratch)
            decode_down(inner, out, table, work, tiles.down, self._scratch)
        for items, gate_up, down in zip(grouped, tiles.grouped_gate_up, tiles.grouped_down, strict=True):
            if len(items):
                work = WorkList(items, self._rows, self._pairs)
                grouped_gate_up(x, hidden, table, work, activation, gate_up)
                grouped_down(hidden, out, table, work, down)


def _tiles_for(tiles: Tiles, tokens: int, *, crowded: bool) -> Tiles:
    """Return the sizes of programs for a step of so many tokens."""
    if tokens > SMALL_BATCH_ROWS:
        return tiles.of_large_batch(crowded=crowded)
    tiles = tiles.on_tensor_cores(tokens) if tiles.gate_up.tensor_cores else tiles
    return replace(tiles, decode_tokens=EVERY, grouped_gate_up=(), grouped_down=())


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
