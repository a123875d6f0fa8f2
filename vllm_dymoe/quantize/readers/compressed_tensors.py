"""compressed-tensors checkpoints, format "pack-quantized": neighbouring inputs in a word, weights not transposed.

``weight_packed`` int32 [rows, columns * bits / 32, rounded up], ``weight_scale`` [rows, groups], where they are
asymmetric ``weight_zero_point`` int32 [rows * bits / 32, rounded up, groups], and ``weight_shape`` int64 [2]. Signed
numbers are stored plus half their range, codes and zero points alike (compressed_tensors/compressors/pack_quantized).
With actorder "group" ``weight_g_idx`` int32 [columns] says the group of each column.
"""

import functools
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vllm_dymoe.quantize.prequantized import PrequantizedMatrix
from vllm_dymoe.quantize.readers import base
from vllm_dymoe.quantize.tensors import CheckpointError
from vllm_dymoe.residency.code import FP8, MXFP4, NVFP4

_FORMAT = "pack-quantized"
FLOAT_FORMATS = {
    "nvfp4-pack-quantized": NVFP4,
    "mxfp4-pack-quantized": MXFP4,
    "float-quantized": FP8,
    "naive-quantized": FP8,
    "mxfp8-quantized": FP8,
}
"""Formats that :mod:`vllm_dymoe.quantize.readers.compressed_floats` reads."""

_ACT_ORDERS = ("group", "dynamic")  # two names of the same


class CompressedTensorsReader(base.Reader):
    """Of a ``quantization_config`` of config.json.

    Raises:
        CheckpointError: a format or a parameter that is not read.
    """

    method = "compressed-tensors"

    def __init__(self, config: Mapping[str, Any]) -> None:
        group, fmt = group_of_experts(config)
        if fmt != _FORMAT:
            raise unreadable(f"the format {fmt}", " or ".join(f'"{name}"' for name in (_FORMAT, *FLOAT_FORMATS)))
        if group.get("input_activations"):
            raise unreadable("quantized activations", "16-bit activations")
        weights = group.get("weights") or {}
        self.bits = base.choose_bits(self.method, weights.get("num_bits"), (8, 4, 2))
        strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "channel")
        if weights.get("type", "int") != "int" or strategy not in ("group", "channel"):
            raise unreadable(f'{weights.get("type")} weights by "{strategy}"', 'integers by "group" or "channel"')
        self.group_size = base.choose_group_size(
            self.method, weights.get("group_size") if strategy == "group" else None
        )
        self.asymmetric = not weights.get("symmetric", True)
        self.act_order = weights.get("actorder") in _ACT_ORDERS and self.group_size is not None
        self.parts = (
            "weight_packed",
            "weight_scale",
            *(("weight_zero_point",) if self.asymmetric else ()),
            *(("weight_g_idx",) if self.act_order else ()),
        )
        self.checked = ("weight_shape",) if self.act_order else ("weight_shape", "weight_g_idx")

    def read(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> PrequantizedMatrix:
        """See :class:`Reader <vllm_dymoe.quantize.readers.base.Reader>`."""
        each = base.WORD_BITS // self.bits
        groups = base.count_groups(columns, self.group_size)
        base.check_part("weight_packed", parts["weight_packed"], (torch.int32,), rows, -(-columns // each))
        base.check_part("weight_scale", parts["weight_scale"], base.SCALE_DTYPES, rows, groups)
        codes = base.unpack_words(parts["weight_packed"], self.bits)[:, :columns]
        zero_points = torch.full((rows, groups), 2 ** (self.bits - 1), dtype=torch.uint8)
        if self.asymmetric:
            words = parts["weight_zero_point"]
            base.check_part("weight_zero_point", words, (torch.int32,), -(-rows // each), groups)
            zero_points = base.unpack_words(words.t(), self.bits).t()[:rows]
        column_groups = base.neighbours(columns, self.group_size)
        if self.act_order:
            part = "weight_g_idx"
            column_groups = base.scattered(part, parts[part], (torch.int32, torch.int64), columns, groups)
        return PrequantizedMatrix(self.bits, codes, parts["weight_scale"], zero_points, column_groups)

    def check(self, part: str, tensor: Tensor, rows: int, columns: int) -> None:
        """weight_shape has to be the shape, and a weight_g_idx without actorder to change nothing."""
        if part == "weight_shape":
            if tensor.tolist() != [rows, columns]:
                raise ValueError(f"{part} is {tensor.tolist()}, expected {[rows, columns]}.")
        elif not torch.equal(tensor.long(), base.neighbours(columns, self.group_size)):
            raise ValueError(f"{part} says that its columns were reordered, although config.json has no such actorder.")


def group_of_experts(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """The way in which experts are quantized, and its format; other layers may be quantized otherwise.

    Args:
        config: ``quantization_config`` of config.json.

    Raises:
        CheckpointError: there are several, or none.
    """
    groups = list((config.get("config_groups") or {}).values())
    named = [group for group in groups if any(map(_names_experts, group.get("targets") or ()))]
    groups = named or [group for group in groups if "Linear" in (group.get("targets") or ())] or groups
    formats = {str(group.get("format") or config.get("format")) for group in groups}
    if len(formats) != 1:
        found = f"the format {' and '.join(sorted(formats)) or 'that it does not name'}"
        raise unreadable(found, "one for all experts")
    sparsity = (config.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise unreadable(f"the sparse format {sparsity}", "dense ones")
    if any(group.get("weights") != groups[0].get("weights") for group in groups):
        raise unreadable("several kinds of weights for experts", "one kind for all of them")
    return groups[0], formats.pop()


def _names_experts(target: str) -> bool:
    """Whether a target, the name of modules or "re:" and an expression, means experts of some layer."""
    if not target.startswith("re:"):
        return ".experts." in target
    try:
        return any(re.match(target[len("re:") :], name) for name in _names_of_experts())
    except re.error:
        return False


@functools.cache
def _names_of_experts() -> tuple[str, ...]:
    """An expert's projections as models name them, in layers of every number that a target could have."""
    return tuple(
        f"{model}layers.{layer}.{block}.experts.0.{projection}"
        for layer in range(128)
        for model in ("model.", "model.language_model.")
        for block in ("mlp", "block_sparse_moe", "feed_forward", "mixer", "ffn")
        for projection in ("gate_proj", "w1")
    )


def unreadable(found: str, readable: str) -> CheckpointError:
    """What is said of a variant that no reader has."""
    return CheckpointError(
        f"the checkpoint is quantized with compressed-tensors, {found}, and only {readable} can be read; use such a "
        "one, or serve it without --quantization dymoe."
    )
