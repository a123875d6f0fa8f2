"""A faster Triton interpreter: the same statements on the same values."""

import dataclasses
import inspect
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_UNCHANGED = SimpleNamespace(restore=lambda: None)


def quicken() -> None:
    """Speed up all kernels that this process interprets.

    Triton's functions are replaced by NumPy's once instead of at each call of a function in a kernel (5 ms). Types are
    made once. Sums and products are not computed a second time in 64 bits to assert that they do not overflow.
    """
    interpreter._patch_lang = _Once(interpreter._patch_lang)
    interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
    _make_block_types_once()
    tl.tensor.__init__ = _kept_shapes(tl.tensor.__init__)
    TritonSemantic.broadcast_impl_value = _unless_alike(TritonSemantic.broadcast_impl_value)
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


def _unless_alike(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    def broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> Any:
        return (lhs, rhs) if lhs.type is rhs.type else broadcast(self, lhs, rhs)

    return broadcast_impl_value
