"""Quantizers, and the packing of a checkpoint's experts into a store."""

from vllm_dymoe.quantize.quantizers import QUANTIZERS, quantize_matrix

__all__ = ["QUANTIZERS", "quantize_matrix"]
