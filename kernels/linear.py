"""Dense quantized matrices on a CPU.

A token's bits depend neither on the other tokens nor on the number of threads. ``torch.ops.vllm_dymoe.linear`` is the
same as an operator, which compiled models call: it finds the matrix by the address of its bytes.
"""

import ctypes
from array import array
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from vllm_dymoe.experts.matrix import PackedMatrix
from vllm_dymoe.kernels import native

_AT_ONCE = 512  # tokens at a time; at a width of 2048 their activations take 7 MB
_PRODUCTS_OF_A_THREAD = 1 << 20
_NUMBERS = torch.arange(_AT_ONCE)
_LINEARS: "WeakValueDictionary[int, Linear]" = WeakValueDictionary()  # by the address of their bytes


class Linear:
    """A packed matrix [rows, columns] at 8, 4 or 2 bits as a linear layer.

    The matrix has to stay in memory as long as this object exists. Raises RuntimeError without a native library.
    """

    def __init__(self, packed: PackedMatrix) -> None:
        library = native.load()
        if library is None:
            raise RuntimeError("the native library was not built; install a C++ compiler, then vllm-dymoe again")
        self._library, self._packed, fmt = library, packed, packed.format
        self._matrices = (native.Matrix * 3)(*3 * [native.matrix(fmt)])
        self._width = -(-max(fmt.padded_columns, fmt.columns) // 256) * 256
        self._row = library.row_floats(self._width)
        self._common = layer = native.Layer()  # what all calls have in common: a copy is faster than its fields
        layer.width, layer.items, layer.matrices = self._width, 1, ctypes.addressof(self._matrices)
        layer.floats = self._matrices[0].code in native.FLOATS
        layer.digits = 0 if layer.floats else 2
        layer.rows = layer.pairs = _NUMBERS.data_ptr()
        _LINEARS[packed.addresses[0]] = self

    def __call__(self, x: Tensor) -> Tensor:
        """Return x [tokens, columns] times the matrix: [tokens, rows].

        The dtype is that of x, bfloat16 or float16.
        """
        out = x.new_empty(len(x), self._packed.format.rows)
        if len(x) <= _AT_ONCE:
            self._multiply(x, out)
        else:
            for part, into in zip(x.split(_AT_ONCE), out.split(_AT_ONCE), strict=True):
                self._multiply(part, into)
        return out

    def _multiply(self, x: Tensor, out: Tensor) -> None:
        fmt, tokens, x, threads = self._packed.format, len(x), x.contiguous(), torch.get_num_threads()
        inputs = torch.empty(tokens * self._row, dtype=torch.float32)
        layer = native.Layer.from_buffer_copy(self._common)
        layer.tokens = layer.positions = layer.out_rows = tokens
        layer.hidden, layer.dtype, layer.threads = fmt.columns, x.dtype is torch.float16, threads
        layer.x, layer.out = x.data_ptr(), out.data_ptr()
        layer.inputs = layer.activations = inputs.data_ptr()
        self._library.experts(layer, native.READ, native.READ)
        codes, residual = self._packed.addresses[0], self._packed.addresses[4]
        item = array("q", (0, 0, codes, 0, 0, residual, 0, 0, tokens))
        layer.item, _ = item.buffer_info()
        layer.hidden, layer.threads = (
            fmt.rows,
            min(threads, 1 + tokens * fmt.rows * fmt.columns // _PRODUCTS_OF_A_THREAD),
        )
        self._library.experts(layer, native.DOWN, native.DOWN)


def _linear(x: Tensor, packed: Tensor, rows: int) -> Tensor:
    return _LINEARS[packed.data_ptr()](x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], rows)


def _linear_fake(x: Tensor, packed: Tensor, rows: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], rows)


_library = torch.library.Library("vllm_dymoe", "FRAGMENT")
_library.define("linear(Tensor x, Tensor packed, int rows) -> Tensor")
_library.impl("linear", _linear, "CPU")
torch.library.register_fake("vllm_dymoe::linear", _linear_fake, lib=_library)
