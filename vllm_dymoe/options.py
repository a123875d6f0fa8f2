"""Every option that a user can set, as plain data (docs/options.md).

:mod:`vllm_dymoe.resolve` reads them from where users set them.
"""

import contextlib
import os
import re
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


_LONGEST_S = 366 * 24 * 3600  # upper bound of timeouts: a year; clocks and locks overflow far above
_MOST_BYTES = 2**63 - 1  # of a budget: counts travel to the server in 64 bits
_REQUESTS = re.compile(r"auto for ([1-9]\d{0,5}) requests?")  # of an automatic budget
_MOST_ROWS = 1 << 20  # upper bound of misses_rows; no step has more rows


CHECKPOINT_OPTIONS = {"hi": "high", "lo": "low", "group_size": "group_size", "quantizer": "quantizer"}
"""Options that a checkpoint's quantization_config may set, by their key there: how its experts are stored.

Only whoever serves the checkpoint can set the others.
"""


class ConfigError(ValueError):
    """An invalid option; the message is one sentence for the user.

    Attributes:
        option: name of the option to change, if it is a single one.
        least: the smallest feasible budget in bytes, if a budget is too small.
    """

    def __init__(self, sentence: str, *, option: str | None = None, least: int | None = None) -> None:
        super().__init__(sentence)
        self.option, self.least = option, least


def _check_named(value: Any) -> Any:
    if isinstance(value, str) and not value.strip():
        raise ValueError("is empty; write a path, or leave it out")
    return value


def _find_home(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError as error:  # no such user, or no home
        raise ValueError(f"{path} has no home directory ({error}); write the path from / on") from error


Place = Annotated[Path, BeforeValidator(_check_named), AfterValidator(_find_home)]
"""A path set by a user; an empty one is refused, because it would mean the current folder."""


def cache_folder(environment: Mapping[str, str] | None = None) -> Path:
    """Return the default folder of packed experts, used if ``store_dir`` is not set.

    The folder is in vLLM's cache if that is set, otherwise in the user's. Raises ConfigError if there is no home
    directory.
    """
    variables = os.environ if environment is None else environment
    root = Path(variables.get("VLLM_CACHE_ROOT") or variables.get("XDG_CACHE_HOME") or "~/.cache")
    if not variables.get("VLLM_CACHE_ROOT") and not root.is_absolute():  # the XDG specification ignores relative paths
        root = Path("~/.cache")
    try:
        folder = root.expanduser() / "vllm-dymoe"
        if root.parts[:1] == ("~",) and variables.get("HOME") == "":
            raise RuntimeError("HOME is empty")
    except RuntimeError as error:
        raise ConfigError(
            "vllm-dymoe: there is no home directory for packed experts; set store_dir (DYMOE_STORE_DIR) to a folder.",
            option="store_dir",
        ) from error
    return folder


def store_root(store_dir: Path | None) -> Path:
    """Return the folder of all packed experts: ``store_dir``, or the default folder.

    Raises ConfigError if it needs a home directory and there is none.
    """
    if store_dir is None:
        return cache_folder()
    try:
        return store_dir.expanduser()
    except RuntimeError as error:
        sentence = f"vllm-dymoe: store_dir is {store_dir}, which has no home directory ({error})."
        raise ConfigError(sentence, option="store_dir") from error


class ExpertBudget(BaseModel):
    """Memory for experts on each rank.

    The budget is a number of bytes, a share of all experts' bytes, a number of slots, or automatic. ``slots`` stands
    for as many slots as a token uses experts in a layer ("top-k"), or as a layer has experts ("layer"). ``requests``
    are those whose KV cache an automatic budget leaves on a GPU.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    bytes: int | None = Field(default=None, gt=0, le=_MOST_BYTES)
    share: float | None = Field(default=None, gt=0, le=1)
    slots: Literal["top-k", "layer"] | None = None
    requests: int = Field(default=1, gt=0)

    @classmethod
    def parse(cls, value: Any) -> "ExpertBudget":
        """Parse a budget as a user writes it.

        ``value`` is "auto", "auto for 4 requests", "top-k", "layer", bytes (``2**30``, "1.5GiB") or a share (``0.25``,
        "25%"). Raises ConfigError for anything else.
        """
        if isinstance(value, ExpertBudget):
            return value
        if value == "auto":
            return cls()
        if value in ("top-k", "layer"):
            return cls(slots=value)
        if isinstance(value, bool):
            raise ConfigError(
                "vllm-dymoe: true and false are no budgets; write a share such as 25%, or bytes such as 8GiB."
            )
        try:
            if isinstance(value, str) and (found := _REQUESTS.fullmatch(value.strip())):
                return cls(requests=int(found[1]))
            if isinstance(value, float) and value <= 1:
                return cls(share=value)
            if isinstance(value, str) and value.strip().endswith("%"):
                return cls(share=float(value.strip()[:-1]) / 100)
            return cls(bytes=TypeAdapter(ByteSize).validate_python(value))
        except ValueError as error:
            raise ConfigError(
                f"vllm-dymoe: {value} is not a budget; write a share such as 25%, or bytes such as 8GiB."
            ) from error

    @property
    def is_auto(self) -> bool:
        return self.bytes is None and self.share is None and self.slots is None


AUTO = ExpertBudget()


class TraceOptions(BaseModel):
    """How routing is traced, see docs/traces.md.

    A trace reveals information about prompts.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    folder: Place
    """Folder of the trace."""
    limit: ByteSize = ByteSize(256 * 2**20)
    """Maximum size of the folder in bytes; then recording ends."""
    inputs: bool = False
    """Whether to record the routers' inputs as well, which are hundreds of times larger."""


class TrainPredictorOptions(BaseModel):
    """Training of a predictor while the server runs, see docs/predictors.md."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    file: Place
    """File of the predictor, written at the end and read at the next start."""
    memory: ByteSize = ByteSize(256 * 2**20)
    """Device memory for training sums, in bytes; if it does not suffice for all layers, they are trained in turn."""


class Options(BaseModel):
    """The options of vllm-dymoe; :mod:`vllm_dymoe.resolve` says where they are read."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    high: Literal[16, 8, 4, 2] = 4
    """Bits per weight of the high precision."""
    low: Literal[8, 4, 2, 0] = 0
    """Bits of the low precision; 0 skips experts that are wanted low. dymoe and adaptive have 2 if it is not set."""
    group_size: Literal[32, 64, 128] = 64
    """Number of weights along the input dimension that share a scale and a zero."""
    quantizer: Literal["rtn", "hqq", "gptq", "e8"] = "rtn"
    """Round to nearest, or HQQ (slower, better at 2 bits); GPTQ and E8 need `vllm-dymoe quantize`."""
    dense: Literal[16, 8, 4] = 16
    """Bits of a 16-bit checkpoint's attention, shared experts and LM head; 16 keeps them, 8 is FP8 on a GPU."""
    activations: Literal[16, 8] = 16
    """Bits of activations that a CPU multiplies codes with; 8 is faster for batches and less accurate."""
    expert_budget: ExpertBudget = AUTO
    """Device memory for experts on each rank: see [the budget](#the-budget)."""
    host_store: Literal["auto", "file", "pinned"] = "auto"
    """Where packed experts are stored: on disk, or in pinned memory. "auto" pins on a GPU if there is room. If it is
    not set, duoserve, and `misses` "compute" and "share", have "pinned".
    """
    host_memory: ExpertBudget = AUTO
    """Host memory for experts on each rank: "auto", bytes ("16GiB"), or a share of all experts."""
    checksums: Literal["first", "always"] = "first"
    """When an expert's bytes are verified: when they are read from disk, or also when they come from the page cache."""
    misses: Literal["auto", "fetch", "compute", "share"] = "auto"
    """What happens to missing experts: "fetch" copies them to the device, "compute" lets the CPU execute them from host
    memory once all slots are full, and "share" divides them by the measured rates of both. "auto" computes on a CPU
    whatever memory or the page cache holds; on a GPU it measures steps at the first start and takes the faster way.
    """
    misses_rows: int = Field(default=16, ge=1, le=_MOST_ROWS)
    """Maximum rows of an expert that the CPU computes for a device; an expert with more rows is fetched."""
    store_dir: Place | None = None
    """Folder for experts quantized while loading; by default `vllm-dymoe` in `VLLM_CACHE_ROOT`, `XDG_CACHE_HOME` or
    ~/.cache.
    """
    policy: str = "exact"
    """How experts are served: see [policies](#policies)."""
    policy_options: dict[str, Any] = {}
    """Parameters of the policy, by name."""
    predictor: Place | None = None
    """File of a predictor trained by `vllm-dymoe train`, which replaces the policy's own."""
    train_predictor: TrainPredictorOptions | None = None
    """[Trains](predictors.md) a predictor while serving, and uses it: a file, or an object with `file` and `memory`."""
    transfer_timeout_s: float = Field(default=60, ge=0, le=_LONGEST_S)
    """Maximum seconds of one expert's transfer, after which requests that wait for it fail; 0 for no limit."""
    disk_gbps: float | None = Field(default=None, gt=0)
    """Rate of an emulated disk in GB/s (1e9 bytes), slower than the real one."""
    link_gbps: float | None = Field(default=None, gt=0)
    """Rate of the link to an emulated card in GB/s (1e9 bytes), on a CPU."""
    trace: TraceOptions | None = None
    """[Records](traces.md) every token's experts: a folder, or an object with `folder`, `limit` and `inputs`."""

    @field_validator("expert_budget", "host_memory", mode="before")
    @classmethod
    def _parse_budget(cls, value: Any, info: ValidationInfo) -> ExpertBudget:
        of_slots = info.field_name == "expert_budget"
        with contextlib.suppress(ValueError):
            parsed = ExpertBudget.parse(value)
            if of_slots or (parsed.slots is None and parsed.requests == 1):
                return parsed
        slots = '"auto for 4 requests", "top-k", "layer", ' if of_slots else ""
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
                f"quantizer e8 supports 2 bits, alone or nested in 4, but high is {self.high} and low is "
                f"{self.low}; set high to 4 and low to 2, or high to 2 and low to 0"
            )
        if self.predictor is not None and self.train_predictor is not None:
            raise ValueError("train_predictor reads its own file if that exists; leave predictor out")
        if self.host_store == "file" and not self.host_memory.is_auto:
            raise ValueError('host_memory is how much of the experts is held, which host_store = "file" leaves to the '
                             "page cache; leave one of them out")  # fmt: skip
        if self.computes_misses and self.host_store == "file":
            raise ValueError(f'misses is "{self.misses}", which needs experts in memory, not in files')
        return self

    @property
    def predictor_file(self) -> Path | None:
        """The predictor file to serve with, if any.

        The file that ``train_predictor`` wrote earlier comes before ``predictor``.
        """
        if self.train_predictor is not None and self.train_predictor.file.is_file():
            return self.train_predictor.file
        return self.predictor

    @property
    def computes_misses(self) -> bool:
        """Whether misses are certainly executed on the CPU.

        False for "auto", which is resolved later.
        """
        return self.misses in ("compute", "share")

    def plain_cpu(self, device_type: str) -> bool:
        """Return whether it is a CPU that emulates no card.

        It computes experts where they are.

        Otherwise a device plans and computes. Its type is "cpu" if it is emulated.
        """
        return device_type == "cpu" and self.link_gbps is None

    @property
    def stored_bits(self) -> tuple[int, ...]:
        """Bit-widths in the host store, the high precision first."""
        return (self.high,) if self.low == 0 else (self.high, self.low)
