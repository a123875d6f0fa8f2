"""What a layer's step asks of a kernel, and what every kernel promises."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from vllm_dymoe.kernels.activation import Activation
from vllm_dymoe.residency.checks import check_tensor
from vllm_dymoe.residency.matrix import BLOCK_ROWS, DTYPES, MatrixFormat, PackedMatrix
from vllm_dymoe.residency.routing import Groups

Linear = Callable[[Tensor, PackedMatrix], Tensor]
"""(x [n, columns], packed) -> x @ weight.T + bias [n, rows], a new tensor."""

Choose = Callable[[MatrixFormat, int], Linear]
"""The linear operation for a format and a number of tokens."""

Packed = tuple[PackedMatrix, PackedMatrix, PackedMatrix]
"""An expert's gate, up and down; a gate of no rows is none."""

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


class LayerWork(Protocol):
    """One layer's step: its routing is described once, its experts are computed as they come."""

    def place(self, expert: int, packed: Packed) -> None:
        """Say where an expert's bytes are, or will be when it is computed; each expert once.

        Raises:
            TypeError: packed for another dtype than x.
            ValueError: projections whose shapes do not fit x or one another, or a misaligned address.
        """
        ...

    def compute(self, experts: Sequence[int], receive: Receive | None = None) -> None:
        """Write their rows of out, as ExpertKernel.forward does; which experts share a call changes no bit.

        Args:
            experts: some that have been placed.
            receive: see ExpertKernel.forward.
        """
        ...


class ExpertKernel(Protocol):
    """Computes experts from their packed bytes; one call at a time per object.

    Attributes:
        name: which implementation, for logs and reports.
        workspace_bytes: scratch on the device that this object holds beyond activations.
        asynchronous: whether calls return when the work is enqueued, so that few large ones cost the host least.
    """

    name: str
    workspace_bytes: int
    asynchronous: bool

    def begin(self, x: Tensor, groups: Groups, order: Sequence[int], out: Tensor, activation: Activation) -> LayerWork:
        """Begin a layer's step.

        Args:
            x: as in forward.
            groups: tokens of each expert.
            order: the experts that will be computed, in about that order: neighbours can share a launch.
            out: as in forward.
            activation: of the gate.
        """
        ...

    def forward(
        self,
        x: Tensor,
        work: Sequence[ExpertWork],
        out: Tensor,
        activation: Activation,
        receive: Receive | None = None,
    ) -> None:
        """Write unweighted expert outputs: out[pairs] = down(activation(gate x, up x)), all experts in one call.

        A projection that has a bias adds it. Rows of `out` that no work names keep what they held.

        Args:
            x: [tokens, hidden] bfloat16 or float16, contiguous.
            work: the active experts, at any mix of bit-widths.
            out: [tokens * top_k, hidden] like x, overwritten where named.
            activation: of the gate.
            receive: lets projections that are still on their way arrive in time; it may block, and it changes no bit.

        Raises:
            TypeError: a dtype other than the packed matrices' own.
            ValueError: a shape that does not fit.
        """
        ...


class ForwardedWork:
    """A layer's step by a kernel whose forward is all it has to offer: one that computes while it is called.

    Args:
        kernel: computes.
        x: as in ExpertKernel.begin, like the others.
        groups: tokens of each expert, where x is.
        out: the outputs.
        activation: of the gate.
    """

    def __init__(self, kernel: ExpertKernel, x: Tensor, groups: Groups, out: Tensor, activation: Activation) -> None:
        self._kernel, self._x, self._groups, self._out, self._activation = kernel, x, groups, out, activation
        self._packed: dict[int, Packed] = {}
        self.place = self._packed.__setitem__  # see LayerWork; in every layer of every step, for each of its experts

    def compute(self, experts: Sequence[int], receive: Receive | None = None) -> None:
        """See LayerWork."""
        packed, groups = self._packed, self._groups
        work = [ExpertWork(*packed[expert], *groups[expert][:2]) for expert in experts]
        self._kernel.forward(self._x, work, self._out, self._activation, receive)


def forward_experts(
    choose: Choose,
    x: Tensor,
    work: Sequence[ExpertWork],
    out: Tensor,
    activation: Activation,
    receive: Receive | None = None,
) -> None:
    """:meth:`ExpertKernel.forward` for kernels that have linear operations of one matrix.

    Several experts of few tokens are gathered, activated and written together: outside of
    the matrix products every operation costs more in calls than in work.

    Args:
        choose: the linear operation for a format and a number of tokens.
        x: as in forward, like the others.
        work: the active experts.
        out: the outputs.
        activation: of the gate.
        receive: see forward.
    """
    receive = receive or _there
    check_activations(x, out)
    for batch, counts in _batches(work, x, activation):
        if x.shape[0] == 1:  # each of them has this token
            rows: Sequence[Tensor] = [x] * len(batch)
        else:
            rows = _parts(x.index_select(0, _joined([expert.tokens for expert in batch])), counts)
        receive(1)
        gates = _products(choose, rows, [expert.gate for expert in batch]) if activation.has_gate else None
        receive(2)
        ups = _products(choose, rows, [expert.up for expert in batch])
        hidden = _parts(activation.alone(ups) if gates is None else activation.gated(gates, ups), counts)
        receive(3)
        outputs = _products(choose, hidden, [expert.down for expert in batch])
        out.index_copy_(0, _joined([expert.pairs for expert in batch]), outputs)


def _there(count: int) -> None:
    """All projections are there."""


def _products(choose: Choose, inputs: Sequence[Tensor], packed: Sequence[PackedMatrix]) -> Tensor:
    """Each input times its matrix, one below the other."""
    products = []
    linears: dict[tuple[int, int], Linear] = {}  # by identity: hashing a format costs more than choosing
    for x, matrix in zip(inputs, packed, strict=True):
        kind = id(matrix.format), x.shape[0]
        linear = linears.get(kind)
        if linear is None:
            linear = linears[kind] = choose(matrix.format, x.shape[0])
        products.append(linear(x, matrix))
    return _joined(products)


def _batches(
    work: Sequence[ExpertWork], x: Tensor, activation: Activation
) -> Iterator[tuple[list[ExpertWork], list[int]]]:
    """Experts that are computed together, with the number of tokens of each; those without tokens are left out."""
    batch: list[ExpertWork] = []
    counts: list[int] = []
    elements = 0
    formats = None
    for expert in work:
        if formats != (these := (expert.gate.format, expert.up.format, expert.down.format)):
            formats = these
            check_formats(*formats, x, activation)
        count = check_tokens(expert)
        if count == 0:
            continue
        width = expert.up.format.rows
        elements += count * width
        if batch and (elements > _ELEMENTS_AT_ONCE or width % BLOCK_ROWS or width != batch[0].up.format.rows):
            yield batch, counts
            batch, counts, elements = [], [], count * width
        batch.append(expert)
        counts.append(count)
    if batch:
        yield batch, counts


def _parts(rows: Tensor, counts: list[int]) -> Sequence[Tensor]:
    """Rows by expert; one row each is the usual case of decode, and half as dear without counts."""
    return rows.unsqueeze(1).unbind() if len(counts) == rows.shape[0] else rows.split(counts)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


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
