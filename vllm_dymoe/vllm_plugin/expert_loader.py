"""Passes experts from vLLM's weight loaders to the store.

For each tensor it finds out which expert, which projection, and which slice of it this is.

vLLM's models hand over experts in several ways, which all end here:

- one projection of one expert, [rows, columns], through ``param.weight_loader``: most models;
- one projection of all local experts, [experts, rows, columns], the same way: Llama 4;
- gate and up of one expert, transposed and interleaved, the same way: GPT-OSS (vLLM 0.32);
- gate and up, or down, of all local experts, already sliced: GPT-OSS, at 16 bits through ``param.copy_``, quantized
  through ``param.weight_loader`` without an expert id; ranks have whole groups of 32 inputs of the down projection, the
  last rank has the remainder, padded with zeros (``GptOssModel._load_weights_mxfp4``);
- one projection of all experts, [experts * intermediate, hidden], without an expert id: DBRX.

A quantized matrix is read once all of its tensors have come.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.models.utils import extract_layer_index
from vllm.model_executor.utils import set_weight_attrs

from vllm_dymoe.experts.format import Projection
from vllm_dymoe.options import ConfigError
from vllm_dymoe.quantize.held import Held
from vllm_dymoe.quantize.readers import PLAIN_READER, Reader
from vllm_dymoe.quantize.tensor_names import Stacking
from vllm_dymoe.vllm_plugin.model_store import ModelStore

_PROJECTIONS = {"w1": Projection.GATE, "w3": Projection.UP, "w2": Projection.DOWN}
_DBRX = {"w1": Projection.GATE, "v1": Projection.UP, "w2": Projection.DOWN}
_WITHOUT_GATE = {"w1": Projection.UP, "w2": Projection.DOWN}
_STACKED_KINDS = ("weight", "weight_scale")


class ExpertLoader:
    """Takes the experts of one layer from vLLM's loaders, in any order.

    Writes this rank's part to a store.
    """

    __name__ = "load_expert"  # vLLM expects a function, which has a name

    def __init__(
        self,
        layer: Any,
        place: tuple[ModelStore, int],  # destination: a model's store, and the layer's position in it
        hidden: int,
        intermediate: int,
        reader: Reader = PLAIN_READER,
        all_experts: int | None = None,  # number of all experts, if any of them may become this rank's (EPLB)
    ) -> None:
        parallel = layer.moe_config.moe_parallel_config
        self._layer, self._readers, self._balanced = layer, reader, all_experts is not None
        self._number = extract_layer_index(layer.layer_name) if reader.mixed else 0
        self._store, self._place = place
        self._here: Callable[[int], int] = layer._map_global_expert_id_to_local_expert_id
        if all_experts is not None:  # vLLM numbers copies after the last expert
            self._here = lambda number: number if number < all_experts else -1
        self._name: str = layer.layer_name
        self._rank, self._ranks = parallel.tp_rank, parallel.tp_size
        self._stacked, self._held = reader.ranks_take_groups, reader.held
        self._projections = _PROJECTIONS if layer.moe_config.activation.is_gated else _WITHOUT_GATE
        self._hidden, self._intermediate = hidden, intermediate
        self._waiting: dict[tuple[int, Projection], dict[str, Tensor]] = {}

    def register(self, layer: Any, dtype: torch.dtype, *, bias: bool) -> None:
        kinds = ["weight", *(_STACKED_KINDS if self._stacked else self._readers.known_parts)]
        for kind in dict.fromkeys(kinds + ["bias"] * bias):
            for name in (f"w13_{kind}", f"w2_{kind}"):
                placeholder = _Placeholder(torch.empty(0, dtype=dtype), requires_grad=False)
                set_weight_attrs(placeholder, {"weight_loader": self, "stack_name": name})
                layer.register_parameter(name, placeholder)

    def __call__(
        self,
        param: Parameter,
        loaded_weight: Tensor,
        weight_name: str,
        shard_id: str | None,
        expert_id: int | None = None,
        return_success: bool = False,
    ) -> bool | None:
        stack: str = param.stack_name  # type: ignore[attr-defined]
        taken = True
        if expert_id is None:
            self._take_layer(stack, loaded_weight, weight_name)
        else:
            taken = self._take_expert(stack, loaded_weight, weight_name, shard_id, expert_id)
        return taken if return_success else None

    def _take_layer(self, stack: str, tensor: Tensor, name: str) -> None:
        """Take a stack without an expert id: gpt-oss's quantized stacks, or DBRX's."""
        if self._stacked:
            self.take_stack(stack, tensor)
        elif self._held or self._readers.mixed:
            raise _error(f"{name} holds quantized experts of DBRX, which are not supported yet.")
        else:
            # [experts * intermediate, hidden]; down is transposed
            name = name.rpartition(".")[2]
            for number, matrix in enumerate(tensor.view(self._layer.moe_config.num_experts, -1, tensor.shape[-1])):
                if (expert := self._here(number)) != -1:
                    self._take_weight(expert, _DBRX[name], matrix.t() if name == "w2" else matrix)

    def _take_expert(self, stack: str, tensor: Tensor, name: str, shard: str | None, number: int) -> bool:
        """Take an expert's tensor; return False if the expert is another rank's."""
        kind = "bias" if name.endswith("bias") else stack.partition("_")[2]
        if self._stacked:
            raise _error(
                f"{name} of {self._name} is one expert's, but a {self._readers.method} checkpoint holds all experts of "
                "a layer in one tensor; use a checkpoint of that form."
            )
        projection = self._projections.get(str(shard))
        reader = self._readers if projection is None else self._reader(projection)
        if tensor.dim() == 3 and kind != "bias":
            if reader.held:
                raise _error(
                    f"{name} of {self._name} holds quantized experts of a whole layer, which is not supported for this "
                    "model yet; use one with tensors for each expert, as compressed-tensors has."
                )
            _check_parts(self._name, self._balanced)
            for expert, weight in enumerate(tensor):
                self._take_weight(expert, self._projections[str(shard)], weight)
            return True
        expert = self._here(number)
        if expert == -1:
            return False
        if reader.held and kind != "bias":
            self._take_part(number, expert, self._projections[str(shard)], kind, tensor)
            return True
        known = kind == "bias" or name.endswith("weight")
        if not known or tensor.dim() != (1 if kind == "bias" else 2):
            raise _error(
                f"cannot take the checkpoint's tensor {name} with shape {list(tensor.shape)}; expected the 16-bit "
                "weight or bias of one expert's projection."
            )
        take = self._take_bias if kind == "bias" else self._take_weight
        if shard in self._projections:
            take(expert, self._projections[shard], tensor)
        else:  # "gpt_oss_w13" and "gpt_oss_w2"
            rows = tensor if kind == "bias" else tensor.t()
            for projection, part in self._split(str(shard).removeprefix("gpt_oss_"), rows):
                take(expert, projection, part)
        return True

    def take_stack(self, name: str, stack: Tensor) -> None:
        """Take a parameter of all local experts, already sliced for this rank.

        Args:
            name: of the parameter, such as w13_weight.
            stack: [experts, rows, ...].
        """
        _check_parts(self._name, self._balanced)
        stem, _, kind = name.partition("_")
        for expert, rows in enumerate(stack):
            for projection, part in self._split(stem, rows):
                if kind == "bias":
                    missing = self._shape(projection)[0] - len(part)
                    self._store.put(self._place, expert, projection, F.pad(part, (0, missing)), bias=True)
                elif not self._held:
                    self._store.put(self._place, expert, projection, part)
                else:
                    named = self._readers.parts[_STACKED_KINDS.index(kind)]
                    self._take_part(expert, expert, projection, named, part)

    def check_complete(self) -> None:
        """Raise ConfigError for a quantized matrix with a missing tensor."""
        for (expert, projection), parts in sorted(self._waiting.items()):
            missing = " and ".join(part for part in self._reader(projection).parts if part not in parts)
            raise _error(f"{self._describe(expert, projection)} lacks {missing} in the checkpoint; download it again.")

    def _take_part(self, number: int, expert: int, projection: Projection, kind: str, tensor: Tensor) -> None:
        reader = self._reader(projection)
        if kind in reader.checks:
            try:
                reader.checks[kind](kind, tensor.cpu(), *self._shape(projection, self._ranks))
            except ValueError as error:
                raise self._unreadable(number, projection, error) from error
        elif kind not in reader.parts:
            why = "it has 16 bits, although the checkpoint is quantized; this mix is not supported."
            raise self._unreadable(number, projection, why)
        else:
            parts = self._waiting.setdefault((expert, projection), {})
            parts[kind] = tensor.cpu()
            if len(parts) == len(reader.parts):
                del self._waiting[expert, projection]
                self._store.put(
                    self._place, expert, projection, partial(self._read, number, projection, parts), parts=parts
                )

    def _read(self, number: int, projection: Projection, parts: dict[str, Tensor]) -> Held:
        reader = self._reader(projection)
        try:
            if self._stacked:
                codes = parts[reader.parts[0]]
                held = reader.read(parts, codes.shape[0], codes[0].numel() * 8 // reader.bits)
                return held.filled(*self._shape(projection))
            held = reader.read(parts, *self._shape(projection, self._ranks))
        except ValueError as error:
            raise self._unreadable(number, projection, error) from error
        return held.part(*self._share(projection, self._intermediate * self._ranks))

    def _take_weight(self, expert: int, projection: Projection, weight: Tensor) -> None:
        dimension, which = self._share(projection, weight.shape[projection is Projection.DOWN])
        self._store.put(self._place, expert, projection, weight[which] if dimension == 0 else weight[:, which])

    def _take_bias(self, expert: int, projection: Projection, bias: Tensor) -> None:
        if projection is not Projection.DOWN:
            bias = bias[self._share(projection, bias.shape[0])[1]]
        elif self._rank > 0:
            bias = torch.zeros_like(bias)  # the ranks' results are added up, so only one of them adds the bias
        self._store.put(self._place, expert, projection, bias, bias=True)

    def _share(self, projection: Projection, size: int) -> tuple[int, slice]:
        """Return this rank's range of a dimension under tensor parallelism.

        Returns:
            the dimension and the range: rows of gate and up, columns of down.
        """
        width = size // self._ranks
        return int(projection is Projection.DOWN), slice(self._rank * width, (self._rank + 1) * width)

    def _reader(self, projection: Projection) -> Reader:
        return self._readers.at(self._number, projection)

    def _shape(self, projection: Projection, ranks: int = 1) -> tuple[int, int]:
        """Return [rows, columns] on ``ranks`` ranks together."""
        sizes = self._intermediate * ranks, self._hidden
        return sizes[::-1] if projection is Projection.DOWN else sizes

    def _split(self, stem: str, rows: Tensor) -> Iterable[tuple[Projection, Tensor]]:
        """Return the projections of one expert's w13 or w2.

        Rows are the first dimension.
        """
        projections = (Projection.DOWN,) if stem == "w2" else (Projection.GATE, Projection.UP)
        interleaved = self._layer.moe_config.activation is MoEActivation.SWIGLUOAI
        return zip(projections, Stacking(interleaved=interleaved).split(rows, projections), strict=True)

    def _unreadable(self, number: int, projection: Projection, why: object) -> ConfigError:
        what = self._describe(number, projection)
        method = self._reader(projection).method
        return _error(f"{what} cannot be read from the {method} checkpoint: {why}")

    def _describe(self, number: int, projection: Projection) -> str:
        return f"the {projection.name.lower()} projection of expert {number} in {self._name}"


def _check_parts(name: str, balanced: bool) -> None:
    """Check that a stack has the experts of vLLM's placement on one rank."""
    if balanced:
        raise _error(
            f"--enable-eplb needs all experts on every machine, but vLLM loads only one rank's part of {name}; leave "
            "it out."
        )


def _error(sentence: str) -> ConfigError:
    return ConfigError(f"vllm-dymoe: {sentence}")


class _Placeholder(Parameter):
    """An empty parameter that stands for a layer's experts."""

    weight_loader: ExpertLoader
    stack_name: str

    def copy_(self, source: Tensor, non_blocking: bool = False) -> "_Placeholder":
        """Take what GPT-OSS's loader copies instead of calling weight_loader."""
        self.weight_loader.take_stack(self.stack_name, source)
        return self
