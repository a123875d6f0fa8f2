"""Quantizers, and the way of a checkpoint's experts into a store."""

from vllm_dymoe.quantize.quantizers import QUANTIZERS, make_quantizer, quantize_matrix

__all__ = ["QUANTIZERS", "make_quantizer", "quantize_matrix"]
