"""Merging and validation of what a user wrote, into options that can be served.

Each error says where the option was set, what is wrong and what to do.
"""

import difflib
import json
import os
import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from vllm_dymoe.cache.store import READABLE_VERSIONS, STORE_VERSION
from vllm_dymoe.options import CHECKPOINT_OPTIONS, ConfigError, Options
from vllm_dymoe.policies import POLICIES, PolicyOptionError, make_policy

ENVIRONMENT_PREFIX = "DYMOE_"
# Keys of a checkpoint's quantization_config that describe the checkpoint, not an option.
_CHECKPOINT_ONLY_KEYS = frozenset({"quant_method", "format_version", "zeros_in_steps", "ordered", "codebooks", "dense"})
# Variables that Kubernetes and Docker links inject for a service whose name begins with "dymoe"; no option is named
# like them.
_OF_A_SERVICE = re.compile(r"(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")
_ADDITIONAL = "additional_config.dymoe."


def resolve_options(
    additional: Mapping[str, Any] | None = None,  # the "dymoe" entry of vLLM's additional_config
    checkpoint: Mapping[str, Any] | None = None,  # quantization_config of the checkpoint, if it is ours
    environment: Mapping[str, str] | None = None,  # ``os.environ`` if None
) -> Options:
    """Merge the three sources of options.

    An unset budget or host store gets the policy's default. Raises ConfigError for an unknown key, an invalid value, or
    a combination that cannot work.
    """
    additional = options_of_additional(additional)
    if not isinstance(checkpoint or {}, Mapping):
        raise ConfigError(
            f"vllm-dymoe: quantization_config in config.json must be an object, but is {checkpoint!r}; download the "
            "checkpoint again."
        )
    version = (checkpoint or {}).get("format_version", STORE_VERSION)
    if version not in READABLE_VERSIONS:
        raise ConfigError(
            f"vllm-dymoe: this checkpoint has format_version {version}, but this vllm-dymoe reads versions "
            f"{', '.join(map(str, READABLE_VERSIONS))}; install the version that wrote it, or write it again with "
            "`vllm-dymoe quantize`."
        )
    stored = {key: value for key, value in (checkpoint or {}).items() if key not in _CHECKPOINT_ONLY_KEYS}
    if foreign := sorted(map(str, stored.keys() - CHECKPOINT_OPTIONS.keys())):
        raise ConfigError(
            f"vllm-dymoe: quantization_config.{foreign[0]} (config.json) cannot be set by a checkpoint, which says "
            f"how its experts are stored ({', '.join(sorted(CHECKPOINT_OPTIONS))}); remove it there, and "
            f"set {_ADDITIONAL}{foreign[0]} if you want it.",
            option=foreign[0],
        )
    variables = options_of_environment(os.environ if environment is None else environment)
    values = {CHECKPOINT_OPTIONS[key]: value for key, value in stored.items()} | variables | additional
    # Where each option was set.
    written = {CHECKPOINT_OPTIONS[key]: f"quantization_config.{key} (config.json)" for key in stored}
    written |= {option: ENVIRONMENT_PREFIX + option.upper() for option in variables}
    written |= {option: _ADDITIONAL + option for option in additional}
    policy_name = values.get("policy")
    if "low" not in values and isinstance(policy_name, str) and policy_name in POLICIES and values.get("high") != 2:
        values["low"] = POLICIES[policy_name].default_low
    try:
        options = Options(**values)
        policy = make_policy(options)
    except ValidationError as error:
        location = error.errors()[0]["loc"]
        option = str(location[0]) if location else None  # None for an error of several options together
        raise ConfigError(_sentence(error, written), option=option) from None
    except PolicyOptionError as error:
        place = written.get(error.option, _ADDITIONAL + error.option)
        raise ConfigError(f"vllm-dymoe: {place}: {error}.", option=error.option) from None
    defaults: dict[str, Any] = {"expert_budget": policy.default_budget, "host_store": policy.default_host_store}
    if options.computes_misses:
        defaults["host_store"] = "pinned"
    chosen = {name: value for name, value in defaults.items() if value and name not in options.model_fields_set}
    return options.model_copy(update=chosen) if chosen else options


def options_of_additional(additional: Any) -> dict[str, Any]:
    """Return the options of the "dymoe" entry of additional_config, unchecked.

    Raises ConfigError if it is no object.
    """
    if not isinstance(additional or {}, Mapping):
        raise ConfigError(
            'vllm-dymoe: additional_config.dymoe must be an object of options such as {"high": 4}, '
            f"but is {additional!r}."
        )
    return dict(additional or {})


def options_of_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the options that variables such as DYMOE_HIGH set, unchecked."""
    options = {}
    for name, text in environment.items():
        option = name.removeprefix(ENVIRONMENT_PREFIX)
        if option == name or not text or _is_of_a_service(option, text):
            continue
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):  # not JSON, a number with too many digits, or too deeply nested
            value = text
        options[option.lower()] = value
    return options


def _is_of_a_service(name: str, text: str) -> bool:
    """Return whether an orchestrator may have set a variable.

    A name that ends with ``_PORT`` counts only if the value is an address.
    """
    return _OF_A_SERVICE.fullmatch(name) is not None or (f"_{name}".endswith("_PORT") and "://" in text)


def _sentence(error: ValidationError, written: Mapping[str, str]) -> str:
    """Return one sentence per mistake: where it was made, what is wrong, what to do."""
    known = sorted(Options.model_fields)
    sentences = []
    for item in error.errors():
        option = str(item["loc"][0]) if item["loc"] else ""
        place = written.get(option, _ADDITIONAL + option) if option else "the options together"
        inside = "".join(f".{part}" for part in item["loc"][1:])
        if item["type"] == "extra_forbidden" and not inside:
            close = difflib.get_close_matches(option, known, n=1)
            hint = f'did you mean "{close[0]}"?' if close else f"the options are {', '.join(known)}."
            sentences.append(f"{place} is not an option; {hint}")
            continue
        reason = item["msg"].removeprefix("Value error, ")
        shown = f" = {json.dumps(item['input'], default=str)}" if option else ""
        sentences.append(f"{place}{inside}{shown}: {reason[0].lower()}{reason[1:]}.")
    return "vllm-dymoe: " + " ".join(sentences)
