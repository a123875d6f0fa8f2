"""CPU kernels for a checkpoint's quantized dense layers.

They are offered to vLLM's choice of kernels. vLLM's own kernels need AMX for FP8, and its AVX-512 build for AWQ and
GPTQ; on machines with AMX they come first. Codes and scales are used unchanged, activations keep their 16 bits, and a
token's result does not depend on other tokens.
"""

from typing import Any

import torch
import vllm.model_executor.kernels.linear as registry
from vllm.config import get_current_vllm_config
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearKernel
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import FP8ScaledMMLinearKernel
from vllm.platforms import PlatformEnum
from vllm.scalar_type import scalar_types

from vllm_dymoe.experts.encoding import FP8
from vllm_dymoe.experts.matrix import GROUP_SIZES, MatrixFormat
from vllm_dymoe.kernels import native
from vllm_dymoe.quantize.held import Held, blocks, check_floats, integers
from vllm_dymoe.quantize.readers.integers import unpack_words
from vllm_dymoe.vllm_plugin.dense import map_packed, multiply

_BITS = {scalar_types.uint4: 4, scalar_types.uint4b8: 4, scalar_types.uint8: 8, scalar_types.uint8b128: 8}
_REGISTERS = {
    "_POSSIBLE_KERNELS": "IntegerKernel",
    "_POSSIBLE_FP8_BLOCK_KERNELS": "Fp8BlockKernel",
    "_POSSIBLE_FP8_KERNELS": "Fp8Kernel",
    "_POSSIBLE_WFP8A16_KERNELS": "Fp8Kernel",
}


def register_kernels() -> None:
    """Register the kernels with vLLM in this process, once.

    Nothing is done without the native library.
    """
    if native.load() is None:
        return
    for name, kernel in _REGISTERS.items():
        known = getattr(registry, name, {}).setdefault(PlatformEnum.CPU, [])
        if globals()[kernel] not in known:
            known.insert(len(known) if torch.cpu._is_amx_tile_supported() else 0, globals()[kernel])


def _asked_for() -> bool:
    """Return whether the model under construction is served with this plugin.

    Other models keep vLLM's kernels.
    """
    model = get_current_vllm_config().model_config  # the quantization config's own name is the checkpoint's
    return model is not None and model.quantization == "dymoe"


def _group_size(columns: int, shared: int) -> int | None:
    """Return the largest group size whose groups divide the checkpoint's.

    None if there is none.

    Args:
        columns: of the matrix.
        shared: how many adjacent columns share a scale in the checkpoint.
    """
    fitting = [size for size in GROUP_SIZES if shared >= columns or shared % size == 0]
    return max(fitting, default=None)


def _take(layer: Any, held: Held, dtype: torch.dtype, shared: int, *names: str, zeros: bool = False) -> None:
    """Pack a layer and free its parameters.

    Those of kv_b_proj stay, because MLA reads them itself.
    """
    rows, columns = held.shape
    size = _group_size(columns, shared)
    assert size is not None, "can_implement refuses it"
    fmt = MatrixFormat(rows, columns, held.encoding, size, dtype, integer_zeros=zeros)
    held.pack(fmt, map_packed(layer, fmt))
    if getattr(layer, "prefix", "").endswith("kv_b_proj"):
        return
    for name in names:
        parameter = getattr(layer, name)
        parameter.data = parameter.data.new_empty(0)


class IntegerKernel(MPLinearKernel):
    """Kernel for AWQ, GPTQ and compressed-tensors at 8 or 4 bits.

    Columns are in their original order.
    """

    @classmethod
    def get_min_capability(cls) -> int:
        return -1

    @classmethod
    def can_implement(cls, c: Any) -> tuple[bool, str | None]:
        if not _asked_for():
            return False, "the model is not served with dymoe"
        if c.weight_type not in _BITS:
            return False, f"{c.weight_type} does not have 8 or 4 bits"
        columns = c.partition_weight_shape[0]
        if _group_size(columns, columns if c.group_size == -1 else c.group_size) is None:
            return False, f"groups of {c.group_size} are not a multiple of {GROUP_SIZES[0]}"
        return not getattr(c, "has_g_idx", False), "columns are reordered"

    def process_weights_after_loading(self, layer: Any) -> None:
        """Pack w_q, whose words hold adjacent inputs.

        It is [columns / n, rows] or transposed, according to its dimensions.
        """
        columns, rows = self.config.partition_weight_shape
        words, scales, zeros = self._get_weight_params(layer)
        bits = _BITS[self.config.weight_type]
        codes = unpack_words(words.data if words.input_dim == 1 else words.data.t(), bits)[:, :columns]
        by_row = scales.data if scales.output_dim == 0 else scales.data.t()
        points = torch.full_like(by_row, 1 << (bits - 1), dtype=torch.uint8)
        names = [self.w_q_name, self.w_s_name, *([] if zeros is None else [self.w_zp_name])]
        if self.config.zero_points:
            assert zeros is not None
            points = unpack_words(zeros.data.t() if zeros.output_dim == 0 else zeros.data, bits)[:, :rows].t()
        shared = -(-columns // by_row.shape[1])
        held = integers(bits, codes, by_row, points, blocks(columns, shared))
        _take(layer, held, self.config.act_type, shared, *names, zeros=self.config.zero_points)

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return multiply(layer, x, bias)


class _Fp8:
    """Common part of vLLM's two families of FP8 kernels."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    @classmethod
    def can_implement(cls, config: Any) -> tuple[bool, str | None]:
        fits = config.out_dtype in (torch.bfloat16, torch.float16)
        return fits and _asked_for(), "neither bfloat16 nor float16, or the model is not served with dymoe"

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None, **_: Any) -> torch.Tensor:
        return multiply(layer, x, bias)

    def _read(self, layer: Any, names: tuple[str, str], weight: torch.Tensor, block: tuple[int, int]) -> None:
        """Pack a weight [rows, columns] with one scale per block."""
        scales = getattr(layer, names[1]).data
        if scales.dtype is torch.uint8:
            scales = scales.view(torch.float8_e8m0fnu)
        (rows, columns), (high, wide) = weight.shape, block
        scales = scales.float().reshape(-(-rows // high), -(-columns // wide))
        codes = weight.contiguous().view(torch.uint8)
        held = check_floats(Held(FP8, codes, scales, blocks(rows, high), blocks(columns, wide)))
        _take(layer, held, self.config.out_dtype, wide, *names)  # type: ignore[attr-defined]


class Fp8BlockKernel(_Fp8, Fp8BlockScaledMMLinearKernel):
    """E4m3 with one scale per block."""

    apply_input_quant = False

    @classmethod
    def can_implement(cls, config: Any) -> tuple[bool, str | None]:
        shared = config.weight_quant_key.scale.group_shape.col
        if _group_size(config.weight_shape[1], shared) is None:
            return False, f"blocks of {shared} columns are not a multiple of {GROUP_SIZES[0]}"
        return super().can_implement(config)

    def process_weights_after_loading(self, layer: Any) -> None:
        params, shape = self._get_layer_params(layer), self.weight_group_shape
        names = params.WEIGHT, params.WEIGHT_SCALE if params.weight_scale_inv is None else params.WEIGHT_SCALE_INV
        self._read(layer, names, params.weight.data, (shape.row, shape.col))

    def apply_block_scaled_mm(self, *arguments: Any, **named: Any) -> torch.Tensor:
        raise NotImplementedError("apply_weights does not call it")


class Fp8Kernel(_Fp8, FP8ScaledMMLinearKernel):
    """E4m3 with one scale per row, or one for all rows."""

    def process_weights_after_loading(self, layer: Any) -> None:
        names = tuple(self.layer_param_names[:2])
        weight = getattr(layer, names[0]).data
        rows, columns = self.config.weight_shape
        weight = weight.t() if tuple(weight.shape) != (rows, columns) or weight.stride(0) == 1 else weight
        each = rows if getattr(layer, names[1]).numel() == 1 else 1
        self._read(layer, (names[0], names[1]), weight, (each, columns))

    def apply_scaled_mm(self, **named: Any) -> torch.Tensor:
        raise NotImplementedError("apply_weights does not call it")
