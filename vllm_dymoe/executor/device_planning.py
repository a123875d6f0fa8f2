"""Decides at start who plans.

Either the host plans every layer, or the device plans in steps without the host.
"""

from vllm_dymoe.kernels import native
from vllm_dymoe.options import ConfigError, Options
from vllm_dymoe.policies import Policy


def plans_on_device(
    options: Options, policy: Policy, device_type: str, *, unreadable: str = "", obstacle: str = ""
) -> tuple[bool, str]:
    """Return whether the device plans, and otherwise the reason.

    Args:
        device_type: "cuda", or "cpu", which with ``link_gbps`` emulates a card.
        unreadable: why neither the device can read the host store by itself, nor a thread for it; empty if one can.
        obstacle: why the model needs host-side planning; empty if it does not.

    Raises:
        ConfigError: ``planning`` is "device", but the device cannot plan.
    """
    emulated = device_type != "cuda" and options.link_gbps is not None
    if options.planning == "host" or (options.planning == "auto" and device_type != "cuda" and not emulated):
        return False, ""
    reason = obstacle or _obstacle(options, policy, unreadable)
    if reason and options.planning == "device":
        sentence = f'vllm-dymoe: planning = "device" is impossible, because {reason}; use "auto" or "host".'
        raise ConfigError(sentence, option="planning")
    return not reason, reason


def _obstacle(options: Options, policy: Policy, unreadable: str) -> str:
    if policy.needs_host:
        return policy.needs_host
    if options.computes_misses and native.load() is None:
        return "CPU execution of misses needs the native library, which was not built here"
    return unreadable


def without_device(options: Options) -> Options:
    """Return the options with host-side planning.

    A trace needs it when ranks share the experts of a layer: a device knows its own experts only; the host knows what
    routers chose.

    Raises:
        ConfigError: ``planning`` is "device".
    """
    if options.planning == "device":
        raise ConfigError(
            'vllm-dymoe: planning = "device" is impossible, because a trace records the experts of all ranks; use '
            '"auto" or "host", or leave trace out.',
            option="planning",
        )
    return options.model_copy(update={"planning": "host"})
