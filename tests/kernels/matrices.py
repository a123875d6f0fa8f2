"""Random packed matrices and experts for kernel tests."""

from dataclasses import dataclass, replace

import torch

from vllm_dymoe.kernels import Activation, Curve, ExpertWork, MatrixFormat, PackedMatrix, pack

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
        return format.view(section)
    if not format.quantized:
        packed = format.view(section)
        packed.weight.copy_(torch.randn(format.rows, format.columns, generator=generator) * size)
        return _with_bias(packed, generator)
    shape = (format.rows, format.columns)
    codes = torch.randint(0, 1 << format.bits, shape, generator=generator, dtype=torch.uint8)
    scales = (torch.rand(format.rows, format.groups, generator=generator) + 0.5) * size * 4 / (1 << format.bits)
    if format.integer_zeros:
        zeros = torch.randint(-format.midpoint, format.midpoint + 1, scales.shape, generator=generator)
    else:
        zeros = torch.randn(scales.shape, generator=generator) * size / 4
    order = torch.randperm(format.columns, generator=generator) if format.act_order else None
    pack(format, codes, scales.to(format.dtype), zeros.to(format.dtype), section, order)
    return _with_bias(format.view(section), generator)


def _with_bias(packed: PackedMatrix, generator: torch.Generator) -> PackedMatrix:
    if packed.bias is not None:
        packed.bias.copy_(torch.randn(packed.format.rows, generator=generator))
    return packed


@dataclass(frozen=True)
class Expert:
    """Three matrices that fit together."""

    gate: PackedMatrix
    up: PackedMatrix
    down: PackedMatrix

    def work(self, tokens: list[int], pairs: list[int]) -> ExpertWork:
        """Its share of a step."""
        rows = torch.tensor(tokens, dtype=torch.int64)
        return ExpertWork(self.gate, self.up, self.down, rows, torch.tensor(pairs, dtype=torch.int64))


def random_expert(
    hidden,
    intermediate,
    bits,
    group_size=32,
    dtype=torch.bfloat16,
    seed=0,
    *,
    bias=False,
    steps=False,
    act_order=False,
    gate=True,
) -> Expert:
    """An expert of [hidden] -> [intermediate] -> [hidden]; at 16 bits its columns have no order."""
    rest = bits, group_size, dtype, bias, steps, act_order and bits < 16
    wide, narrow = MatrixFormat(intermediate, hidden, *rest), MatrixFormat(hidden, intermediate, *rest)
    first = wide if gate else replace(wide, rows=0)
    return Expert(random_packed(first, seed), random_packed(wide, seed + 1), random_packed(narrow, seed + 2))
