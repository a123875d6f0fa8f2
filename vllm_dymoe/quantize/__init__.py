"""Quantizers, and the packing of a checkpoint's experts into a store."""

from vllm_dymoe.quantize.quantizers import QUANTIZERS, quantize_matrix

PACKING_VERSION = 0
"""Raise it when a reader or a quantizer packs other bytes from equal weights: starts then pack them again."""

__all__ = ["PACKING_VERSION", "QUANTIZERS", "quantize_matrix"]
