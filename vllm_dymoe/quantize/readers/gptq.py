"""AutoGPTQ's and GPTQModel's checkpoints: transposed, neighbouring inputs in a word.

``qweight`` int32 [columns * bits / 32, rows], ``qzeros`` int32 [groups, rows * bits / 32], ``scales`` [groups, rows],
and ``g_idx`` int32 [columns], the group of each column. The first version of the format stores zero points less one,
which dequantizing adds and masks again (AutoGPTQ, nn_modules/qlinear/qlinear_cuda_old.py: a stored 15 is 0 at 4 bits;
other code of AutoGPTQ makes 16 of it, which its quantizer never chooses); "gptq_v2" stores them as they are. With
desc_act columns were quantized in the order of their activations, and only ``g_idx`` knows their groups.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vllm_dymoe.quantize.prequantized import PrequantizedMatrix
from vllm_dymoe.quantize.readers import base
from vllm_dymoe.quantize.tensors import CheckpointError

_ZERO_POINT_OFFSETS = {"gptq": 1, "gptq_v2": 0}
_RULES_OF_FORMAT = ("bits", "group_size", "sym", "desc_act")


class GptqReader(base.Reader):
    """Of a ``quantization_config`` of config.json.

    Raises:
        CheckpointError: a version or a parameter that is not read.
    """

    method = "gptq"

    def __init__(self, config: Mapping[str, Any]) -> None:
        version = "marlin" if config.get("is_marlin_format") else str(config.get("checkpoint_format") or "gptq")
        if version not in _ZERO_POINT_OFFSETS:
            raise CheckpointError(
                f'the checkpoint is quantized with gptq, checkpoint_format "{version}", and only '
                f"{' and '.join(_ZERO_POINT_OFFSETS)} can be read; save it in one of them."
            )
        for pattern, rule in (config.get("dynamic") or {}).items():
            if not pattern.startswith("-:") and any(key in rule for key in _RULES_OF_FORMAT):
                raise CheckpointError(
                    f'the checkpoint is quantized with gptq and has another format for the modules "{pattern}" '
                    '("dynamic"), which cannot be read; use one with the same format everywhere.'
                )
        self.bits = base.choose_bits(self.method, config.get("bits"), (8, 4, 2))
        self.group_size = base.choose_group_size(self.method, config.get("group_size"))
        self.asymmetric = not config.get("sym", True)
        self._offset = _ZERO_POINT_OFFSETS[version]
        # With one group for all columns their order has no effect, and static groups are made of base.neighbours.
        anywhere = self.group_size is not None and not config.get("static_groups")
        self.act_order = bool(config.get("desc_act")) and anywhere
        tensors = ("qweight", "qzeros", "scales")
        self.parts = (*tensors, "g_idx") if self.act_order else tensors
        self.checked = () if self.act_order else ("g_idx",)

    def read(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> PrequantizedMatrix:
        """See :class:`Reader <vllm_dymoe.quantize.readers.base.Reader>`."""
        each = base.WORD_BITS // self.bits
        if rows % each or columns % each:
            raise ValueError(f"qweight cannot hold {rows} x {columns} codes, which are no multiples of {each}.")
        groups = base.count_groups(columns, self.group_size)
        base.check_part("qweight", parts["qweight"], (torch.int32,), columns // each, rows)
        base.check_part("qzeros", parts["qzeros"], (torch.int32,), groups, rows // each)
        base.check_part("scales", parts["scales"], base.SCALE_DTYPES, groups, rows)
        codes = base.unpack_words(parts["qweight"].t(), self.bits)
        column_groups = base.neighbours(columns, self.group_size)
        if self.act_order:
            column_groups = base.scattered("g_idx", parts["g_idx"], (torch.int32,), columns, groups)
        zero_points = self._zero_points(parts["qzeros"]).t()
        return PrequantizedMatrix(self.bits, codes, parts["scales"].t(), zero_points, column_groups)

    def check(self, part: str, tensor: Tensor, rows: int, columns: int) -> None:
        """g_idx, without desc_act or with static groups: groups have to be base.neighbours."""
        base.check_part(part, tensor, (torch.int32,), columns)
        if not torch.equal(tensor.long(), base.neighbours(columns, self.group_size)):
            raise ValueError(
                f"{part} says that its columns were reordered, although config.json says desc_act false or "
                "static_groups true."
            )

    def _zero_points(self, words: Tensor) -> Tensor:
        """uint8 [groups, rows]."""
        stored = base.unpack_words(words, self.bits)
        highest, middle = 2**self.bits - 1, 2 ** (self.bits - 1)
        if self.asymmetric:
            return (stored + self._offset) & highest
        # Not all tools agree on the version where it has no effect.
        if not bool(((stored == middle) | (stored == middle - 1)).all()):
            raise ValueError(f"qzeros has zero points other than {middle}, although config.json says sym true.")
        return torch.full_like(stored, middle)
