"""What a layer's step asks of a kernel, and what every kernel promises."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from vllm_dymoe.kernels.activation import Activation
from vllm_dymoe.residency.checks import check_tensor
from vllm_dymoe.residency.decision import Decision, Grouped
from vllm_dymoe.residency.format import Expert
from vllm_dymoe.residency.matrix import DTYPES, MatrixFormat, PackedMatrix

Linear = Callable[[Tensor, PackedMatrix], Tensor]
"""(x [n, columns], packed) -> x @ weight.T + bias [n, rows], a new tensor."""

Choose = Callable[[MatrixFormat, int], Linear]
"""The linear operation for a format and a number of tokens."""

Receive = Callable[[int], None]
"""Called with n = 1, 2, 3 before the first n projections (gate, up, down) of any of the experts are read."""

# Experts whose activations fit one chunk of torch's elementwise loops share one call. In a larger tensor, or with
# rows that are no whole vectors, an element's neighbours decide whether vector or scalar code computes it, and the
# two may differ in the last bit: then the order in which experts arrive would show.
_ELEMENTS_AT_ONCE = 32768


class ExpertWork(NamedTuple):
    """One expert's share of one layer's step.

    Attributes:
        gate: [intermediate, hidden], or [0, hidden] for none.
        up: [intermediate, hidden].
        down: [hidden, intermediate].
        tokens: int64 [n], rows of x that are routed to the expert.
        pairs: int64 [n], rows of out to write, token * top_k + k.
    """

    gate: PackedMatrix
    up: PackedMatrix
    down: PackedMatrix
    tokens: Tensor
    pairs: Tensor


class ExpertKernel(Protocol):
    """Computes experts from their packed bytes, one layer's step at a time.

    Attributes:
        name: which implementation, for logs and reports.
        workspace_bytes: scratch on the device that this object holds beyond activations.
        asynchronous: whether calls return when the work is enqueued, so that few large ones cost the host least.
    """

    name: str
    workspace_bytes: int
    asynchronous: bool

    def begin(self, x: Tensor, decision: Decision, out: Tensor, activation: Activation) -> None:
        """Begin a layer's step.

        Args:
            x: [rows, hidden] bfloat16 or float16, contiguous.
            decision: made by the host. Neighbouring items can share a launch.
            out: [tokens * top_k, hidden] like x, overwritten where pairs of computed items are.
            activation: of the gate.

        Raises:
            TypeError: a dtype that no kernel computes with, or two.
            ValueError: shapes that do not fit.
        """
        ...

    def compute(self, items: Sequence[int], receive: Receive | None = None) -> None:
        """Write unweighted outputs: out[pairs] = down(activation(gate x, up x)), with the biases that there are.

        Which items share a call changes no bit.

        Args:
            items: of the decision, whose views are placed.
            receive: lets projections that are still on their way arrive in time; it may block, and it changes no bit.

        Raises:
            TypeError: an expert that is packed for another dtype than x.
            ValueError: projections whose shapes do not fit x or one another, or a misaligned address.
        """
        ...


def compute_experts(
    kernel: ExpertKernel,
    x: Tensor,
    work: Sequence[ExpertWork],
    out: Tensor,
    activation: Activation,
    receive: Receive | None = None,
) -> None:
    """Begin a step of some experts and compute all of them at once."""
    bounds = [0, *accumulate(check_tokens(expert) for expert in work)]
    rows, pairs = (
        torch.cat([getattr(expert, name).cpu() for expert in work]) if work else torch.empty(0, dtype=torch.int64)
        for name in ("tokens", "pairs")
    )
    items = list(range(len(work)))
    decision = Decision.of_routing(Grouped(items, bounds, rows, pairs), items)
    for item, expert in enumerate(work):
        decision.place(item, Expert(*expert[:3]))
    kernel.begin(x, decision, out, activation)
    kernel.compute(items, receive)


def check_activations(x: Tensor, out: Tensor) -> None:
    """Refuse what is no input, or no output of it.

    Raises:
        TypeError: a dtype that no kernel computes with, or two.
        ValueError: shapes that do not fit, or strides.
    """
    if x.dtype not in DTYPES:
        raise TypeError(f"x is {x.dtype}, expected torch.bfloat16 or torch.float16")
    check_tensor("x", x, shape=(None, None))
    check_tensor("out", out, shape=(None, x.shape[1]), dtype=x.dtype)


def check_formats(gate: MatrixFormat, up: MatrixFormat, down: MatrixFormat, x: Tensor, activation: Activation) -> None:
    """Refuse experts that do not fit the activations.

    Raises:
        TypeError: scales of another dtype than x.
        ValueError: projections whose shapes do not fit together, or a gate that the activation does not have.
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


def check_tokens(expert: ExpertWork) -> int:
    """The number of tokens of one expert.

    Raises:
        TypeError: tokens or pairs that are not int64.
        ValueError: as many pairs as tokens are missing.
    """
    tokens, pairs = expert.tokens, expert.pairs
    if tokens.dtype is not torch.int64 or pairs.dtype is not torch.int64:
        raise TypeError(f"tokens is {tokens.dtype} and pairs is {pairs.dtype}, expected torch.int64")
    shape = tokens.shape
    if len(shape) != 1 or shape != pairs.shape:
        raise ValueError(f"tokens has shape {list(shape)} and pairs {list(pairs.shape)}, expected [n] twice")
    return shape[0]
