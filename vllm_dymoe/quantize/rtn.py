"""Round to nearest: each group's codes spread evenly between its smallest and its largest weight."""

from torch import Tensor

from vllm_dymoe.quantize.base import Codes, group_ranges, nearest_codes, quantize_groups
from vllm_dymoe.residency.matrix import MatrixFormat


class RoundToNearest:
    """Asymmetric, group-wise; no weight is further from its code than half a scale and the rounding of the zero."""

    name = "rtn"

    def quantize(self, weight: Tensor, format: MatrixFormat) -> Codes:

        def quantize(groups: Tensor, _: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
            scales, zeros = group_ranges(groups, format)
            return nearest_codes(groups, scales, zeros, format), scales, zeros

        return quantize_groups(weight, format, quantize)
