"""The MoE layers of one rank while vLLM loads them: collected, packed unless they are already, and then running."""

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from vllm.config import VllmConfig
from vllm.model_executor.models.utils import extract_layer_index

from vllm_dymoe.config import ConfigError, Options
from vllm_dymoe.experts.layout import ExpertFormat, ModelExperts, Projection
from vllm_dymoe.host_memory import available_host_memory
from vllm_dymoe.predict import RoutedModel
from vllm_dymoe.quantize import make_quantizer
from vllm_dymoe.quantize.dummy import random_store
from vllm_dymoe.quantize.packer import ExpertPacker
from vllm_dymoe.quantize.prequantized import PrequantizedMatrix
from vllm_dymoe.quantize.readers import Reader
from vllm_dymoe.quantize.readers.compatibility import describe, format_fields, quantizer_name
from vllm_dymoe.runtime import MoERuntime, minimum_budget
from vllm_dymoe.runtime.sizing import workspace_bytes
from vllm_dymoe.store import HostStore, StoreError
from vllm_dymoe.systems import make_system
from vllm_dymoe.traces import TraceHeader
from vllm_dymoe.vllm_adapter.failures import make_step_failures
from vllm_dymoe.vllm_adapter.gates import Foresight
from vllm_dymoe.vllm_adapter.memory import automatic_budget
from vllm_dymoe.vllm_adapter.observers import Observation, observe_trace
from vllm_dymoe.vllm_adapter.report import announce, logger
from vllm_dymoe.vllm_adapter.running import Running
from vllm_dymoe.vllm_adapter.step import RunningStep
from vllm_dymoe.vllm_adapter.store import LayerSpec, RankStore


class Loading:
    """Collects the MoE layers that vLLM creates, and fills or opens their store; the last one makes the rank run.

    Args:
        vllm_config: vLLM's configuration of this engine.
        options: validated options.
        checkpoint: quantization_config of the checkpoint, if it is ours.
        reader: of the checkpoint's experts, if another tool has quantized them.

    Attributes:
        running: the rank, once its last layer is loaded.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        options: Options,
        checkpoint: Mapping[str, Any] | None,
        reader: Reader | None = None,
    ) -> None:
        self.options = options
        self.reader = reader
        self.running: Running | None = None
        self._checkpoint_is_ours = checkpoint is not None
        self._format_fields = format_fields(reader, checkpoint or {})
        self._vllm_config = vllm_config
        self._layers: list[LayerSpec] = []
        self._loaded = 0
        self._foresight = Foresight(options)
        self._source: RankStore | None = None
        self._packer: ExpertPacker | None = None
        self._store: HostStore | None = None
        # Asked for before any rank of this machine fills its share.
        self._host_memory = available_host_memory()
        self._progress: tqdm[Any] | None = None
        self._begin = time.perf_counter()

    def add_layer(self, spec: LayerSpec) -> int:
        """Enter one MoE layer and return its position.

        Raises:
            ConfigError: it differs from the layers before it, or comes after loading began.
        """
        if self._source is not None:
            raise ConfigError(
                f"vllm-dymoe: {spec.name} belongs to a second model with MoE layers (a speculative draft?), "
                "which is not supported yet; serve without speculative decoding."
            )
        if self._layers and replace(spec, name="") != replace(self._layers[0], name=""):
            raise ConfigError(
                f"vllm-dymoe: the experts of {spec.name} have another shape than those of {self._layers[0].name}, "
                "which is not supported yet; serve this model without --quantization dymoe."
            )
        self._layers.append(spec)
        return len(self._layers) - 1

    @property
    def experts(self) -> ModelExperts:
        """The rank's experts, as the model's configuration describes them."""
        spec = self._layers[0]
        formats = {
            bits: ExpertFormat(
                spec.hidden, spec.intermediate, bits, self.options.group_size, spec.dtype, spec.bias,
                **{field: bits in widths for field, widths in self._format_fields.items()},
            )
            for bits in self.options.stored_bits
        }  # fmt: skip
        layers = tuple(extract_layer_index(layer.name) for layer in self._layers)
        return ModelExperts(layers, spec.num_experts, spec.top_k, formats)

    def wants_experts(self) -> bool:
        """Whether the checkpoint's experts are needed: not where a complete store exists.

        Raises:
            StoreError: the store cannot be written.
        """
        with self._loading():
            self._prepare()
        return self._packer is not None

    def put(self, layer: int, expert: int, projection: Projection, weight: torch.Tensor | PrequantizedMatrix) -> None:
        """Take one projection from the checkpoint; nothing to do where a complete store exists.

        Raises:
            StoreError: the store cannot be written, or the weights cannot be quantized.
        """
        with self._loading():
            self._prepare()
            if self._packer is not None:
                self._packer.put(layer, expert, projection, weight)

    def put_bias(self, layer: int, expert: int, projection: Projection, bias: torch.Tensor) -> None:
        """Take one projection's bias; otherwise as ``put``.

        Raises:
            StoreError: the store cannot be written, or the bias not be stored.
        """
        with self._loading():
            self._prepare()
            if self._packer is not None:
                self._packer.put_bias(layer, expert, projection, bias)

    def layer_loaded(self, position: int, routed_experts: Any) -> None:
        """Note that vLLM has loaded one more layer; with the last one the rank runs.

        Args:
            position: of the layer.
            routed_experts: vLLM's module for it.

        Raises:
            StoreError: the checkpoint lacks an expert, or the store cannot be written.
            ConfigError: the budget cannot work.
        """
        with self._loading():
            source = self._prepare()
        self._foresight.layer_loaded(position, routed_experts)
        self._loaded += 1
        if self._loaded < len(self._layers):
            return
        if self._packer is not None:
            with self._loading():
                self._store = source.placed(self._packer.finish())
            self._packer = None
        if self._progress is not None:
            self._progress.close()
        assert self._store is not None
        self._run(source, self._store, routed_experts.moe_config.num_experts)

    def _run(self, rank_store: RankStore, store: HostStore, num_experts: int) -> None:
        """Make the rank run that has these experts, of ``num_experts`` on all ranks."""
        options, config, spec = self.options, self._vllm_config, self._layers[0]
        device = torch.device(config.device_config.device)
        automatic = self._automatic_budget(device)
        predictor = self._foresight.predictor(self._routed_model(options.predictor))
        runtime = MoERuntime(store, options, device, automatic, predictor=predictor)
        origin = ""
        if self.reader is not None and not rank_store.dummy:
            origin = f" Experts: {describe(self.reader, options.stored_bits, options.quantizer)}."
        announce(runtime, self._rank_name, time.perf_counter() - self._begin, origin, rank_store.place.reason)

        def header() -> TraceHeader:
            model = config.model_config.model, rank_store.model_fingerprint
            return TraceHeader(*model, len(self._layers), num_experts, spec.top_k, spec.hidden)

        observation = Observation(self._recordable())
        observation.trace = observe_trace(options, header, lambda: self._foresight.gates)
        if observation.trace is not None:
            observation.join(observation.trace)
        speculative, step = config.speculative_config, RunningStep()
        drafted = speculative.num_speculative_tokens if speculative else 0
        failures = make_step_failures(step)
        self.running = Running(runtime, step, failures, self._foresight, observation, self._routed_model, drafted)

    def _automatic_budget(self, device: torch.device) -> int:
        experts, options = self.experts, self.options
        tiers = make_system(options).tiers
        least = minimum_budget(experts, options, tiers, workspace_bytes(experts, device.type))
        try:
            return automatic_budget(self._vllm_config, device, experts, least)
        except ConfigError:
            if options.expert_budget.is_auto:
                raise
            return 0  # whoever asks for it while the model is served is refused then

    def _routed_model(self, predictor: Path | None) -> RoutedModel:
        experts, source = self.experts, self._source
        assert source is not None

        def hits() -> int:
            assert self.running is not None
            return self.running.runtime.hits

        return RoutedModel(
            len(experts.layers),
            experts.num_experts,
            experts.top_k,
            hits=hits,
            hidden=self._layers[0].hidden,
            fingerprint="" if predictor is None else source.model_fingerprint,
            device=torch.device(self._vllm_config.device_config.device),
            predictor=predictor,
        )

    def _recordable(self) -> dict[str, Any] | None:
        """What a calibration of this rank's inputs holds; None on ranks that see what another one records."""
        spec = self._layers[0]
        if spec.rank or spec.expert_rank:
            return None
        return {
            "layers": list(self.experts.layers),
            "top_k": spec.top_k,
            "hidden_size": spec.hidden,
            "dtype": str(spec.dtype).removeprefix("torch."),
            "activation": spec.activation.value,
        }

    @property
    def _rank_name(self) -> str:
        """Which of several ranks this is; empty for the only one."""
        parallel = self._vllm_config.parallel_config
        ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        return f"rank {parallel.rank} of {ranks}" if ranks > 1 else ""

    @contextlib.contextmanager
    def _loading(self) -> Iterator[None]:
        """After an error nothing half-written stays, and the user reads whose error it is."""
        try:
            yield
        except StoreError as error:
            if self._packer is not None:
                self._packer.discard()
            raise StoreError(f"vllm-dymoe: {error}") from error

    def _prepare(self) -> RankStore:
        """Open the store or the way into it, once, before the first weight.

        Raises:
            StoreError: it cannot be opened or written.
        """
        if self._source is not None:
            return self._source
        experts, options = self.experts, self.options
        quantizer = quantizer_name(self.reader, options.stored_bits, options.quantizer)
        source = RankStore(
            self._vllm_config, options, self._layers[0], experts, quantizer,
            packed=self._checkpoint_is_ours, host_memory=self._host_memory,
        )  # fmt: skip
        existing = source.existing()
        if existing is not None:
            logger.info("vllm-dymoe: the experts are packed already; reading them from %s", existing.folder)
            self._store = source.placed(existing)
        else:
            writer = source.writer()
            total = len(experts.layers) * experts.num_experts * len(Projection)
            what = "Making random experts" if source.dummy else "Quantizing experts"
            self._progress = tqdm(total=total, desc=what, unit=" projections", dynamic_ncols=True)
            if source.dummy:
                self._store = source.placed(random_store(experts, writer, source.seed, self._progress.update))
            else:
                self._packer = ExpertPacker(experts, make_quantizer(options.quantizer), writer, self._progress.update)
        self._source = source
        return source
