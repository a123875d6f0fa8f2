"""A faster Triton interpreter: the same statements on the same values."""

import dataclasses
import inspect
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

_UNCHANGED = SimpleNamespace(restore=lambda: None)


def quicken() -> None:
    """Speed up all kernels that this process interprets.

    Triton's functions are replaced by NumPy's once instead of at each call of a function in a kernel (5 ms). Types are
    made once, and rules for types are applied once to each pair of types. Sums and products are not computed a second
    time in 64 bits to assert that they do not overflow.
    """
    interpreter._patch_lang = _Once(interpreter._patch_lang)
    interpreter._patch_attr = _patch_attr
    interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
    interpreter.TensorHandle.__post_init__ = lambda handle: None  # would compare the sizes of two types
    _make_block_types_once()
    tl.core._unwrap_if_constexpr = _unless_plain(tl.core._unwrap_if_constexpr)
    tl.tuple.__eq__ = _of_integers(tl.tuple.__eq__)
    tl.tensor.__init__ = _kept_shapes(tl.tensor.__init__)
    rules = interpreter.interpreter_semantic
    rules.computation_type_impl = _by_types(rules.computation_type_impl)
    rules.binary_op_type_checking_impl = _unless_of_one_type(rules.binary_op_type_checking_impl)
    rules.broadcast_impl_value = _unless_alike(rules.broadcast_impl_value)
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


class _Once:
    def __init__(self, patch: Callable[[Any], Any]) -> None:
        self._patch = patch
        self._known: dict[int, dict[str, Any]] = {}  # functions' globals, by their id
        self._patched: list[ModuleType] = []

    def __call__(self, fn: Any) -> Any:
        if id(fn.__globals__) in self._known:
            return _UNCHANGED
        modules = [value for value in fn.__globals__.values() if inspect.ismodule(value) and value in (tl, tl.core)]
        if not modules or any(module not in self._patched for module in modules):
            self._patch(fn)
            self._patched += modules
        self._known[id(fn.__globals__)] = fn.__globals__
        return _UNCHANGED


def _patch_attr(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """Let a function of Triton's language always use the interpreter."""
    inner = getattr(member, "__wrapped__", member)

    def patched(*args: Any, _semantic: Any = None, **named: Any) -> Any:
        return inner(*args, _semantic=interpreter.interpreter_semantic, **named)

    scope.set_attr(owner, name, patched)


def _by_name(find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    known: dict[str, Any] = {}

    def found(dtype: Any) -> Any:
        if dtype.name not in known:
            known[dtype.name] = find(dtype)
        return known[dtype.name]

    return found


def _make_block_types_once() -> None:
    made: dict[Any, Any] = {}
    begin = tl.block_type.__init__

    def new(cls: Any, element_ty: Any, shape: Any) -> Any:
        key = element_ty.name, *(size.value if isinstance(size, tl.constexpr) else size for size in shape)
        if key not in made:
            made[key] = object.__new__(cls)
        return made[key]

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        if not hasattr(self, "name"):
            begin(self, element_ty, shape)

    tl.block_type.__new__, tl.block_type.__init__ = new, init


def _kept_shapes(begin: Callable[..., None]) -> Callable[..., None]:
    def init(self: Any, handle: Any, type: Any) -> None:
        kept = type.__dict__.get("kept")
        if kept is None:
            begin(self, handle, type)
            type.kept = self.shape, self.numel
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = kept

    return init


def _unless_plain(unwrap: Callable[[Any], Any]) -> Callable[[Any], Any]:
    plain = {tl.tensor, int, float, bool, tl.dtype, tl.block_type, tl.pointer_type}
    return lambda value: value if value.__class__ in plain else unwrap(value)


def _of_integers(equal: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def eq(self: Any, other: Any) -> Any:
        if other is self:
            return tl.constexpr(True)
        values = other.values if other.__class__ is tl.tuple else other
        if values.__class__ is list and all(value.__class__ is int for value in values):
            return tl.constexpr(self.values == values)
        return equal(self, other)

    return eq


def _by_types(rule: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[Any, Any] = {}

    def of_types(a: Any, a_is_scalar: bool, b: Any, b_is_scalar: bool, div_or_mod: bool) -> Any:
        key = a.name, a_is_scalar, b.name, b_is_scalar, div_or_mod
        if key not in known:
            known[key] = rule(a, a_is_scalar, b, b_is_scalar, div_or_mod)
        return known[key]

    return of_types


_STAYING = {*tl.dtype.SINT_TYPES, *tl.dtype.UINT_TYPES, "fp32", "fp64"}
"""Types whose values are computed in their own type, in divisions as well."""


def _unless_of_one_type(check: Callable[..., Any]) -> Callable[..., Any]:
    def checked(lhs: Any, rhs: Any, *args: Any, **named: Any) -> Any:
        if lhs.__class__ is rhs.__class__ is tl.tensor and lhs.type is rhs.type and lhs.dtype.name in _STAYING:
            return lhs, rhs
        return check(lhs, rhs, *args, **named)

    return checked


def _unless_alike(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    def broadcasted(lhs: Any, rhs: Any) -> Any:
        one, other = lhs.type, rhs.type
        if one is other or (one.is_block() and other.is_block() and one.shape.values == other.shape.values):
            return lhs, rhs
        return broadcast(lhs, rhs)

    return broadcasted
