"""Checks that every output of decode is computed by the same operations.

They have to be the same however decode is launched. One program of a compiled kernel is run from its PTX, all threads
in step, on random bytes. Integers are computed. A float operation gives its value and a hash of its name, its rounding
and its operands' hashes. Two outputs have equal hashes if the same operations were applied in the same order to the
same bits. For each kernel that fetches, and for the same one that does not, ``compile_table.py`` records the hashes of
two tokens, each alone and both together.
"""

import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from variants import Variant

Lanes = NDArray[np.uint64]
_SIZES = {"pred": 1, "8": 8, "16": 16, "32": 32, "64": 64}
_ROUNDED = np.uint64(4)
"""Marks products in a tree that are inexact and name no rounding, so that ptxas may fuse them with a sum. Exact
products have the same tree either way.
"""
_REST = np.uint64(1)  # in memory and registers, replaces the second half's tree, which equals the first one's


class Value(NamedTuple):
    """A value in each thread; a register may hold two 16-bit floats."""

    bits: Lanes
    tree: Lanes  # how it, or its lower half, was computed; 0 for integers, whose bits suffice
    upper: Lanes


Copy = tuple[NDArray[np.int64], NDArray[np.uint8], Lanes | None]
"""Where each thread copies to in shared memory, the bytes, and the trees of their halves."""


def _mix(name: str, *parts: Lanes) -> Lanes:
    result = np.full(parts[0].shape, zlib.crc32(name.encode()) + (1 << 40), np.uint64)
    for part in parts:
        result = (result ^ part) * np.uint64(0x9E3779B97F4A7C15)
        result ^= result >> np.uint64(29)
    return (result | np.uint64(2)) & ~_ROUNDED


def _tree(value: Value) -> Lanes:
    known = np.where(value.upper > _REST, _mix("both", value.tree, value.upper), value.tree)
    return np.where(known != 0, known, _mix("leaf", value.bits))


class Instruction(NamedTuple):
    """A line of PTX, taken apart.

    Attributes:
        does: "jump", "wait", "release", "copy", "show", "execute", or "" if it does nothing here.
        guard: the predicate's register, or "" if every thread executes it.
        negated: whether threads execute it whose predicate is false.
        words: its name, cut at its dots.
        operands: the texts of registers, numbers, places in brackets and lists in braces.
        line: its text.
    """

    does: str
    guard: str
    negated: bool
    words: tuple[str, ...]
    operands: list[str]
    line: str


@lru_cache(maxsize=4)  # the programs of a grid run one after the other
def _taken_apart(ptx: str) -> tuple[list[Instruction], dict[str, int]]:
    """Return the instructions of a kernel, and where its labels are."""
    lines = [line.split("//")[0].strip() for line in ptx[ptx.index(".entry") : ptx.index("// -- End")].splitlines()]
    code, labels = list[Instruction](), dict[str, int]()
    for line in lines:
        if line.startswith(".") or not line.endswith((";", ":")):
            continue
        if line.endswith(":"):
            labels[line[:-1]] = len(code)
            continue
        guard, name, rest = re.match(r"(?:@(!?%p\d+)\s+)?([\w.:]+)\s*(.*);", line).groups()
        operands = re.findall(r"\{[^}]*\}|\[[^]]*\]|[^,\s]+", rest)
        does = "execute"
        if name.startswith(("bra", "ret")):
            does = "jump"
        elif name.startswith("cp.async"):
            does = "copy"
        elif name.startswith("griddepcontrol"):
            does = "wait" if name.endswith("wait") else "release"
        elif name.startswith(("bar", "membar", "fence")):
            does = "show" if name.startswith("bar") and "warp" not in name else ""
        else:
            operands = [text.strip("{} ") if "," not in text else text for text in operands]
            name = name.replace("::cta", "")
        guard = guard or ""
        code.append(Instruction(does, guard.lstrip("!"), guard[:1] == "!", tuple(name.split(".")), operands, line))
    return code, labels


@cache
def _place(text: str) -> tuple[str, int]:
    """Return the base and the offset of an operand in brackets."""
    base, offset = re.match(r"\[\s*(\S+?)\s*(?:\+\s*(-?\d+))?\s*\]", text).groups()
    return base, int(offset or 0)


class _Space:
    """Memory as bytes and as words, and the trees of its 16-bit halves."""

    def __init__(self, memory: NDArray[np.uint8], trees: Lanes | None) -> None:
        self.bytes, self.trees = memory, trees
        self.words = {size: memory.view(f"u{size // 8}") for size in (8, 16, 32, 64)}


class Program:
    """The first program of a launch with integer arguments.

    Args:
        ptx: the kernel.
        memory: the card's memory.
        arguments: the addresses that the kernel is launched with.
        threads: threads of the program.
        traced: whether it also follows how numbers are computed: `trees` has an entry for every 16 bits of memory.
    """

    def __init__(
        self, ptx: str, memory: NDArray[np.uint8], arguments: Sequence[int], threads: int, *, traced: bool = True
    ) -> None:
        self._code, self._labels = _taken_apart(ptx)
        self._arguments, self._lane, self._traced = arguments, np.arange(threads), traced
        self._all = np.ones(threads, np.bool_)
        self.trees = np.zeros(len(memory) // 2, np.uint64) if traced else np.zeros(0, np.uint64)
        shared = np.zeros(1 << 18, np.uint8)
        self._spaces = {
            "global": _Space(memory, self.trees if traced else None),
            "shared": _Space(shared, np.zeros(1 << 17, np.uint64) if traced else None),
        }
        zero = np.zeros(threads, np.uint64)
        self._nothing = Value(zero, zero, zero)
        # Registers, and the numbers that occur as operands.
        self._registers = dict.fromkeys(("global_smem", "%ctaid.x", "%ctaid.y", "%ctaid.z"), self._nothing)
        self._registers["%tid.x"] = self._only(self._lane.astype(np.uint64))
        # Asynchronous copies: those since the last commit, groups on their way, and groups that only a barrier shows.
        self._copies: list[Copy] = []
        self._groups, self._arrived = list[list[Copy]](), list[Copy]()

    def run(self) -> None:
        """Run it to its end.

        Raises:
            ValueError: threads diverge, or an instruction is unknown.
        """
        at = 0
        with np.errstate(all="ignore"):
            while at < len(self._code):
                does, guard, negated, words, operands, line = self._code[at]
                at += 1
                active = (self._registers[guard].bits != 0) ^ negated if guard else self._all
                if does == "execute":
                    self._execute(words, operands, active)
                elif does == "jump":
                    if active.any() != active.all():
                        raise ValueError(f"threads diverge: {line}")
                    if active.all():
                        at = len(self._code) if words[0] == "ret" else self._labels[operands[0]]
                elif does == "copy":
                    self._copy(".".join(words), operands, active)
                elif does == "show":
                    self._show()
                elif does in ("wait", "release"):
                    if not active.all():
                        raise ValueError(f"threads diverge: {line}")
                    self._wait() if does == "wait" else self._release()

    def _only(self, bits: Lanes) -> Value:
        """Return a value that is no float's, or of which only the bits matter."""
        return Value(bits, self._nothing.bits, self._nothing.bits)

    def _wait(self) -> None:
        """Wait for the previous launch, which has ended here."""

    def _release(self) -> None:
        """Let the next launch begin."""

    def _copy(self, name: str, operands: list[str], active: NDArray[np.bool_]) -> None:
        """Copy to shared memory, as late as the program allows.

        Threads see the copy after the first barrier that follows the wait for its group.
        """
        if name == "cp.async.commit_group":
            self._groups.append(self._copies)
            self._copies = []
        elif name == "cp.async.wait_group":
            done = max(0, len(self._groups) - int(operands[0], 0))
            self._arrived += [copy for group in self._groups[:done] for copy in group]
            del self._groups[:done]
        elif name in ("cp.async.cg.shared.global", "cp.async.ca.shared.global"):
            to, source = (self._address(text)[active] for text in operands[:2])
            size = int(operands[2], 0)
            held = self._value(operands[3]).bits[active] if len(operands) > 3 else np.full(len(to), size, np.uint64)
            space = self._spaces["global"]
            inside = np.arange(size) < held[:, None]
            at = np.where(inside, source[:, None] + np.arange(size), 0)
            trees = None
            if space.trees is not None:
                halves = np.where(inside[:, ::2], source[:, None] // 2 + np.arange(size // 2), 0)
                trees = np.where(inside[:, ::2], space.trees[halves], 0)
            self._copies.append((to, np.where(inside, space.bytes[at], 0), trees))
        else:
            raise ValueError(f"{name} is an unknown instruction")

    def _show(self) -> None:
        """Make the copies that have arrived visible to all threads."""
        space = self._spaces["shared"]
        for to, data, of in self._arrived:
            space.bytes[to[:, None] + np.arange(data.shape[1])] = data
            if of is not None:
                space.trees[to[:, None] // 2 + np.arange(of.shape[1])] = of
        self._arrived = []

    def _address(self, place: str) -> NDArray[np.int64]:
        """Return each thread's address that an operand in brackets names."""
        base, offset = _place(place)
        return self._value(base).bits.astype(np.int64) + offset

    def _value(self, text: str) -> Value:
        if (known := self._registers.get(text)) is not None:
            return known
        if text[0] == "{":
            low, high = (self._value(part.strip()) for part in text[1:-1].split(","))
            bits = low.bits | high.bits << np.uint64(16 if "%rs" in text else 32)
            if not self._traced:
                return self._only(bits)
            any_float = (low.tree | high.tree) != 0
            trees = (np.where(any_float, _tree(part), 0).astype(np.uint64) for part in (low, high))
            return Value(bits, *trees)
        if text[0] in "%g":
            return self._nothing  # halves of a pair that nothing reads are never written
        number = int(text[2:], 16) if text[:2] == "0f" else int(text.rstrip("U"), 0)
        value = self._only(np.full(len(self._lane), number & (1 << 64) - 1, np.uint64))
        self._registers[text] = value
        return value

    def _set(self, text: str, value: Value, active: NDArray[np.bool_]) -> None:
        if text[0] == "{":
            size = np.uint64(16 if "%rs" in text else 32)
            halves = value.bits & np.uint64((1 << int(size)) - 1), value.bits >> size
            if self._traced:
                whole = (value.tree != 0) & (value.upper <= _REST)
                named = zip(("low", "high"), value[1:], strict=True)
                trees = [np.where(whole, _mix(name, value.tree), tree) for name, tree in named]
            else:
                trees = [self._nothing.bits] * 2
            for part, bits, tree in zip(text[1:-1].split(","), halves, trees, strict=True):
                self._set(part.strip(), Value(bits, tree, self._nothing.bits), active)
        elif active is self._all or active.all():
            self._registers[text] = value
        else:
            before = self._registers.get(text, self._nothing)
            if self._traced:
                self._registers[text] = Value(*(np.where(active, *both) for both in zip(value, before, strict=True)))
            else:
                self._registers[text] = self._only(np.where(active, value.bits, before.bits))

    def _execute(self, words: tuple[str, ...], operands: list[str], active: NDArray[np.bool_]) -> None:
        name, size, lane = words[0], _size(words[-1]), self._lane
        if name == "ld" and "param" in words:
            number = int(re.search(r"_param_(\d+)", operands[1])[1])
            self._set(operands[0], self._value(str([*self._arguments, 0, 0, 0][number])), active)
        elif name in ("ld", "st", "ldmatrix", "atom"):
            space, place = self._spaces["shared" if "shared" in words else "global"], operands[name != "st"]
            address = self._address(place)
            if active is not self._all:
                address = np.where(active, address, 0)
            if space is self._spaces["shared"]:  # such addresses have 32 bits
                address &= 0xFFFFFFFF
            for number, part in enumerate(operands[name == "st"].strip("{} ").split(",")):
                where = address + number * size // 8
                if name == "ldmatrix":  # threads 8 n to 8 n + 7 hold the rows of matrix n
                    where, size = address[lane - lane % 32 + lane % 32 // 4 + 8 * number] + 4 * (lane % 4), 32
                if name == "st":
                    self._store(space, where[active], size, [of[active] for of in self._value(part.strip())])
                else:
                    self._set(part.strip(), self._load(space, where, size), active)
        elif name == "mma":
            self._multiply(words, [self._values(text) for text in operands[1:]], operands[0])
        elif name == "shfl":
            other = (
                lane ^ int(operands[2])
                if "bfly" in words
                else lane - lane % 32 + self._value(operands[2]).bits.astype(int)
            )
            self._set(operands[0].split("|")[0], Value(*(part[other] for part in self._value(operands[1]))), active)
        elif self._traced:
            self._set(operands[0], _compute(words, [self._value(text) for text in operands[1:]], size), active)
        else:
            bits = _operation(words, size)(*(self._value(text).bits for text in operands[1:]))
            self._set(operands[0], self._only(bits), active)

    def _values(self, text: str) -> list[Value]:
        """Return the registers of a list in braces."""
        return [self._value(part.strip()) for part in text.strip("{} ").split(",")]

    def _multiply(self, words: tuple[str, ...], operands: list[list[Value]], to: str) -> None:
        """Compute to = a b + c, mma.m16n8k16 of 16-bit floats, for every warp.

        The fragments are those of PTX's ISA. Here the sum over k is exact, and then rounded once; hardware rounds more
        often, in an order that is not documented.
        """
        kind, warps, name = words[-2], len(self._lane) // 32, ".".join(words)
        if words[1:3] != ("sync", "aligned") or "m16n8k16" not in words or words[-4] != "f32" or words[-1] != "f32":
            raise ValueError(f"{name} is not known here")
        g, t = self._lane // 4 % 8, self._lane % 4
        a, b, c = operands
        warp = self._lane // 32
        bits = [np.zeros((warps, *shape), np.uint64) for shape in ((16, 16), (16, 8), (16, 8))]
        trees = [part.copy() for part in bits] if self._traced else []

        def place(number: int, at: tuple[Any, ...], bit: Lanes, tree: Lanes) -> None:
            bits[number][at] = bit
            if trees:
                trees[number][at] = tree

        halves = _halves if self._traced else _halves_of_bits
        for number, register in enumerate(a):
            for half, both in enumerate(halves(register)):
                place(0, (warp, g + 8 * (number % 2), 2 * t + half + 8 * (number // 2)), *both)
        for number, register in enumerate(b):
            for half, both in enumerate(halves(register)):
                place(1, (warp, 2 * t + half + 8 * number, g), *both)
        for number, register in enumerate(c):
            tree = _tree(register) if trees else register.tree
            place(2, (warp, g + 8 * (number // 2), 2 * t + number % 2), register.bits, tree)
        left, right, added = (_numbers(of, part, size) for of, part, size in zip(
            (kind, kind, "f32"), bits, (16, 16, 32), strict=True))  # fmt: skip
        result = _bits("f32", left @ right + added)
        if trees:
            tree = trees[2]
            for k in range(16):
                tree = _mix(name, tree, trees[0][:, :, k, None] + 0 * tree, trees[1][:, None, k, :] + 0 * tree)
        for number, part in enumerate(to.strip("{} ").split(",")):
            at = warp, g + 8 * (number // 2), 2 * t + number % 2
            of = Value(result[at], tree[at], self._nothing.bits) if trees else self._only(result[at])
            self._set(part.strip(), of, self._all)

    def _load(self, space: _Space, at: NDArray[np.int64], size: int) -> Value:
        if (at % (size // 8)).any():
            raise ValueError(f"a load of {size} bits at an address that is no multiple of its size")
        bits = space.words[size][at // (size // 8)].astype(np.uint64)
        if space.trees is None:
            return self._only(bits)
        return Value(bits, space.trees[at // 2], 0 * bits if size < 32 else space.trees[at // 2 + size // 32])

    def _store(self, space: _Space, at: NDArray[np.int64], size: int, value: Any) -> None:
        bits, tree, upper = value
        if (at % (size // 8)).any():
            raise ValueError(f"a store of {size} bits at an address that is no multiple of its size")
        space.words[size][at // (size // 8)] = bits.astype(f"u{size // 8}")
        if space.trees is None:
            return
        rest = [np.where(part != 0, _REST, 0) for part in (tree, upper)]
        halves = (tree, rest[0], upper, rest[1]) if size == 64 else (tree, np.where(upper == 0, rest[0], upper))
        for half in range(size // 16):
            space.trees[at // 2 + half] = halves[half]


@cache
def _size(kind: str) -> int:
    """Return the bits of a type's values."""
    return _SIZES.get(kind.lstrip("bsuf"), 32)


_COMPARED = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater}
_COMPARED |= {"ge": np.greater_equal, "num": lambda a, b: (a == a) & (b == b), "nan": lambda a, b: (a != a) | (b != b)}
_RESULT: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "fma": lambda a, b, c: a * b + c, "neg": np.negative,
    "mad": lambda a, b, c: a * b + c, "abs": np.abs, "ex2": np.exp2, "rcp": np.reciprocal, "div": np.divide,
    "lg2": np.log2, "tanh": np.tanh, "min": np.fmin, "max": np.fmax, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor, "not": np.invert, "bfe": lambda a, at, length: _field(a >> at, int(length[0])),
    "shl": lambda a, by: np.where(by > 63, 0, a << np.minimum(by, 63)),
    "shr": lambda a, by: a >> np.minimum(by, 63).astype(a.dtype),
    "lop3": lambda a, b, c, table: _by_table(a, b, c, int(table[0])),
    "prmt": lambda a, b, by: sum(((a | b << np.uint64(32)) >> (8 * (by >> np.uint64(4 * n) & np.uint64(7)))
                                  & np.uint64(255)) << np.uint64(8 * n) for n in range(4)),
}  # fmt: skip


def _by_table(a: Lanes, b: Lanes, c: Lanes, table: int) -> Lanes:
    """Apply a table of eight bits (PTX's lop3) to three bits each."""
    result = np.zeros_like(a)
    for number in range(8):
        if table >> number & 1:
            some = [part if number >> at & 1 else ~part for part, at in ((a, 2), (b, 1), (c, 0))]
            result |= some[0] & some[1] & some[2]
    return result


def _field(values: Any, length: int) -> Any:
    """Return the last ``length`` bits, with a sign if values are signed."""
    last = values & ((1 << length) - 1)
    return last - ((last >> (length - 1)) << length) if values.dtype == np.int64 else last


@cache
def _operation(words: tuple[str, ...], size: int) -> Callable[..., Lanes]:
    """Return what computes a result's bits from those of the operands."""
    name, kind, known = words[0], words[-1], np.uint64
    if name != "cvt" and words[-2:] in (("f32", "bf16"), ("f32", "f16")):  # factors, or the first term, are widened
        widened, wide = _operation(("cvt", *words[-2:]), 32), _operation((*words[:-2], "f32"), 32)

        def mixed(*bits: Lanes) -> Lanes:
            factors = max(1, len(bits) - 1)
            return wide(*map(widened, bits[:factors]), *bits[factors:])

        return mixed
    if kind in ("f32x2", "bf16x2", "f16x2"):  # two floats in one register are computed like single ones
        bits_each = 32 if kind == "f32x2" else 16
        one, by, mask = _operation((*words[:-1], kind[:-2]), bits_each), known(bits_each), known((1 << bits_each) - 1)
        return lambda *bits: one(*(part & mask for part in bits)) | one(*(part >> by & mask for part in bits)) << by
    if name in ("mov", "cvta"):
        return lambda bits: bits
    if name == "selp":
        return lambda one, other, chosen: np.where(chosen != 0, one, other)
    if name == "cvt" and words[-2] in ("bf16x2", "f16x2"):
        one = _operation((*words[:-2], words[-2][:-2], kind), size)
        return lambda upper, lower: one(lower) | one(upper) << known(16)
    if name == "cvt" and (words[-2] in ("bf16", "f16", "f32") or "f" in kind):
        return lambda bits: _bits(words[-2], _numbers(kind, bits, size))
    if name == "setp":
        comparison = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.get(words[1], words[1])
        compared = _COMPARED[comparison if comparison in _COMPARED else comparison[:2]]
        return lambda *bits: compared(*(_numbers(kind, part, size) for part in bits[:2])).astype(known)
    if name not in (*_RESULT, "cvt"):
        raise ValueError(f"{'.'.join(words)} is an unknown instruction")
    result = _RESULT.get(name, lambda numbers: numbers)
    if kind in ("f32", "bf16", "f16"):
        return lambda *bits: _bits(kind, result(*(_numbers(kind, part, size) for part in bits)))
    to = _SIZES.get(words[-2][1:], size) if name == "cvt" else 2 * size if "wide" in words else size
    mask = known((1 << to) - 1)
    if "hi" in words:  # of a product of integers
        if name != "mul" or size > 32:
            raise ValueError(f"{'.'.join(words)} is an unknown instruction")
        return lambda *bits: (result(*(_numbers(kind, part, size) for part in bits)) >> size).astype(known) & mask
    return lambda *bits: np.asarray(result(*(_numbers(kind, part, size) for part in bits))).astype(known) & mask


def _compute(words: tuple[str, ...], values: list[Value], size: int) -> Value:
    """Return the result of an instruction, and how it was computed."""
    if words[0] != "cvt" and words[-2:] in (("f32", "bf16"), ("f32", "f16")):
        factors = max(1, len(values) - 1)
        wide = [_compute(("cvt", *words[-2:]), [value], 32) for value in values[:factors]]
        return _compute((*words[:-2], "f32"), [*wide, *values[factors:]], 32)
    if words[-1] == "f32x2":
        low, high = (_compute((*words[:-1], "f32"), [_half(value, n) for value in values], 32) for n in range(2))
        return Value(low.bits | high.bits << np.uint64(32), low.tree, high.tree)
    if words[-1] in ("bf16x2", "f16x2"):
        parts = [[Value(*_halves(value)[n], 0 * value.bits) for value in values] for n in range(2)]
        low, high = (_compute((*words[:-1], words[-1][:-2]), part, 16) for part in parts)
        return Value(low.bits | high.bits << np.uint64(16), low.tree, high.tree)
    name, kind, bits, none = words[0], words[-1], [value.bits for value in values], 0 * values[0].bits
    rounding, words = words, tuple(word for word in words if word != "rn" or name not in ("add", "sub", "mul"))
    if name in ("mov", "cvta"):
        return values[0]
    if name == "selp":
        return Value(*(np.where(bits[2] != 0, *both) for both in zip(*values[:2], strict=True)))
    if words == ("shl", "b64") and (bits[1] == 32).all():  # half of a pair, to which the other half is added
        return Value(bits[0] << np.uint64(32), none, values[0].tree)
    if words == ("or", "b64") and not (values[0].upper | values[1].tree).any() and values[1].upper.any():
        return Value(bits[0] | bits[1], values[0].tree, values[1].upper)
    if name == "cvt" and words[-2] in ("bf16x2", "f16x2"):
        upper, lower = (_compute((*words[:-2], words[-2][:-2], kind), [value], size) for value in values)
        return Value(lower.bits | upper.bits << np.uint64(16), lower.tree, upper.tree)
    result = _operation(words, size)(*bits)
    if name == "setp":
        return Value(result, none, none)
    any_float, trees = np.logical_or.reduce([value.tree != 0 for value in values]), [_tree(value) for value in values]
    if name in ("add", "mul", "fma", "mad", "min", "max", "and", "or", "xor"):
        trees[:2] = np.minimum(*trees[:2]), np.maximum(*trees[:2])
    tree = _mix(".".join(words), *trees)
    if kind == "f32" and name in ("fma", "mul"):
        product = np.multiply(*(_numbers(kind, part, size) for part in bits[:2]))
        exact = (product == product.astype(np.float32)) | (product != product)
        if exact.all() and words[:2] == ("fma", "rn"):
            product = _mix("mul.f32", *trees[:2])  # not rounded: a sum like any other
            tree = _mix("add.f32", np.minimum(product, trees[2]), np.maximum(product, trees[2]))
        elif name == "mul" and "rn" not in rounding:
            tree |= np.where(exact, 0, _ROUNDED).astype(np.uint64)
    elif kind == "f32" and name in ("add", "sub") and "rn" not in rounding:
        for value, other in (values, values[::-1]):
            if (value.tree[other.bits << np.uint64(33) != 0] & _ROUNDED).any():  # adding 0 changes nothing
                raise ValueError(f"ptxas may choose whether a product is rounded before its {name}")
    if name == "cvt" and (words[-2] in ("bf16", "f16", "f32") or "f" in kind):
        exact = kind in ("bf16", "f16") or "f" not in kind  # an integer needs no tree
        return Value(result, np.where(any_float | (not exact), tree, 0).astype(np.uint64), none)
    if kind in ("f32", "bf16", "f16"):
        return Value(result, tree, none)
    return Value(result, np.where(any_float, values[0].tree if name == "cvt" else tree, 0), none)


def _halves_of_bits(register: Value) -> list[tuple[Lanes, Lanes]]:
    """Return the bits of both 16-bit floats in a register of 32 bits, without trees."""
    return [(register.bits >> np.uint64(16 * number) & np.uint64(0xFFFF), register.tree) for number in range(2)]


def _halves(register: Value) -> list[tuple[Lanes, Lanes]]:
    """Return the bits and trees of both 16-bit floats in a register of 32 bits."""
    whole = (register.tree != 0) & (register.upper <= _REST)
    found = []
    for number, name in enumerate(("low", "high")):
        bits = register.bits >> np.uint64(16 * number) & np.uint64(0xFFFF)
        tree = np.where(whole, _mix(name, register.tree), register[1 + number])
        found.append((bits, np.where(tree != 0, tree, _mix("leaf", bits))))
    return found


def _half(pair: Value, number: int) -> Value:
    """Return one of the two floats in a register of 64 bits."""
    whole = (pair.tree != 0) & (pair.upper <= _REST)
    tree = np.where(whole, _mix(("low", "high")[number], pair.tree), pair[1 + number])
    return Value(pair.bits >> np.uint64(32 * number) & np.uint64((1 << 32) - 1), tree, 0 * pair.bits)


def _numbers(kind: str, bits: Lanes, size: int) -> Any:
    if kind in ("f32", "bf16"):
        whole = bits << np.uint64(16) if kind == "bf16" else bits
        return whole.astype(np.uint32).view(np.float32).astype(np.float64)
    if kind == "f16":
        return bits.astype(np.uint16).view(np.float16).astype(np.float64)
    cut = bits & np.uint64((1 << size) - 1)
    return cut.astype(np.int64) << (64 - size) >> (64 - size) if kind[0] == "s" else cut


def _bits(kind: str, numbers: Any) -> Lanes:
    if kind == "f16":
        return numbers.astype(np.float16).view(np.uint16).astype(np.uint64)
    bits = numbers.astype(np.float32).view(np.uint32).astype(np.uint64)
    if kind == "bf16":
        bits = (bits + np.uint64(0x7FFF) + (bits >> np.uint64(16) & np.uint64(1))) >> np.uint64(16)
    return bits


def digests(variant: Variant, ptx: Callable[[Variant], str]) -> str:
    """Return hashes of two tokens' outputs: four times 8 hex digits.

    Each token is computed alone and together with the other, with and without fetching. On tensor cores an absent token
    is a column of zeros. Its numbers share a register with the other token's, so their tree differs from that of two
    tokens; there, tokens computed alone and together are compared by their bits.

    Raises:
        ValueError: ptxas may still choose which products to round.
    """
    found = []
    for fetch in (True, False):
        code = ptx(replace(variant, constants=variant.constants | {"FETCH": fetch}))
        if left := _left_to_ptxas(code):
            raise ValueError(f"{variant.key} lets ptxas choose whether a product is rounded: {left[0]}")
        try:
            first, second, both = (_outputs(variant, code, *span) for span in ((0, 1), (1, 2), (0, 2)))
        except ValueError as error:
            raise ValueError(f"{variant.key}: {error}") from error
        alone = np.stack((first[:, 0], second[:, 1]), axis=1)
        if variant.kernel.startswith("mma") and (alone[1] == both[1]).all():
            both = alone
        found += [f"{zlib.crc32(trees.tobytes()):08x}" for trees in (alone[0], both[0])]
    return " ".join(found)


def _left_to_ptxas(ptx: str) -> list[str]:
    """Return PTX sums of a rounded product that name no rounding themselves.

    ptxas may fuse such a pair of instructions. Products with powers of two are exact and do not count. Paths that are
    not run are read, too; packed pairs are not.
    """
    products, found = set[str](), []
    for line in re.finditer(r"(mul|add|sub)\.f32\s+(%\w+), (\S+), (\S+);", ptx):
        name, to, *of = line.groups()
        if name == "mul" and not any(text[:2] == "0f" and int(text[2:], 16) << 9 & 0xFFFFFFFF == 0 for text in of):
            products.add(to)
        elif name != "mul" and products & {*of}:
            found.append(line[0])
    return found


def _outputs(variant: Variant, ptx: str, first: int, last: int) -> Lanes:
    """Return the hashes and bits of the first program's outputs at two positions.

    Only the positions from `first` to `last` are computed.

    Returns:
        [2, 2, 64].
    """
    constants, memory, sections = variant.constants, _random_bytes().copy(), np.arange(1, 4) << 24
    names = [name for name in variant.code.arg_names if name in variant.types]
    place, top_k = {name: (number + 1) << 20 for number, name in enumerate(names)}, constants.get("TOP_K", 1)
    given = {
        "addresses": sections, "destinations": sections + (1 << 23), "residual": sections + (1 << 22),
        "residual_destinations": sections + (3 << 22), "bits": [1 << constants["PRECISIONS"].bit_length() - 1] * 3,
        "items": [0, first, last], "rows": [0, 1], "pairs": [0, top_k], "computed": np.arange(2 * top_k) % top_k == 0,
        "semaphores": [constants["SPLIT"] - 1] * 4096, "weights": np.linspace(0.1, 0.9, 2 * top_k),
    }  # fmt: skip
    for name in given.keys() & place.keys():
        values = np.asarray(given[name]).astype({"*i64": "i8", "*i32": "i4", "*fp32": "f4"}[variant.types[name]])
        memory[place[name] : place[name] + values.nbytes] = values.view(np.uint8)
    program = Program(ptx, memory, list(place.values()), 32 * constants["WARPS"])
    program.run()
    each = constants["ROWS"] * (1 if "rows" in place or constants["WEIGHTED"] else top_k)
    out = place["hidden" if "rows" in place else "out"] // 2
    at = out + each * np.arange(2)[:, None] + np.arange(64)
    if not program.trees[at][first:last].all():
        raise ValueError("no floats are stored")
    return np.stack((program.trees[at], memory.view(np.uint16)[at]))


@cache
def _random_bytes() -> NDArray[np.uint8]:
    """Return random bytes that no format reads as a very large number."""
    return np.random.default_rng(0).integers(0, 256, 1 << 26, dtype=np.uint8) & np.array(
        [0x6F, 0xBF] * (1 << 25), np.uint8
    )
