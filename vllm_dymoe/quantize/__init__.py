"""Quantizers: each turns a matrix of real weights into codes, scales and zeros."""

from vllm_dymoe.quantize.base import Codes, Quantizer, quantize_matrix
from vllm_dymoe.quantize.hqq import HalfQuadratic
from vllm_dymoe.quantize.rtn import RoundToNearest

_QUANTIZERS = {quantizer.name: quantizer for quantizer in (RoundToNearest, HalfQuadratic)}

QUANTIZERS = tuple(_QUANTIZERS)
"""Names that :func:`make_quantizer` knows."""

__all__ = ["QUANTIZERS", "Codes", "Quantizer", "make_quantizer", "quantize_matrix"]


def make_quantizer(name: str) -> Quantizer:
    """The quantizer of a name.

    Raises:
        ValueError: no quantizer has that name.
    """
    if name not in _QUANTIZERS:
        raise ValueError(f"there is no quantizer named {name!r}; choose one of {', '.join(QUANTIZERS)}.")
    return _QUANTIZERS[name]()
