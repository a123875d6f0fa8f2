"""Which expert deserves which tier: named policies over one interface."""

from collections.abc import Callable, Mapping
from typing import Any

from vllm_dymoe.policy.base import Policy, Tier
from vllm_dymoe.policy.systems import SYSTEMS
from vllm_dymoe.policy.uniform import UniformPolicy


def _exact() -> Policy:
    return UniformPolicy(Tier.HI)


POLICIES: Mapping[str, Callable[..., Policy]] = {
    "exact": _exact,
    "uniform-lo": lambda: UniformPolicy(Tier.LO),
    **dict.fromkeys(SYSTEMS, _exact),
}


def make_policy(name: str, options: Mapping[str, Any] | None = None) -> Policy:
    """Build the policy called ``name`` with its parameters.

    Raises:
        ValueError: no policy has that name, or it has no such parameter.
    """
    if name not in POLICIES:
        raise ValueError(f'policy "{name}" does not exist; choose one of {", ".join(sorted(POLICIES))}')
    try:
        return POLICIES[name](**(options or {}))
    except TypeError as error:
        raise ValueError(f'policy "{name}" does not take the policy_options {sorted(options or {})}') from error


__all__ = ["POLICIES", "SYSTEMS", "Policy", "Tier", "UniformPolicy", "make_policy"]
