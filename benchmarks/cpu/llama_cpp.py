"""The same layer in llama.cpp, through the wheel `xllamacpp`.

Its matrices have Q4_0, repacked for this processor. The wheel exports ggml's C interface, and one C++ symbol: the
buffer whose tensors are repacked.
"""

import contextlib
import ctypes
import importlib.util
import os
import time
from collections.abc import Callable, Iterator
from ctypes import c_bool, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

FLOAT32, Q4_0, INT32 = 0, 2, 26  # values of ggml_type
BLOCK = 32  # weights that share a float16 scale in Q4_0
clock: Callable[[], float] = time.perf_counter
SETS = ("avx512_vnni", "avx512", "avx_vnni", "avx2", "neon")


class _Context(ctypes.Structure):
    _fields_ = (("size", c_size_t), ("memory", c_void_p), ("no_alloc", c_bool))


def find() -> Path | None:
    """Return the library of the installed wheel."""
    found = importlib.util.find_spec("xllamacpp")
    places = [] if found is None else found.submodule_search_locations or []
    return next((file for place in places for file in Path(place).glob("xllamacpp*.so")), None)


class LlamaCpp:
    """Experts with random codes, and steps of random tokens.

    ``shape`` is the number of experts, experts per token, hidden size, and an expert's intermediate size.
    """

    def __init__(self, library: Path, shape: tuple[int, int, int, int], threads: int) -> None:
        self._library, self._shape, self._random = ctypes.CDLL(str(library)), shape, np.random.default_rng(1)
        experts, _, hidden, inter = shape
        used = [name for name in SETS if getattr(self._library, f"ggml_cpu_has_{name}")()]
        self.name = f"llama.cpp, {used[0] if used else 'no vectors'}"
        self._backend = self._call("ggml_backend_cpu_init", c_void_p)
        self._call("ggml_backend_cpu_set_n_threads", None, c_void_p(self._backend), c_int(threads))
        weights = self._context()
        shapes = (hidden, inter), (hidden, inter), (inter, hidden)
        self._weights = [self._tensor(weights, Q4_0, *of_one, experts) for of_one in shapes]
        repacked = self._call("_Z35ggml_backend_cpu_repack_buffer_typev", c_void_p)
        with _silent():
            self._call("ggml_backend_alloc_ctx_tensors_from_buft", c_void_p, c_void_p(weights), c_void_p(repacked))
            blocks = np.zeros((experts * hidden * inter // BLOCK, 18), np.uint8)
            blocks[:, :2] = np.array([0.01], np.float16).view(np.uint8)
            blocks[:, 2:] = np.random.default_rng(0).integers(0, 256, (len(blocks), 16), dtype=np.uint8)
            for tensor in self._weights:
                self._set(tensor, blocks)
        self._graphs: dict[int, tuple[int, int, int]] = {}

    def step(self, tokens: int) -> float:
        """Return the seconds of a step of ``tokens`` random tokens."""
        experts, top_k, hidden, _ = self._shape
        ids = np.argsort(self._random.random((tokens, experts)), axis=1)[:, :top_k].astype(np.int32)
        inputs, chosen, graph = self._graphs.get(tokens) or self._graphs.setdefault(tokens, self._graph(tokens))
        self._set(inputs, self._random.standard_normal((tokens, hidden), np.float32))
        self._set(chosen, np.ascontiguousarray(ids))
        begin = clock()
        self._call("ggml_backend_graph_compute", c_int, c_void_p(self._backend), c_void_p(graph))
        return clock() - begin

    def _graph(self, tokens: int) -> tuple[int, int, int]:
        context, (_, top_k, hidden, _) = self._context(), self._shape
        x = self._tensor(context, FLOAT32, hidden, 1, tokens)
        ids = self._call(
            "ggml_new_tensor_2d", c_void_p, *self._at(context), c_int(INT32), *map(c_int64, (top_k, tokens))
        )

        def multiply(weights: int, rows: int) -> int:
            return self._call("ggml_mul_mat_id", c_void_p, *self._at(context, weights, rows, ids))

        gate, up, down = self._weights
        inner = self._call("ggml_swiglu_split", c_void_p, *self._at(context, multiply(gate, x), multiply(up, x)))
        graph = self._call("ggml_new_graph", c_void_p, c_void_p(context))
        self._call("ggml_build_forward_expand", None, *self._at(graph, multiply(down, inner)))
        self._call("ggml_backend_alloc_ctx_tensors", c_void_p, *self._at(context, self._backend))
        return x, ids, graph

    def _context(self) -> int:
        return self._call("ggml_init", c_void_p, _Context(1 << 22, None, True))

    def _tensor(self, context: int, kind: int, *shape: int) -> int:
        return self._call("ggml_new_tensor_3d", c_void_p, c_void_p(context), c_int(kind), *map(c_int64, shape))

    def _set(self, tensor: int, values: np.ndarray) -> None:
        address = c_void_p(values.ctypes.data)
        self._call("ggml_backend_tensor_set", None, c_void_p(tensor), address, c_size_t(0), c_size_t(values.nbytes))

    def _at(self, *addresses: int) -> list[c_void_p]:
        return [c_void_p(address) for address in addresses]

    def _call(self, name: str, result: Any, *arguments: Any) -> Any:
        function = getattr(self._library, name)
        function.restype = result
        return function(*arguments)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Silence standard error, because repacking writes a line for each tensor."""
    kept = os.dup(2)
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
