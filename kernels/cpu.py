"""The CPU kernel: one native call computes all experts whose bytes are in memory.

A token's result has the same bits whatever else is in the batch, for any number of threads, and wherever the weights
are. Processors with different instruction sets may differ. Without the native library torch computes from dequantized
rows (``torch_experts``), and the last bit may depend on the number of tokens of an expert.
"""

import ctypes
from array import array
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from vllm_dymoe.experts.matrix import MatrixFormat
from vllm_dymoe.kernels import native
from vllm_dymoe.kernels.activation import Activation
from vllm_dymoe.kernels.base import check_activations, check_formats
from vllm_dymoe.kernels.torch_experts import compute_with_torch
from vllm_dymoe.planner.plan import LayerPlan

DEFAULT_WORKSPACE_BYTES = 1 << 20
MINIMUM_WORKSPACE_BYTES = 320 << 10
_PRODUCTS_OF_A_THREAD = 1 << 20  # fewer products take less time than starting a second thread, above all on busy cores
_MOST_ACTIVATION_BYTES = 16 << 20
"""Most bytes of activations that experts computed together may take; further experts are computed afterwards. As
much is kept for the next step, and as much for its inputs: the system clears new memory page by page, which took
longer than 16 cores needed to compute.
"""


class CpuKernel:
    """Computes experts on a CPU.

    Args:
        workspace_bytes: scratch to keep, at least 320 KiB; larger steps allocate their own.
        isa: the largest instruction set that may be used, a name of ``native.ISAS``, or "torch" to do without the
            native library; None for the best that this machine has.
        activations: bits of the activations that integer codes are multiplied with, 16 or 8; FP8 and 16-bit weights are
            multiplied with floats.
        threads: number of threads; None for as many as torch uses.

    Raises ValueError if the workspace is too small, or for 8-bit activations without the native library.
    """

    _step: tuple[Tensor, LayerPlan, Tensor, Activation]

    def __init__(
        self, workspace_bytes: int = DEFAULT_WORKSPACE_BYTES, isa: str | None = None, activations: int = 16,
        threads: int | None = None,
    ) -> None:  # fmt: skip
        if workspace_bytes < MINIMUM_WORKSPACE_BYTES:
            raise ValueError(f"workspace has {workspace_bytes} bytes, expected at least {MINIMUM_WORKSPACE_BYTES}")
        self.workspace_bytes, self._threads, self.activations = workspace_bytes, threads, activations
        self._workspace = torch.empty(workspace_bytes, dtype=torch.uint8)
        self._address = self._workspace.data_ptr()
        self.library = None if isa == "torch" else native.load(isa)
        if self.library is None:
            self.name = "cpu, torch (slow: no native library; with a C++ compiler install vllm-dymoe again)"
        else:
            self.name = f"cpu, native, {self.library.name}{', activations of 8 bits' if activations == 8 else ''}"
        if self.library is None and activations != 16:
            raise ValueError(
                "activations of 8 bits need the native library; with a C++ compiler install vllm-dymoe again"
            )
        self._layer = native.Layer()
        self._kept: dict[str, Tensor] = {}
        self._inputs: Tensor | None = None  # the step's tokens as integers; None before its first experts
        self._forms = Forms()

    def most_positions(self, row_floats: int) -> int:
        """Return how many positions to compute at a time.

        Args:
            row_floats: floats that the activations of each position take.
        """
        return max(_MOST_ACTIVATION_BYTES // (4 * row_floats), 1)

    def scratch(self, floats: int) -> Tensor:
        """Return float32 memory of at least ``floats`` numbers.

        This is the workspace, or new memory for a step that needs more.
        """
        workspace = self._workspace.view(torch.float32)
        return workspace if floats <= len(workspace) else torch.empty(floats, dtype=torch.float32)

    def begin(self, x: Tensor, plan: LayerPlan, out: Tensor, activation: Activation) -> None:
        """Begin a layer's step.

        Args:
            x: [rows, hidden] bfloat16 or float16, contiguous.
            plan: the layer's plan, made by the host.
            out: [tokens * top_k, hidden], dtype of x; rows of computed pairs are overwritten.
            activation: applied between the projections.

        Raises TypeError and ValueError as ``check_activations``.
        """
        check_activations(x, out)
        self._step = x, plan, out, activation
        self._inputs = None

    def compute(self, items: Sequence[int]) -> None:
        """Write unweighted outputs of experts.

        out[pairs] = down(activation(gate x, up x)), plus biases if the experts have them. How items are divided among
        calls does not change the result.

        Args:
            items: indices into the plan; the views of these items have been set.

        Raises TypeError and ValueError as ``check_formats``, and IndexError if the plan names a row that does not
        exist.
        """
        x, plan, out, activation = self._step
        if self.library is None:
            parts = [(item, slice(plan.bounds[item], plan.bounds[item + 1])) for item in items]
            work = [(plan.views[item], plan.rows[part], plan.pairs[part]) for item, part in parts]
            compute_with_torch(x, work, out, activation)  # type: ignore[arg-type]
            return
        if not items:
            return
        forms, layer, library, bounds = self._forms, self._layer, self.library, plan.bounds
        read_as = forms.read_as
        fields = self._fields(items)
        floats = library.row_floats(forms.width)
        phase = native.GATE_UP
        if self._inputs is None or forms.read_as != read_as:
            phase = self._prepare(floats)
        first, last = bounds[min(items)], bounds[max(items) + 1]
        products = 3 * (last - first) * layer.hidden * layer.inter
        layer.threads = min(self._threads or torch.get_num_threads(), 1 + products // _PRODUCTS_OF_A_THREAD)
        layer.matrices = forms.address
        most, behind = self.most_positions(floats), floats * layer.tokens
        pieces = [(fields, first, last)] if last - first <= most else _parts(fields, most)
        for part, first, last in pieces:
            activations, _held = self._room("activations", behind, floats * (last - first))
            layer.items, (layer.item, _) = len(part) // native.ITEM_FIELDS, part.buffer_info()
            layer.activations = activations - 4 * floats * first  # positions count from the step's first one
            library.experts(layer, phase, native.DOWN)
            phase = native.GATE_UP

    def _fields(self, items: Sequence[int]) -> "array[int]":
        """Return native.ITEM_FIELDS numbers for each item, as the library expects them."""
        (x, plan, _, activation), forms, fields = self._step, self._forms, array("q")
        wanted, bounds, views = (x.shape[1], x.dtype, activation.has_gate), plan.bounds, plan.views
        for item in items:
            gate, up, down = views[item]  # type: ignore[misc]
            known = forms.known.get(id(up.format))
            if known is None or known[1] != wanted or known[2] is not gate.format or known[4] is not down.format:
                known = forms.learn(gate.format, up.format, down.format, x, activation)
            first = bounds[item]
            (a, _, _, _, d), (b, _, _, _, e), (c, _, _, _, f) = gate.addresses, up.addresses, down.addresses
            fields.extend((a, b, c, d, e, f, known[0], first, bounds[item + 1] - first))
        forms.intermediate, forms.rotations = up.format.rows, (up.format.rotation, down.format.rotation)
        return fields

    def _room(self, what: str, behind: int, floats: int) -> tuple[int, Tensor]:
        """Return the address of ``floats`` floats, and the owner of their memory.

        They follow the first ``behind`` floats of the workspace, or are new memory.
        """
        if 4 * (behind + floats) <= self.workspace_bytes:
            return self._address + 4 * behind, self._workspace
        own = self._kept.get(what)
        if own is None or own.numel() < floats:
            own = torch.empty(floats, dtype=torch.float32)
            if own.nbytes <= _MOST_ACTIVATION_BYTES:
                self._kept[what] = own
        return own.data_ptr(), own

    def _prepare(self, floats: int) -> int:
        """Describe the step to the library; return the phase in which it reads the tokens."""
        layer, (x, plan, out, activation) = self._layer, self._step
        rows, pairs = plan.rows, plan.pairs
        layer.tokens, layer.hidden = x.shape
        layer.inputs, self._inputs = self._room("inputs", 0, floats * layer.tokens)
        native.set_activation(layer, activation)
        layer.floats, layer.inter = self._forms.floats, self._forms.intermediate
        layer.digits = self.activations // 8 if self._forms.integers else 0
        layer.dtype, layer.width = x.dtype is torch.float16, self._forms.width
        layer.positions, layer.out_rows = rows.shape[0], out.shape[0]
        layer.outer, layer.inner = self._forms.rotations
        layer.x, layer.out = x.data_ptr(), out.data_ptr()
        layer.rows, layer.pairs = rows.data_ptr(), pairs.data_ptr()
        return native.READ


class Forms:
    """The formats of all experts computed so far, as the library expects them."""

    width = 0  # columns of the widest matrix, rounded up to the padding of rows
    intermediate, rotations = 0, (0, 0)  # of the last one; adjacent inputs that are rotated together
    floats = integers = False  # whether some experts are multiplied as floats, and some as integers

    def __init__(self) -> None:
        self._matrices = (native.Matrix * 0)()
        # By identity: hashing a format costs more than computing an expert.
        self.known: dict[int, tuple[int, tuple[int, torch.dtype, bool], MatrixFormat, MatrixFormat, MatrixFormat]] = {}

    @property
    def read_as(self) -> tuple[int, bool, bool]:
        """What the rows that experts read have to hold.

        Inputs that were read as less are read again.
        """
        return self.width, self.floats, self.integers

    @property
    def address(self) -> int:
        """Address of the matrices, three for each triple of formats."""
        return ctypes.addressof(self._matrices)

    def learn(
        self, gate: MatrixFormat, up: MatrixFormat, down: MatrixFormat, x: Tensor, activation: Activation
    ) -> tuple[int, tuple[int, torch.dtype, bool], MatrixFormat, MatrixFormat, MatrixFormat]:
        """Register a triple of formats.

        Returns:
            its number, its checked properties, and the formats.

        Raises TypeError and ValueError as ``check_formats``.
        """
        check_formats(gate, up, down, x, activation)
        described = [native.matrix(format) for format in (gate, up, down)]
        number = len(self._matrices) // 3
        floats = [matrix.code in native.FLOATS for matrix in described]
        self.floats, self.integers = self.floats or any(floats), self.integers or not all(floats)
        self._matrices = (native.Matrix * (3 * number + 3))(*self._matrices, *described)
        columns = max(format.padded_columns for format in (gate, up, down))
        self.width = max(self.width, -(-max(columns, up.rows) // 256) * 256)
        known = self.known[id(up)] = number, (x.shape[1], x.dtype, activation.has_gate), gate, up, down
        return known


def _parts(fields: "array[int]", most: int) -> Iterator[tuple["array[int]", int, int]]:
    """Split items into parts of at most `most` adjacent positions.

    Each part comes with its first position and its last + 1. An item with more positions than that is cut.
    """
    part, begin, end = array("q"), 0, 0
    for at in range(0, len(fields), native.ITEM_FIELDS):
        item = fields[at : at + native.ITEM_FIELDS]
        first, count = item[-2:]
        for start in range(first, first + count, most):
            size = min(most, first + count - start)
            if part and (start != end or end + size - begin > most):
                yield part, begin, end
                part = array("q")
            begin, end = begin if part else start, start + size
            part.extend((*item[:-2], start, size))
    yield part, begin, end
