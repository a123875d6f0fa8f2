"""Experts on CUDA, computed straight from packed bytes at any address, at any mix of bits in one launch.

Importing this package imports triton; ``make_kernel`` does so for a CUDA device only.
"""

from vllm_dymoe.kernels.triton.kernel import TritonKernel
from vllm_dymoe.kernels.triton.launch import (
    DOWN,
    GATE,
    UP,
    Scratch,
    Weighting,
    decode_down,
    decode_gate_up,
    grouped_gate_up,
    grouped_linear,
)
from vllm_dymoe.kernels.triton.schedule import schedule
from vllm_dymoe.kernels.triton.table import ExpertShape, ExpertTable, WorkList
from vllm_dymoe.kernels.triton.tiles import DecodeTile, GroupedTile, Tiles, choose_tiles

__all__ = [
    "DOWN",
    "GATE",
    "UP",
    "DecodeTile",
    "ExpertShape",
    "ExpertTable",
    "GroupedTile",
    "Scratch",
    "Tiles",
    "TritonKernel",
    "Weighting",
    "WorkList",
    "choose_tiles",
    "decode_down",
    "decode_gate_up",
    "grouped_gate_up",
    "grouped_linear",
    "schedule",
]
