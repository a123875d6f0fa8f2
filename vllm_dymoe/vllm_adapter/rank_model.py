"""The MoE layers of one rank, from their creation over loading to the running model."""

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from vllm.config import VllmConfig
from vllm.model_executor.models.utils import extract_layer_index

from vllm_dymoe.config import ConfigError
from vllm_dymoe.experts.layout import ExpertFormat, ModelExperts, Projection
from vllm_dymoe.experts.routing import Routing
from vllm_dymoe.host_memory import available_host_memory
from vllm_dymoe.kernels import Activation
from vllm_dymoe.predict import Predictor, PredictorError, RoutedModel, TrainedPredictor
from vllm_dymoe.predict.checkpoint import PredictorCard, read_card
from vllm_dymoe.quantize import make_quantizer
from vllm_dymoe.quantize.checkpoint import Checkpoint
from vllm_dymoe.quantize.dummy import random_store
from vllm_dymoe.quantize.packer import ExpertPacker
from vllm_dymoe.quantize.prequantized import PrequantizedMatrix
from vllm_dymoe.quantize.readers import Reader
from vllm_dymoe.quantize.readers.compatibility import describe, format_fields, quantizer_name
from vllm_dymoe.quantize.tensors import CheckpointError
from vllm_dymoe.runtime import MoERuntime, minimum_budget
from vllm_dymoe.runtime.sizing import workspace_bytes
from vllm_dymoe.store import FileStore, HostStore, Manifest, StoreError
from vllm_dymoe.store.placement import HostPlace, choose_host_place
from vllm_dymoe.store.writer import StoreWriter
from vllm_dymoe.systems import System, make_system
from vllm_dymoe.traces import TraceHeader
from vllm_dymoe.transfer import TransferError
from vllm_dymoe.vllm_adapter.checkpoint import cached_store, fingerprint, local_folder
from vllm_dymoe.vllm_adapter.foresight import Foresight
from vllm_dymoe.vllm_adapter.host_place import place_experts
from vllm_dymoe.vllm_adapter.log import logger
from vllm_dymoe.vllm_adapter.memory import automatic_budget
from vllm_dymoe.vllm_adapter.patches import apply_patches
from vllm_dymoe.vllm_adapter.prompt_tap import PromptTap
from vllm_dymoe.vllm_adapter.recorder import Recorder
from vllm_dymoe.vllm_adapter.report import announce
from vllm_dymoe.vllm_adapter.source import read_options
from vllm_dymoe.vllm_adapter.step import RunningStep
from vllm_dymoe.vllm_adapter.step_failures import StepFailures, make_step_failures
from vllm_dymoe.vllm_adapter.trace_tap import TraceTap, make_trace_tap


@dataclass(frozen=True)
class LayerSpec:
    """What vLLM says of one MoE layer on this rank.

    Attributes:
        name: prefix in the model, ``model.layers.3.mlp.experts``.
        num_experts: local experts.
        top_k: experts per token.
        hidden: model width.
        intermediate: expert width on this rank.
        dtype: of the weights.
        bias: whether every projection has one.
        rank: tensor-parallel rank, of ``ranks``.
        expert_rank: expert-parallel rank, of ``expert_ranks``.
        activation: of the gate.
    """

    name: str
    num_experts: int
    top_k: int
    hidden: int
    intermediate: int
    dtype: torch.dtype
    bias: bool
    rank: int
    ranks: int
    expert_rank: int
    expert_ranks: int
    activation: Activation = Activation.SILU


class RankModel:
    """Collects the MoE layers that vLLM creates, fills the store, and runs them.

    Args:
        vllm_config: vLLM's configuration of this engine.
        checkpoint: quantization_config of the checkpoint, if it is ours.
        reader: of the checkpoint's experts, if another tool has quantized them.

    Raises:
        ConfigError: the options are wrong.
    """

    def __init__(
        self, vllm_config: VllmConfig, checkpoint: Mapping[str, Any] | None, reader: Reader | None = None
    ) -> None:
        apply_patches(in_worker=True)
        self.options = read_options(vllm_config, checkpoint, reader)
        self.reader = reader
        self._checkpoint_is_ours = checkpoint is not None
        self._format_fields = format_fields(reader, checkpoint or {})
        self._dummy = vllm_config.load_config.load_format == "dummy"
        self._vllm_config = vllm_config
        self._layers: list[LayerSpec] = []
        self._loaded = 0
        self._packer: ExpertPacker | None = None
        self._store: HostStore | None = None
        self._packed_for = ""  # fingerprint of the model that the checkpoint's own store was made from
        # Asked for before any rank of this machine fills its share.
        self._host_memory = available_host_memory()
        self._place = HostPlace(False)
        self._progress: tqdm[Any] | None = None
        self._begin = time.perf_counter()
        self.runtime: MoERuntime | None = None
        self.step = RunningStep()
        self.recorder: Recorder | None = None
        self.foresight = Foresight(self.options)
        self.trace: TraceTap | None = None
        self.trained_predictor: tuple[Path | None, PredictorCard | None] = (None, None)
        self.prompts: PromptTap | None = None
        if make_system(self.options).heavy_hitters is not None:
            speculative = vllm_config.speculative_config
            self.prompts = PromptTap(self._system, self.step, speculative.num_speculative_tokens if speculative else 0)

    def _system(self) -> System:
        assert self.runtime is not None
        return self.runtime.system

    @property
    def _seed(self) -> int:
        """Of dummy weights."""
        return self._vllm_config.model_config.seed

    # -- creation ---------------------------------------------------------------------------------

    def add_layer(self, spec: LayerSpec) -> int:
        """Enter one MoE layer and return its position.

        Raises:
            ConfigError: it differs from the layers before it, or comes after loading began.
        """
        if self._store is not None or self._packer is not None:
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

    # -- loading ----------------------------------------------------------------------------------

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
        """Note that vLLM has loaded one more layer; with the last one the model can run.

        Args:
            position: of the layer.
            routed_experts: vLLM's module for it.

        Raises:
            StoreError: the checkpoint lacks an expert, or the store cannot be written.
            ConfigError: the budget cannot work.
        """
        with self._loading():
            self._prepare()
        self.foresight.layer_loaded(position, routed_experts)
        self._loaded += 1
        if self._loaded < len(self._layers):
            return
        if self._packer is not None:
            with self._loading():
                self._store = self._placed(self._packer.finish())
            self._packer = None
        if self._progress is not None:
            self._progress.close()
        assert self._store is not None
        device = torch.device(self._vllm_config.device_config.device)
        automatic = self._automatic_budget(device)
        self.runtime = MoERuntime(self._store, self.options, device, automatic, predictor=self._predictor())
        source = ""
        if self.reader is not None and not self._dummy:
            source = f" Experts: {describe(self.reader, self.options.stored_bits, self.options.quantizer)}."
        seconds = time.perf_counter() - self._begin
        announce(self.runtime, self._rank_name, seconds, source, self._place.reason)
        self.trace = make_trace_tap(self.options, self._trace_header(routed_experts), self.foresight)

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

    def _predictor(self) -> Predictor | None:
        """What foresees the experts of coming layers.

        Raises:
            ConfigError: a trained one cannot be used.
        """
        path = self.options.predictor
        try:
            predictor = self.foresight.predictor(self._routed_model(path))
            self.trained_predictor = (path, None if path is None else read_card(path))
        except PredictorError as error:
            raise ConfigError(f"vllm-dymoe: {error}") from error
        return predictor

    def take_predictor(self, path: Path) -> None:
        """Foresee with a trained predictor from the next step on; if it is refused, with the old one.

        Raises:
            ConfigError: it is damaged, another model's, or there is no room for it.
        """
        assert self.runtime is not None
        try:
            predictor = TrainedPredictor.load(self._routed_model(path))
            card = read_card(path)
            self.runtime.set_predictor(predictor)
        except PredictorError as error:
            raise ConfigError(f"vllm-dymoe: {error}") from error
        self.foresight.taken_over()
        self.trained_predictor = (path, card)

    def _routed_model(self, predictor: Path | None) -> RoutedModel:
        experts = self.experts

        def hits() -> int:
            assert self.runtime is not None
            return self.runtime.hits

        return RoutedModel(
            len(experts.layers),
            experts.num_experts,
            experts.top_k,
            hits=hits,
            hidden=self._layers[0].hidden,
            fingerprint="" if predictor is None else self.model_fingerprint,
            device=torch.device(self._vllm_config.device_config.device),
            predictor=predictor,
        )

    def _trace_header(self, routed_experts: Any) -> TraceHeader:
        spec = self._layers[0]
        return TraceHeader(
            model=self._vllm_config.model_config.model,
            fingerprint=self.model_fingerprint,
            num_layers=len(self._layers),
            num_experts=routed_experts.moe_config.num_experts,
            top_k=spec.top_k,
            hidden=spec.hidden,
        )

    @cached_property
    def model_fingerprint(self) -> str:
        """Sixteen hex digits of the model's weights, whatever was made of its experts; what traces are known by."""
        if self._dummy:
            return self._fingerprint
        if self._packed_for:
            return self._packed_for
        folder = local_folder(self._vllm_config)
        try:
            return Checkpoint(folder).fingerprint()
        except CheckpointError:  # vLLM reads more kinds of checkpoints than we do
            return fingerprint(folder, "its routers")

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

    def _prepare(self) -> None:
        """Open the store or the way into it, once, before the first weight."""
        if self._store is not None or self._packer is not None:
            return
        experts = self.experts
        device_type, ranks = self._vllm_config.device_config.device_type, self._vllm_config.parallel_config
        self._place = choose_host_place(
            self.options.host_store, device_type, experts, self._host_memory, ranks.local_world_size
        )
        existing = self._existing_store(experts)
        if existing is not None:
            logger.info("vllm-dymoe: the experts are packed already; reading them from %s", existing.folder)
            self._store = self._placed(existing)
            return
        writer = StoreWriter(self._cache_folder(), self._manifest(experts))
        total = len(experts.layers) * experts.num_experts * len(Projection)
        what = "Making random experts" if self._dummy else "Quantizing experts"
        self._progress = tqdm(total=total, desc=what, unit=" projections", dynamic_ncols=True)
        if self._dummy:
            self._store = self._placed(random_store(experts, writer, self._seed, self._progress.update))
            return
        self._packer = ExpertPacker(experts, make_quantizer(self.options.quantizer), writer, self._progress.update)

    def _placed(self, files: HostStore) -> HostStore:
        """The packed experts where they are to live: the files themselves, or memory that is filled from them.

        Raises:
            StoreError: the files cannot be read, or memory that was asked for cannot be had.
        """
        device, asked_for = torch.device(self._vllm_config.device_config.device), self.options.host_store != "auto"
        store, self._place = place_experts(files, self._place, device, asked_for=asked_for)
        return store

    def _existing_store(self, experts: ModelExperts) -> FileStore | None:
        """The checkpoint's own store, or the one that an earlier start has left; None if there is none.

        Raises:
            StoreError: the checkpoint's store is not for this model, dtype or rank.
        """
        if self._checkpoint_is_ours and not self._dummy:
            folder = local_folder(self._vllm_config)
            store = FileStore(folder, experts.layers)
            _check_belongs(store, experts, self._layers[0], folder)
            self._packed_for = store.manifest.model
            return store
        return cached_store(self._cache_folder(), self._manifest(experts))

    def _cache_folder(self) -> Path:
        spec = self._layers[0]
        root = self.options.store_dir or Path.home() / ".cache" / "vllm-dymoe"
        name = Path(self._vllm_config.model_config.model).name
        return root.expanduser() / f"{name}-{self._fingerprint}" / f"rank-{spec.rank}-{spec.expert_rank}"

    @cached_property
    def _fingerprint(self) -> str:
        """Asked for once the last layer was added; it looks at every file of the checkpoint."""
        spec = self._layers[0]
        described = (self.experts, self._quantizer_name, spec.rank, spec.ranks, spec.expert_rank, spec.expert_ranks)
        if self._dummy:  # of the checkpoint, only the shapes count
            return fingerprint(None, f"{described} random with seed {self._seed}")
        return fingerprint(local_folder(self._vllm_config), str(described))

    @property
    def _quantizer_name(self) -> str:
        return quantizer_name(self.reader, self.options.stored_bits, self.options.quantizer)

    def _manifest(self, experts: ModelExperts) -> Manifest:
        spec = self._layers[0]
        quantizer = "dummy" if self._dummy else self._quantizer_name
        return Manifest(experts, quantizer, self._fingerprint, (spec.rank, spec.ranks))

    # -- calibration ------------------------------------------------------------------------------

    def recordable(self) -> dict[str, Any] | None:
        """What a recording of this model's inputs holds; None on ranks that see what another one records."""
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

    def record(self, path: Path, tokens: int) -> None:
        """Record the inputs of the next tokens.

        Raises:
            CalibrationError: the part cannot be written.
        """
        if self.recordable() is None:
            return
        if self.recorder is not None:  # of a caller that went away
            self.recorder.discard()
        self.recorder = None
        spec = self._layers[0]
        self.recorder = Recorder(
            path, tokens, layers=len(self._layers), hidden=spec.hidden, top_k=spec.top_k, dtype=spec.dtype
        )

    def end_record(self) -> None:
        """Complete the part.

        Raises:
            CalibrationError: it could not be written, or tokens are missing.
        """
        recorder, self.recorder = self.recorder, None
        if recorder is not None:
            recorder.finish()

    # -- running ----------------------------------------------------------------------------------

    @cached_property
    def failures(self) -> StepFailures:
        """What went wrong in the running step."""
        failures = make_step_failures(self.step)
        if self.trace is not None:
            failures.on_failure = self.trace.forget
        return failures

    def forward(
        self,
        layer: int,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: Activation,
    ) -> torch.Tensor:
        """Run one MoE layer on tokens, or on what vLLM makes up to warm up, which nobody counts or learns from.

        A layer that cannot be computed gives zeros and fails the step; see ``step_failures``.
        """
        assert self.runtime is not None, "vLLM runs a model that it has not finished loading"
        layers = len(self.runtime.experts.layers)
        if self.step.warming_up:
            return self._warm_up(Routing(layer, layers, x, topk_ids, topk_weights), activation)
        if self.failures.sentence is not None:
            return torch.zeros_like(x)  # the step has failed already
        if not self.foresight.agrees(layer, x, topk_ids):
            self.runtime.predictor = None
        try:
            prompt = None if self.prompts is None else self.prompts.tokens(x.shape[0], x.device)
            routing = Routing(
                layer, len(self.runtime.experts.layers), x, topk_ids, topk_weights, self.step.phase, prompt
            )
            return self.runtime.forward(routing, activation)
        except TransferError as error:
            self.failures.record(f"vllm-dymoe: {error}")
            return torch.zeros_like(x)

    def _warm_up(self, routing: Routing, activation: Activation) -> torch.Tensor:
        runtime = self.runtime
        assert runtime is not None
        try:
            with runtime.unobserved():
                return runtime.forward(routing, activation)
        except TransferError as error:
            if self.failures.alone:
                raise  # the start ends with this sentence
            logger.error("vllm-dymoe: %s", error)  # the other ranks wait for this one; the first step fails as well
            return torch.zeros_like(routing.x)


def _check_belongs(store: FileStore, experts: ModelExperts, spec: LayerSpec, folder: Path) -> None:
    held = store.experts
    for what, has, needs in (
        ("tensor-parallel ranks", store.manifest.tensor_parallel, (spec.rank, spec.ranks)),
        ("experts per layer", held.num_experts, experts.num_experts),
        ("expert formats", held.formats, experts.formats),
    ):
        if has != needs:
            store.close()
            raise StoreError(
                f"the experts in {folder} do not fit this model: the store has {what} {has}, the model needs {needs}; "
                "write the checkpoint again with `vllm-dymoe quantize` for this model, dtype and parallel size."
            )
