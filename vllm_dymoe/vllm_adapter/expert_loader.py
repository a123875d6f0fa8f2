"""From vLLM's weight loaders to the store: which expert, which projection, which slice of it.

vLLM's models hand 16-bit experts over in five ways, and all of them end here:

- one projection of one expert, [rows, columns], through ``param.weight_loader``: most models; vLLM itself cuts stacks
  of all experts into such pieces;
- one projection of all local experts, [experts, rows, columns], the same way: Llama 4;
- gate and up of one expert as GPT-OSS's checkpoints have them, transposed and interleaved, the same way (vLLM 0.32);
- gate and up, or down, of all local experts, sliced already, through ``param.copy_``: GPT-OSS;
- one projection of all experts, [experts * intermediate, hidden], without an expert's number: DBRX.

Only views are taken of what vLLM hands over, so nothing bigger than one projection is ever copied. Of experts that are
quantized in the checkpoint, codes, scales and zero points wait for each other, then go on.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.utils import set_weight_attrs

from vllm_dymoe.config import ConfigError
from vllm_dymoe.quantize.held import Held
from vllm_dymoe.quantize.packer import Given
from vllm_dymoe.quantize.readers import Reader
from vllm_dymoe.residency.format import Projection

PutWeight = Callable[[int, Projection, Given], None]
"""(local expert, projection, weight of this rank)."""

PutBias = Callable[[int, Projection, Tensor], None]
"""(local expert, projection, bias of this rank)."""

_PROJECTIONS = {"w1": Projection.GATE, "w3": Projection.UP, "w2": Projection.DOWN}
_DBRX = {"w1": Projection.GATE, "v1": Projection.UP, "w2": Projection.DOWN}
_WITHOUT_GATE = {"w1": Projection.UP, "w2": Projection.DOWN}
# The dimension of a projection that tensor parallelism slices: rows of gate and up, columns of down.
_SLICED_DIMENSION = {Projection.GATE: 0, Projection.UP: 0, Projection.DOWN: 1}


class ExpertLoader:
    """Takes the experts of one layer from vLLM's loaders.

    Args:
        layer: the RoutedExperts.
        put_weight: receives every projection's weight.
        put_bias: receives every projection's bias.
    """

    kinds: tuple[str, ...] = ("weight",)
    """Ends of the names of the parameters that vLLM's loaders look for."""

    def __init__(self, layer: Any, put_weight: PutWeight, put_bias: PutBias) -> None:
        parallel = layer.moe_config.moe_parallel_config
        self._moe = layer.moe_config
        self._local = layer._map_global_expert_id_to_local_expert_id
        self._rank, self._ranks = parallel.tp_rank, parallel.tp_size
        self._interleaved = layer.moe_config.activation is MoEActivation.SWIGLUOAI
        self._projections = _PROJECTIONS if layer.moe_config.activation.is_gated else _WITHOUT_GATE
        self._put_weight, self._put_bias = put_weight, put_bias

    def register(self, layer: Any, dtype: torch.dtype, *, bias: bool) -> None:
        """Give the layer the parameters that vLLM's loaders look for, without elements."""
        kinds = (*self.kinds, "bias") if bias else self.kinds
        for name in (f"{stem}_{kind}" for kind in kinds for stem in ("w13", "w2")):
            placeholder = _Placeholder(torch.empty(0, dtype=dtype), requires_grad=False)
            set_weight_attrs(placeholder, {"weight_loader": self, "stack_name": name})
            layer.register_parameter(name, placeholder)

    def __call__(
        self,
        param: Parameter,
        loaded_weight: Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int | None = None,
        return_success: bool = False,
    ) -> bool | None:
        """Take what belongs to one shard, as RoutedExperts.weight_loader does.

        Raises:
            ConfigError: it is neither a weight nor a bias.
        """
        if expert_id is None:
            self._take_dbrx(weight_name.rpartition(".")[2], loaded_weight)
            return True if return_success else None
        is_bias = weight_name.endswith("bias")
        if loaded_weight.dim() == 3 and not is_bias:
            for expert, weight in enumerate(loaded_weight):
                self._take(expert, self._projections[shard_id], weight)
            return True if return_success else None
        expert = self._local(expert_id)
        if expert == -1:
            return False if return_success else None
        if loaded_weight.dim() != (1 if is_bias else 2) or not (is_bias or weight_name.endswith("weight")):
            raise ConfigError(
                f"vllm-dymoe: cannot take the checkpoint's tensor {weight_name} with shape "
                f"{list(loaded_weight.shape)}; expected the 16-bit weight or bias of one expert's projection."
            )
        take = self._take_bias if is_bias else self._take
        if shard_id in self._projections:
            take(expert, self._projections[shard_id], loaded_weight)
        else:  # "gpt_oss_w13" and "gpt_oss_w2"
            rows = loaded_weight if is_bias else loaded_weight.t()
            for projection, part in _split(shard_id.removeprefix("gpt_oss_"), rows, interleaved=self._interleaved):
                take(expert, projection, part)
        return True if return_success else None

    def take_stack(self, name: str, stack: Tensor) -> None:
        """Take a parameter of all local experts, sliced for this rank already.

        Args:
            name: the parameter.
            stack: [experts, rows, columns], or [experts, rows] for a bias; what vLLM would copy into its own parameter.
        """
        stem, _, kind = name.partition("_")
        put = self._put_bias if kind == "bias" else self._put_weight
        for expert, rows in enumerate(stack):
            for projection, part in _split(stem, rows, interleaved=self._interleaved):
                put(expert, projection, part)

    def _take_dbrx(self, name: str, stack: Tensor) -> None:
        """Take a projection of all experts, [experts * intermediate, hidden]; down lies transposed."""
        for number, matrix in enumerate(stack.view(self._moe.num_experts, -1, stack.shape[-1])):
            if (expert := self._local(number)) != -1:
                self._take(expert, _DBRX[name], matrix.t() if name == "w2" else matrix)

    def _take(self, expert: int, projection: Projection, weight: Tensor) -> None:
        dimension = _SLICED_DIMENSION[projection]
        self._put_weight(expert, projection, weight.narrow(dimension, *self._share(weight.shape[dimension])))

    def _take_bias(self, expert: int, projection: Projection, bias: Tensor) -> None:
        if projection is not Projection.DOWN:
            bias = bias.narrow(0, *self._share(bias.shape[0]))
        elif self._rank > 0:
            bias = torch.zeros_like(bias)  # the ranks' results are added up: one of them brings the bias
        self._put_bias(expert, projection, bias)

    def _share(self, size: int) -> tuple[int, int]:
        """Where this rank's part of a dimension begins, and how long it is."""
        width = size // self._ranks
        return self._rank * width, width


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
        self.kinds = tuple(dict.fromkeys(("weight", *reader.known_parts)))
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
        expert_id: int | None = None,
        return_success: bool = False,
    ) -> bool | None:
        """Take one tensor of one projection of one expert.

        Raises:
            ConfigError: it is not what the checkpoint's configuration says.
        """
        if expert_id is None:
            raise ConfigError(
                f"vllm-dymoe: {weight_name} holds quantized experts of DBRX, which are not supported yet."
            )
        kind = param.stack_name.partition("_")[2]  # type: ignore[attr-defined]
        if kind == "bias":
            return super().__call__(param, loaded_weight, weight_name, shard_id, expert_id, return_success)
        if loaded_weight.dim() == 3:  # Llama 4's, of which vLLM hands over all experts at once
            raise ConfigError(
                f"vllm-dymoe: {weight_name} of {self._name} holds quantized experts of a whole layer, which is not "
                "supported for this model yet; use one with tensors for each expert, as compressed-tensors has."
            )
        expert, projection = self._local(expert_id), self._projections[shard_id]
        if expert == -1:
            return False if return_success else None
        down = projection is Projection.DOWN
        sizes = (self._hidden, self._intermediate) if down else (self._intermediate, self._hidden)
        try:
            if kind in self._reader.parts:
                self._take_part(expert_id, expert, projection, kind, loaded_weight, sizes)
            elif kind in self._reader.checks:
                self._reader.checks[kind](kind, loaded_weight.cpu(), *sizes)
            else:
                raise ValueError("it has 16 bits, although the checkpoint is quantized; this mix is not supported.")
        except ValueError as error:
            raise self._unreadable(expert_id, projection, error) from error
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

    def _take_part(
        self, number: int, expert: int, projection: Projection, kind: str, part: Tensor, sizes: tuple[int, int]
    ) -> None:
        parts = self._waiting.setdefault((expert, projection), {})
        parts[kind] = part.cpu()
        if len(parts) == len(self._reader.parts):
            del self._waiting[expert, projection]
            if self._wanted():
                self._put_weight(expert, projection, lambda: self._read(number, projection, parts, sizes))

    def _read(self, number: int, projection: Projection, parts: dict[str, Tensor], sizes: tuple[int, int]) -> Held:
        """This rank's part of a matrix.

        Raises:
            ConfigError: it is not what the checkpoint's configuration says.
        """
        try:
            matrix = self._reader.read(parts, *sizes)
        except ValueError as error:
            raise self._unreadable(number, projection, error) from error
        dimension = _SLICED_DIMENSION[projection]
        start, length = self._share(sizes[dimension])
        return matrix.part(dimension, slice(start, start + length))

    def _unreadable(self, number: int, projection: Projection, error: ValueError) -> ConfigError:
        return ConfigError(
            f"vllm-dymoe: the {projection.name.lower()} projection of expert {number} in {self._name} cannot be "
            f"read from the {self._reader.method} checkpoint: {error}"
        )


class _Placeholder(Parameter):
    """An empty parameter in the place of a layer's experts."""

    weight_loader: ExpertLoader
    stack_name: str

    def copy_(self, source: Tensor, non_blocking: bool = False) -> "_Placeholder":
        """What GPT-OSS's loader does instead of calling weight_loader."""
        self.weight_loader.take_stack(self.stack_name, source)
        return self


def _split(stem: str, rows: Tensor, *, interleaved: bool) -> tuple[tuple[Projection, Tensor], ...]:
    """The projections of one expert's w13 or w2, whose first dimension is their rows."""
    if stem == "w2":
        return ((Projection.DOWN, rows),)
    gate, up = (rows[0::2], rows[1::2]) if interleaved else rows.chunk(2)
    return (Projection.GATE, gate), (Projection.UP, up)
