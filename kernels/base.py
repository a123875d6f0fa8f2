"""What a layer's step asks of a kernel, and what every kernel promises."""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from vllm_dymoe.experts.checks import check_tensor
from vllm_dymoe.experts.matrix import DTYPES, MatrixFormat
from vllm_dymoe.kernels.activation import Activation
from vllm_dymoe.planner.plan import LayerPlan

Receive = Callable[[int], None]
"""Called with n = 1, 2, 3 before the first n projections (gate, up, down) of any of the experts are read."""


class ExpertKernel(Protocol):
    """Computes experts from their packed bytes, one layer's step at a time."""

    name: str  # which implementation, for logs and reports
    workspace_bytes: int  # scratch on the device that this object holds beyond activations
    asynchronous: bool  # whether calls return when the work is enqueued, so that few large ones cost the host least

    def begin(self, x: Tensor, plan: LayerPlan, out: Tensor, activation: Activation) -> None:
        """Begin a layer's step; TypeError and ValueError as ``check_activations``.

        Args:
            x: [rows, hidden] bfloat16 or float16, contiguous.
            decision: made by the host. Neighbouring items can share a launch.
            out: [tokens * top_k, hidden] like x, overwritten where pairs of computed items are.
            activation: of the gate.
        """
        ...

    def compute(self, items: Sequence[int], receive: Receive | None = None) -> None:
        """Write unweighted outputs: out[pairs] = down(activation(gate x, up x)), with the biases that there are.

        Which items share a call changes no bit. TypeError and ValueError as ``check_formats``, or for a misaligned
        address.

        Args:
            items: of the decision, whose views are placed.
            receive: lets projections that are still on their way arrive in time; it may block, and it changes no bit.
        """
        ...


def check_activations(x: Tensor, out: Tensor) -> None:
    """TypeError for a dtype that no kernel computes with, or two; ValueError for shapes or strides that do not fit."""
    if x.dtype not in DTYPES:
        raise TypeError(f"x is {x.dtype}, expected torch.bfloat16 or torch.float16")
    fit = x.dim() == out.dim() == 2 and x.shape[1] == out.shape[1] and out.dtype is x.dtype
    if fit and x.is_contiguous() and out.is_contiguous():
        return  # the checks below, which have a sentence for everything, take four times as long
    check_tensor("x", x, shape=(None, None))
    check_tensor("out", out, shape=(None, x.shape[1]), dtype=x.dtype)


def check_formats(gate: MatrixFormat, up: MatrixFormat, down: MatrixFormat, x: Tensor, activation: Activation) -> None:
    """Refuse experts that do not fit the activations: TypeError for scales of another dtype than x, ValueError for
    shapes that do not fit together, or a gate that the activation does not have."""
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
