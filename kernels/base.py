"""What a layer's step asks of a kernel, and what every kernel promises."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from vllm_dymoe.kernels.activation import Activation
from vllm_dymoe.kernels.checks import check_tensor
from vllm_dymoe.kernels.packed import DTYPES, PackedMatrix


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWork:
    """One expert's share of one layer's step.

    Attributes:
        gate: [intermediate, hidden].
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
    """Computes experts from their packed bytes; one call at a time per object.

    Attributes:
        name: which implementation, for logs and reports.
        workspace_bytes: scratch on the device that this object holds beyond activations.
    """

    name: str
    workspace_bytes: int

    def forward(self, x: Tensor, work: Sequence[ExpertWork], out: Tensor, activation: Activation) -> None:
        """Write unweighted expert outputs: out[pairs] = down(activation(gate x) * up x).

        A projection that has a bias adds it. Rows of `out` that no work names keep what they held.

        Args:
            x: [tokens, hidden] bfloat16 or float16, contiguous.
            work: the active experts, at any mix of bit-widths.
            out: [tokens * top_k, hidden] like x, overwritten where named.
            activation: of the gate.

        Raises:
            TypeError: a dtype other than the packed matrices' own.
            ValueError: a shape that does not fit.
        """
        ...


def forward_experts(
    linear: Callable[[Tensor, PackedMatrix], Tensor],
    x: Tensor,
    work: Sequence[ExpertWork],
    out: Tensor,
    activation: Activation,
) -> None:
    """:meth:`ExpertKernel.forward` one expert after the other, for kernels that have one linear operation.

    Args:
        linear: (x [n, columns], packed) -> x @ weight.T + bias [n, rows], a new tensor.
        x: as in forward, like the others.
        work: the active experts.
        out: the outputs.
        activation: of the gate.
    """
    if x.dtype not in DTYPES:
        raise TypeError(f"x is {x.dtype}, expected torch.bfloat16 or torch.float16")
    check_tensor("x", x, shape=(None, None))
    check_tensor("out", out, shape=(None, x.shape[1]), dtype=x.dtype)
    single = x.shape[0] == 1
    for expert in work:
        check_work(expert, x)
        count = expert.tokens.shape[0]
        if count == 0:
            continue
        # With a batch of one token the selection is the batch.
        rows = x if single and count == 1 else x.index_select(0, expert.tokens)
        hidden = activation.gated(linear(rows, expert.gate), linear(rows, expert.up))
        out.index_copy_(0, expert.pairs, linear(hidden, expert.down))


def check_work(expert: ExpertWork, x: Tensor) -> None:
    """Refuse work that does not fit the activations; cheap enough for every step.

    Raises:
        TypeError: scales of another dtype than x, or tokens or pairs that are not int64.
        ValueError: projections whose shapes do not fit together, or as many pairs as tokens are missing.
    """
    gate, up, down = expert.gate.format, expert.up.format, expert.down.format
    hidden = x.shape[1]
    if not (gate.columns == up.columns == down.rows == hidden and gate.rows == up.rows == down.columns):
        raise ValueError(
            f"work holds gate {gate.rows} x {gate.columns}, up {up.rows} x {up.columns} and "
            f"down {down.rows} x {down.columns}, expected I x {hidden}, I x {hidden} and {hidden} x I"
        )
    if not (gate.dtype is up.dtype is down.dtype is x.dtype):
        raise TypeError(f"work is packed for {gate.dtype}, {up.dtype} and {down.dtype}, but x is {x.dtype}")
    tokens, pairs = expert.tokens, expert.pairs
    if tokens.dtype is not torch.int64 or pairs.dtype is not torch.int64:
        raise TypeError(f"tokens is {tokens.dtype} and pairs is {pairs.dtype}, expected torch.int64")
    if tokens.dim() != 1 or tokens.shape != pairs.shape:
        raise ValueError(f"tokens has shape {list(tokens.shape)} and pairs {list(pairs.shape)}, expected [n] twice")
