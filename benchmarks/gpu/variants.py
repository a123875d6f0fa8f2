"""Every variant that is compiled ahead of time: what the launches would compile, noted instead of launched.

All combinations of tiers, tiles, dtype, bias, activation, group size and way of launching would take days. Planned are

- on every architecture every width by itself, the mixes 4/2 and 16/4, and each kind of published floats, in decode and
  grouped on the largest tile; in decode these as the device's own steps launch them (fetching, weighted, with indices
  of 32 bits), and many options at once; the weighted sum, what places experts, decides a step, and fetches ahead;
- on the oldest and the newest one also every other mix that a runtime can have, grouped on every tile, and each option
  by itself: in decode at 4 bits, grouped at 4/2, and what checkpoints of other tools have at 4/2 and 8/4: float16 and
  zeros in steps, without and with an order of columns.

Codes of 4/2 and 8/4 are two sections, as they are stored.
"""

import ast
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_dymoe.kernels import Activation, Curve
from vllm_dymoe.kernels.combine import Pairs
from vllm_dymoe.kernels.triton import (
    ExpertShape,
    ExpertTable,
    Scratch,
    Tiles,
    Weighting,
    WorkList,
    ahead,
    choose_tiles,
    combine,
    decide,
    decode_down,
    decode_gate_up,
    grouped_down,
    grouped_gate_up,
    launch,
    place,
)
from vllm_dymoe.residency.code import CODEBOOKS, WHOLE
from vllm_dymoe.residency.decision import Decision
from vllm_dymoe.residency.decode_ahead import Copies
from vllm_dymoe.residency.table import Table

ARCHITECTURES = (80, 86, 89, 90, 100, 120)
BITS = (16, 8, 4, 2)
MIXES = [(bits,) for bits in BITS] + list(combinations(BITS, 2))
SMALL, LARGE = (2048, 768), (4096, 14336)
"""Hidden and intermediate size of Qwen3-30B-A3B and of Mixtral-8x7B: both ends of the table of tiles."""

_TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.int8: "*i8",
}
_MODULES = {
    "gate_up": ("activation", "combine", "decode", "fetch", "float_rows", "rows", "section"),
    "down": ("activation", "combine", "decode", "fetch", "float_rows", "rows", "section"),
    "grouped_gate_up": ("activation", "float_rows", "float_tiles", "grouped", "section"),
    "grouped_down": ("activation", "float_rows", "float_tiles", "grouped", "section"),
    "combine": ("combine",),
    "place": ("place",),
    "decide": ("decide",),
    "name_ahead": ("ahead", "decide"),
    "fetch_ahead": ("ahead",),
}
"""Where a kernel's code comes from."""


@dataclass(frozen=True, eq=False)
class Variant:
    """One kernel to compile.

    Attributes:
        architecture: such as 90.
        kernel: gate_up, down, grouped_gate_up, grouped_down, combine, place, decide, name_ahead or fetch_ahead.
        shape: hidden x intermediate; of combine, hidden; of what decides, experts.
        tiers: bit-widths of a launch, if it reads experts.
        note: what is special about it.
        types: of its tensors, by argument.
        constants: its compile-time arguments.
        options: num_warps and what else the compiler is told.
    """

    architecture: int
    kernel: str
    shape: str
    tiers: str
    note: str
    types: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, int]

    @property
    def code(self) -> Any:
        """The kernel itself; by name, because Triton's functions cannot travel to another process."""
        others = {"combine": combine, "place": place, "decide": decide, "name_ahead": ahead, "fetch_ahead": ahead}
        module = others.get(self.kernel, launch)
        return getattr(module, f"{self.kernel}_kernel")

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells it apart, as the first columns of the table."""
        return self.architecture, self.kernel, self.shape, self.tiers, self.note

    @property
    def digest(self) -> str:
        """16 hex digits of all that its machine code depends on, but for the compiler."""
        parts = [_code(module) for module in _MODULES[self.kernel]]
        parts += [json.dumps([self.types, self.constants, self.options], sort_keys=True)]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Case:
    """Experts and a way of launching them.

    Attributes:
        weighted: whether decode sums a token's experts.
        index: dtype of rows and pairs.
        steps: bit-widths whose zeros count steps.
        ordered: bit-widths whose columns have an order.
    """

    note: str = ""
    sizes: tuple[int, int] = SMALL
    bits: tuple[int, ...] = (4, 2)
    dtype: torch.dtype = torch.bfloat16
    bias: bool = False
    group: int = 64
    activation: Activation = Activation.SILU
    fetch: bool = False
    weighted: bool = False
    index: torch.dtype = torch.int64
    steps: tuple[int, ...] = ()
    ordered: tuple[int, ...] = ()

    @property
    def shape(self) -> ExpertShape:
        """As launches want it."""
        flags = frozenset(self.steps), frozenset(self.ordered)
        nested = self.bits[0] if self.bits in ((8, 4), (4, 2)) else 0
        return ExpertShape(
            *self.sizes, self.group, self.dtype, self.bias, *flags, self.activation.has_gate, nested=nested
        )


_ODD = {"sizes": (2000, 700), "dtype": torch.float16, "bias": True, "activation": Activation.SWIGLU_OAI}
_BOTH_CLASSES = (
    Case("fp16", dtype=torch.float16),
    Case("bias", bias=True),
    Case("group 32", group=32),
    Case("group 128", group=128),
    Case("off tile", sizes=(2000, 700)),
    Case("large", sizes=LARGE),
    Case("zeros in steps", steps=(4,)),
    Case("ordered", ordered=(4,)),
)
_GATE = (
    Case("gelu", activation=Activation.GELU),
    Case("gelu_tanh", activation=Activation.GELU_TANH),
    Case("swiglu_oai", activation=Activation.SWIGLU_OAI),
    Case("swiglu_step", activation=Activation(Curve.SWIGLU_STEP, limit=7.0)),
    Case("situ", activation=Activation(Curve.SITU, beta=4.0, limit=25.0)),
    Case("no gate", activation=Activation(Curve.RELU2, has_gate=False)),
)
_AT_ONCE = tuple(Case("fp16, bias, swiglu_oai, off tile", bits=bits, **_ODD) for bits in ((16, 8), (4, 2)))
# As checkpoints of other tools are: float16, and a low tier inside theirs.
_INTEGERS = tuple(
    Case(note, bits=bits, dtype=torch.float16, steps=bits, ordered=ordered)
    for bits in ((4, 2), (8, 4))
    for note, ordered in (("fp16, zeros in steps", ()), ("fp16, zeros in steps, ordered", bits))
)
_FLOATS = tuple(Case(bits=(book.tag,)) for book in CODEBOOKS.values())
# As `DecodeStep.run` launches: misses are fetched on the way, experts weighted, indices the device's own.
_DEVICE = tuple(
    replace(case, note=", ".join(filter(None, ("device", case.note))), fetch=True, weighted=True, index=torch.int32)
    for case in (*(Case(bits=bits) for bits in ((16,), (8,), (4,), (2,), (4, 2), (8, 4))), *_FLOATS)
)
_DEVICE_AT_ONCE = tuple(replace(_DEVICE[0], note=f"device, {case.note}", bits=case.bits, **_ODD) for case in _AT_ONCE)
# Hidden size, top_k, dtype, and whether pairs can be absent: DeepSeek-V3's, gpt-oss's, and an odd one of 22.
_SUMS = (
    (7168, 8, torch.bfloat16, False),
    (2880, 4, torch.float16, True),
    (1001, 22, torch.bfloat16, True),
)

# Experts and top_k: gpt-oss-20b's, Qwen3-30B-A3B's, and the most there are.
_ROUTERS = ((32, 4), (128, 8), (512, 22))


def all_variants() -> Iterator[Variant]:
    """Every variant of every architecture."""
    for architecture in ARCHITECTURES:
        yield from variants(architecture)


def essential_variants() -> Iterator[Variant]:
    """Those that every change of a kernel compiles: on the H100's architecture every kernel, and every kind of experts
    with no option, grouped on the largest tile; on both ends' what the device decides."""
    kernels = ("gate_up", "down", "grouped_gate_up", "grouped_down")
    for variant in variants(90):
        if variant.kernel not in kernels or variant.note in ("", "m 128", "device"):
            yield variant
    for architecture in (ARCHITECTURES[0], ARCHITECTURES[-1]):
        yield from (variant for variant in variants(architecture) if variant.note == "device")


def variants(architecture: int) -> Iterator[Variant]:
    """Those of one architecture."""
    every = architecture in (ARCHITECTURES[0], ARCHITECTURES[-1])
    mixes = [Case(bits=bits) for bits in MIXES if every or len(bits) == 1 or bits in ((4, 2), (16, 4))]
    options = _BOTH_CLASSES if every else ()
    alone, together = [replace(case, bits=(4,)) for case in options], _INTEGERS if every else ()
    for case in [*mixes, *alone, *together, *_FLOATS, *_DEVICE, *_DEVICE_AT_ONCE]:
        yield from (_gate_up(architecture, case), _down(architecture, case))
    for case in mixes:
        tiles = range(len(_tiles(architecture, case).grouped_down)) if every else (-1,)
        for number in tiles:
            yield _grouped_gate_up(architecture, case, number)
            yield _grouped_down(architecture, case, number)
    for case in [*options, *together, *_AT_ONCE, *_FLOATS]:
        yield from (_grouped_gate_up(architecture, case), _grouped_down(architecture, case))
    for case in _GATE if every else ():
        yield _gate_up(architecture, replace(case, bits=(4,)))
        yield _grouped_gate_up(architecture, case)
    for hidden, top_k, dtype, absent in _SUMS:
        yield _combine(architecture, hidden, top_k, dtype, absent)
    yield _place(architecture)
    for experts, top_k in _ROUTERS:
        yield from (_decide(architecture, experts, top_k, nested) for nested in (False, True))
        yield _name_ahead(architecture, experts, top_k)
    yield _fetch_ahead(architecture)


def _gate_up(architecture: int, case: Case) -> Variant:
    x, hidden, table, work, scratch = _arguments(case)
    note = _Note(architecture, "gate_up", case)
    tile = _tiles(architecture, case).gate_up
    decode_gate_up(x, hidden, table, work, case.activation, tile, scratch, start=note)
    return note.variant


def _down(architecture: int, case: Case) -> Variant:
    x, hidden, table, work, scratch = _arguments(case)
    note = _Note(architecture, "down", case)
    weighting = None
    if case.weighted:
        weighting = Weighting(torch.empty(1, 8), torch.empty(1, 8, dtype=torch.int32))
    tile = _tiles(architecture, case).down
    decode_down(hidden, x, table, work, tile, scratch, weighting, start=note)
    return note.variant


def _grouped_gate_up(architecture: int, case: Case, number: int = -1) -> Variant:
    x, hidden, table, work, _ = _arguments(case)
    tile = _tiles(architecture, case).grouped_gate_up[number]
    note = _Note(architecture, "grouped_gate_up", case, f"m {tile.block_m}")
    grouped_gate_up(x, hidden, table, work, case.activation, tile, start=note)
    return note.variant


def _grouped_down(architecture: int, case: Case, number: int = -1) -> Variant:
    x, hidden, table, work, _ = _arguments(case)
    tile = _tiles(architecture, case).grouped_down[number]
    note = _Note(architecture, "grouped_down", case, f"m {tile.block_m}")
    grouped_down(hidden, x, table, work, tile, start=note)
    return note.variant


def _combine(architecture: int, hidden: int, top_k: int, dtype: torch.dtype, absent: bool) -> Variant:
    name = str(dtype).removeprefix("torch.") + ", absent and skipped, renormalized" * absent
    note = _Note(architecture, "combine", None, f"top {top_k}, {name}", str(hidden))
    ids = torch.empty(1, top_k, dtype=torch.int32)
    out, into = torch.empty(top_k, hidden, dtype=dtype), torch.empty(1, hidden, dtype=dtype)
    some = (ids, ids[0], True) if absent else (None, None, False)
    combine.combine_on_gpu(Pairs(out, torch.empty(1, top_k), *some), into, start=note)
    return note.variant


def _place(architecture: int) -> Variant:
    note = _Note(architecture, "place", None)
    table = torch.zeros(1, 3, dtype=torch.int64), torch.zeros(1, 3, dtype=torch.int32)
    place.place_experts(*table, [place.Place(0, (0, 0, 0), (4, 4, 4))], start=note)
    return note.variant


def _decide(architecture: int, experts: int, top_k: int, nested: bool) -> Variant:
    note = _Note(architecture, "decide", None, f"top {top_k}" + ", nested" * nested, f"{experts} experts")
    table = Table.allocate(1, experts, rows=1, top_k=top_k, depth=1, device="cpu", nested=nested)
    decision = Decision.allocate(1, top_k, experts, "cpu", slices=1 + nested)
    ids, weights = torch.zeros(1, top_k, dtype=torch.int32), torch.zeros(1, top_k)
    decide.decide(vars(table), 0, ids, weights, ids[0, :1], decision.tensors, start=note)
    return note.variant


def _name_ahead(architecture: int, experts: int, top_k: int) -> Variant:
    note = _Note(architecture, "name_ahead", None, f"top {top_k}", f"{experts} experts")
    table = Table.allocate(1, experts, rows=1, top_k=top_k, depth=1, device="cpu")
    ids, scores = torch.zeros(1, top_k, dtype=torch.int64), torch.zeros(1, top_k)
    rows = torch.zeros(1, dtype=torch.int32)
    ahead.name_ahead(vars(table), 0, ids, scores, rows, vars(Copies.allocate(1, top_k, experts, "cpu")), start=note)
    return note.variant


def _fetch_ahead(architecture: int) -> Variant:
    note = _Note(architecture, "fetch_ahead", None)
    ahead.fetch_ahead(vars(Copies.allocate(1, 1, 1, "cpu")), start=note)
    return note.variant


def _tiles(architecture: int, case: Case) -> Tiles:
    return choose_tiles(architecture, *case.sizes)


def _arguments(case: Case) -> tuple[Tensor, Tensor, ExpertTable, WorkList, Scratch]:
    """One token of one expert, at no address, with indices as the runtime has them."""
    hidden, intermediate = case.sizes
    addresses = torch.zeros(1, 3, dtype=torch.int64)
    bits = torch.zeros(1, 3, dtype=torch.int32)
    destinations, fine = addresses if case.fetch else None, addresses if case.shape.nested else None
    fine_destinations = destinations if case.shape.nested else None
    table = ExpertTable(
        case.shape, frozenset(case.bits), addresses, bits, destinations, fine=fine, fine_destinations=fine_destinations
    )
    index = torch.zeros(1, dtype=case.index)
    work = WorkList(torch.zeros(1, 3, dtype=torch.int32), index, index)
    scratch = Scratch(torch.empty(1 << 20), torch.empty(1 << 10, dtype=torch.int32))
    x, states = (torch.empty(1, size, dtype=case.dtype) for size in (hidden, intermediate))
    return x, states, table, work, scratch


class _Note:
    """Takes a kernel's launch and keeps it as a variant."""

    variant: Variant

    def __init__(self, architecture: int, kernel: str, case: Case | None, detail: str = "", shape: str = "") -> None:
        note, tiers = detail, ""
        if case is not None:
            note = ", ".join(part for part in (case.note, detail) if part)
            shape, tiers = (
                "x".join(map(str, case.sizes)),
                "/".join(WHOLE[bits].name for bits in case.bits),
            )
        self._key = architecture, kernel, shape, tiers, note

    def __call__(
        self,
        code: Any,
        grid: tuple[int, ...],
        tensors: Sequence[Tensor | int],
        constants: dict[str, Any],
        options: dict[str, int],
    ) -> None:
        types = {
            parameter.name: parameter.annotation_type or "i64" if isinstance(tensor, int) else _TYPES[tensor.dtype]
            for parameter, tensor in zip(code.params, tensors, strict=False)
        }
        self.variant = Variant(*self._key, types, constants, options)


@cache
def _code(module: str) -> str:
    """A module without comments and docstrings, which change no machine code."""
    tree = ast.parse((Path(launch.__file__).parent / f"{module}.py").read_text())
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [part for part in body if not _is_text(part)] or [ast.Pass()]
    return ast.unparse(tree)


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
