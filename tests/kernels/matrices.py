"""Random packed matrices and experts for kernel tests."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import torch
from hypothesis import assume
from hypothesis import strategies as st

from benchmarks.gpu.experts import random_packed
from vllm_dymoe.experts.encoding import CODEBOOKS, NESTED, PLAIN, STEPS, UPPER_HALVES, Encoding, encoding_of
from vllm_dymoe.experts.format import ExpertFormat
from vllm_dymoe.experts.format import PackedExpert as Views
from vllm_dymoe.experts.matrix import MatrixFormat, PackedMatrix
from vllm_dymoe.kernels import Activation, CpuKernel, Curve, expert_reference, pack, unpack
from vllm_dymoe.planner.plan import Grouped, LayerPlan

ACTIVATIONS = (
    Activation.SILU,
    Activation.GELU,
    Activation.GELU_TANH,
    Activation.SWIGLU_OAI,
    Activation(Curve.SWIGLU, limit=0.75),
    Activation(Curve.SWIGLU, limit=0.75, alpha=1.5, beta=0.5),
    Activation(Curve.SWIGLU_STEP, limit=0.5),
    Activation(Curve.SITU, beta=2.0),
    Activation(Curve.SITU, limit=0.75, beta=0.5),
    Activation(Curve.SWIGLU, has_gate=False),
    Activation(Curve.GELU, has_gate=False),
    Activation(Curve.GELU_TANH, has_gate=False),
    Activation(Curve.RELU2, has_gate=False),
)
"""Every activation curve, with limits that products of random weights exceed."""


SIZES = {
    # In smaller matrices one rounding dominates the result; test_torch_experts.py tests those one at a time.
    "hidden": st.integers(30, 150),
    "intermediate": st.integers(30, 150),
    "group_size": st.sampled_from([32, 64, 128, 256]),
    "dtype": st.sampled_from([torch.bfloat16, torch.float16]),
    "bias": st.booleans(),
}
MIXED = SIZES | {"activation": st.sampled_from(ACTIVATIONS), "seed": st.integers(0, 1000)}
"""Sizes that are no multiples of a tile, and inputs that differ between calls."""


class ExpertWork(NamedTuple):
    """One expert's part of one layer's step."""

    gate: PackedMatrix  # [intermediate, hidden], or [0, hidden] without a gate
    up: PackedMatrix  # [intermediate, hidden]
    down: PackedMatrix  # [hidden, intermediate]
    tokens: torch.Tensor  # int64 [n], rows of x that are routed to the expert
    pairs: torch.Tensor  # int64 [n], rows of out to write, token * top_k + k


def compute_experts(kernel: CpuKernel, x: torch.Tensor, work: Sequence[ExpertWork], out, activation) -> None:
    """Compute some experts in one call."""
    bounds = [0, *accumulate(len(expert.tokens) for expert in work)]
    rows, pairs = (torch.cat([getattr(expert, name) for expert in work]) for name in ("tokens", "pairs"))
    items = list(range(len(work)))
    views = [Views(*expert[:3]) for expert in work]
    kernel.begin(x, LayerPlan.of_experts(Grouped(items, bounds, rows, pairs), views), out, activation)
    kernel.compute(items)


def check_mix(compute, work_of, x, experts, chosen, activation, tolerance):
    """Check that experts with and without tokens match the reference.

    Rows of no pair must stay unchanged. ``work_of`` converts an expert, rows and pairs to work; ``compute`` maps work
    and a number of rows to [rows, hidden], which is NaN where nothing was written.
    """
    tokens, count = len(x), len(experts)
    work = [
        work_of(e, rows, [t * count + i for t in rows]) for i, (e, rows) in enumerate(zip(experts, chosen, strict=True))
    ]
    out = compute([*work, work_of(experts[0], [], [])], tokens * count).view(tokens, count, -1).cpu()
    for i, (expert, rows) in enumerate(zip(experts, chosen, strict=True)):
        want = expert_reference(x[rows].cpu(), expert.gate, expert.up, expert.down, activation)
        # The square of an activation may overflow the dtype, which is not the kernel's fault.
        assume(not rows or want.abs().max() < torch.finfo(x.dtype).max)
        error = (out[rows, i].double() - want).norm() / want.norm()
        assert not rows or error < tolerance, expert.up.format.encoding.name
        assert bool(out[[t for t in range(tokens) if t not in rows], i].isnan().all()), "rows of no pair were written"


def in_one_section(packed: PackedMatrix) -> PackedMatrix:
    format = replace(packed.format, encoding=encoding_of(packed.format.bits))
    section = torch.empty(format.nbytes, dtype=torch.uint8)
    scales, zeros = packed.scales_zeros[:, : format.rows].permute(2, 1, 0)
    order = None if packed.order is None else packed.order.long()
    pack(format, unpack(packed), scales, zeros, section, order)
    whole = format.view(section)
    if packed.bias is not None:
        whole.bias.copy_(packed.bias)
    return whole


KINDS = {
    "16": PLAIN,
    "8": STEPS[8],
    "4": STEPS[4],
    "2": STEPS[2],
    "8 in two": NESTED[8],
    "4 in two": NESTED[4],
    "half of 8": UPPER_HALVES[8],
    "half of 4": UPPER_HALVES[4],
    **CODEBOOKS,
}
"""Every code of a width."""


@dataclass(frozen=True)
class PackedExpert:
    """Three matrices whose shapes match."""

    gate: PackedMatrix
    up: PackedMatrix
    down: PackedMatrix

    @property
    def formats(self) -> tuple[MatrixFormat, MatrixFormat, MatrixFormat]:
        return self.gate.format, self.up.format, self.down.format

    def work(self, tokens: list[int], pairs: list[int]) -> ExpertWork:
        rows = torch.tensor(tokens, dtype=torch.int64)
        return ExpertWork(self.gate, self.up, self.down, rows, torch.tensor(pairs, dtype=torch.int64))


def random_expert(
    hidden,
    intermediate,
    encoding,
    group_size=32,
    dtype=torch.bfloat16,
    seed=0,
    *,
    bias=False,
    steps=False,
    act_order=False,
    gate=True,
) -> PackedExpert:
    """Return an expert with random weights: [hidden] -> [intermediate] -> [hidden].

    ``encoding`` may be a number of bits. Only integers have an order of columns.
    """
    encoding = encoding if isinstance(encoding, Encoding) else encoding_of(encoding)
    act_order = act_order and encoding.bits < 16 and not (encoding.floats or encoding.lattice)
    formats = ExpertFormat(hidden, intermediate, encoding, group_size, dtype, bias, steps, act_order, gate).matrices
    return PackedExpert(*(random_packed(format, seed + number) for number, format in enumerate(formats)))
