"""Ways of a GPU to compute experts, and checks of a kernel's arguments."""

from enum import IntEnum

from torch import Tensor

from vllm_dymoe.experts.checks import check_tensor
from vllm_dymoe.experts.matrix import DTYPES, MatrixFormat
from vllm_dymoe.kernels.activation import Activation


class Decode(IntEnum):
    """How a GPU computes experts of few tokens, the slowest first."""

    PLAIN = 0  # without tensor cores
    TENSOR_CORES = 1
    DEPENDENT = 2  # on tensor cores, and down begins while gate and up still run
    CHAINED = 3  # the same, and gate and up begin while the launch before them still runs


class Grouped(IntEnum):
    """How a GPU computes experts of more tokens, the slowest first."""

    PLAIN = 0  # weights reach tensor cores by way of shared memory
    IN_REGISTERS = 1  # weights are dequantized in the registers that tensor cores read


def check_activations(x: Tensor, out: Tensor) -> None:
    """Check dtypes, shapes and strides of a layer's input and output.

    Raises TypeError unless both are bfloat16 or both float16, and ValueError for shapes or strides that do not fit.
    """
    if x.dtype not in DTYPES:
        raise TypeError(f"x is {x.dtype}, expected torch.bfloat16 or torch.float16")
    fit = x.dim() == out.dim() == 2 and x.shape[1] == out.shape[1] and out.dtype is x.dtype
    if fit and x.is_contiguous() and out.is_contiguous():
        return  # the checks below, which give detailed messages, take four times as long
    check_tensor("x", x, shape=(None, None))
    check_tensor("out", out, shape=(None, x.shape[1]), dtype=x.dtype)


def check_formats(gate: MatrixFormat, up: MatrixFormat, down: MatrixFormat, x: Tensor, activation: Activation) -> None:
    """Check that experts fit the activations.

    Raises TypeError if scales and x have different dtypes, and ValueError if shapes do not fit together or if a gate is
    missing or superfluous for the activation.
    """
    hidden = x.shape[1]
    if bool(gate.rows) != activation.has_gate:
        raise ValueError(f"work holds a gate of {gate.rows} rows, but the activation is {activation}")
    gate_rows = gate.rows or up.rows
    if not (gate.columns == up.columns == down.rows == hidden and gate_rows == up.rows == down.columns):
        raise ValueError(
            f"work holds gate {gate.rows} x {gate.columns}, up {up.rows} x {up.columns} and "
            f"down {down.rows} x {down.columns}, expected I x {hidden}, I x {hidden} and {hidden} x I"
        )
    if not (gate.dtype is up.dtype is down.dtype is x.dtype):
        raise TypeError(f"work is packed for {gate.dtype}, {up.dtype} and {down.dtype}, but x is {x.dtype}")
