"""Readers of checkpoints that other tools have quantized."""

from vllm_dymoe.quantize.readers.base import PLAIN_READER, Reader
from vllm_dymoe.quantize.readers.configurations import (
    EXPERT_DTYPE,
    METHODS,
    describe_modelopt,
    make_reader,
    with_expert_dtype,
)

__all__ = ["EXPERT_DTYPE", "METHODS", "PLAIN_READER", "Reader", "describe_modelopt", "make_reader", "with_expert_dtype"]
