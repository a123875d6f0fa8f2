"""The quantization method ``dymoe`` of vLLM.

It reads the options of a checkpoint, and gives every layer its method.
"""

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.weight_utils import maybe_download_from_modelscope
from vllm.platforms import current_platform
from vllm.transformers_utils.config import get_hf_text_config

from vllm_dymoe.options import CALIBRATED, CHECKPOINT_OPTIONS, ConfigError, Options
from vllm_dymoe.quantize.model_config import INTERMEDIATE
from vllm_dymoe.quantize.readers import PLAIN_READER, Reader, make_reader
from vllm_dymoe.quantize.readers.base import check_compatible, store_group_sizes
from vllm_dymoe.quantize.readers.configurations import (
    EXPERT_DTYPE,
    check_method,
    describe_modelopt,
    with_expert_dtype,
)
from vllm_dymoe.quantize.readers.modules import ExpertModule, modules_of, representatives
from vllm_dymoe.quantize.tensors import CheckpointError
from vllm_dymoe.resolve import resolve_options
from vllm_dymoe.vllm_plugin.dense import check_dense, packed_method
from vllm_dymoe.vllm_plugin.loading import Loading
from vllm_dymoe.vllm_plugin.model_files import ranks_of_machine, read_dtypes
from vllm_dymoe.vllm_plugin.rank_server import RankServer
from vllm_dymoe.vllm_plugin.threads import keep_to_quota

_ANY_LAYER = 1 << 14  # more than any model has
_DENSE_G_IDX = re.compile(r"^(?!.*\.experts\.).*\.g_idx$")


class DymoeConfig(QuantizationConfig):
    """Gives MoE layers our method; other layers stay as the checkpoint has them.

    Those are as the checkpoint has them.

    Raises:
        ConfigError: a variant is unsupported, or this vLLM cannot run its dense layers.
    """

    # A class attribute, because QuantizationConfig sets attributes before __init__ does.
    _dense: QuantizationConfig | None = None

    def __init__(
        self,
        checkpoint: dict[str, Any] | None = None,  # its quantization_config, if it is ours
        said: Mapping[str, Any] | None = None,  # that of another tool, which has quantized all layers, or all others
        dense: QuantizationConfig | None = None,  # vLLM's configuration for that, which runs the other layers
        refusal: str | None = None,  # why none of them may be quantized; None if they may
    ) -> None:
        QuantizationConfig.__init__(self)
        self.checkpoint, self._said = checkpoint, said
        self.loading: Loading | None = None  # made with the first MoE layer, where the weights are
        self._options: Options | None = None
        self._modules: tuple[Sequence[ExpertModule] | None, Sequence[ExpertModule] | None] = None, None
        self._reader: Reader | None = None
        self._dense_refusal, self._dense = refusal, dense

    def __reduce__(self) -> Any:
        """Support pickling, since vLLM sends a configuration to its workers."""
        return _received, (None if self._dense is None else type(self._dense), self.__dict__)

    @property
    def reader(self) -> Reader:
        """The reader for the model's experts.

        Quantized experts of another tool keep their codes.

        Raises:
            ConfigError: the format is unsupported.
        """
        if self._reader is None:
            with _as_config_error():
                ours = self.checkpoint is not None
                self._reader = PLAIN_READER if ours else make_reader(self._said, self._modules[0])
        return self._reader

    @property
    def draft_reader(self) -> Reader:
        """The reader for experts of draft layers.

        The tool may have quantized them in another way, or not at all.
        """
        with _as_config_error():
            return make_reader(self._said, self._modules[1])

    def get_name(self) -> str:
        """Return the checkpoint's method, if it has one, else "dymoe".

        vLLM's models check the name to handle peculiarities of tools.
        """
        return "dymoe" if self._dense is None else self._dense.get_name()

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the checkpoint's own configuration.

        vLLM's models read such attributes.
        """
        dense = self.__dict__.get("_dense")
        if dense is None or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name}")
        return getattr(dense, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the checkpoint's own configuration.

        That configuration runs the other layers. Attributes of this object are set here.
        """
        dense = self.__dict__.get("_dense")
        own = dense is None or name in self.__dict__ or hasattr(DymoeConfig, name)
        (object.__setattr__ if own else setattr)(self if own else dense, name, value)

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        if self._dense is None:
            return [torch.bfloat16, torch.float16, torch.float32]  # the last is refused with an error of ours
        return [dtype for dtype in (torch.bfloat16, torch.float16) if dtype in self._dense.get_supported_act_dtypes()]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80  # Ampere, the first with bfloat16

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "DymoeConfig":
        ours = dict(config) if config.get("quant_method") == "dymoe" else None
        said = config if ours is None else config.get("dense")
        if said is None:
            return DymoeConfig(ours)
        with _as_config_error():
            check_method(said)
        dense, refusal = _read_dense(said)
        return _joined(type(dense))(ours, said, dense, refusal)

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: Any, user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Return our name for a supported checkpoint, if the user asks for it.

        Raises:
            ConfigError: the user asks for it with an unsupported checkpoint.
        """
        if user_quant != "dymoe" or hf_quant_cfg.get("quant_method") == "dymoe":
            return None
        # vLLM passes this very dictionary to from_config, and nothing else of the model.
        model = {key: getattr(hf_config, key, None) for key in ("model_type", EXPERT_DTYPE)}
        hf_quant_cfg.update(with_expert_dtype(hf_quant_cfg, model))
        for said in (hf_quant_cfg, getattr(hf_config, "quantization_config", None)):  # the latter is read by drafts
            if isinstance(said, dict) and (rules := said.get("dynamic")):
                said["dynamic"] = {_shown_to_drafts(pattern): rule for pattern, rule in rules.items()}
        with _as_config_error():
            check_method(hf_quant_cfg)
        return "dymoe"

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Return our method for a MoE layer.

        Any other layer gets the checkpoint's own method, else one of :mod:`~.dense` or the unquantized one.
        """
        from vllm_dymoe.vllm_plugin.moe_method import DymoeMoEMethod, loading_of

        if isinstance(layer, RoutedExperts):
            config = get_current_vllm_config()
            self.loading = self.loading or loading_of(config)
            if self.loading is None:
                keep_to_quota(config.device_config.device_type, ranks_of_machine(config.parallel_config))
                self.loading = Loading(
                    config, self._read_options(config), self.checkpoint, self.reader, lambda: self.draft_reader
                )
            return DymoeMoEMethod(layer.moe_config, self.loading)
        if self._dense is not None:
            return _dense_method(self._dense, self._dense_refusal, layer, prefix)
        if not isinstance(layer, LinearBase | ParallelLMHead):
            return None
        config = get_current_vllm_config()
        method = packed_method(layer, prefix, self._read_options(config), config)
        return method or (UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None)

    def _read_options(self, config: VllmConfig) -> Options:
        if self._options is None:
            self._options = read_options(config, self.checkpoint, self.reader)
            check_dense(self._options, quantized=self._dense is not None)
        return self._options

    # vLLM's calls on a quantization config are passed to that of the dense layers.

    @property
    def packed_modules_mapping(self) -> dict[str, list[str]]:
        """Layers that vLLM has joined; models set and extend it."""
        return self._packed if self._dense is None else self._dense.packed_modules_mapping

    @packed_modules_mapping.setter
    def packed_modules_mapping(self, mapping: dict[str, list[str]]) -> None:
        self._packed = mapping
        if self._dense is not None:
            self._dense.packed_modules_mapping = mapping

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        if self._dense is not None:
            self._dense.apply_vllm_mapper(hf_to_vllm_mapper)

    def maybe_update_config(self, model_name: str, **about: Any) -> None:
        """Read the names and dtypes of the checkpoint's experts.

        Rules are interpreted by them. ``prepare`` reports unsupported ones later: vLLM would wrap an error from here
        in its own words.
        """
        if self._dense is None or self._said is None:
            return
        revision, hf_config = about.get("revision"), about.get("hf_config")
        model_name = maybe_download_from_modelscope(model_name, revision) or model_name
        self._dense.maybe_update_config(model_name, **about)
        tensors = read_dtypes(model_name, revision)
        layers = getattr(hf_config and get_hf_text_config(hf_config), "num_hidden_layers", None) or _ANY_LAYER
        if tensors:
            model, drafts = (representatives(self._said, modules) for modules in modules_of(tensors, layers))
            self._modules, self._reader = (model, drafts), None

    def get_cache_scale_mapper(self) -> Any:
        return super().get_cache_scale_mapper() if self._dense is None else self._dense.get_cache_scale_mapper()

    def get_checkpoint_weight_mapper(self) -> Any:
        """Return the tensors that vLLM (0.32 and newer) leaves out.

        That is g_idx, except for experts, whose reader uses it.
        """
        from vllm.model_executor.models.utils import WeightsMapper

        return WeightsMapper(orig_to_new_regex={_DENSE_G_IDX: None})

    def close(self) -> None:
        """Free everything of this rank; see ``Loading.close``."""
        loading, self.loading = self.loading, None
        if loading is not None:
            loading.close()

    def loaded_model(self) -> RankServer:
        """Return this rank's server; ConfigError if the model has no MoE layers on it."""
        if self.loading is None or self.loading.rank_server is None:
            raise ConfigError("vllm-dymoe: this model has no MoE layers, so there is nothing to serve with dymoe.")
        return self.loading.rank_server


def _shown_to_drafts(pattern: str) -> str:
    """Return a GPTQ rule in a form in which vLLM does not find "mtp".

    Qwen3.5's draft gets no quantization configuration at all if a rule excludes "mtp"; its experts would then not come
    to us, and be outside of the budget.
    """
    return pattern.replace("mtp", "mt[p]") if pattern.startswith("-:") else pattern


_JOINED: dict[type[QuantizationConfig], type[DymoeConfig]] = {}


def _joined(dense: type[QuantizationConfig]) -> type[DymoeConfig]:
    """Return our configuration as a subclass of the checkpoint's own class.

    vLLM's models check for that class.
    """
    if dense not in _JOINED:
        _JOINED[dense] = type(f"Dymoe{dense.__name__}", (DymoeConfig, dense), {})
    return _JOINED[dense]


def _received(dense: type[QuantizationConfig] | None, state: dict[str, Any]) -> DymoeConfig:
    made: DymoeConfig = object.__new__(DymoeConfig if dense is None else _joined(dense))
    made.__dict__.update(state)
    return made


def expert_width(config: VllmConfig) -> int | None:
    """Return the width of one expert on one rank, according to config.json.

    None if it names none.
    """
    text = config.model_config.hf_text_config
    width = next((width for name in INTERMEDIATE if (width := getattr(text, name, None))), None)
    return width // _ranks_of_an_expert(config) if isinstance(width, int) else None


def _ranks_of_an_expert(config: VllmConfig) -> int:
    return 1 if config.parallel_config.enable_expert_parallel else config.parallel_config.tensor_parallel_size


def read_options(
    vllm_config: VllmConfig, checkpoint: Mapping[str, Any] | None, reader: Reader = PLAIN_READER
) -> Options:
    """Return the options for a checkpoint.

    The checkpoint is ours, another tool's, or not quantized.

    Raises:
        ConfigError: an option is invalid.
    """
    additional = vllm_config.additional_config
    asked = additional.get("dymoe") if isinstance(additional, Mapping) else None
    usual, _ = reader.usual
    if reader.held or reader.mixed:
        # The packer checks what config.json does not contain.
        columns = expert_width(vllm_config) or 0, _ranks_of_an_expert(vllm_config)
        sizes = store_group_sizes(usual, *columns) if usual.held else ()
        options = resolve_options(asked, {"hi": usual.bits, **({"group_size": sizes[0]} if sizes else {})})
        if not reader.mixed or reader.keeps(options.stored_bits):
            with _as_config_error():
                check_compatible(usual, options.stored_bits, options.group_size, *columns)
                for own in {own for pair in reader.layers.values() for own in pair}:
                    own_sizes = store_group_sizes(own, *columns)
                    check_compatible(own, (own.bits,), own_sizes[0] if own_sizes else 0, *columns)
            return options
    # For several formats only dequantized weights are exact, so lower bits must be set explicitly.
    options = resolve_options(asked, {"hi": 16} if reader.mixed else checkpoint)
    if checkpoint is None and options.quantizer in CALIBRATED:
        raise ConfigError(
            f'vllm-dymoe: quantizer "{options.quantizer}" needs a calibration, which does not exist while a model '
            "loads; write a checkpoint with `vllm-dymoe quantize --calibration FOLDER` and serve that."
        )
    for key, option in CHECKPOINT_OPTIONS.items():
        stored, wanted = (checkpoint or {}).get(key), getattr(options, option)
        if stored is not None and stored != wanted:
            raise ConfigError(
                f"vllm-dymoe: {option} is {wanted}, but this checkpoint was written with "
                f"{option} = {stored}; leave the option out, or write the checkpoint again with `vllm-dymoe quantize`."
            )
    return options


@contextlib.contextmanager
def _as_config_error() -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        raise ConfigError(f"vllm-dymoe: {error}") from error


def _read_dense(config: Mapping[str, Any]) -> tuple[QuantizationConfig, str | None]:
    """Return vLLM's own configuration of a quantized checkpoint.

    vLLM 0.32 and newer refuse checkpoints with reordered columns before they look which layers are quantized. If only
    experts are quantized, that order does not concern vLLM, which gets the configuration without it.

    Returns:
        the configuration, and why no dense layer may be quantized; None if they may.
    """
    if current_platform.is_cpu():
        with contextlib.suppress(ImportError):  # older vLLMs have no such register: their own kernels run
            from vllm_dymoe.vllm_plugin.dense_kernels import register_kernels

            register_kernels()
    make = get_quantization_config(_name_in_vllm(config)).from_config
    try:
        return make(dict(config)), None
    except ValueError as error:
        refusal = (
            f"vllm-dymoe: this vLLM cannot run the dense layers of the {config['quant_method']} checkpoint "
            f"({str(error).rstrip('.')}); use a checkpoint that `vllm serve` opens without --quantization dymoe"
        )
        unordered = _without_order(config)
        if unordered != config:
            with contextlib.suppress(ValueError):
                return make(unordered), f"{refusal}, or one whose dense layers have 16 bits."
        raise ConfigError(f"{refusal}.") from error


def _dense_method(
    dense: QuantizationConfig, refusal: str | None, layer: torch.nn.Module, prefix: str
) -> QuantizeMethodBase | None:
    """Return vLLM's method of a layer without experts.

    Raises:
        ConfigError: it would quantize despite a refusal.
    """
    method = dense.get_quant_method(layer, prefix)
    plain = method is None or isinstance(method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod)
    # Attention asks for the scales of its cache.
    if refusal is not None and not plain and isinstance(layer, LinearBase | ParallelLMHead):
        raise ConfigError(refusal)
    return method


def _name_in_vllm(config: Mapping[str, Any]) -> str:
    """Return vLLM's name of a quantization_config's method.

    ModelOpt's algorithms are several methods there.
    """
    if EXPERT_DTYPE in config:
        return "deepseek_v4_fp8"
    if config.get("quant_method") == "auto-round":
        return "inc"
    algorithm = str(describe_modelopt(config).get("quant_algo") or "").upper()
    names = {"NVFP4": "modelopt_fp4", "MXFP8": "modelopt_mxfp8", "MIXED": "modelopt_mixed", "FP8": "modelopt"}
    return next((name for part, name in names.items() if part in algorithm), str(config["quant_method"]))


def _without_order(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a quantization_config without reordered columns.

    It reads as if columns had been quantized in their own order.
    """
    plain = dict(config)
    if config.get("desc_act"):
        plain["desc_act"] = False
    if groups := config.get("config_groups"):
        ordered = {name: group for name, group in groups.items() if (group.get("weights") or {}).get("actorder")}
        changed = {
            name: {**group, "weights": {**group["weights"], "actorder": None}} for name, group in ordered.items()
        }
        plain["config_groups"] = {**groups, **changed}
    return plain
