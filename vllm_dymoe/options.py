"""Every option that a user can set, as plain data; :mod:`vllm_dymoe.resolve` reads them, see docs/options.md."""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationInfo,
    field_validator,
    model_validator,
)

CALIBRATED = ("gptq", "e8")
"""Quantizers that need a calibration."""


_LONGEST_S = 366 * 24 * 3600  # of a timeout: a year; clocks and locks overflow far above
_MOST_ROWS = 1 << 20  # that the host computes of an expert; more than any step has


CHECKPOINT_OPTIONS = {"hi": "high", "lo": "low", "group_size": "group_size", "quantizer": "quantizer"}
"""Options that a checkpoint's quantization_config may set, how its experts are stored, by the keys that the format has
for them. Everything else is for whoever serves it."""


class ConfigError(ValueError):
    """An option that cannot be honoured; the message is one sentence for the user.

    Attributes:
        option: name of the option to change, if it is one.
        least: the smallest budget in bytes that would do, if a budget is too small.
    """

    def __init__(self, sentence: str, *, option: str | None = None, least: int | None = None) -> None:
        super().__init__(sentence)
        self.option, self.least = option, least


def _check_named(value: Any) -> Any:
    if isinstance(value, str) and not value.strip():
        raise ValueError("names no place; write a path, or leave it out")
    return value


def _find_home(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError as error:  # no such user, or no home
        raise ValueError(f"{path} has no home directory ({error}); write the path from / on") from error


Place = Annotated[Path, BeforeValidator(_check_named), AfterValidator(_find_home)]
"""A path that a user wrote: never the current folder by accident."""


def cache_folder(environment: Mapping[str, str] | None = None) -> Path:
    """The folder for packed experts where ``store_dir`` is not set: in vLLM's cache, else in the user's.

    ConfigError if there is no home directory to put it in.
    """
    variables = os.environ if environment is None else environment
    root = Path(variables.get("VLLM_CACHE_ROOT") or variables.get("XDG_CACHE_HOME") or "~/.cache")
    if not variables.get("VLLM_CACHE_ROOT") and not root.is_absolute():  # the XDG specification ignores such a path
        root = Path("~/.cache")
    try:
        folder = root.expanduser() / "vllm-dymoe"
        if root.parts[:1] == ("~",) and variables.get("HOME") == "":
            raise RuntimeError("HOME is empty")
    except RuntimeError as error:
        raise ConfigError(
            "vllm-dymoe: there is no home directory for packed experts; set store_dir (DYMOE_STORE_DIR) to a folder."
        ) from error
    return folder


def store_root(store_dir: Path | None) -> Path:
    """The folder of all packed experts: the option ``store_dir``, or a cache; ConfigError without a home."""
    if store_dir is None:
        return cache_folder()
    try:
        return store_dir.expanduser()
    except RuntimeError as error:
        raise ConfigError(f"vllm-dymoe: store_dir is {store_dir}, which has no home directory ({error}).") from error


class ExpertBudget(BaseModel):
    """Device memory for experts on each rank: bytes, a share of the high precision, slots in it, or none of them:
    automatic.

    ``slots`` are as many experts as a token uses in a layer, or as a layer has.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    bytes: int | None = Field(default=None, gt=0)
    share: float | None = Field(default=None, gt=0, le=1)
    slots: Literal["top-k", "layer"] | None = None

    @classmethod
    def parse(cls, value: Any) -> "ExpertBudget":
        """Read "auto", "top-k", "layer", bytes (``2**30``, "1.5GiB") or a share (``0.25``, "25%"); or ConfigError."""
        if isinstance(value, ExpertBudget):
            return value
        if value == "auto":
            return cls()
        if value in ("top-k", "layer"):
            return cls(slots=value)
        if isinstance(value, bool):
            raise ConfigError(
                "vllm-dymoe: a truth value is no budget; write a share such as 25%, or bytes such as 8GiB."
            )
        try:
            if isinstance(value, float) and value <= 1:
                return cls(share=value)
            if isinstance(value, str) and value.strip().endswith("%"):
                return cls(share=float(value.strip()[:-1]) / 100)
            return cls(bytes=TypeAdapter(ByteSize).validate_python(value))
        except ValueError as error:
            raise ConfigError(
                f"vllm-dymoe: {value} is no budget; write a share such as 25%, or bytes such as 8GiB."
            ) from error

    @property
    def is_auto(self) -> bool:
        return self == AUTO


AUTO = ExpertBudget()


class TraceOptions(BaseModel):
    """What is recorded of the routers, see docs/traces.md; a trace tells about prompts."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    folder: Place
    """Where every token's experts are recorded to."""
    limit: ByteSize = ByteSize(256 * 2**20)
    """Bytes that the folder may have; recording ends there."""
    inputs: bool = False
    """Whether the routers' inputs are recorded as well, which are hundreds of times larger."""


class TrainPredictorOptions(BaseModel):
    """A predictor that is trained while the server serves, see docs/predictors.md."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    file: Place
    """Where it is written to at the end, and read from at the next start."""
    memory: ByteSize = ByteSize(256 * 2**20)
    """Bytes of the device for sums; with fewer than all layers need, they are trained in turn."""


class Options(BaseModel):
    """The options of vllm-dymoe. See the module for where they are read from."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    high: Literal[16, 8, 4, 2] = 4
    """Bits per weight of the high precision."""
    low: Literal[8, 4, 2, 0] = 0
    """Bits per weight of the low precision; 0 skips low experts. With dymoe 2."""
    group_size: Literal[32, 64, 128] = 64
    """Weights that share a scale and zero, along the inputs."""
    quantizer: Literal["rtn", "hqq", "gptq", "e8"] = "rtn"
    """Round to nearest, HQQ (slower, better at 2 bits); GPTQ, E8 by vllm-dymoe quantize."""
    dense: Literal[16, 8, 4] = 16
    """Bits of a 16-bit checkpoint's attention, shared experts and LM head; 16 leaves them, on a GPU 8 is FP8."""
    activations: Literal[16, 8] = 16
    """Bits of what a CPU multiplies codes with; 8 is faster for batches and loses more."""
    expert_budget: ExpertBudget = AUTO
    """Device memory for experts, on each rank: [the budget](#the-budget)."""
    host_store: Literal["auto", "file", "pinned"] = "auto"
    """Where packed experts live: on disk, in pinned memory, or what there is room for."""
    host_memory: ExpertBudget = AUTO
    """Host memory for experts, on each rank: "auto", bytes ("16GiB"), or a share of all."""
    checksums: Literal["first", "always"] = "first"
    """When an expert's bytes are checked: whenever they come from the disk, or from the page cache, too."""
    misses: Literal["auto", "fetch", "compute", "share"] = "auto"
    """Experts without a slot are fetched, or, free slots filled, computed by the host where they lie in its memory, or
    shared between both as their measured rates say; "auto" computes on a CPU what memory or the page cache has, and on
    a GPU measures steps of both at the first start and takes the faster one."""
    misses_rows: int = Field(default=16, ge=1, le=_MOST_ROWS)
    """Rows of an expert that the host computes beside a device at most; with more it is fetched."""
    planning: Literal["auto", "host", "device"] = "auto"
    """What decides in decode which experts are kept and fetched: [CUDA graphs](#cuda-graphs)."""
    store_dir: Place | None = None
    """For what is quantized while it loads; else `vllm-dymoe` in `VLLM_CACHE_ROOT`, `XDG_CACHE_HOME` or ~/.cache."""
    policy: str = "exact"
    """How experts are served: [policies](#policies)."""
    policy_options: dict[str, Any] = {}
    """Parameters of the policy, by name."""
    predictor: Place | None = None
    """File of a predictor that `vllm-dymoe train` has trained, in place of the policy's own."""
    train_predictor: TrainPredictorOptions | None = None
    """[Trains](predictors.md) a predictor while serving, and uses it: its file, or an object of `file` and `memory`."""
    transfer_timeout_s: float = Field(default=60, ge=0, le=_LONGEST_S)
    """Seconds of one expert's transfer, after which requests that wait for it fail; 0 for ever."""
    disk_gbps: float | None = Field(default=None, gt=0)
    """1e9 bytes per second of an emulated disk, slower than the real one."""
    link_gbps: float | None = Field(default=None, gt=0)
    """1e9 bytes per second of the link to an emulated card, on a CPU."""
    trace: TraceOptions | None = None
    """[Records](traces.md) every token's experts: a folder, or an object of `folder`, `limit` and `inputs`."""

    @field_validator("expert_budget", "host_memory", mode="before")
    @classmethod
    def _parse_budget(cls, value: Any, info: ValidationInfo) -> ExpertBudget:
        of_slots = info.field_name == "expert_budget"
        with contextlib.suppress(ValueError):
            parsed = ExpertBudget.parse(value)
            if of_slots or parsed.slots is None:
                return parsed
        slots = '"top-k", "layer", ' if of_slots else ""
        raise ValueError(
            f'must be "auto", {slots}bytes such as "4GiB", or a share above 0% and up to 100% such as "25%"'
        )

    @field_validator("trace", mode="before")
    @classmethod
    def _take_folder(cls, value: Any) -> Any:
        return {"folder": value} if isinstance(value, str | Path) else value

    @field_validator("train_predictor", mode="before")
    @classmethod
    def _take_file(cls, value: Any) -> Any:
        return {"file": value} if isinstance(value, str | Path) else value

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.low >= self.high:
            raise ValueError(
                f"low is {self.low} bits but must be below high, which is {self.high}; "
                "set low to 0 to store one version of each expert only"
            )
        if self.quantizer == "e8" and self.stored_bits not in ((4, 2), (2,)):
            raise ValueError(
                f"quantizer is e8, whose points have 2 bits, alone or inside of 4, but high is {self.high} and low is "
                f"{self.low}; set high to 4 and low to 2, or high to 2 and low to 0"
            )
        if self.predictor is not None and self.train_predictor is not None:
            raise ValueError("train_predictor reads its own file where it exists; leave predictor out")
        if self.host_store == "file" and not self.host_memory.is_auto:
            raise ValueError('host_memory is how much of the experts is held, which host_store = "file" leaves to the '
                             "page cache; leave one of them out")  # fmt: skip
        if self.computes_misses and self.host_store == "file":
            raise ValueError(f'misses is "{self.misses}", which needs experts in memory, and not in files')
        return self

    @property
    def predictor_file(self) -> Path | None:
        """The file of a predictor to serve with: that of ``predictor``, or what ``train_predictor`` wrote before."""
        if self.train_predictor is not None and self.train_predictor.file.is_file():
            return self.train_predictor.file
        return self.predictor

    @property
    def computes_misses(self) -> bool:
        """Whether the host computes experts without a slot; False where that is not settled so far."""
        return self.misses in ("compute", "share")

    @property
    def stored_bits(self) -> tuple[int, ...]:
        """Bit-widths that the host store holds, the high precision first."""
        return (self.high,) if self.low == 0 else (self.high, self.low)
