"""From what a user wrote to options that can be served: the one place where both are judged.

Whatever cannot be honoured is refused before any weight is loaded, with a sentence that says where it was written, what
is wrong and what to do; nothing is ignored.
"""

import difflib
import json
import os
from collections.abc import Mapping
from enum import Enum
from typing import Any

from pydantic import ValidationError

from vllm_dymoe.config import ConfigError, Options
from vllm_dymoe.store import STORE_VERSION
from vllm_dymoe.systems import SystemOptionError, make_system

ENVIRONMENT_PREFIX = "DYMOE_"
# Keys of a checkpoint's quantization_config that describe the checkpoint, not an option.
_CHECKPOINT_ONLY_KEYS = frozenset({"quant_method", "format_version", "zeros_in_steps", "ordered", "codebooks", "dense"})


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


def resolve_options(
    additional: Mapping[str, Any] | None = None,
    checkpoint: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Options:
    """Merge the three places that options are read from, and validate.

    Args:
        additional: the "dymoe" entry of vLLM's additional_config.
        checkpoint: quantization_config of the checkpoint's config.json, if it is ours.
        environment: process environment; ``os.environ`` if None.

    Returns:
        Options whose system exists and can be served; a budget or host store that nobody has set is the system's.

    Raises:
        ConfigError: an unknown key, an impossible value, or a combination that cannot work.
    """
    if not isinstance(additional or {}, Mapping):
        raise ConfigError(
            'vllm-dymoe: additional_config.dymoe must be an object of options such as {"hi": 4}, '
            f"but is {additional!r}."
        )
    version = (checkpoint or {}).get("format_version", STORE_VERSION)
    if version != STORE_VERSION:
        raise ConfigError(
            f"vllm-dymoe: this checkpoint has format_version {version}, but this vllm-dymoe reads version "
            f"{STORE_VERSION}; install the version that wrote it, or write it again with `vllm-dymoe quantize`."
        )
    values: dict[str, Any] = {}
    sources: dict[str, Source] = {}
    for source, layer in (
        (Source.CHECKPOINT, {k: v for k, v in (checkpoint or {}).items() if k not in _CHECKPOINT_ONLY_KEYS}),
        (Source.ENVIRONMENT, _read_environment(os.environ if environment is None else environment)),
        (Source.ADDITIONAL_CONFIG, dict(additional or {})),
    ):
        values |= layer
        sources |= dict.fromkeys(layer, source)
    try:
        options = Options(**values)
        system = make_system(options)
    except ValidationError as error:
        raise ConfigError(_sentence(error, sources)) from None
    except SystemOptionError as error:
        place = sources.get(error.option, Source.ADDITIONAL_CONFIG).name_of(error.option)
        raise ConfigError(f"vllm-dymoe: {place}: {error}.") from None
    if "expert_budget" not in options.model_fields_set and system.default_budget is not None:
        options = options.model_copy(update={"expert_budget": system.default_budget})
    if "host_store" not in options.model_fields_set and system.default_host_store is not None:
        options = options.model_copy(update={"host_store": system.default_host_store})
    return options


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


def _sentence(error: ValidationError, sources: Mapping[str, Source]) -> str:
    """One sentence per mistake: where it was written, what is wrong, what to do."""
    known = sorted(Options.model_fields)
    sentences = []
    for item in error.errors():
        option = str(item["loc"][0]) if item["loc"] else ""
        place = sources.get(option, Source.ADDITIONAL_CONFIG).name_of(option) if option else "the options together"
        inside = "".join(f".{part}" for part in item["loc"][1:])
        if item["type"] == "extra_forbidden" and not inside:
            close = difflib.get_close_matches(option, known, n=1)
            hint = f'did you mean "{close[0]}"?' if close else f"the options are {', '.join(known)}."
            sentences.append(f"{place} is not an option; {hint}")
            continue
        reason = item["msg"].removeprefix("Value error, ")
        reason = reason[0].lower() + reason[1:]
        shown = f" = {json.dumps(item['input'], default=str)}" if option else ""
        sentences.append(f"{place}{inside}{shown}: {reason}.")
    return "vllm-dymoe: " + " ".join(sentences)
