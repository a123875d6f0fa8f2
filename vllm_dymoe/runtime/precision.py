"""Changing the precision of a running model: which values may change, and what has to hold."""

from collections.abc import Collection, Mapping
from typing import Any

from pydantic import ValidationError

from vllm_dymoe.config import ConfigError, Options
from vllm_dymoe.policy import DymoeOptions

_TIERS = ("hi", "lo")


def changed_precision(options: Options, stored: Collection[int], changes: Mapping[str, Any]) -> Options:
    """The options with another retention, another pair of tiers, or another parameter of the policy.

    Args:
        options: in force.
        stored: bit-widths that the host store holds.
        changes: ``hi``, ``lo``, ``skipped_weights`` and parameters of the policy, by name.

    Raises:
        ConfigError: a name that cannot change, or a value that cannot be honoured.
    """
    parameters = tuple(DymoeOptions.model_fields) if options.policy == "dymoe" else ()
    known = (*_TIERS, "skipped_weights", *parameters)
    for name in changes:
        if name in DymoeOptions.model_fields and not parameters:
            raise ConfigError(
                f'vllm-dymoe: {name} is a parameter of the policy "dymoe", but "{options.policy}" is served; start '
                'with policy "dymoe", whose retention 1 is the same as "exact".'
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
    values["policy_options"] = options.policy_options | {n: v for n, v in changes.items() if n in parameters}
    try:
        return Options.model_validate(values)
    except ValidationError as error:
        reasons = "; ".join(item["msg"].removeprefix("Value error, ") for item in error.errors())
        raise ConfigError(f"vllm-dymoe: the precision stays as it was: {reasons}.") from None
