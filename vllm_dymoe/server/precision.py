"""Changes of precision while a model is served.

This module says which options may change, and to which values.
"""

from collections.abc import Collection, Mapping
from typing import Any

from pydantic import ValidationError

from vllm_dymoe.options import ConfigError, Options
from vllm_dymoe.policies import POLICIES, PolicyOptionError, make_policy

_PRECISIONS = ("high", "low")


def changed_precision(options: Options, stored: Collection[int], changes: Mapping[str, Any]) -> Options:
    """Return the options with other values for what decides precision.

    This can be high, low, or one of the policy's parameters that decide precision.

    Args:
        stored: bits of the precisions that the store has.
        changes: new values, by name.

    Raises:
        ConfigError: a name that cannot change while the model is served, or an invalid value.
    """
    parameters = POLICIES[options.policy].precision_parameters
    known = (*_PRECISIONS, *parameters)
    for name in changes:
        owners = [policy.name for policy in POLICIES.values() if name in policy.precision_parameters]
        if owners and name not in parameters:
            raise ConfigError(
                f'vllm-dymoe: {name} is a parameter of policy "{owners[0]}", but the server runs "{options.policy}"; '
                f'start with policy "{owners[0]}".',
                option=name,
            )
        if name not in known:
            sentence = f"vllm-dymoe: {name} cannot change while the model is served; {', '.join(known)} can."
            raise ConfigError(sentence, option=name)
    for name in _PRECISIONS:
        bits = changes.get(name, getattr(options, name))
        is_number = isinstance(bits, int) and not isinstance(bits, bool)
        if not is_number or (bits not in stored and not (name == "low" and bits == 0)):
            widths = " and ".join(str(width) for width in sorted(stored, reverse=True))
            raise ConfigError(
                f"vllm-dymoe: {name} cannot become {bits!r} bits, because the experts are stored at {widths} bits; "
                "restart with the precisions that you want to change between.",
                option=name,
            )
    values = dict(options) | {name: value for name, value in changes.items() if name not in parameters}
    values["policy_options"] = options.policy_options | {n: v for n, v in changes.items() if n in parameters}
    changing = next(iter(changes)) if len(changes) == 1 else None
    try:
        changed = Options.model_validate(values)
        make_policy(changed)
    except ValidationError as error:
        reasons = "; ".join(item["msg"].removeprefix("Value error, ") for item in error.errors())
        raise ConfigError(f"vllm-dymoe: the precision stays as it was: {reasons}.", option=changing) from None
    except PolicyOptionError as error:
        raise ConfigError(f"vllm-dymoe: the precision stays as it was: {error}.", option=changing) from None
    return changed
