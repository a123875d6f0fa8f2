"""Experts by themselves, without a runtime: what a kernel computes of some, and where a launch finds them."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_dymoe.kernels import Activation, ExpertKernel
from vllm_dymoe.kernels.base import Receive
from vllm_dymoe.kernels.triton import ExpertShape, ExpertTable
from vllm_dymoe.residency.decision import Decision, Grouped
from vllm_dymoe.residency.format import Expert
from vllm_dymoe.residency.matrix import PackedMatrix


class ExpertWork(NamedTuple):
    """One expert's share of one layer's step."""

    gate: PackedMatrix  # [intermediate, hidden], or [0, hidden] for none
    up: PackedMatrix  # [intermediate, hidden]
    down: PackedMatrix  # [hidden, intermediate]
    tokens: Tensor  # int64 [n], rows of x that are routed to the expert
    pairs: Tensor  # int64 [n], rows of out to write, token * top_k + k


def work_of_ids(experts: Mapping[int, Expert], ids: Tensor) -> list[ExpertWork]:
    """Of each expert that occurs in ids, int [tokens, top_k] where the experts are."""
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
    """Begin a step of some experts and compute all of them at once."""
    kernel.compute(begin_experts(kernel, x, work, out, activation), receive)


def begin_experts(
    kernel: ExpertKernel, x: Tensor, work: Sequence[ExpertWork], out: Tensor, activation: Activation
) -> list[int]:
    """Begin a step of some experts; its items."""
    bounds = [0, *accumulate(len(expert.tokens) for expert in work)]
    rows, pairs = (
        torch.cat([getattr(expert, name).cpu() for expert in work]) if work else torch.empty(0, dtype=torch.int64)
        for name in ("tokens", "pairs")
    )
    items = list(range(len(work)))
    decision = Decision.of_routing(Grouped(items, bounds, rows, pairs), items)
    for item, expert in enumerate(work):
        decision.place(item, Expert(*expert[:3]))
    kernel.begin(x, decision, out, activation)
    return items


def section_of(packed: PackedMatrix) -> Tensor:
    """The bytes that a packed matrix is a view of, from the first of its section to the last."""
    return torch.empty(0, dtype=torch.uint8, device=packed.weight.device).set_(packed.weight.untyped_storage())


def table_of_blobs(
    shape: ExpertShape,
    blobs: Sequence[int],
    bits: Sequence[int],
    device: torch.device | str,
    destinations: Sequence[int] | None = None,
    fine: Sequence[int] | None = None,
    fine_destinations: Sequence[int] | None = None,
) -> ExpertTable:
    """The table of experts that are one blob each: gate, up and down behind one another.

    Args:
        shape: of all.
        blobs: addresses, multiples of 16.
        bits: tags of each expert's code.
        device: of the table.
        destinations: addresses of slots that decode fills as it reads, 0 for none.
        fine: addresses of the blobs' lower halves, 0 for none; only where the shape has nested codes.
        fine_destinations: like destinations, for them.
    """

    def sections(starts: Sequence[int] | None, lower: bool = False) -> Tensor | None:
        if starts is None:
            return None
        rows = []
        for start, width in zip(starts, bits, strict=True):
            offsets = (fine_offsets if lower else section_offsets)(shape, width)
            rows.append([start + offset if start else 0 for offset in offsets])
        return torch.tensor(rows, dtype=torch.int64).view(-1, 3).to(device)

    widths = torch.tensor([[width] * 3 for width in bits], dtype=torch.int32).view(-1, 3).to(device)
    addresses = sections(blobs)
    assert addresses is not None
    lower = sections(fine, True), sections(fine_destinations, True)
    return ExpertTable(shape, frozenset(bits), addresses, widths, sections(destinations), *lower)


def section_offsets(shape: ExpertShape, bits: int) -> tuple[int, int, int]:
    """Bytes from a blob's beginning to gate, up and down; to their upper halves where codes are nested."""
    gate, up, _ = (fmt.base if fmt.nested else fmt for fmt in shape.formats(bits))
    return 0, gate.nbytes, gate.nbytes + up.nbytes


def fine_offsets(shape: ExpertShape, bits: int) -> tuple[int, int, int]:
    """The same for lower halves; zeros where there are none."""
    gate, up, _ = shape.formats(bits)
    return (0, gate.nbytes, gate.nbytes + up.nbytes) if gate.nested else (0, 0, 0)
