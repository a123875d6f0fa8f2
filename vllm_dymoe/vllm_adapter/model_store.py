"""From the MoE layers of one model, as vLLM creates and loads them, to the store of their experts."""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm
from vllm.config import VllmConfig
from vllm.model_executor.models.utils import extract_layer_index

from vllm_dymoe.config import ConfigError, Options
from vllm_dymoe.quantize import make_quantizer
from vllm_dymoe.quantize.dummy import random_store
from vllm_dymoe.quantize.packer import ExpertPacker, Given
from vllm_dymoe.quantize.readers import Reader
from vllm_dymoe.quantize.readers.compatibility import format_fields, quantizer_name
from vllm_dymoe.residency.format import Format, ModelExperts, Projection, stored_formats
from vllm_dymoe.store import HostStore, StoreError
from vllm_dymoe.vllm_adapter.report import logger
from vllm_dymoe.vllm_adapter.store import LayerSpec, RankStore


class ModelStore:
    """Collects the MoE layers of one model, and fills or opens their store.

    Layers whose experts are narrower than the widest, or fewer, are stored as wide and as many as those: zeros fill
    them up, which changes no result, and every slot fits every expert.

    Args:
        vllm_config: vLLM's configuration of this engine.
        options: validated options.
        checkpoint: quantization_config of the checkpoint, if it is ours.
        reader: of the checkpoint's experts, if another tool has quantized them.
        host_memory: bytes that all ranks of this machine can get.

    Attributes:
        layers: in the order in which vLLM created them.
        source: where the store is found or made, once the first weight came.
        store: the experts, once the last layer is loaded.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        options: Options,
        checkpoint: Mapping[str, Any] | None,
        reader: Reader | None,
        host_memory: int,
    ) -> None:
        self.layers: list[LayerSpec] = []
        self.source: RankStore | None = None
        self.store: HostStore | None = None
        self._vllm_config, self._options = vllm_config, options
        self._packed = checkpoint is not None
        self._reader = reader
        self._checkpoint = checkpoint or {}
        self._host_memory = host_memory
        self._loaded = 0
        self._packer: ExpertPacker | None = None
        self._progress: tqdm[Any] | None = None

    def add(self, spec: LayerSpec) -> None:
        """Enter one layer.

        Raises:
            ConfigError: its experts are of another kind than those of the layers before it.
        """
        if self.layers and _kind(spec) != _kind(self.layers[0]):
            raise ConfigError(
                f"vllm-dymoe: the experts of {spec.name} are of another kind than those of {self.layers[0].name} "
                "(hidden size, dtype, biases or gates differ), which is not supported yet; serve this model without "
                "--quantization dymoe."
            )
        if self.layers and self._reader is not None and spec.intermediate != self.layers[0].intermediate:
            raise ConfigError(
                f"vllm-dymoe: the quantized experts of {spec.name} are {spec.intermediate} wide and those of "
                f"{self.layers[0].name} {self.layers[0].intermediate}, which is supported for 16-bit checkpoints only; "
                "serve this model without --quantization dymoe."
            )
        self.layers.append(spec)

    @property
    def experts(self) -> ModelExperts:
        """The rank's experts, as the model's configuration describes them."""
        spec = self.layers[0]
        width = max(layer.intermediate for layer in self.layers)
        formats = stored_formats(
            self._options.stored_bits,
            lambda bits: Format(
                spec.hidden, width, group_size=self._options.group_size, dtype=spec.dtype, bias=spec.bias,
                has_gate=spec.activation.has_gate, **format_fields(self._reader, self._checkpoint, bits),
            ),
        )  # fmt: skip
        numbers = layer_numbers([layer.name for layer in self.layers])
        count, top_k = (max(sizes) for sizes in zip(*((s.num_experts, s.top_k) for s in self.layers), strict=True))
        return ModelExperts(numbers, count, top_k, formats)

    def wants_experts(self) -> bool:
        """Whether the checkpoint's experts are needed: not where a complete store exists.

        Raises:
            StoreError: the store cannot be written.
        """
        with self._loading():
            self._prepare()
        return self._packer is not None

    def put(self, layer: int, expert: int, projection: Projection, weight: Given) -> None:
        """Take one projection from the checkpoint; nothing to do where a complete store exists.

        Raises:
            StoreError: the store cannot be written, or the weights cannot be quantized.
        """
        with self._loading():
            self._prepare()
            if self._packer is not None:
                if isinstance(weight, Tensor):
                    weight = self._widened(layer, projection, weight)
                self._packer.put(layer, expert, projection, weight)

    def put_bias(self, layer: int, expert: int, projection: Projection, bias: Tensor) -> None:
        """Take one projection's bias; otherwise as ``put``.

        Raises:
            StoreError: the store cannot be written, or the bias not be stored.
        """
        with self._loading():
            self._prepare()
            if self._packer is not None:
                self._packer.put_bias(layer, expert, projection, self._widened(layer, projection, bias))

    def layer_loaded(self, layer: int) -> bool:
        """Note that vLLM has loaded one more layer; whether it was the last one, so that the store is complete.

        Raises:
            StoreError: the checkpoint lacks an expert, or the store cannot be written.
        """
        with self._loading():
            source = self._prepare()
            if self._packer is not None:
                self._fill_up(layer, self._packer)
            self._loaded += 1
            if self._loaded < len(self.layers):
                return False
            if self._packer is not None:
                self.store = source.placed(self._packer.finish())
                self._packer = None
        if self._progress is not None:
            self._progress.close()
        return True

    def _widened(self, layer: int, projection: Projection, part: Tensor) -> Tensor:
        """A projection's weight or bias with zeros where its layer's experts are narrower than the widest."""
        missing = max(spec.intermediate for spec in self.layers) - self.layers[layer].intermediate
        if not missing or (projection is Projection.DOWN and part.dim() == 1):
            return part
        # Columns of down, rows of the others.
        sides = (0, missing) if projection is Projection.DOWN or part.dim() == 1 else (0, 0, 0, missing)
        return F.pad(part, sides)

    def _fill_up(self, layer: int, packer: ExpertPacker) -> None:
        """Store zeros in the places of experts that a layer has not, and no router names."""
        experts = packer.experts
        fmt = next(iter(experts.formats.values()))
        for expert in range(self.layers[layer].num_experts, experts.num_experts):
            for projection in experts.projections:
                form = fmt.matrices[projection]
                packer.put(layer, expert, projection, torch.zeros(form.rows, form.columns))
                if fmt.bias:
                    packer.put_bias(layer, expert, projection, torch.zeros(form.rows))

    @contextlib.contextmanager
    def _loading(self) -> Iterator[None]:
        """After an error nothing half-written stays, and the user reads whose error it is."""
        try:
            yield
        except (StoreError, ConfigError) as error:
            if self._packer is not None:
                self._packer.discard()
            if isinstance(error, ConfigError):  # says already whose it is
                raise
            raise StoreError(f"vllm-dymoe: {error}") from error

    def _prepare(self) -> RankStore:
        """Open the store or the way into it, once, before the first weight.

        Raises:
            StoreError: it cannot be opened or written.
        """
        if self.source is not None:
            return self.source
        experts, options = self.experts, self._options
        quantizer = quantizer_name(self._reader, options.stored_bits, options.quantizer)
        source = RankStore(
            self._vllm_config, options, self.layers[0], experts, quantizer,
            packed=self._packed, host_memory=self._host_memory,
        )  # fmt: skip
        existing = source.existing()
        if existing is not None:
            logger.info("vllm-dymoe: the experts are packed already; reading them from %s", existing.folder)
            self.store = source.placed(existing)
        else:
            writer = source.writer()
            total = len(experts.layers) * experts.num_experts * len(experts.projections)
            what = "Making random experts" if source.dummy else "Quantizing experts"
            self._progress = tqdm(total=total, desc=what, unit=" projections", dynamic_ncols=True)
            update: Callable[[], object] = self._progress.update
            if source.dummy:
                self.store = source.placed(random_store(experts, writer, source.seed, update))
            else:
                self._packer = ExpertPacker(experts, make_quantizer(options.quantizer), writer, update)
        self.source = source
        return source


def _kind(spec: LayerSpec) -> LayerSpec:
    """What all layers of a model have in common."""
    gate = replace(spec.activation, has_gate=True) == spec.activation
    silu = type(spec.activation).SILU
    return replace(
        spec, name=str(gate), activation=silu, intermediate=0, num_experts=0, top_k=0, weights_on_input=False
    )


def layer_numbers(names: list[str]) -> tuple[int, ...]:
    """A number for each layer, which its file is named by: its index in the model, where that is its own.

    Where a model has several stacks of layers with experts (text and images), those after the first count on from the
    highest index.
    """
    stacks: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        stacks.setdefault(re.sub(r"\d+", "", name), []).append(place)
    numbers = [extract_layer_index(name) for name in names]
    used: set[int] = set()
    for places in stacks.values():
        shift = max(used) + 1 if used.intersection(numbers[place] for place in places) else 0
        for place in places:
            numbers[place] += shift
            used.add(numbers[place])
    return tuple(numbers)
