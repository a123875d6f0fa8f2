"""Experts that are quantized in the checkpoint: codes, scales and zero points wait for each other, then go on."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from vllm_dymoe.config import ConfigError
from vllm_dymoe.experts.layout import Projection
from vllm_dymoe.quantize.readers import Reader
from vllm_dymoe.vllm_adapter.expert_loader import PROJECTIONS, ExpertLoader, PutBias, PutWeight


class PrequantizedExpertLoader(ExpertLoader):
    """Takes the quantized experts of one layer from vLLM's loaders, in whatever order their tensors come.

    Args:
        layer: the RoutedExperts.
        put_weight: receives every projection's codes.
        put_bias: receives every projection's bias.
        reader: of the checkpoint.
        wanted: says whether anybody still needs codes; asked before each projection is read.
        hidden: model width.
        intermediate: width of a whole expert, before tensor parallelism cuts it.
    """

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
        self._wanted = wanted
        self.kinds = ("weight", *reader.known_parts)
        self._name = layer.layer_name
        self._reader = reader
        self._hidden, self._intermediate = hidden, intermediate
        self._waiting: dict[tuple[int, Projection], dict[str, Tensor]] = {}

    def __call__(
        self,
        param: Parameter,
        loaded_weight: Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        """Take one tensor of one projection of one expert.

        Raises:
            ConfigError: it is not what the checkpoint's configuration says.
        """
        kind = param.stack_name.partition("_")[2]  # type: ignore[attr-defined]
        if kind == "bias":
            return super().__call__(param, loaded_weight, weight_name, shard_id, expert_id, return_success)
        expert, projection = self._local(expert_id), PROJECTIONS[shard_id]
        if expert == -1:
            return False if return_success else None
        down = projection is Projection.DOWN
        sizes = (self._hidden, self._intermediate) if down else (self._intermediate, self._hidden)
        try:
            if kind in self._reader.parts:
                self._take_part(expert, projection, kind, loaded_weight, sizes)
            elif kind in self._reader.checked:
                self._reader.check(kind, loaded_weight.cpu(), *sizes)
            else:
                raise ValueError("it has 16 bits, although the checkpoint is quantized; this mix is not supported.")
        except ValueError as error:
            raise ConfigError(
                f"vllm-dymoe: the {projection.name.lower()} projection of expert {expert_id} in {self._name} cannot be "
                f"read from the {self._reader.method} checkpoint: {error}"
            ) from error
        return True if return_success else None

    def check_complete(self) -> None:
        """Refuse what has come in part only.

        Raises:
            ConfigError: a tensor is missing.
        """
        for (expert, projection), parts in sorted(self._waiting.items()):
            missing = [part for part in self._reader.parts if part not in parts]
            raise ConfigError(
                f"vllm-dymoe: the {projection.name.lower()} projection of expert {expert} in {self._name} lacks "
                f"{' and '.join(missing)} in the checkpoint; download it again."
            )

    def _take_part(self, expert: int, projection: Projection, kind: str, part: Tensor, sizes: tuple[int, int]) -> None:
        parts = self._waiting.setdefault((expert, projection), {})
        parts[kind] = part.cpu()
        if len(parts) == len(self._reader.parts):
            del self._waiting[expert, projection]
            if self._wanted():
                self._take(expert, projection, self._reader.read(parts, *sizes))
