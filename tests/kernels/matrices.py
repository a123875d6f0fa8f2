"""Random packed matrices and experts for kernel tests."""

from dataclasses import dataclass, replace

import torch
from hypothesis import assume
from hypothesis import strategies as st

from benchmarks.gpu.experts import ExpertWork
from vllm_dymoe.kernels import Activation, Curve, expert_reference, pack, pack_floats, pack_nested, unpack
from vllm_dymoe.residency.code import CODEBOOKS, MXFP4, NESTED, PLAIN, STEPS, UPPER_HALVES, Code, code_of
from vllm_dymoe.residency.format import Format
from vllm_dymoe.residency.matrix import MatrixFormat, PackedMatrix

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
"""Every curve, with limits that the products of random weights exceed."""


def random_packed(format: MatrixFormat, seed: int = 0) -> PackedMatrix:
    """A random matrix of a format, with weights and biases of about the size that models have, over poisoned bytes."""
    generator = torch.Generator().manual_seed(seed)
    section = torch.full((format.nbytes,), 0xEE, dtype=torch.uint8)
    size = format.columns**-0.5
    if not format.rows:
        return format.view(section, format.base.view(section.clone()) if format.nested else None)
    if not format.quantized:
        packed = format.view(section)
        packed.weight.copy_(torch.randn(format.rows, format.columns, generator=generator) * size)
        return _with_bias(packed, generator)
    shape = (format.rows, format.columns)
    if format.code.floats:
        _pack_random_floats(format, size, section, generator)
        return _with_bias(format.view(section), generator)
    if format.code.lattice:
        return _random_points(format, size, generator)
    codes = torch.randint(0, 1 << format.bits, shape, generator=generator, dtype=torch.uint8)
    scales = (torch.rand(format.rows, format.groups, generator=generator) + 0.5) * size * 4 / (1 << format.bits)
    if format.integer_zeros:
        zeros = torch.randint(-format.code.midpoint, format.code.midpoint + 1, scales.shape, generator=generator)
    else:
        zeros = torch.randn(scales.shape, generator=generator) * size / 4
    order = torch.randperm(format.columns, generator=generator) if format.act_order else None
    if format.nested:
        base = torch.full((format.base.nbytes,), 0xEE, dtype=torch.uint8)
        pack_nested(format, codes, scales.to(format.dtype), zeros.to(format.dtype), base, section, order)
        return format.view(section, _with_bias(format.base.view(base), generator))
    pack(format, codes, scales.to(format.dtype), zeros.to(format.dtype), section, order)
    return _with_bias(format.view(section), generator)


def _random_points(format: MatrixFormat, size: float, generator: torch.Generator) -> PackedMatrix:
    shape = format.padded_rows, format.columns
    codes = torch.randint(0, 1 << format.bits, shape, generator=generator, dtype=torch.uint8)
    low, high = ((torch.rand(2, format.rows, 1, generator=generator) + 0.5) * size).to(format.dtype)
    section = torch.full((format.nbytes,), 0xEE, dtype=torch.uint8)
    if format.nested:
        base = torch.full((format.base.nbytes,), 0xEE, dtype=torch.uint8)
        pack_nested(format, codes, low, high, base, section)
        return format.view(section, _with_bias(format.base.view(base), generator))
    pack(format, codes, low, low, section)
    return _with_bias(format.view(section), generator)


def _pack_random_floats(format: MatrixFormat, size: float, section: torch.Tensor, generator: torch.Generator) -> None:
    codes = torch.randint(0, 1 << format.bits, (format.rows, format.columns), generator=generator, dtype=torch.uint8)
    codes[~format.code.levels(codes).isfinite()] = 1
    scales = torch.rand(format.rows, format.groups, generator=generator) + 0.5
    factor = (1.0, 1.0)
    if format.code is MXFP4:
        exponents = 124 + scales.mul(4).to(torch.int32) - format.columns.bit_length() // 2
        scales = exponents.to(torch.uint8).view(torch.float8_e8m0fnu)
    elif format.code.has_factor:
        scales, factor = (scales * 200).to(torch.float8_e4m3fn), (size, 800.0)
    else:
        scales = scales * size / 100
    pack_floats(format, codes, scales, section, factor)


SIZES = {
    # In smaller ones a single rounding is the whole result: test_torch_experts.py has their matrices one at a time.
    "hidden": st.integers(30, 150),
    "intermediate": st.integers(30, 150),
    "group_size": st.sampled_from([32, 64, 128, 256]),
    "dtype": st.sampled_from([torch.bfloat16, torch.float16]),
    "bias": st.booleans(),
}
MIXED = SIZES | {"activation": st.sampled_from(ACTIVATIONS), "seed": st.integers(0, 1000)}
"""Sizes off every tile, and what differs between calls."""


def check_mix(compute, work_of, x, experts, chosen, activation, tolerance):
    """Experts that some tokens chose, and one with none, give what the reference does; other rows stay as they were.

    ``work_of`` makes work of an expert, rows and pairs, and ``compute`` of work and a number of rows [rows, hidden],
    NaN where nothing was written.
    """
    tokens, count = len(x), len(experts)
    work = [
        work_of(e, rows, [t * count + i for t in rows]) for i, (e, rows) in enumerate(zip(experts, chosen, strict=True))
    ]
    out = compute([*work, work_of(experts[0], [], [])], tokens * count).view(tokens, count, -1).cpu()
    for i, (expert, rows) in enumerate(zip(experts, chosen, strict=True)):
        want = expert_reference(x[rows].cpu(), expert.gate, expert.up, expert.down, activation)
        # A square of what random weights give may be more than the type has numbers for: not the kernel's doing.
        assume(not rows or want.abs().max() < torch.finfo(x.dtype).max)
        error = (out[rows, i].double() - want).norm() / want.norm()
        assert not rows or error < tolerance, expert.up.format.code.name
        assert bool(out[[t for t in range(tokens) if t not in rows], i].isnan().all()), "rows of no pair were written"


def in_one_section(packed: PackedMatrix) -> PackedMatrix:
    format = replace(packed.format, code=code_of(packed.format.bits))
    section = torch.empty(format.nbytes, dtype=torch.uint8)
    scales, zeros = packed.scales_zeros[:, : format.rows].permute(2, 1, 0)
    order = None if packed.order is None else packed.order.long()
    pack(format, unpack(packed), scales, zeros, section, order)
    whole = format.view(section)
    if packed.bias is not None:
        whole.bias.copy_(packed.bias)
    return whole


def _with_bias(packed: PackedMatrix, generator: torch.Generator) -> PackedMatrix:
    if packed.bias is not None:
        packed.bias.copy_(torch.randn(packed.format.rows, generator=generator))
    return packed


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
"""Every code."""


@dataclass(frozen=True)
class Expert:
    """Three matrices that fit together."""

    gate: PackedMatrix
    up: PackedMatrix
    down: PackedMatrix

    def work(self, tokens: list[int], pairs: list[int]) -> ExpertWork:
        rows = torch.tensor(tokens, dtype=torch.int64)
        return ExpertWork(self.gate, self.up, self.down, rows, torch.tensor(pairs, dtype=torch.int64))


def random_expert(
    hidden,
    intermediate,
    code,
    group_size=32,
    dtype=torch.bfloat16,
    seed=0,
    *,
    bias=False,
    steps=False,
    act_order=False,
    gate=True,
) -> Expert:
    """An expert of [hidden] -> [intermediate] -> [hidden], of a code or so many bits; an order is of integers only."""
    code = code if isinstance(code, Code) else code_of(code)
    act_order = act_order and code.bits < 16 and not (code.floats or code.lattice)
    formats = Format(hidden, intermediate, code, group_size, dtype, bias, steps, act_order, gate).matrices
    return Expert(*(random_packed(format, seed + number) for number, format in enumerate(formats)))
