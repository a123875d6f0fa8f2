"""The kernel for experts in a CPU's memory: one native call for all experts that are there.

A token's result is the same, bit for bit, whatever else is in the batch, on any number of threads and wherever weights
lie; processors of different instruction sets may differ. Without the native library torch computes from dequantized
rows (``torch_experts``), where the last bit may depend on how many tokens an expert got.
"""

import ctypes
import itertools
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_dymoe.kernels import native
from vllm_dymoe.kernels.activation import Activation
from vllm_dymoe.kernels.base import Receive, check_activations, check_formats
from vllm_dymoe.kernels.torch_experts import compute_with_torch
from vllm_dymoe.residency.decision import Decision
from vllm_dymoe.residency.matrix import MatrixFormat

DEFAULT_WORKSPACE_BYTES = 1 << 20
MINIMUM_WORKSPACE_BYTES = 320 << 10
_PRODUCTS_OF_A_THREAD = 1 << 20  # fewer take less time than a second thread takes to begin, above all on busy cores
_MOST_ACTIVATION_BYTES = 32 << 20  # experts whose activations would take more are computed one after the other

Item = tuple[int, ...]
"""An expert's share of a step: native.ITEM_FIELDS numbers, the last two its first position and how many there are."""


class CpuKernel:
    """Experts on a CPU.

    Args:
        workspace_bytes: scratch that is held, at least 320 KiB; larger steps allocate theirs.
        isa: the largest instruction set of ``native.ISAS`` that may be used, or "torch" for no native library; None for
            the best of this machine.
        activations: bits of those that codes are multiplied with, 16 or 8; FP8 and 16 bits have floats.

    Raises:
        ValueError: a smaller workspace, or activations of 8 bits without the native library.
    """

    asynchronous = False
    _step: tuple[Tensor, Decision, Tensor, Activation]

    def __init__(
        self, workspace_bytes: int = DEFAULT_WORKSPACE_BYTES, isa: str | None = None, activations: int = 16
    ) -> None:
        if workspace_bytes < MINIMUM_WORKSPACE_BYTES:
            raise ValueError(f"workspace has {workspace_bytes} bytes, expected at least {MINIMUM_WORKSPACE_BYTES}")
        self.workspace_bytes = workspace_bytes
        workspace = torch.empty(workspace_bytes, dtype=torch.uint8)
        self._floats = workspace.view(torch.float32)
        self._library = None if isa == "torch" else native.load(isa)
        if self._library is None:
            self.name = "cpu, torch (slow: no native library; with a C++ compiler install vllm-dymoe again)"
        else:
            self.name = f"cpu, native, {self._library.name}{', activations of 8 bits' if activations == 8 else ''}"
        if self._library is None and activations != 16:
            raise ValueError(
                "activations of 8 bits need the native library; with a C++ compiler install vllm-dymoe again"
            )
        self._layer = native.Layer(digits=activations // 8)
        self._inputs: Tensor | None = None  # what a step's tokens are read as; None before its first experts
        self._forms = _Forms()

    def begin(self, x: Tensor, decision: Decision, out: Tensor, activation: Activation) -> None:
        """Begin a layer's step, see :class:`vllm_dymoe.kernels.base.ExpertKernel`."""
        check_activations(x, out)
        self._step = x, decision, out, activation
        self._inputs = None

    def compute(self, items: Sequence[int], receive: Receive | None = None) -> None:
        """Compute some items, see :class:`vllm_dymoe.kernels.base.ExpertKernel`.

        Raises:
            IndexError: the decision names a row that there is not.
        """
        x, decision, out, activation = self._step
        if self._library is None:
            parts = [(item, slice(decision.bounds[item], decision.bounds[item + 1])) for item in items]
            work = [(decision.views[item], decision.rows[part], decision.pairs[part]) for item, part in parts]
            compute_with_torch(x, work, out, activation, receive or _there)  # type: ignore[arg-type]
            return
        forms, bounds, views = self._forms, decision.bounds, decision.views
        read_as, listed = (forms.width, forms.floats), list[Item]()
        wanted = x.shape[1], x.dtype, activation.has_gate
        for item in items:
            gate, up, down = views[item]  # type: ignore[misc]
            known = forms.known.get(id(up.format))
            if known is None or known[1] != wanted or known[2] is not gate.format or known[4] is not down.format:
                known = forms.learn(gate.format, up.format, down.format, x, activation)
            first = bounds[item]
            (a, _, _, _, d), (b, _, _, _, e), (c, _, _, _, f) = gate.addresses, up.addresses, down.addresses
            listed.append((a, b, c, d, e, f, known[0], first, bounds[item + 1] - first))
        if not listed:
            return
        forms.intermediate, forms.rotations = up.format.rows, (up.format.rotation, down.format.rotation)
        layer, library = self._layer, self._library
        floats = library.row_floats(forms.width)
        if self._inputs is None or (forms.width, forms.floats) != read_as:
            self._read(library, floats)
        most, behind = max(_MOST_ACTIVATION_BYTES // (4 * floats), 1), floats * x.shape[0]
        receive, layer.matrices = receive or _there, forms.address
        products = 3 * sum(item[-1] for item in listed) * layer.hidden * layer.inter
        layer.threads = min(torch.get_num_threads(), 1 + products // _PRODUCTS_OF_A_THREAD)
        layer.rows, layer.pairs = decision.rows.data_ptr(), decision.pairs.data_ptr()
        for part in _parts(listed, most):
            first = min(item[-2] for item in part)
            held = floats * (max(item[-2] + item[-1] for item in part) - first)
            small = behind + held <= len(self._floats)
            activations = self._floats[behind:] if small else torch.empty(held, dtype=torch.float32)
            fields = array("q", itertools.chain.from_iterable(part))
            layer.items, (layer.item, _) = len(part), fields.buffer_info()
            layer.activations = activations.data_ptr() - 4 * floats * first  # positions count from the step's first one
            receive(1)
            receive(2)
            library.experts(layer, native.GATE_UP)
            receive(3)
            library.experts(layer, native.DOWN)

    def _read(self, library: native.Library, floats: int) -> None:
        """Tell the library of the step, and make of its tokens what experts read."""
        layer, (x, decision, out, activation) = self._layer, self._step
        tokens, rows, pairs = x.shape[0], decision.rows, decision.pairs
        small = floats * tokens <= len(self._floats)
        self._inputs = self._floats if small else torch.empty(floats * tokens, dtype=torch.float32)
        native.set_activation(layer, activation)
        layer.floats = self._forms.floats
        layer.tokens, layer.hidden, layer.inter = tokens, x.shape[1], self._forms.intermediate
        layer.dtype, layer.width = x.dtype is torch.float16, self._forms.width
        layer.threads = min(torch.get_num_threads(), 1 + x.numel() // (1 << 14))
        layer.positions, layer.out_rows = len(rows), len(out)
        layer.outer, layer.inner = self._forms.rotations
        layer.x, layer.out = x.data_ptr(), out.data_ptr()
        layer.inputs, layer.rows, layer.pairs = self._inputs.data_ptr(), rows.data_ptr(), pairs.data_ptr()
        library.experts(layer, native.READ)


class _Forms:
    """The formats of experts that were computed, as the library wants them.

    Attributes:
        width: columns of the widest matrix, as a multiple of what a row's padding may be.
        intermediate, rotations: of the expert that was asked for last; neighbouring inputs that are rotated together.
        floats: whether some have no small integers.
    """

    width = intermediate = 0
    rotations = 0, 0
    floats = False

    def __init__(self) -> None:
        self._matrices = (native.Matrix * 0)()
        # By identity: hashing a format costs more than computing an expert.
        self.known: dict[int, tuple[int, tuple[int, torch.dtype, bool], MatrixFormat, MatrixFormat, MatrixFormat]] = {}

    @property
    def address(self) -> int:
        """Of the matrices, three for each form."""
        return ctypes.addressof(self._matrices)

    def learn(
        self, gate: MatrixFormat, up: MatrixFormat, down: MatrixFormat, x: Tensor, activation: Activation
    ) -> tuple[int, tuple[int, torch.dtype, bool], MatrixFormat, MatrixFormat, MatrixFormat]:
        """A form's number, what it was checked against, and its formats.

        Raises:
            TypeError: packed for another dtype than x.
            ValueError: projections that do not fit x or one another.
        """
        check_formats(gate, up, down, x, activation)
        described = [native.matrix(format) for format in (gate, up, down)]
        number = len(self._matrices) // 3
        self.floats |= any(matrix.code in (native.E4M3, native.PLAIN) for matrix in described)
        self._matrices = (native.Matrix * (3 * number + 3))(*self._matrices, *described)
        columns = max(format.padded_columns for format in (gate, up, down))
        self.width = max(self.width, -(-max(columns, up.rows) // 256) * 256)
        known = self.known[id(up)] = number, (x.shape[1], x.dtype, activation.has_gate), gate, up, down
        return known


def _there(count: int) -> None:
    """All projections are there."""


def _parts(items: list[Item], most: int) -> list[list[Item]]:
    """Items in parts of at most `most` neighbouring positions; an expert with more is cut."""
    if max(item[-2] + item[-1] for item in items) - min(item[-2] for item in items) <= most:
        return [items]
    parts: list[list[Item]] = []
    last = room = 0
    for *places, first, count in items:
        for begin in range(first, first + count, most):
            size = min(most, first + count - begin)
            if size > room or begin != last:
                parts.append([])
                room = most
            parts[-1].append((*places, begin, size))
            room, last = room - size, begin + size
    return parts
