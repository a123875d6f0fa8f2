"""Which expert deserves which tier: named policies over one interface."""

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError

from vllm_dymoe.experts.routing import PromptTokens, Routing
from vllm_dymoe.experts.tier import Tier
from vllm_dymoe.policy.base import Policy
from vllm_dymoe.policy.dymoe import DymoeOptions, DymoePolicy
from vllm_dymoe.policy.systems import PRESETS, SYSTEMS
from vllm_dymoe.policy.uniform import UniformPolicy


def _exact() -> Policy:
    return UniformPolicy(Tier.HI)


POLICIES: Mapping[str, Callable[..., Policy]] = {
    "exact": _exact,
    "uniform-lo": lambda: UniformPolicy(Tier.LO),
    **dict.fromkeys(SYSTEMS, _exact),
    "dymoe": lambda **options: DymoePolicy(DymoeOptions(**options)),
}


def make_policy(name: str, options: Mapping[str, Any] | None = None) -> Policy:
    """Build the policy called ``name`` with its parameters.

    Raises:
        ValueError: no policy has that name, or it has no such parameter, or not with that value.
    """
    if name not in POLICIES:
        raise ValueError(f'policy "{name}" does not exist; choose one of {", ".join(sorted(POLICIES))}')
    try:
        return POLICIES[name](**(options or {}))
    except TypeError as error:
        raise ValueError(f'policy "{name}" has no policy_options, but {sorted(options or {})} were given') from error
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, item['loc']))}: {item['msg'][0].lower()}{item['msg'][1:]}" for item in error.errors()
        )
        raise ValueError(
            f'policy "{name}" does not take these policy_options ({problems}); it has '
            f"{', '.join(DymoeOptions.model_fields)}"
        ) from error


__all__ = [
    "POLICIES",
    "PRESETS",
    "SYSTEMS",
    "DymoeOptions",
    "DymoePolicy",
    "Policy",
    "PromptTokens",
    "Routing",
    "Tier",
    "UniformPolicy",
    "make_policy",
]
