"""Triton kernels that compute experts on a CUDA device from packed bytes.

Precisions can be mixed in any way. Importing this package imports triton; ``make_kernel`` imports it for a CUDA device
only.
"""

from vllm_dymoe.kernels.triton.kernel import TritonKernel
from vllm_dymoe.kernels.triton.launch import (
    Codes,
    ExpertShape,
    ExpertTable,
    Scratch,
    Weighting,
    WorkList,
    decode_down,
    decode_gate_up,
    grouped_down,
    grouped_gate_up,
)
from vllm_dymoe.kernels.triton.tiles import DecodeTile, GroupedTile, Tiles, choose_tiles
