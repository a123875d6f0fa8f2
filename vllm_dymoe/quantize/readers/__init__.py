"""Readers of checkpoints that other tools have quantized."""

from vllm_dymoe.quantize.readers.base import PLAIN_READER, Reader
from vllm_dymoe.quantize.readers.configurations import METHODS, make_reader

__all__ = ["METHODS", "PLAIN_READER", "Reader", "make_reader"]
