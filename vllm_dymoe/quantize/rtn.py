"""Round to nearest: each group's codes spread evenly between its smallest and its largest weight."""

import torch
from torch import Tensor

from vllm_dymoe.kernels import MatrixFormat
from vllm_dymoe.quantize.base import Codes, group_ranges, grouped, nearest_codes


class RoundToNearest:
    """Asymmetric, group-wise; no weight is further from its code than half a scale and the rounding of the zero."""

    name = "rtn"

    def quantize(self, weight: Tensor, format: MatrixFormat) -> Codes:
        """See :class:`vllm_dymoe.quantize.base.Quantizer`."""
        groups = grouped(weight, format)
        scales, zeros = group_ranges(groups, format)
        codes = nearest_codes(groups, scales, zeros, format).to(torch.uint8)
        return Codes(codes.view(format.rows, -1)[:, : format.columns], scales, zeros)
