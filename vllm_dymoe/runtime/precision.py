"""Changing the precision of a running model: which values may change, and what has to hold."""

from collections.abc import Collection, Mapping
from typing import Any

from pydantic import ValidationError

from vllm_dymoe.config import ConfigError, Options
from vllm_dymoe.systems import SYSTEMS, SystemOptionError, make_system

_TIERS = ("hi", "lo")


def changed_precision(options: Options, stored: Collection[int], changes: Mapping[str, Any]) -> Options:
    """The options with another pair of tiers, of those that are stored, or another parameter of the system that decides
    precision, by name; ConfigError for a name that cannot change, or a value that cannot be honoured."""
    parameters = SYSTEMS[options.system].precision_parameters
    known = (*_TIERS, *parameters)
    for name in changes:
        owners = [system.name for system in SYSTEMS.values() if name in system.precision_parameters]
        if owners and name not in parameters:
            raise ConfigError(
                f'vllm-dymoe: {name} is a parameter of the system "{owners[0]}", but "{options.system}" is served; '
                f'start with system "{owners[0]}".'
            )
        if name not in known:
            raise ConfigError(f"vllm-dymoe: {name} cannot change while the model is served; {', '.join(known)} can.")
    for name in _TIERS:
        bits = changes.get(name, getattr(options, name))
        if bits not in stored and not (name == "lo" and bits == 0):
            widths = " and ".join(str(width) for width in sorted(stored, reverse=True))
            raise ConfigError(
                f"vllm-dymoe: {name} cannot become {bits} bits, because the experts are stored at {widths} bits; "
                "start again with the tiers that you want to change between."
            )
    values = dict(options) | {name: value for name, value in changes.items() if name not in parameters}
    values["system_options"] = options.system_options | {n: v for n, v in changes.items() if n in parameters}
    try:
        changed = Options.model_validate(values)
        make_system(changed)
    except ValidationError as error:
        reasons = "; ".join(item["msg"].removeprefix("Value error, ") for item in error.errors())
        raise ConfigError(f"vllm-dymoe: the precision stays as it was: {reasons}.") from None
    except SystemOptionError as error:
        raise ConfigError(f"vllm-dymoe: the precision stays as it was: {error}.") from None
    return changed
