"""Device functions that are written once, for Triton and for Gluon kernels.

Gluon is the layer below Triton's language: a kernel names the layout of each tensor over registers, lanes and warps.
Copies, offsets, activations and weighted sums need no layout of their own. :func:`in_gluon` compiles those from the
same source, with Triton's names replaced by Gluon's.
"""

import types
from typing import Any

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
"""Wait for all threads of the program; Triton renamed it after 3.6."""


@gluon.jit
def _arange(start: gl.constexpr, end: gl.constexpr):
    """Return numbers in a layout whose threads have four neighbours each.

    Each thread then loads 16 bytes of words at once.
    """
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    return gl.arange(start, end, layout)


@gluon.jit
def _zeros(shape: gl.constexpr, dtype: gl.constexpr):
    """Return zeros in the layout of :func:`_arange`."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    return gl.full(shape, 0, dtype, layout)


_NAMES = types.ModuleType("triton_names_in_gluon")
"""What `tl` stands for in a function that is compiled for Gluon."""
for _language in (tl, gl):
    _NAMES.__dict__.update({name: value for name, value in vars(_language).items() if name[:2] != "__"})
_NAMES.__dict__.update(arange=_arange, zeros=_zeros, debug_barrier=barrier)

_CONVERTED: dict[Any, Any] = {}


def in_gluon(function: Any) -> Any:
    """Return a function of Triton's language as a Gluon function.

    What it calls is converted as well. The function may make tensors of one dimension only (`arange`, `zeros`); others
    come from its arguments.
    """
    if function not in _CONVERTED:
        plain = function.fn
        names = dict(plain.__globals__)
        copied = types.FunctionType(plain.__code__, names, plain.__name__, plain.__defaults__, plain.__closure__)
        copied.__annotations__, copied.__module__ = plain.__annotations__, plain.__module__
        copied.__qualname__, copied.__doc__, copied.__kwdefaults__ = plain.__qualname__, plain.__doc__, None
        _CONVERTED[function] = gluon.jit(copied)
        for name in plain.__code__.co_names:
            value = names.get(name)
            if value is tl:
                names[name] = _NAMES
            elif type(value) is type(function):
                names[name] = in_gluon(value)
    return _CONVERTED[function]
