"""Every variant that is compiled ahead of time.

Variants are the code's launches, recorded instead of launched. All combinations of precisions, tiles, dtype, bias,
activation, group size and way of launching would take days; tests launch them in the interpreter.

On the H100's architecture these are compiled:

- every bit-width alone, the mixes 4/2 and 16/4, and each kind of published floats and lattice codes, in decode and
  grouped on the largest tile;
- the same in decode as device-planned steps launch them (fetching, weighted, with 32-bit indices), also on the oldest
  and the newest architecture;
- the weighted sum, rotations, and the kernels that plan a step and copy.

Decode on tensor cores is compiled for every code on the main architecture, and at 4, 2 and 4/2 bits on all five. Ada
and data-center Blackwell have 4 and 4/2 bits without tensor cores, too. From sm_90 on its launches, and those before
it, overlap as by default. Codes of 4/2 and 8/4 are two sections, as they are stored.
"""

import ast
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_dymoe.experts.encoding import CODEBOOKS, E8, E8_NESTED, WHOLE
from vllm_dymoe.kernels import Activation
from vllm_dymoe.kernels.combine import Pairs
from vllm_dymoe.kernels.triton import (
    ExpertShape,
    ExpertTable,
    Scratch,
    Weighting,
    WorkList,
    choose_tiles,
    combine,
    cpu_queue,
    decode_down,
    decode_gate_up,
    grouped_down,
    grouped_gate_up,
    large_batch,
    launch,
    mma_decode,
    mma_grouped,
    planner,
    popularity,
    prefetch,
    rotate,
    spans,
    uses,
)
from vllm_dymoe.kernels.triton.large_batch import plan_large_batch_on_gpu
from vllm_dymoe.kernels.triton.start import Overlap
from vllm_dymoe.planner.large_batch import LargeBatchShape, LargeBatchWork
from vllm_dymoe.planner.plan import LayerPlan
from vllm_dymoe.planner.prefetch import PrefetchList
from vllm_dymoe.planner.table import Table

ARCHITECTURES, MAIN = (80, 89, 90, 100, 120), 90
OVERLAPPING = 90
"""The first architecture whose launches overlap."""
WHOLE_STEPS = 80, 90, 120
"""Architectures for which everything that a device's own step launches without tensor cores is compiled; for the others
what it does by default, at 4 and 4/2 bits."""
_SOME = {("4", 8), ("2", 8), ("4/2", 8), ("4/2", 16)}
"""Bits and tokens of decode on tensor cores on other architectures than the main one, which has all of it."""
MIXES = ((16,), (8,), (4,), (2,), (16, 4), (4, 2))
SIZES, DTYPE = (2048, 768), torch.bfloat16
"""Hidden and intermediate size of Qwen3-30B-A3B."""

_TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.int8: "*i8",
}
_WIDE = ("count", "list", "place_pairs")  # the launches around the products of a large-batch step
_DECODE = "activation", "combine", "decode", "fetch", "float_rows", "rotate", "rows", "section"
_TENSOR_CORES = "in_gluon", "mma_codes", "mma_decode", "mma_rows"
_GROUPED_CODE = "activation", "float_rows", "float_tiles", "grouped", "rotate", "section"
_IN_REGISTERS = "activation", "float_rows", "in_gluon", "mma_codes", "mma_grouped", "mma_rows", "section"
_MODULES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gate_up", "down"), _DECODE),
    **dict.fromkeys(("mma_gate_up", "mma_down"), (*_DECODE, *_TENSOR_CORES)),
    **dict.fromkeys(("grouped_gate_up", "grouped_down"), _GROUPED_CODE),
    **dict.fromkeys(("mma_grouped_gate_up", "mma_grouped_down"), _IN_REGISTERS),
    **{name: (name,) for name in ("rotate", "combine")},
    **dict.fromkeys(("decide", "choose"), ("planner",)),
    "copy_spans": ("spans",),
    **dict.fromkeys(("name_experts", "judge_predicted", "list_predicted", "copy_predicted"), ("planner", "prefetch")),
    "popularity": ("popularity",),
    "count_uses": ("uses",),
    **dict.fromkeys(_WIDE, ("planner", "large_batch")),
    **dict.fromkeys(("post", "wait", "collect", "ask", "take_sources"), ("cpu_queue",)),
}
"""Source modules of a kernel."""


@dataclass(frozen=True, eq=False)
class Variant:
    """One kernel to compile."""

    architecture: int  # such as 90
    kernel: str  # gate_up, down, grouped_gate_up, grouped_down, combine, decide, copy_spans, post, ...
    shape: str  # hidden x intermediate; for combine, hidden; for planning, experts
    precisions: str  # bit-widths of a launch, if it reads experts
    note: str  # special properties
    types: dict[str, str]  # of its tensors, by argument
    constants: dict[str, Any]  # its compile-time arguments
    options: dict[str, int]  # num_warps and other options of the compiler

    @property
    def code(self) -> Any:
        """The kernel, found by name.

        Triton's functions cannot be sent to another process.
        """
        name = f"{self.kernel}_kernel"
        products = launch, mma_decode, mma_grouped, combine
        modules = *products, planner, prefetch, popularity, rotate, spans, large_batch, cpu_queue, uses
        return next(vars(module)[name] for module in modules if name in vars(module))

    @property
    def key(self) -> tuple[Any, ...]:
        """The variant's identity, as in the first columns of the table."""
        return self.architecture, self.kernel, self.shape, self.precisions, self.note

    @property
    def digest(self) -> str:
        """16 hex digits of everything but the compiler that determines machine code."""
        parts = [_code(module) for module in _MODULES[self.kernel]]
        parts += [json.dumps([self.types, self.constants, self.options], sort_keys=True)]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Case:
    """Experts, and a way of launching them."""

    bits: tuple[int, ...]  # tags of their encodings
    device: bool = False  # as `SmallBatchStep.run` launches: it fetches misses, and weights experts
    tensor_cores: int = 0  # see DecodeTile
    in_registers: bool = False  # see GroupedTile

    @property
    def shape(self) -> ExpertShape:
        """Return the shape as launches take it."""
        return ExpertShape(*SIZES, 64, DTYPE, nested={(8, 4): 8, (4, 2): 4, _POINTS: 4}.get(self.bits, 0))


_POINTS = E8_NESTED.tag, E8.tag
_BOOKS = tuple(book.tag for book in CODEBOOKS.values())
# Published floats, and lattice codes.
_OTHERS = (*(Case((tag,)) for tag in _BOOKS), Case((E8.tag,)), Case(_POINTS))
_DEVICE = tuple(replace(case, device=True) for case in (
    *map(Case, ((16,), (8,), (4,), (2,), (4, 2), (8, 4))), *_OTHERS))  # fmt: skip
_ON_TENSOR_CORES = tuple(replace(case, device=True, tensor_cores=8) for case in (
    *map(Case, ((8,), (4,), (2,), (4, 2), (8, 4))), *_OTHERS))  # fmt: skip
_IN_LARGE_BATCHES = tuple(replace(case, in_registers=True) for case in map(Case, ((4,), (2,), (4, 2))))
# Gate and up only; down has the same loops.
_MORE_IN_LARGE_BATCHES = tuple(replace(Case(tags), in_registers=True) for tags in ((8,), *zip(_BOOKS), _POINTS))
_MANY = tuple(replace(case, device=True, tensor_cores=16) for case in map(Case, ((4,), (4, 2))))
# Hidden size, top_k, dtype, and whether pairs can be absent: of DeepSeek-V3, of gpt-oss, and of a model with odd sizes.
_SUMS = ((7168, 8, torch.bfloat16, False), (2880, 4, torch.float16, True), (1001, 22, torch.bfloat16, True))
# Experts and top_k: gpt-oss-20b's, Qwen3-30B-A3B's, more than Qwen3-Next's, and the largest supported.
_ROUTERS = ((32, 4), (128, 8), (512, 22), (1024, 22))
_LAUNCHES = {
    "gate_up": decode_gate_up,
    "down": decode_down,
    "grouped_gate_up": grouped_gate_up,
    "grouped_down": grouped_down,
}


def all_variants() -> Iterator[Variant]:
    """Yield all variants on one architecture, and device-planned steps on the others."""
    for architecture in ARCHITECTURES:
        for found in variants(architecture):
            if found.kernel.startswith("mma_grouped"):
                some = found.precisions == "4"
            elif found.kernel.startswith("mma"):
                some = (found.precisions, found.constants["MOST"]) in _SOME
            else:
                some = found.note == "device" and (architecture in WHOLE_STEPS or found.precisions in ("4", "4/2"))
            if architecture == MAIN or some:
                yield found


def variants(architecture: int) -> Iterator[Variant]:
    """Yield the variants of one architecture."""
    everywhere = (*map(Case, MIXES), *_OTHERS)
    kernels = tuple(_LAUNCHES)
    for cases, pair in (((*everywhere, *_DEVICE), kernels[:2]), (everywhere, kernels[2:])):
        yield from (_experts(architecture, kernel, case) for case in cases for kernel in pair)
    yield from (_experts(architecture, kernel, case) for case in (*_ON_TENSOR_CORES, *_MANY) for kernel in kernels[:2])
    yield from (_experts(architecture, kernel, case) for case in _IN_LARGE_BATCHES for kernel in kernels[2:])
    yield from (_experts(architecture, kernels[2], case) for case in _MORE_IN_LARGE_BATCHES)
    yield from _others(architecture)


def _experts(architecture: int, kernel: str, case: Case) -> Variant:
    """Return the variant for one token of one expert, with the server's indices.

    It has no addresses.
    """
    grouped, tiles = kernel.startswith("grouped"), choose_tiles(architecture, *SIZES)
    overlaps = case.tensor_cores > 0 and architecture >= OVERLAPPING
    if case.tensor_cores:
        tiles = tiles.on_tensor_cores(case.tensor_cores, dependent=overlaps)
    tile = getattr(tiles.in_registers() if case.in_registers else tiles, kernel)
    tile = tile[-1] if grouped else tile
    addresses, bits = torch.zeros(1, 3, dtype=torch.int64), torch.zeros(1, 3, dtype=torch.int32)
    fetched = addresses if case.device else None
    residual = (addresses, fetched) if case.shape.nested else (None, None)
    table = ExpertTable(case.shape, frozenset(case.bits), addresses, bits, fetched, *residual)
    index = torch.zeros(1, dtype=torch.int32 if case.device else torch.int64)
    x, states = (torch.empty(1, size, dtype=DTYPE) for size in SIZES)
    gate = kernel.endswith("gate_up")
    arguments: list[Any] = [*((x, states) if gate else (states, x)), table, WorkList(bits, index, index)]
    arguments += [Activation.SILU, tile] if gate else [tile]
    if not grouped:
        arguments.append(Scratch(torch.empty(1 << 20), torch.empty(1 << 10, dtype=torch.int32)))
    if kernel == "down" and case.device:
        arguments.append(Weighting(torch.empty(1, 8), torch.empty(1, 8, dtype=torch.int32)))
    note = f"m {tile.block_m}" if grouped else "device" if case.device else ""
    name, note = (f"mma_{kernel}", f"{note}, {case.tensor_cores} tokens") if case.tensor_cores else (kernel, note)
    name = f"mma_{kernel}" if case.in_registers else name
    shape, precisions = "x".join(map(str, SIZES)), "/".join(WHOLE[tag].name for tag in case.bits)
    launch = partial(_LAUNCHES[kernel], **({"overlap": Overlap.START} if overlaps and gate else {}))
    return _noted((architecture, name, shape, precisions, note), launch, *arguments)


def _others(architecture: int) -> Iterator[Variant]:
    """Yield the weighted sum, and the kernels that plan and copy experts."""
    for hidden, top_k, dtype, absent in _SUMS:
        name = str(dtype).removeprefix("torch.") + ", absent and skipped, renormalized" * absent
        ids = torch.empty(1, top_k, dtype=torch.int32)
        out, into = torch.empty(top_k, hidden, dtype=dtype), torch.empty(1, hidden, dtype=dtype)
        pairs = Pairs(out, torch.empty(1, top_k), *((ids, ids[0], True) if absent else (None, None, False)))
        key = architecture, "combine", str(hidden), "", f"top {top_k}, {name}"
        yield _noted(key, combine.combine_on_gpu, pairs, into)
    for hidden in (2880, 2048, 4096):
        x, block = torch.empty(1, hidden, dtype=torch.bfloat16), hidden & -hidden
        yield _noted((architecture, "rotate", str(hidden), "", f"blocks of {block}"), rotate.rotate_inputs, x, x, block)
    for experts, top_k in _ROUTERS:
        ids, scores, rows = torch.zeros(1, top_k, dtype=torch.int32), torch.zeros(1, top_k), torch.zeros(1).int()
        key = architecture, "decide", f"{experts} experts", "", f"top {top_k}"
        tables = [
            Table.allocate(1, experts, rows=1, top_k=top_k, depth=1, device="cpu", nested=nested)
            for nested in (False, True)
        ]
        for nested, columns in enumerate(tables):
            plan = LayerPlan.allocate(1, top_k, experts, "cpu", slices=1 + nested).tensors
            described = *key[:4], key[4] + ", nested" * nested
            alone = partial(planner.plan_small_batch_on_gpu, followed=architecture >= OVERLAPPING)
            yield _noted(described, alone, vars(columns), 0, ids, scores, rows, plan)
            if not nested and top_k == _ROUTERS[0][1]:
                described = *key[:4], f"{key[4]}, shared with the host"
                shared = partial(planner.plan_small_batch_on_gpu, on_cpu=True)
                yield _noted(described, shared, vars(columns), 0, ids, scores, rows, plan)
    counted = torch.zeros(3 * 129).long(), torch.zeros(1, 128, dtype=torch.int8), 0, torch.zeros(1, 8).int()
    key = architecture, "count_uses", "128 experts", "", "top 8"
    yield _noted(key, uses.count_uses_on_gpu, *counted, torch.zeros(1, 8))
    yield from _choices(architecture)
    key = architecture, "copy_spans", "", "", ""
    yield _noted(key, spans.copy_spans, torch.zeros(1, 3, dtype=torch.int64))
    yield from _prefetch(architecture, *_ROUTERS[1])
    for nested in (False, True):
        yield from _wide(architecture, *_ROUTERS[1], nested)
    yield from _cpu_queue(architecture)


def _choices(architecture: int) -> Iterator[Variant]:
    """Yield the kernels of a rank that chooses precision among all experts.

    It has an eighth of them. They are for one token, and for a large batch with marks.
    """
    for experts, top_k in _ROUTERS:
        own, sizes = experts // 8, {"rows": 1, "top_k": top_k, "depth": 1, "device": "cpu", "all_experts": experts}
        table, plan = vars(Table.allocate(1, own, **sizes)), LayerPlan.allocate(1, top_k, own, "cpu").tensors
        ids, scores, rows = torch.zeros(1, top_k, dtype=torch.int32), torch.zeros(1, top_k), torch.zeros(1).int()
        key = f"{experts} experts", "", f"top {top_k}"
        given = table, 0, ids, ids, scores, rows
        yield _noted((architecture, "choose", *key), planner.choose_on_gpu, *given)
        large = partial(planner.choose_on_gpu, chunks=1, marked=True)
        noted = architecture, "choose", *key[:2], f"large, {key[2]}"
        yield _noted(noted, large, *given, torch.zeros(1, dtype=torch.int32))
        if (experts, top_k) == _ROUTERS[-1]:
            noted = architecture, "decide", f"{own} experts", "", f"{key[2]}, chosen among {experts}"
            decided = partial(planner.plan_small_batch_on_gpu, global_ids=ids)
            yield _noted(noted, decided, table, 0, ids, scores, rows, plan)


def _prefetch(architecture: int, experts: int, top_k: int) -> Iterator[Variant]:
    """Yield the kernels that name, judge, list and copy predicted experts.

    There are variants for one gate and for six, and for one coming layer and for two.
    """
    table = vars(Table.allocate(2, experts, rows=1, top_k=top_k, depth=1, device="cpu"))
    listed, rows = vars(PrefetchList.allocate(experts, "cpu")), torch.zeros(1).int()
    key = f"{experts} experts", "", ""
    for look_ahead, nested in ((1, False), (2, False), (1, True), (2, True)):
        sizes: dict[str, Any] = {"rows": 1, "top_k": top_k, "depth": 1, "device": "cpu", "nested": nested}
        own, lists = Table.allocate(2, experts, **sizes).at(1), PrefetchList.allocate(experts, "cpu", slices=1 + nested)
        note = key[0], "", f"{look_ahead} ahead" + ", nested" * nested
        given = own, 1, rows, 3, vars(lists), look_ahead
        yield _noted((architecture, "list_predicted", *note), prefetch.list_predicted_on_gpu, *given)
    ids, numbers = torch.zeros(1, top_k).int(), torch.zeros(2, experts).int()
    yield _noted((architecture, "judge_predicted", *key), prefetch.judge_predicted_on_gpu, table, 1, ids, rows, listed)
    for voters in (1, 6):
        given = table, 1, 0, torch.zeros(voters, 1, experts), rows, numbers, numbers, listed["scratch"]
        note = key[0], "", f"{voters} voters"
        yield _noted((architecture, "name_experts", *note), prefetch.name_experts_on_gpu, *given)
    yield _noted((architecture, "copy_predicted", *key), prefetch.copy_predicted_on_gpu, table, 1, listed)
    counts = torch.zeros(2, experts).long()
    named = counts, table["predicted"][0], 0, ids, rows, 10, 1 << 20, top_k
    yield _noted((architecture, "popularity", *key), popularity.count_and_name_on_gpu, *named)


def _wide(architecture: int, experts: int, top_k: int, nested: bool) -> Iterator[Variant]:
    """Yield the kernels around the products of a large batch.

    They have marks and, for nested versions, streamed groups.
    """
    shape, steps = LargeBatchShape(17, top_k, experts, 1 + nested, 2 * nested, nested, True), (4, 16, 64, 128)
    table = vars(Table.allocate(1, experts, rows=1, top_k=top_k, depth=1, device="cpu", nested=nested))
    plan = LayerPlan.allocate(17, top_k, experts, "cpu", slices=1 + nested, scratch=shape.scratch)
    lists = vars(LargeBatchWork.allocate(shape, steps, "cpu"))
    ids, weights = torch.zeros(17, top_k, dtype=torch.int32), torch.zeros(17, top_k)
    rows, parts, launched = ids[0, :1], ids.expand(3, 17, top_k), list[tuple[Any, ...]]()

    def start(*launch: Any) -> None:
        launched.append(launch)

    plan_large_batch_on_gpu(table, 0, ids, weights, rows, plan.tensors, shape, 0, 0, steps, lists, parts, start=start)
    for kernel, *others in launched:
        name = kernel.__name__.removesuffix("_kernel")
        if name in ("decide", "list") or not nested:
            key = architecture, name, f"{experts} experts", "", f"large, top {top_k}" + ", nested" * nested
            yield _noted(key, lambda start, launch=(kernel, *others): start(*launch))


def _cpu_queue(architecture: int) -> Iterator[Variant]:
    """Yield the kernels around a step's products if the CPU executes misses."""
    shape, plan = cpu_queue.QueueShape(2, 16, 8, 128, SIZES[0], torch.bfloat16), LayerPlan.allocate(16, 8, 128, "cpu")
    x, ids, turn = torch.empty(16, SIZES[0]).bfloat16(), torch.zeros(16, 8).int(), torch.zeros(3).long()
    rows, door = x.new_empty(128, SIZES[0]), cpu_queue.DeviceQueue(shape, turn, ids.flatten())
    posted, followed = (door, 0, x, ids, ids[0, :1], plan.tensors), architecture >= OVERLAPPING
    post, take_sources = (partial(some, followed=followed) for some in (cpu_queue.post, cpu_queue.take_sources))
    yield _noted((architecture, "post", str(SIZES[0]), "", ""), post, *posted)
    yield _noted((architecture, "wait", "", "", ""), cpu_queue.wait, turn)
    yield _noted((architecture, "collect", str(SIZES[0]), "", ""), cpu_queue.take, door, rows, ids)
    for nested in (False, True):  # for experts that come from disk
        table = Table.allocate(1, 128, rows=1, top_k=8, depth=1, device="cpu", nested=nested).at(0)
        asked, note = LayerPlan.allocate(16, 8, 128, "cpu", slices=1 + nested).tensors, "nested" * nested
        yield _noted((architecture, "ask", "128 experts", "", note), cpu_queue.ask, door, 0, asked)
        taken = door, table, 0, asked
        yield _noted((architecture, "take_sources", "128 experts", "", note), take_sources, *taken)


def variant_of(
    key: tuple[int, str, str, str, str], code: Any, tensors: Sequence[Tensor | int], constants: dict[str, Any],
    options: dict[str, int],
) -> Variant:  # fmt: skip
    """Return the variant that a launch of a kernel compiles."""
    types = {
        parameter.name: parameter.annotation_type or "i64" if isinstance(tensor, int) else _TYPES[tensor.dtype]
        for parameter, tensor in zip(code.params, tensors, strict=False)
    }
    return Variant(*key, types, constants, options)


def _noted(key: tuple[int, str, str, str, str], launch: Callable[..., None], *arguments: Any) -> Variant:
    """Return the variant that a launch would compile."""
    found = []

    def note(
        code: Any, grid: Any, tensors: Sequence[Tensor | int], constants: dict[str, Any], options: dict[str, int]
    ) -> None:
        found.append(variant_of(key, code, tensors, constants, options))

    launch(*arguments, start=note)
    return found[-1]


@cache
def _code(module: str) -> str:
    """Return the part of a module that becomes machine code.

    This is its compiled functions and what they use. Comments and docstrings change no machine code. Neither do
    functions of the host: the arguments with which they launch kernels are hashed as arguments.
    """
    return _compiled_part((Path(launch.__file__).parent / f"{module}.py").read_text())


def _compiled_part(source: str) -> str:
    statements = ast.parse(source).body
    kept = [part for part in statements if isinstance(part, ast.FunctionDef) and _is_compiled(part)]
    used: set[str] = set()
    while more := {node.id for part in kept for node in ast.walk(part) if isinstance(node, ast.Name)} - used:
        used |= more
        kept = [part for part in statements if part in kept or _binds(part, used)]
    tree = ast.Module(kept, type_ignores=[])
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(node, ast.Import | ast.ImportFrom):
            node.names = [alias for alias in node.names if (alias.asname or alias.name) in used]
        elif isinstance(body, list):
            node.body = [part for part in body if not _is_text(part)] or [ast.Pass()]
    return ast.unparse(tree)


def _is_compiled(function: ast.FunctionDef) -> bool:
    return any(ast.unparse(decorator).startswith(("triton.", "gluon.")) for decorator in function.decorator_list)


def _binds(statement: ast.stmt, names: set[str]) -> bool:
    """Whether a module's statement defines, assigns or imports one of `names`."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return statement.name in names
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return any((alias.asname or alias.name) in names for alias in statement.names)
    bound = [node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    return not names.isdisjoint(bound)


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
