"""The native library of ``kernels/cpu``.

This file has twins of its structures, instruction sets, and threads.

The library is plain C over addresses and links neither torch nor OpenMP, so one build serves every version of torch.
It uses the threads of the OpenMP runtime that torch has loaded, so no second thread pool competes for the cores.
"""

import contextlib
import ctypes
import struct
from collections.abc import Sequence
from ctypes import Structure, c_double, c_int64, c_void_p
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any

import torch

from vllm_dymoe.experts.encoding import Encoding
from vllm_dymoe.experts.matrix import MatrixFormat
from vllm_dymoe.kernels.activation import Activation, Curve
from vllm_dymoe.kernels.sources import digest

ISAS = {
    "AMX": (5, "AMX"),
    "AVX512_BF16": (4, "AVX-512 with BF16"),
    "AVX512": (3, "AVX-512"),
    "AVX2_VNNI": (2, "AVX2 with VNNI"),
    "AVX2": (1, "AVX2"),
    "NEON_I8MM": (-2, "NEON with i8mm"),
    "NEON_DOTPROD": (-1, "NEON with dotprod"),
    "DEFAULT": (0, "portable vectors"),
}
"""Number and name of each instruction set, by torch's name for it, so that variables that restrict torch restrict
the library, too. With AVX512 torch uses BF16 and AMX if the CPU has them, and the library VNNI with AVX2. If torch
names none of these, as on ARM, the library looks for NEON.
"""
_TORCH = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
_CURVES = {curve: number for number, curve in enumerate(Curve)}
SOURCES = Path(__file__).parent / "cpu"
_SCALES = {torch.float8_e8m0fnu: 1, torch.float8_e4m3fn: 2, torch.float32: 3}
READ, GATE_UP, DOWN = 0, 1, 2
AFFINE, E2M1, E4M3, PLAIN, LATTICE = 0, 1, 2, 3, 4
FLOATS = (E4M3, PLAIN)  # codes that are multiplied as floats; the others are multiplied as integers


def _integers(names: str) -> list[tuple[str, Any]]:
    return [(name, c_int64) for name in names.split()]


def _doubles(names: str) -> list[tuple[str, Any]]:
    return [(name, c_double) for name in names.split()]


class Matrix(Structure):
    """One projection at one precision: ``Matrix`` of layer.h."""

    _fields_ = (
        *_integers("rows columns padded_rows padded_columns code bits nested group fold"),
        *_integers("scale zeros scales factor bias order"),
        *_doubles("step center"),
    )


class Layer(Structure):
    """One step of a layer: ``Layer`` of layer.h."""

    _fields_ = (
        *_integers("tokens items positions out_rows hidden inter dtype"),
        *_integers("x out item matrices rows pairs inputs activations"),
        *_integers("width phase last has_gate curve digits outer inner floats tiles"),
        *_doubles("limit alpha beta"),
        *_integers("threads next"),
    )


class Sum(Structure):
    """The weighted sum of a token's experts: ``Sum`` of layer.h."""

    _fields_ = _integers("tokens top_k hidden dtype rows weights into present threads next")


class CacheTable(Structure):
    """Addresses of the columns of ``planner.table.Table`` that planning uses.

    The structure is ``CacheTable`` of planner.h.
    """

    _fields_ = _integers(
        "layers experts slices held slot score used_at step quotas reuse_high counters critical prompt_threshold "
        "threshold cpu_costs bits offsets pool slot_bytes source"
    )


ROUTING_FIELDS = (
    "layer tokens top_k wide_ids ids weights x into marks actions versions observed weights_on_input threads"
)
_ROUTING = struct.Struct(f"={len(ROUTING_FIELDS.split())}q")


class MoeLayer(Structure):
    """One MoE layer of one step: ``MoeLayer`` of moe_layer.h."""

    _fields_ = (
        *_integers(ROUTING_FIELDS),
        ("table", CacheTable),
        *_integers("evicts admits executes renormalizes plans_only"),
        ("form", c_int64 * 3),
        ("slice_bytes", c_int64 * 3),
        *_integers("in_memory_until lost_pages uses"),
        ("kernel", Layer),
        *_integers("scratch scratch_floats piece_positions pair_rows pair_capacity"),
        *_integers("count experts wanted places bad_expert planned"),
    )

    def route(self, *values: int) -> None:
        """Write a layer's routing: all of ``ROUTING_FIELDS``, in order.

        One call in place of one for each field: it is made in every layer of every step.
        """
        _ROUTING.pack_into(self, 0, *values)


class TorchFunctions(Structure):
    """Functions of torch's stable C interface, and its numbers of dtypes.

    The structure is ``TorchFunctions`` of operator.h.
    """

    _fields_ = _integers("sizes dtype is_contiguous data empty release call error float32 int32 int64")


class NativeStep(Structure):
    """A step whose layers need no Python: ``NativeStep`` of operator.h.

    ``call`` is the address of a :class:`MoeLayer`, ``tokens`` the most rows of a layer, and ``ready`` the address of
    uint8 [layers]: 0 for a layer that Python has not checked yet, else 1 + weights_on_input.
    """

    _fields_ = _integers("call isa parallel tokens threads layers ready")


class Outcome(IntEnum):
    """What ``Library.moe_layer`` returns: ``Outcome`` of moe_layer.h."""

    DONE = 0
    FETCH = 1  # planned; some experts have to be fetched into slots first, and nothing is computed or counted
    VERIFY = 2  # nothing is planned: bytes of misses in files have to be verified first
    LOST = 3  # done, but a page of a mapped file could not be read
    BAD_EXPERT = 4  # nothing is planned: an id is outside of the experts
    BAD_ROOM = 5  # nothing is planned: scratch is too small


class Rounding(Structure):
    """A block of columns to round to lattice points: ``Rounding`` of layer.h."""

    _fields_ = (
        *_integers("rows columns streams left errors base fine factors divisors before"),
        *_doubles("low_share"),
    )


class QueueControl(Structure):
    """The words through which both sides of a CPU queue synchronize.

    Each has a cache line of its own. They match ``QueueControl`` of cpu_queue.h.
    """

    _fields_ = (
        *((f"{word}{n or ''}", c_int64) for word in ("posted", "answered", "stop") for n in range(16)),
        *_integers("depth entry_bytes items ids weights x out top_k hidden busy_ns rows"),
        ("padding", c_int64 * 5),
    )


ITEM_FIELDS = 9
"""Number of int64 fields of ``Item``: three sections, three residual sections, form, first position, number of
positions.
"""


class Library:
    """The loaded library, and the instruction set that it uses.

    That is the largest up to ``isa`` that the CPU has.

    Raises OSError if the library cannot be loaded, or was built from other sources than this file.
    """

    def __init__(self, path: Path, isa: str) -> None:
        library = ctypes.CDLL(str(path))
        library.dymoe_row_floats.restype = library.dymoe_sizes.restype = c_int64
        library.dymoe_row_floats.argtypes = [c_int64]
        sizes = [
            ctypes.sizeof(Matrix),
            8 * ITEM_FIELDS,
            *map(ctypes.sizeof, (Layer, Sum, Rounding, QueueControl, MoeLayer, TorchFunctions, NativeStep)),
        ]
        built = [library.dymoe_sizes(which) for which in range(len(sizes))]
        if sizes != built or not _has_these_sources(library):
            raise OSError(
                f"{path} was built from other sources; install vllm-dymoe again, or run make setup in a checkout."
            )
        library.dymoe_experts.argtypes = library.dymoe_weighted_sum.argtypes = [c_void_p, ctypes.c_int, c_void_p]
        library.dymoe_round_block.argtypes = [c_void_p, ctypes.c_int]
        # Arguments: address of a MoeLayer, instruction set, and the threads' function. Returns an Outcome.
        self.moe_layer = library.dymoe_moe_layer
        self.moe_layer.argtypes = [c_void_p, ctypes.c_int, c_void_p]
        # Argument: address of a NativeStep, which begins in this thread, or None to end it.
        self.native_step = library.dymoe_native_step
        self.native_step.argtypes, self.native_step.restype = [c_void_p], None
        # Argument: address of a QueueControl. ``post`` publishes a number after all earlier writes; ``wait`` waits
        # until it is answered, and returns 1 if it was given up instead; ``give_up`` gives up the entry that is waited
        # for, and returns its number or 0.
        self.post, self.wait, self.give_up = library.dymoe_post, library.dymoe_await, library.dymoe_give_up
        self.give_up.argtypes, self.give_up.restype = [c_void_p], c_int64
        self.wait.argtypes = self.post.argtypes = [c_void_p, c_int64]
        # For the thread that answers: wait until a number is posted (0 if the queue is stopped first), and answer it.
        self.wait_posted, self.answered = library.dymoe_await_posted, library.dymoe_answered
        self.wait_posted.argtypes = self.answered.argtypes = [c_void_p, c_int64]
        self.answered.restype = None
        library.dymoe_answer.argtypes = [
            c_void_p, c_void_p, c_void_p, c_int64, c_int64, ctypes.c_int, c_void_p, c_int64
        ]  # fmt: skip
        library.dymoe_answer.restype = self.post.restype = None
        # Arguments: a mapping's address and bytes, and -1; returns the number of its guard. With no bytes, removes a
        # guard. ``lost_pages`` counts those of all mappings.
        self.guard, self.lost_pages = library.dymoe_guard, library.dymoe_lost_pages
        self.guard.argtypes, self.lost_pages.restype = [c_void_p, c_int64, ctypes.c_int], c_int64
        library.dymoe_resident.argtypes = [c_void_p, c_int64]
        self._library = library
        known = list(ISAS)
        usable = known[known.index(isa if isa in ISAS else "DEFAULT") :]
        self.isa, self.name = next(ISAS[some] for some in usable if library.dymoe_supports(ISAS[some][0]))
        self.parallel = _openmp()
        self.row_floats = cache(library.dymoe_row_floats)

    def experts(self, layer: Layer, first: int, last: int) -> None:
        """Run phases `first` to `last` of a step.

        Raises IndexError for a row outside of x or out.
        """
        layer.phase, layer.last = first, last
        if self._library.dymoe_experts(ctypes.addressof(layer), self.isa, self.parallel):
            raise IndexError(f"work names a row beyond the {layer.tokens} of x or the {layer.out_rows} of out")

    def register_operator(self) -> None:
        """Let torch call the library for ``vllm_dymoe::moe`` on the CPU.

        Before this call, ``moe`` and ``moe_in_python`` must be defined.

        Raises:
            OSError: torch refuses it.
        """
        torch_library = ctypes.CDLL(str(_TORCH))
        functions = "get_sizes get_dtype is_contiguous get_data_ptr empty_strided delete_tensor_object call_dispatcher"
        found = [_address(torch_library, f"aoti_torch_{name}") for name in functions.split()]
        error = _address(torch_library, "torch_exception_get_what_without_backtrace", missing=0)
        dtypes = [getattr(torch_library, f"aoti_torch_dtype_{name}")() for name in ("float32", "int32", "int64")]
        self._library.dymoe_use_torch(ctypes.byref(TorchFunctions(*found, error, *dtypes)))
        registered, file = c_void_p(), str(SOURCES / "operator.h").encode()  # lives as long as the process
        failed = torch_library.aoti_torch_library_init_impl(b"vllm_dymoe", b"CPU", file, 0, ctypes.byref(registered))
        operator = _address(self._library, "dymoe_operator")
        if failed or torch_library.aoti_torch_library_impl(registered, b"moe", c_void_p(operator)):
            raise OSError("torch does not take vllm-dymoe's operator for the CPU; please report this")

    def answer(
        self, control: int, layer: Layer, forms: Sequence[Sequence[tuple[int, int]]], tokens: int, spin_ns: int = 0
    ) -> None:
        """Compute what is posted to the queue at an address until it is stopped.

        This releases the interpreter lock. ``layer`` describes what all steps have in common and has scratch for
        all pairs of ``tokens`` tokens. ``forms`` holds the tags of the encodings of each layer's versions, and where
        their matrices begin. With ``spin_ns``, ``layer.threads`` threads spin for so long after each answer; otherwise
        OpenMP's threads compute, which sleep between two answers.
        """
        numbers = [number for of_layer in forms for form in of_layer for number in form]
        listed, versions = (c_int64 * len(numbers))(*numbers), len(forms[0]) if forms else 0
        parallel = self.parallel if layer.threads > 1 else None
        given = control, ctypes.addressof(layer), listed, versions, tokens, self.isa, parallel, spin_ns
        self._library.dymoe_answer(*given)

    def weighted_sum(self, rows: torch.Tensor, weights: torch.Tensor, into: torch.Tensor) -> None:
        """Write the weighted sum of each token's rows.

        Args:
            rows: [tokens * top_k, hidden].
            weights: [tokens, top_k].
            into: [tokens, hidden], overwritten with the sum over k.
        """
        tokens, top_k = weights.shape
        addresses = rows.data_ptr(), weights.data_ptr(), into.data_ptr(), 0
        threads = torch.get_num_threads() if into.numel() > 1 << 14 else 1
        job = Sum(tokens, top_k, into.shape[1], into.dtype is torch.float16, *addresses, threads, 0)
        self._library.dymoe_weighted_sum(ctypes.addressof(job), self.isa, self.parallel)

    def resident(self, mapped: torch.Tensor) -> bool:
        """Return whether all pages of a part of a mapped file are in memory."""
        return bool(self._library.dymoe_resident(mapped.data_ptr(), mapped.numel()))

    def round_block(self, low_share: float, before: torch.Tensor | None, *parts: torch.Tensor) -> None:
        """Round a block of columns to lattice points, see ``quantize.lattice``.

        Tensors are contiguous and in the order of `Rounding`: remainders [columns, streams, rows], errors, codes of the
        base and the residual slice, factors, divisors.
        """
        columns, streams, rows = parts[0].shape
        addresses = [0 if part is None else part.data_ptr() for part in (*parts, before)]
        # A variable, because an address keeps nothing alive.
        block = Rounding(rows, columns, streams, *addresses, low_share)
        self._library.dymoe_round_block(ctypes.addressof(block), self.isa)


def _has_these_sources(library: ctypes.CDLL) -> bool:
    """Return whether a library was built from the sources next to it.

    True where that is not known: a wheel has no sources, and a library that setup.py did not build does not know its
    own.
    """
    try:
        library.dymoe_sources.restype = ctypes.c_char_p
        known = library.dymoe_sources().decode()
    except AttributeError:  # it is older than this function
        return False
    return not known or not SOURCES.is_dir() or known == digest(SOURCES)


@cache
def load(isa: str | None = None) -> Library | None:
    """Return the library that was built with the package.

    None if there was no compiler. ``isa`` limits its instruction set; by default to the one that torch uses.
    """
    built = Path(__file__).parent / "_cpu.so"
    used = torch.backends.cpu.get_cpu_capability()
    largest = isa or {"AVX512": "AMX", "AVX2": "AVX2_VNNI"}.get(used, "NEON_I8MM")
    return Library(built, largest) if built.exists() else None


def _address(library: ctypes.CDLL, function: str, missing: int | None = None) -> int:
    """Return a function's address; ``missing`` if the library has no such function."""
    if missing is not None and not hasattr(library, function):
        return missing
    return ctypes.cast(getattr(library, function), c_void_p).value or 0


def _openmp() -> int | None:
    """Return the address of ``GOMP_parallel`` in torch's OpenMP runtime.

    None if there is none; one thread is used then. A process may have loaded several runtimes (sentencepiece brings
    its own). Two pools of spinning threads made a step of 16 tokens eight times slower. A symbol of the whole process
    takes precedence over torch's dependency, as it does for torch itself.
    """
    for name in (None, str(_TORCH)):
        with contextlib.suppress(AttributeError, OSError):
            return _address(ctypes.CDLL(name), "GOMP_parallel")
    return None


def _kind(encoding: Encoding, quantized: bool) -> int:
    if encoding.lattice or not quantized:
        return LATTICE if encoding.lattice else PLAIN
    return (E2M1 if encoding.bits == 4 else E4M3) if encoding.floats else AFFINE


def matrix(format: MatrixFormat) -> Matrix:
    """Describe a projection for the library, with both sections if it is nested."""
    encoding, base = format.encoding, format.base if format.nested else format
    offsets = (
        base.bias_offset - 256 if encoding.has_factor else -1,
        base.bias_offset if base.bias and base.rows else -1,
        base.order_offset if base.act_order and base.rows else -1,
    )
    return Matrix(
        format.rows, format.columns, format.padded_rows, format.padded_columns,
        _kind(encoding, format.quantized),
        encoding.bits, format.nested,
        format.padded_columns // format.groups if format.quantized else format.columns, format.fold,
        4 + format.nested if encoding.lattice else 0 if encoding.scale_dtype is None else _SCALES[encoding.scale_dtype],
        format.integer_zeros | (format.dtype is torch.float16) << 1,
        base.scales_offset, *offsets,
        *_step_and_center(encoding),
    )  # fmt: skip


def _step_and_center(encoding: Encoding) -> tuple[float, float]:
    """Return step and center of an unsigned code for the library.

    A weight is (step * code - center) * scale.
    """
    if encoding.lattice:  # 7 + 4 * point; a nested code is 4 times that of the base plus that of the residual slice
        return (1 / 16, 35 / 16) if encoding.nested else (1 / 4, 7 / 4)
    if encoding.floats:  # e2m1 as 2 * level + 12
        return (0.5, 12.0) if encoding.bits == 4 else (1.0, 0.0)
    return encoding.step, encoding.center


def set_activation(layer: Layer, activation: Activation) -> None:
    """Write an activation's parameters into the library's description of a layer."""
    layer.has_gate, layer.curve = activation.has_gate, _CURVES[activation.curve]
    layer.limit, layer.alpha, layer.beta = activation.limit, activation.alpha, activation.beta
