"""Every option a user can set, in one validated, frozen model.

An option is looked for in three places, and the first that names it wins:

1. ``--additional-config '{"dymoe": {...}}'`` (offline: ``LLM(additional_config={"dymoe": {...}})``)
2. the environment, ``DYMOE_<OPTION>`` in capitals: ``DYMOE_EXPERT_BUDGET=25%``
3. the checkpoint's own ``quantization_config`` in its config.json

and the defaults below come last. Whatever cannot be honoured is refused with a
sentence that names the place it came from; nothing is ignored.
"""

import difflib
import json
import os
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    ByteSize,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

ENVIRONMENT_PREFIX = "DYMOE_"
# Keys of a checkpoint's quantization_config that describe the checkpoint, not an option.
_CHECKPOINT_ONLY_KEYS = frozenset({"quant_method", "format_version", "zeros_in_steps", "ordered", "dense"})


class ConfigError(ValueError):
    """An option that cannot be honoured; the message is one sentence for the user."""


class Source(Enum):
    """Where an option's value came from, in the words a user would recognise."""

    CHECKPOINT = "the checkpoint's quantization_config"
    ENVIRONMENT = "the environment"
    ADDITIONAL_CONFIG = "--additional-config"

    def name_of(self, option: str) -> str:
        """The option as the user wrote it at this place."""
        if self is Source.ENVIRONMENT:
            return ENVIRONMENT_PREFIX + option.upper()
        if self is Source.CHECKPOINT:
            return f"quantization_config.{option} (config.json)"
        return f"additional_config.dymoe.{option}"


class ExpertBudget(BaseModel):
    """How much device memory experts may take on each rank: bytes, a share, one token's experts, or automatic.

    At most one of ``bytes``, ``share`` and ``top_k`` is set; none means automatic.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    bytes: int | None = Field(default=None, gt=0)
    share: float | None = Field(default=None, gt=0, le=1)
    top_k: bool = False

    @classmethod
    def parse(cls, value: Any) -> "ExpertBudget":
        """Read ``"auto"``, ``"top-k"``, bytes (``1073741824``, ``"1.5GiB"``) or a share (``0.25``, ``"25%"``).

        A float of at most 1 is a share of all experts' bytes in the high tier.

        Raises:
            ValueError: the value is none of these.
        """
        if isinstance(value, ExpertBudget):
            return value
        if value == "auto":
            return cls()
        if value == "top-k":
            return cls(top_k=True)
        if isinstance(value, bool):
            raise ValueError("a truth value is no budget")
        if isinstance(value, float) and value <= 1:
            return cls(share=value)
        if isinstance(value, str) and value.strip().endswith("%"):
            return cls(share=float(value.strip()[:-1]) / 100)
        return cls(bytes=TypeAdapter(ByteSize).validate_python(value))

    @property
    def is_auto(self) -> bool:
        """Whether the budget follows from the free device memory."""
        return self.bytes is None and self.share is None and not self.top_k

    def resolve(self, all_experts_bytes: int, token_bytes: int = 0) -> int:
        """Bytes that this budget stands for.

        Args:
            all_experts_bytes: bytes of every expert of the rank in the high tier.
            token_bytes: bytes of the experts that one token uses in a layer.

        Raises:
            ValueError: the budget is automatic; only the device can say.
        """
        if self.share is not None:
            return int(self.share * all_experts_bytes)
        if self.top_k:
            return token_bytes
        if self.bytes is None:
            raise ValueError("an automatic budget needs the device's free memory")
        return self.bytes

    def __str__(self) -> str:
        if self.is_auto:
            return "auto"
        if self.top_k:
            return "as many experts as a token uses in a layer"
        return f"{self.share:.4g} of the experts" if self.share is not None else f"{self.bytes} bytes"


class Options(BaseModel):
    """The options of vllm-dymoe. See the module for where they are read from."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    preset: str | None = None
    """A row of DyMoE's Table 3 by name: sets hi, lo, policy and prefetch, unless they are set as well."""
    hi: Literal[16, 8, 4, 2] = 4
    """Bits per weight of the high tier."""
    lo: Literal[8, 4, 2, 0] = 0
    """Bits per weight of the low tier; 0 stores no second version, so that a low expert is skipped."""
    group_size: Literal[32, 64, 128] = 64
    """Weights that share one scale and zero, along the input dimension."""
    quantizer: Literal["rtn", "hqq", "gptq"] = "rtn"
    """How experts are quantized: round to nearest, HQQ (slower, better at 2 bits), or GPTQ (by vllm-dymoe quantize)."""
    expert_budget: ExpertBudget = ExpertBudget()
    """Device memory for experts, on each rank: "auto", bytes ("4GiB"), a share of all experts ("25%") or "top-k"."""
    host_store: Literal["auto", "file", "pinned"] = "auto"
    """Where the packed experts live: safetensors shards on disk, page-locked host memory, or what there is room for."""
    store_dir: Path | None = None
    """Folder of the shards of checkpoints that are quantized while they load (default: ~/.cache/vllm-dymoe)."""
    policy: str = "exact"
    """Which expert gets which tier: "exact" (all high), "uniform-lo" (all low), or a paper's system by name."""
    policy_options: dict[str, Any] = {}
    """Parameters of the policy, by name."""
    skipped_weights: Literal["keep", "renormalize"] = "keep"
    """Routing weights of experts that are skipped: lost, or handed to the token's other experts."""
    reuse_high: bool = True
    """Whether an expert that is wanted low is computed high where its high version is on the device."""
    prefetch: str = "next-gate"
    """Which experts are fetched before their router names them: the name of a scheme, see docs/options.md."""
    prefetch_options: dict[str, Any] = {}
    """Parameters of the prefetch scheme, by name."""
    predictor: Path | None = None
    """File of a predictor that `vllm-dymoe train` has trained on this model; prefetch is then "trained"."""
    prefetch_projections: Literal[3, 2, 1] = 3
    """Projections of an expert that are fetched ahead: all, gate and up, or gate only (FIRM-MoE's n)."""
    keep_experts: bool = True
    """Whether layers keep experts for later steps; without, every step fetches all that it needs."""
    staging_slots: int | None = Field(default=None, ge=1)
    """Slots that no layer keeps, to stream experts through and to fetch ahead into; from how many there are if None."""
    io_threads: int = Field(default=1, ge=0, le=64)
    """Threads that read the host store; 0 reads only when an expert is waited for."""
    transfer_timeout_s: float = Field(default=60, ge=0)
    """Seconds that one expert's transfer may take before the requests that wait for it fail; 0 waits for ever."""
    link_gbps: float | None = Field(default=None, gt=0)
    """Rate in 1e9 bytes per second of an emulated link between host store and device, on a CPU; none by default."""
    trace_dir: Path | None = None
    """Folder to record every token's experts to, see docs/traces.md; a trace tells about prompts."""
    trace_limit: ByteSize = ByteSize(256 * 2**20)
    """Bytes that the folder of traces may have; recording ends there."""
    trace_inputs: bool = False
    """Whether a trace holds the routers' inputs as well, which are hundreds of times larger."""
    seed: int = 0
    """Seed of everything random (dummy weights)."""

    @model_validator(mode="before")
    @classmethod
    def _complete_system(cls, values: Any) -> Any:
        from vllm_dymoe.policy import SYSTEMS

        if not isinstance(values, dict):
            return values
        trained = {"prefetch": "trained"} if values.get("predictor") is not None else {}
        return {**SYSTEMS.get(str(values.get("policy")), {}), **trained, **values}

    @field_validator("expert_budget", mode="before")
    @classmethod
    def _parse_budget(cls, value: Any) -> ExpertBudget:
        try:
            return ExpertBudget.parse(value)
        except (ValidationError, ValueError) as error:
            raise ValueError(
                'must be "auto", "top-k", bytes such as "4GiB", or a share above 0% and up to 100% such as "25%"'
            ) from error

    @field_validator("predictor")
    @classmethod
    def _find_home(cls, value: Path | None) -> Path | None:
        return value and value.expanduser()

    @model_validator(mode="after")
    def _check_combination(self) -> Self:
        from vllm_dymoe.policy import PRESETS, Tier, make_policy
        from vllm_dymoe.predict import make_scheme

        if self.lo >= self.hi:
            raise ValueError(
                f"lo is {self.lo} bits but must be below hi, which is {self.hi}; "
                "set lo to 0 to store one version of each expert only"
            )
        if self.preset is not None and self.preset not in PRESETS:
            raise ValueError(f'preset "{self.preset}" does not exist; choose one of {", ".join(PRESETS)}')
        policy = make_policy(self.policy, self.policy_options)
        if self.lo == 0 and Tier.HI not in policy.tiers:
            raise ValueError(f'policy "{self.policy}" with lo = 0 would skip every expert; set lo to 2, 4 or 8')
        make_scheme(self.prefetch, self.prefetch_options)
        if (self.predictor is not None) != (self.prefetch == "trained"):
            raise ValueError(
                'prefetch "trained" needs the file of a predictor; name it in the option predictor'
                if self.predictor is None
                else f'predictor is set, but prefetch is "{self.prefetch}", which has no use for it; leave one out'
            )
        return self

    @property
    def stored_bits(self) -> tuple[int, ...]:
        """Bit-widths that the host store holds, the high tier first."""
        return (self.hi,) if self.lo == 0 else (self.hi, self.lo)

    @classmethod
    def load(
        cls,
        additional: Mapping[str, Any] | None = None,
        checkpoint: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Self:
        """Merge the three places that options are read from, and validate.

        Args:
            additional: the "dymoe" entry of vLLM's additional_config.
            checkpoint: quantization_config of the checkpoint's config.json, if it is ours.
            environment: process environment; ``os.environ`` if None.

        Raises:
            ConfigError: an unknown key, an impossible value, or a combination that cannot work.
        """
        if not isinstance(additional or {}, Mapping):
            raise ConfigError(
                'vllm-dymoe: additional_config.dymoe must be an object of options such as {"hi": 4}, '
                f"but is {additional!r}."
            )
        from vllm_dymoe.policy import PRESETS
        from vllm_dymoe.store import STORE_VERSION

        version = (checkpoint or {}).get("format_version", STORE_VERSION)
        if version != STORE_VERSION:
            raise ConfigError(
                f"vllm-dymoe: this checkpoint has format_version {version}, but this vllm-dymoe reads version "
                f"{STORE_VERSION}; install the version that wrote it, or write it again with `vllm-dymoe quantize`."
            )
        layers = (
            (Source.CHECKPOINT, {k: v for k, v in (checkpoint or {}).items() if k not in _CHECKPOINT_ONLY_KEYS}),
            (Source.ENVIRONMENT, _read_environment(os.environ if environment is None else environment)),
            (Source.ADDITIONAL_CONFIG, dict(additional or {})),
        )
        values: dict[str, Any] = {}
        sources: dict[str, Source] = {}
        for source, layer in layers:
            if "preset" in layer:  # said by the user, and therefore before what a checkpoint says
                layer = {**PRESETS.get(str(layer["preset"]), {}), **layer}
            values |= layer
            sources |= dict.fromkeys(layer, source)
        try:
            return cls(**values)
        except ValidationError as error:
            raise ConfigError(_sentence(error, sources, sorted(cls.model_fields))) from None


def _read_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    options = {}
    for name, text in environment.items():
        if name.startswith(ENVIRONMENT_PREFIX):
            try:
                value = json.loads(text)
            except json.JSONDecodeError:
                value = text
            options[name.removeprefix(ENVIRONMENT_PREFIX).lower()] = value
    return options


def _sentence(error: ValidationError, sources: Mapping[str, Source], known: list[str]) -> str:
    """One sentence per mistake: what is wrong, where it was written, what to do."""
    sentences = []
    for item in error.errors():
        option = str(item["loc"][0]) if item["loc"] else ""
        place = sources.get(option, Source.ADDITIONAL_CONFIG).name_of(option) if option else "the options together"
        if item["type"] == "extra_forbidden":
            close = difflib.get_close_matches(option, known, n=1)
            hint = f'did you mean "{close[0]}"?' if close else f"the options are {', '.join(known)}."
            sentences.append(f"{place} is not an option; {hint}")
            continue
        reason = item["msg"].removeprefix("Value error, ")
        reason = reason[0].lower() + reason[1:]
        shown = f" = {json.dumps(item['input'], default=str)}" if option else ""
        sentences.append(f"{place}{shown}: {reason}.")
    return "vllm-dymoe: " + " ".join(sentences)
