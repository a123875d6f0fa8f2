"""From vLLM's loader of gpt-oss to the store: quantized tensors of all experts of a layer.

It hands over all local experts of a rank at once, cut already (``GptOssModel._load_weights_mxfp4``): codes as
``weight``, exponents as ``weight_scale``, biases as ``bias``. Ranks have whole groups of 32 inputs of the down
projection, the last one what is left; zeros fill it up.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from vllm_dymoe.config import ConfigError
from vllm_dymoe.quantize.held import HeldFloats
from vllm_dymoe.quantize.readers import Reader
from vllm_dymoe.residency.format import Projection
from vllm_dymoe.vllm_adapter.expert_loader import ExpertLoader, PutBias, PutWeight

_WEIGHT, _SCALE = "weight", "weight_scale"


class QuantizedStackLoader(ExpertLoader):
    """Takes the quantized experts of one layer, in whatever order their tensors come.

    Args:
        layer: the RoutedExperts.
        put_weight: receives every projection's codes.
        put_bias: receives every projection's bias.
        reader: of the checkpoint, whose parts are codes and scales.
        wanted: says whether anybody still needs codes.
        hidden: model width.
        intermediate: width of an expert on this rank.
    """

    kinds = (_WEIGHT, _SCALE)

    def __init__(
        self,
        layer: Any,
        put_weight: PutWeight,
        put_bias: PutBias,
        reader: Reader,
        wanted: Callable[[], bool],
        hidden: int,
        intermediate: int,
    ) -> None:
        super().__init__(layer, put_weight, put_bias)
        self._name, self._reader, self._wanted = layer.layer_name, reader, wanted
        self._sizes = {
            Projection.GATE: (intermediate, hidden),
            Projection.UP: (intermediate, hidden),
            Projection.DOWN: (hidden, intermediate),
        }
        self._waiting: dict[str, dict[str, Tensor]] = {}

    def __call__(
        self,
        param: Parameter,
        loaded_weight: Tensor,
        weight_name: str,
        shard_id: str | None,
        expert_id: int | None = None,
        return_success: bool = False,
    ) -> bool | None:
        """Take one tensor of all local experts.

        Raises:
            ConfigError: it is not what the checkpoint's configuration says.
        """
        name: str = param.stack_name  # type: ignore[attr-defined]
        if expert_id is not None:
            raise ConfigError(
                f"vllm-dymoe: {weight_name} of {self._name} is one expert's, and a {self._reader.method} checkpoint "
                "holds all experts of a layer in one tensor; use a checkpoint of that form."
            )
        self.take_stack(name, loaded_weight)
        return True if return_success else None

    def take_stack(self, name: str, stack: Tensor) -> None:
        """Take a parameter of all local experts, cut for this rank already.

        Args:
            name: the parameter.
            stack: [experts, rows, ...].

        Raises:
            ConfigError: it is not what the checkpoint's configuration says.
        """
        stem, _, kind = name.partition("_")
        if kind == "bias":
            for expert, rows in enumerate(stack):
                for projection, part in self._split(stem, rows.shape[0]):
                    bias = rows[part]
                    self._put_bias(expert, projection, F.pad(bias, (0, self._sizes[projection][0] - len(bias))))
            return
        parts = self._waiting.setdefault(stem, {})
        parts[kind] = stack.cpu()
        if len(parts) == 2:
            del self._waiting[stem]
            if self._wanted():
                self._take_matrices(stem, parts[_WEIGHT], parts[_SCALE])

    def check_complete(self) -> None:
        """Refuse what has come in part only.

        Raises:
            ConfigError: a tensor is missing.
        """
        for stem, parts in self._waiting.items():
            missing = _SCALE if _WEIGHT in parts else _WEIGHT
            raise ConfigError(f"vllm-dymoe: {self._name} lacks {stem}_{missing}; download the checkpoint again.")

    def _take_matrices(self, stem: str, codes: Tensor, scales: Tensor) -> None:
        for expert, both in enumerate(zip(codes, scales, strict=True)):
            for projection, rows in self._split(stem, codes.shape[1]):
                parts = dict(zip(self._reader.parts, (each[rows] for each in both), strict=True))
                where = f"{stem} of expert {expert} in {self._name}"
                self._put_weight(expert, projection, partial(self._read, where, projection, parts))

    def _read(self, where: str, projection: Projection, parts: dict[str, Tensor]) -> HeldFloats:
        """One matrix, filled up to this rank's sizes.

        Raises:
            ConfigError: it is not what the checkpoint's configuration says.
        """
        codes = parts[self._reader.parts[0]]
        try:
            matrix = self._reader.read(parts, codes.shape[0], codes[0].numel() * 8 // self._reader.bits)
        except ValueError as error:
            raise ConfigError(
                f"vllm-dymoe: {where} cannot be read from the {self._reader.method} checkpoint: {error}"
            ) from error
        assert isinstance(matrix, HeldFloats)
        return matrix.filled(*self._sizes[projection])

    def _split(self, stem: str, rows: int) -> tuple[tuple[Projection, slice], ...]:
        """Rows of one expert's w13 or w2 by projection; of w13 gate and up take turns."""
        if stem == "w2":
            return ((Projection.DOWN, slice(0, rows)),)
        return (Projection.GATE, slice(0, rows, 2)), (Projection.UP, slice(1, rows, 2))
